"""`greedy`, `match` and `coupled` on trees: the reference's path, plain text, no row too many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider import noise
from outrider.certify import reference_trees
from outrider.decoding import RULES, Draft, Kind, RoundNoise, TargetLaws, Verdict
from outrider.decoding.draw import Draws
from outrider.decoding.laws import Law
from outrider.decoding.sampling import gumbel_race
from outrider.tree import TokenTree, full
from tests.decoding.toy_trees import Case, Watched, drawn, nobody_left_out, noise_of

SHAPES = [full(2, 2), full(3, 1), (0, 1, 2), (0, 0, 1, 1, 1, 4, 4), (), (0,), (0, 1, 1, 1)]
NAMES = ["greedy", "match", "coupled"]


def case(seed: int, repeats: int = 40) -> Case:
    return drawn([shape for shape in SHAPES for _ in range(repeats)], 4, seed, Kind.POINT)


def outcome(verdict: Verdict, b: int) -> tuple[tuple[int, ...], int]:
    count = int(verdict.num_accepted_B[b])
    path = verdict.path_BD[b].tolist()
    assert path[count:] == [0] * (len(path) - count)
    return tuple(path[:count]), int(verdict.token_B[b])


@pytest.mark.parametrize("name", ["greedy", "match"])
def test_the_path_is_the_references(name: str):
    rule = {"greedy": reference_trees.greedy, "match": reference_trees.match}[name]
    depths: set[int] = set()
    for seed in range(8):
        here = case(seed, repeats=1 if name == "greedy" else 20)
        verdict = RULES[name].verify(here.draft, here.target, here.noise)
        wanted = [rule(round_) for round_ in here.rounds()]
        got = [outcome(verdict, b) for b in range(len(wanted))]
        assert got == [(one.path, one.token) for one in wanted]
        depths |= {len(one.path) for one in wanted}
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_leaving_texts_out_changes_nothing(name: str):
    here = case(2)
    verdict = RULES[name].verify(here.draft, here.target, here.noise)
    with nobody_left_out():
        other = RULES[name].verify(here.draft, here.target, here.noise)
    assert torch.equal(verdict.path_BD, other.path_BD)
    assert torch.equal(verdict.token_B, other.token_B)


@pytest.mark.parametrize("name", NAMES)
def test_chains_of_all_rows_at_once_decide_alike(name: str):
    here = drawn([tuple(range(n)) for n in (3, 1, 0, 2) for _ in range(50)], 3, 3)
    assert here.draft.tree.is_chain
    verdict = RULES[name].verify(here.draft, here.target, here.noise)
    with nobody_left_out():
        other = RULES[name].verify(here.draft, here.target, here.noise)
    assert torch.equal(verdict.path_BD, other.path_BD)
    assert torch.equal(verdict.token_B, other.token_B)
    assert len(set(verdict.num_accepted_B.tolist())) > 1


@pytest.mark.parametrize("name", NAMES)
def test_rows_behind_a_miss_are_not_read(name: str):
    here = case(4, repeats=5)
    target = Watched(here.target_BTV)
    verdict = RULES[name].verify(here.draft, target, here.noise)
    num_rows = here.target_BTV.shape[1]
    wanted = [
        b * num_rows + row for b in range(len(here.shapes)) for row in (0, *outcome(verdict, b)[0])
    ]
    assert sorted(target.asked) == wanted


def test_coupled_draws_no_noise_behind_a_miss():
    here = case(5, repeats=3)
    with noise.NoiseLedger() as ledger:
        verdict = RULES["coupled"].verify(here.draft, here.target, here.noise)
    reached = {
        (int(seed) % 2**64, 5 + depth)
        for seed, kept in zip(here.noise.seed_B, verdict.num_accepted_B.tolist(), strict=True)
        for depth in range(kept + 1)
    }
    assert {(address[0], address[3]) for address in ledger.addresses} == reached


@pytest.mark.parametrize("kind", [Kind.POINT, Kind.IID])
def test_coupled_writes_the_plain_seeded_text(kind: Kind):
    """Whatever the tree: path and added token are the first tokens of plain sampling."""
    here = drawn([shape for shape in SHAPES for _ in range(40)], 3, 6, kind)
    verdict = RULES["coupled"].verify(here.draft, here.target, here.noise)
    for b, round_ in enumerate(here.rounds()):
        path, token = outcome(verdict, b)
        text = (*(round_.tree.tokens[row - 1] for row in path), token)
        assert text == _plain(round_.target, path, here.noise, b)
        children = round_.tree.children(path[-1] if path else 0)
        assert token not in {round_.tree.tokens[node] for node in children}


def _plain(rows: list[list[float]], path: tuple[int, ...], chance: RoundNoise, b: int) -> tuple:
    text = []
    for depth, row in enumerate((0, *path)):
        law = torch.tensor([rows[row]], dtype=torch.float64)
        address = chance.seed_B[b : b + 1], chance.sample_B[b : b + 1], chance.anchor_B[b : b + 1]
        text.append(int(gumbel_race(law, None, address[0], address[1], address[2] + depth)))
    return tuple(text)


def test_match_keeps_children_as_often_as_the_target_draws_them():
    """Two certain children x, y: kept with chance p(x) + p(y); the text has the target's law."""
    rounds = 20_000
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    tree = TokenTree.of([[3, 1]] * rounds, [[0, 0]] * rounds)
    verdict = RULES["match"].verify(
        Draft(tree, None), TargetLaws(p.expand(rounds, 3, 4)), noise_of(rounds)
    )
    kept = verdict.num_accepted_B.double().mean()
    assert float(kept) == pytest.approx(0.6, abs=5 * (0.24 / rounds) ** 0.5)
    first = torch.where(
        verdict.num_accepted_B > 0,
        tree.tokens_BN.gather(1, (verdict.path_BD[:, :1] - 1).clamp(min=0)).squeeze(1),
        verdict.token_B,
    )
    _close(first, p)
    with pytest.raises(AssertionError):
        _close(first, p.flip(0))


def _close(tokens_B: Tensor, law_V: Tensor) -> None:
    seen_V = torch.bincount(tokens_B, minlength=len(law_V)) / len(tokens_B)
    error_V = (law_V * (1 - law_V) / len(tokens_B)).sqrt()
    assert bool(((seen_V - law_V).abs() < 5 * error_V).all()), (seen_V, law_V)


def test_of_equal_siblings_the_first_is_taken():
    tree = TokenTree.of([[2, 2, 0, 1]], [[0, 0, 1, 2]])
    target = torch.eye(3)[torch.tensor([[2, 1, 0, 0, 0]])]
    for name in NAMES:
        verdict = RULES[name].verify(Draft(tree, None), TargetLaws(target), noise_of(1))
        assert outcome(verdict, 0) == ((1,), 1)


def test_a_walk_is_the_draws_own_text_when_the_draft_is_the_target():
    """Children raced on the target's noise with the target's law are always met."""
    p = torch.softmax(torch.randn(1, 6, generator=torch.Generator().manual_seed(3)), -1)
    chance = noise_of(100)
    everyone = torch.arange(100)
    law = Law.dense(p.expand(100, 6))
    tokens = [Draws(RULES["coupled"], chance).draw(law, i, everyone).tolist() for i in (0, 1)]
    tree = TokenTree.of(
        [[(a + 1) % 6, a, b] for a, b in zip(*tokens, strict=True)], [[0, 0, 2]] * 100
    )
    verdict = RULES["coupled"].verify(Draft(tree, None), TargetLaws(p.expand(100, 4, 6)), chance)
    assert verdict.path_BD.tolist() == [[2, 3]] * 100
