"""Production rules: held to the reference, to theory, to plain decoding, and at their edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider import noise
from outrider.certify import pairs, reference, runs
from outrider.certify.paths import FORMS, PathCount, compare
from outrider.decoding import (
    RULES,
    Draft,
    Draws,
    Law,
    RoundNoise,
    TargetLaws,
    TargetRows,
    Verdict,
    theory,
)
from outrider.decoding.rules import base, leftover
from outrider.decoding.rules.base import Rule, Sifted
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.token import TokenRule
from outrider.decoding.sampling import gumbel_race, inverse_cdf


def noise_of(num_texts: int, seed: int = 0, anchor: int = 5) -> RoundNoise:
    return RoundNoise(
        noise.as_key(range(seed, seed + num_texts)),
        torch.zeros(num_texts, dtype=torch.int64),
        torch.full((num_texts,), anchor),
    )


def verify(rule: str, draft: Draft, target: torch.Tensor, seed: int = 0) -> Verdict:
    return RULES[rule].verify(draft, TargetLaws(target), noise_of(len(target), seed))


def laws(*shape: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=chance) * 2, -1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", list(RULES))
def test_production_is_the_reference_path_by_path(rule: str, dtype: torch.dtype, form: str):
    total = PathCount(rule)
    for seed in range(4):
        total.add(compare(rule, 100 * FORMS.index(form) + seed, 400, form, dtype))
    assert total.wrong == 0, total.examples
    assert dtype == torch.float32 or total.excused == 0


class _NotScaled(BlockRule):
    def sift(self, draft: Draft, target: TargetRows, tests_BK: torch.Tensor) -> Sifted:
        kept = super().sift(draft, target, tests_BK).num_accepted_B
        return leftover.left_over(draft, target, kept, None)


class _FirstToFail(BlockRule):
    def sift(self, draft: Draft, target: TargetRows, tests_BK: torch.Tensor) -> Sifted:
        return TokenRule().sift(draft, target, tests_BK)


class _WholeTarget(TokenRule):
    def sift(self, draft: Draft, target: TargetRows, tests_BK: torch.Tensor) -> Sifted:
        kept = super().sift(draft, target, tests_BK).num_accepted_B
        return Sifted(kept, target.probs(base.first_rows(target) + kept))


@pytest.mark.parametrize("mutant", [_NotScaled(), _FirstToFail(), _WholeTarget()])
def test_a_mutant_leaves_the_path(mutant: Rule):
    count = PathCount(mutant.name)
    for seed in range(4):
        count.add(compare(mutant.name, seed, 400, "dense", torch.float64, mutant))
    assert count.wrong > 0


@pytest.mark.parametrize(
    ("rule", "mean"), [("token", 10 / 9), ("block", 11 / 9), ("match", 52 / 81)]
)
def test_sun_toy_keeps_what_theory_says(rule: str, mean: float):
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafted: 10/9 by token, 11/9 by block."""
    rounds = 60_000
    chance = noise_of(rounds)
    target = torch.tensor([1 / 3, 2 / 3]).expand(rounds, 3, 2)
    law = Law.dense(torch.tensor([2 / 3, 1 / 3]).expand(2 * rounds, 2))
    draws, everyone = Draws(RULES[rule], chance), torch.arange(rounds)
    tokens = torch.stack([draws.draw(law.select(2 * everyone + i), i, everyone) for i in (0, 1)], 1)
    draft = Draft.chain(tokens, torch.full((rounds,), 2), law)
    kept = RULES[rule].verify(draft, TargetLaws(target), chance).num_accepted_B.double()
    error = 5 * float(kept.std()) / rounds**0.5
    assert float(kept.mean()) == pytest.approx(mean, abs=error)
    assert error < 1 / 27


@pytest.mark.parametrize("rule", ["match", "token", "block", "coupled"])
def test_texts_over_several_rounds_have_the_target_law(rule: str):
    """Chi-square of 4-token texts written by the production rule; a wrong law is far out."""
    pair = pairs.toy()
    written = runs.write(rule, pair.target, pair.draft, range(4000), 2, 4)
    assert runs.surprise(written.texts, pair.target, 4) < 4.5
    nearly = pairs.fixed("nearly", [4, 7], [1, 1], 2, 4).target
    assert runs.surprise(written.texts, nearly, 4) > 4.5


class _WholeTargetBlock(BlockRule):
    def sift(self, draft: Draft, target: TargetRows, tests_BK: torch.Tensor) -> Sifted:
        kept = super().sift(draft, target, tests_BK).num_accepted_B
        return Sifted(kept, target.probs(base.first_rows(target) + kept))


@pytest.mark.parametrize("mutant", [_WholeTargetBlock(), _WholeTarget()])
def test_a_mutant_fails_the_chi_square(mutant: Rule):
    pair = pairs.fixed("three", [1, 2, 3], [3, 2, 1], 3, 4)
    written = runs.write(mutant, pair.target, pair.draft, range(4000), 3, 4)
    assert runs.surprise(written.texts, pair.target, 4) > 4.5


def test_every_address_is_used_once_in_law():
    """Rules in law over several rounds never meet an address twice."""
    pair = pairs.random_pair(2)
    for rule in ("match", "token", "block"):
        with noise.NoiseLedger() as ledger:
            runs.write(rule, pair.target, pair.draft, range(20), 3, 8)
        streams = {address[2] for address in ledger.addresses}
        expected = {noise.STREAM_DRAFT, noise.STREAM_ACCEPT, noise.STREAM_EXTRA}
        assert streams == (expected - {noise.STREAM_ACCEPT} if rule == "match" else expected)


def test_seeded_rules_write_the_plain_text():
    facts = list(runs.seeded_checks(15))
    assert all(good for _, good in facts), facts
    assert all(found for _, _, found in runs.seeded_wrong(15))


@pytest.mark.parametrize("rule", list(RULES))
def test_rows_of_a_batch_are_what_they_are_alone(rule: str):
    target, draft_law, tokens, lengths = _ragged(6)
    whole = verify(rule, Draft.chain(tokens, lengths, draft_law), target)
    for b in range(6):
        n = int(lengths[b])
        rows = torch.arange(n) + 3 * b
        alone = Draft.chain(tokens[b : b + 1, :n], lengths[b : b + 1], draft_law.select(rows))
        verdict = verify(rule, alone, target[b : b + 1, : n + 1], seed=b)
        assert verdict.num_accepted_B[0] == whole.num_accepted_B[b]
        assert verdict.token_B[0] == whole.token_B[b]


@pytest.mark.parametrize("rule", list(RULES))
def test_padding_is_not_read(rule: str):
    target, draft_law, tokens, lengths = _ragged(40)
    draft = Draft.chain(tokens, lengths, draft_law)
    before = verify(rule, draft, target)
    beyond = torch.arange(3) >= lengths[:, None]
    junk = target.clone()
    junk[:, 1:][beyond] = laws(int(beyond.sum()), target.shape[2], seed=9)
    probs = draft_law.probs.clone()
    probs[beyond.flatten()] = 0
    other = Draft.chain(tokens.masked_fill(beyond, 0), lengths, Law.dense(probs))
    after = verify(rule, other, junk)
    assert torch.equal(before.num_accepted_B, after.num_accepted_B)
    assert torch.equal(before.token_B, after.token_B)


def _ragged(num_texts: int) -> tuple[torch.Tensor, Law, torch.Tensor, torch.Tensor]:
    target, q = laws(num_texts, 4, 7, seed=1), laws(3 * num_texts, 7, seed=2)
    tokens = q.argmax(1).view(num_texts, 3)
    return target, Law.dense(q), tokens, torch.arange(num_texts) % 4


def _greedy_chains(seed: int) -> tuple[Draft, torch.Tensor]:
    """Chains of up to four tokens of up to five texts, and the target's own tokens."""
    chance = torch.Generator().manual_seed(seed)
    num, depth = int(torch.randint(6, (), generator=chance)), seed % 5
    tokens_BK = torch.randint(2, (num, depth), generator=chance)
    counts_B = torch.randint(depth + 1, (num,), generator=chance)
    own_BT = torch.randint(2, (num, depth + 1), generator=chance)
    return Draft.chain(tokens_BK, counts_B, None), own_BT


def _counts_ignored(draft: Draft, own_BT: torch.Tensor) -> Verdict:
    whole_B = torch.full_like(draft.tree.counts_B, draft.tree.num_nodes)
    return base._few_while_equal(Draft.chain(draft.tree.tokens_BN, whole_B, None), own_BT)


def _no_path(draft: Draft, own_BT: torch.Tensor) -> Verdict:
    found = base._few_while_equal(draft, own_BT)
    return Verdict(found.num_accepted_B, found.token_B, torch.zeros_like(found.path_BD))


def _as_many(few: Callable[[Draft, torch.Tensor], Verdict]) -> bool:
    """Whether chains of few numbers have the verdicts that calls on tensors find."""
    for seed in range(200):
        draft, own_BT = _greedy_chains(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "FEW_TEXTS", -1)
            want = base.while_equal(draft, own_BT)
        found = few(draft, own_BT)
        for name in ("num_accepted_B", "token_B", "path_BD"):
            ours, theirs = getattr(found, name), getattr(want, name)
            if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
                return False
    return True


def test_few_numbers_are_compared_as_many_are():
    assert _as_many(base.while_equal) and _as_many(base._few_while_equal)
    # The negative controls.
    assert not _as_many(_counts_ignored) and not _as_many(_no_path)


@pytest.mark.parametrize("rule", list(RULES))
def test_without_a_draft_it_is_plain_decoding(rule: str):
    target = laws(50, 1, 9)
    none = Draft.chain(
        torch.zeros(50, 0, dtype=torch.int64), torch.zeros(50, dtype=torch.int64), None
    )
    verdict = verify(rule, none, target)
    assert verdict.num_accepted_B.tolist() == [0] * 50
    if rule == "greedy":
        assert torch.equal(verdict.token_B, target[:, 0].argmax(-1))
    empty = Draft.chain(
        torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), None
    )
    nobody = verify(rule, empty, target[:0].expand(0, 3, 9))
    assert len(nobody.token_B) == 0
    for one in (verdict, nobody):
        parts = one.num_accepted_B, one.token_B, one.path_BD
        assert [part.dtype for part in parts] == [torch.int64] * 3


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("form", ["dense", "none"])
def test_one_hot_laws_come_out_right(rule: str, form: str):
    """Temperature 0: the target's argmax, kept while drafted, whatever the rule and the noise."""
    own = torch.tensor([[2, 0, 1, 3], [2, 0, 1, 3], [2, 0, 1, 3]])
    tokens = torch.tensor([[2, 0, 1], [2, 3, 1], [0, 0, 1]])
    target, q = torch.eye(4)[own], torch.eye(4)[tokens].view(9, 4)
    law = Law.dense(q) if form == "dense" else None
    for seed in range(20):
        verdict = verify(rule, Draft.chain(tokens, torch.full((3,), 3), law), target, seed)
        assert verdict.num_accepted_B.tolist() == [3, 1, 0]
        assert verdict.token_B.tolist() == [3, 0, 2]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_forbidden_token_never_stays(rule: str):
    """Not even at u = 0."""
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = Draft.chain(
        torch.tensor([[0]]), torch.tensor([1]), Law.dense(torch.tensor([[1.0, 0.0]]))
    )
    sifted = RULES[rule].sift(draft, TargetLaws(target), torch.zeros(1, 1, dtype=torch.float64))  # type: ignore[attr-defined]
    assert sifted.num_accepted_B.tolist() == [0]
    assert inverse_cdf(sifted.weights_BV, torch.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("p", "kept"), [(0.25, 1), (0.0, 0)])
def test_where_q_is_zero_the_target_decides(rule: str, p: float, kept: int):
    target = torch.tensor([[[p, 1 - p], [0.5, 0.5]]])
    draft = Draft.chain(
        torch.tensor([[0]]), torch.tensor([1]), Law.dense(torch.tensor([[0.0, 1.0]]))
    )
    for seed in range(10):
        assert verify(rule, draft, target, seed).num_accepted_B.tolist() == [kept]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_laws_are_always_kept(rule: str):
    target = laws(300, 4, 5)
    tokens = target[:, :3].argmax(-1)
    law = Law.dense(target[:, :3].reshape(-1, 5))
    verdict = verify(rule, Draft.chain(tokens, torch.full((300,), 3), law), target)
    assert verdict.num_accepted_B.tolist() == [3] * 300


def test_an_empty_residual_leaves_the_target():
    """Only rounding refuses a token of equal laws; what is added then follows the target."""
    target = laws(1, 2, 5)
    draft = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), Law.dense(target[:, 0]))
    sifted = TokenRule().sift(draft, TargetLaws(target), torch.ones(1, 1, dtype=torch.float64))
    assert sifted.num_accepted_B.tolist() == [0]
    torch.testing.assert_close(sifted.weights_BV, target[:, 0])


def test_ties_go_to_the_lowest_id():
    target = torch.tensor([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]])
    draft = Draft.chain(torch.tensor([[1]]), torch.tensor([1]), None)
    verdict = verify("greedy", draft, target)
    assert (verdict.num_accepted_B.tolist(), verdict.token_B.tolist()) == ([1], [0])
    assert RULES["greedy"].draw(Law.dense(target[0]), noise_of(2), 0).tolist() == [1, 0]


def test_block_keeps_at_least_what_token_keeps():
    """Same chains, same tests: on average block keeps more, never less in expectation."""
    target, q = laws(20_000, 4, 5, seed=3), laws(60_000, 5, seed=4)
    chance = noise_of(20_000)
    draws, everyone = Draws(RULES["block"], chance), torch.arange(20_000)
    law = Law.dense(q)
    tokens = torch.stack(
        [draws.draw(law.select(3 * everyone + i), i, everyone) for i in range(3)], 1
    )
    draft = Draft.chain(tokens, torch.full((20_000,), 3), law)
    by = {
        r: RULES[r].verify(draft, TargetLaws(target), chance).num_accepted_B.double().mean()
        for r in RULES
    }
    assert by["block"] > by["token"] + 0.01 > by["match"]


def test_inverse_cdf_edges():
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]]).expand(6, 5)
    uniform = torch.tensor(
        [0.0, 0.2499999, 0.25, 0.9999999, 1.0, 1.0 - 2.0**-53], dtype=torch.float64
    )
    assert inverse_cdf(weights, uniform).tolist() == [1, 1, 3, 3, 3, 3]
    tiny = torch.full((1, 3), 1e-30)
    assert inverse_cdf(tiny, torch.tensor([0.5])).tolist() == [1]


def test_the_race_is_one_whatever_the_form():
    """Dense rows, their supports and shuffled sparse rows race alike; chances are the law's."""
    chance = noise_of(4000)
    address = chance.seed_B, chance.sample_B, chance.anchor_B
    probs = laws(1, 12).expand(4000, 12)
    dense = gumbel_race(probs, None, *address)
    order = torch.randperm(12)
    sparse = gumbel_race(probs[:, order], order.expand(4000, 12), *address)
    assert torch.equal(dense, sparse)
    few = torch.where(torch.arange(12) < 3, probs, 0)
    third = gumbel_race(few, None, *address)
    assert torch.equal(third, gumbel_race(few[:, :3], None, *address))
    seen = torch.bincount(dense, minlength=12) / 4000
    assert float((seen - probs[0]).abs().max()) < 5 * 0.5 / 4000**0.5


def test_draws_follow_the_law_they_are_given():
    chance = noise_of(4000)
    probs = laws(1, 6).expand(4000, 6)
    for rule in ("match", "token", "block", "coupled"):
        drawn = Draws(RULES[rule], chance).draw(Law.dense(probs), 2, torch.arange(4000))
        seen = torch.bincount(drawn, minlength=6) / 4000
        assert float((seen - probs[0]).abs().max()) < 5 * 0.5 / 4000**0.5
    point = Law.point(torch.arange(5))
    with noise.NoiseLedger() as ledger:
        assert Draws(RULES["token"], chance).draw(point, 0, torch.arange(5)).tolist() == [
            0,
            1,
            2,
            3,
            4,
        ]
    assert not ledger.addresses


def test_coupled_drafts_meet_the_target_as_often_as_theory_says():
    p, q = laws(1, 6, seed=5)[0].double(), laws(1, 6, seed=6)[0].double()
    chance = noise_of(20_000)
    drawn = [
        gumbel_race(law.expand(20_000, 6), None, chance.seed_B, chance.sample_B, chance.anchor_B)
        for law in (p, q)
    ]
    agreed = float((drawn[0] == drawn[1]).double().mean())
    assert agreed == pytest.approx(
        float(theory.gumbel_acceptance(p.tolist(), q.tolist())), abs=0.018
    )


def test_reference_writes_what_it_says():
    """The reference itself, on one round worked by hand."""
    numbers = reference.Noise(lambda i: 0.5, lambda i: 0.9, lambda i: 0.0)
    case = reference.Round([0, 0], [[0.5, 0.5]] * 3, [[0.8, 0.2]] * 2, numbers)
    # 0.5 * 0.8 < 0.5 keeps both, then 0.9 of (0.5, 0.5) is token 1.
    assert reference.token(case) == reference.Outcome(2, 1)
    # b = (1, 5/8, 25/64): 0.5 >= 25/64; the prefix of one token has S = 0.1125, h = 0.1125/0.4875.
    assert reference.block(case) == reference.Outcome(0, 1)
