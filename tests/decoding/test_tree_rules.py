"""Rules on trees: held to the reference path by path, to the chain rules, and at their edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import noise
from outrider.certify.paths import PathCount, law_rows
from outrider.certify.tree_paths import (
    STYLES,
    TREE_RULES,
    combinations_of,
    compare_trees,
    random_case,
    with_law,
)
from outrider.decoding import (
    RULES,
    Draft,
    Draws,
    Kind,
    Law,
    RoundNoise,
    Rule,
    TargetLaws,
    TargetLogits,
    TargetRows,
    Verdict,
    children,
)
from outrider.decoding.children import Places
from outrider.decoding.grow import grow
from outrider.decoding.rules import (
    base,
    gbv,
    kseq,
    match,
    recursive,
    residual,
    rowwise,
    traversal,
)
from outrider.decoding.sampling import gumbel_race
from outrider.tree import TokenTree, full
from tests.decoding.toy_trees import nobody_left_out, noise_of

WALKS = ("recursive", "hybrid", "traversal", "hybrid-traversal")
CASES = [(rule, *combination) for rule in TREE_RULES for combination in combinations_of(rule)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rule", "style", "form"), CASES)
def test_production_is_the_reference_path_by_path(
    rule: str, style: str, form: str, dtype: torch.dtype
):
    total = PathCount(rule)
    for seed in range(4):
        total.add(compare_trees(rule, seed, 80, style, form, dtype))
    with nobody_left_out():
        for seed in (1, 2):
            total.add(compare_trees(rule, seed, 80, style, form, dtype))
    assert total.wrong == 0, total.examples
    assert dtype == torch.float32 or total.excused == 0
    assert total.draws > 0 or rule == "greedy"


def test_children_drawn_otherwise_are_found(monkeypatch: pytest.MonkeyPatch):
    """The second child at the first one's address."""
    assert compare_trees("recursive", 0, 100, "grown", "dense", torch.float64).wrong == 0
    monkeypatch.setattr(Places, "all_uniforms", lambda self, num: [self.uniforms(0)] * num)
    assert compare_trees("recursive", 0, 100, "grown", "dense", torch.float64).wrong > 0


def test_sharp_rows_drawn_from_their_sums_are_found(monkeypatch: pytest.MonkeyPatch):
    """Where laws span e^-60 to 1, what a taken token leaves is below the grain of the sums."""
    assert compare_trees("recursive", 1, 300, "grown", "dense", torch.float32).wrong == 0
    monkeypatch.setattr(children, "_SHARP", 0.0)
    assert compare_trees("recursive", 1, 300, "grown", "dense", torch.float32).wrong > 0


def test_every_rule_for_trees_is_compared():
    assert set(TREE_RULES) == {name for name, rule in RULES.items() if rule.trees}


def wrong_rounds(rule: Rule, name: str) -> int:
    return sum(
        compare_trees(name, seed, 150, style, "dense", torch.float64, rule).wrong
        for style in ("without replacement", "with replacement", "tail + top K-1")
        for seed in range(3)
    )


class _Thrifty(kseq.KseqRule):
    """K-SEQ with the rho of one child."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kseq, "least_rho", lambda p, q, count: torch.ones_like(count))
            return super().verify(draft, target, noise)


class _FirstPath(gbv.GbvRule):
    """The first path, told to be the best of all."""

    def best(self, draft: Draft, target: TargetRows) -> gbv.Best:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gbv.Ranked, "place_of", lambda self, tokens: torch.zeros_like(tokens))
            return super().best(draft, target)


class _ByRow(type(RULES["match"])):
    """Every row draws at the root's address."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            one = base.extra_uniforms
            patch.setattr(match, "extra_uniforms", lambda at, index: one(at, index * 0))
            return super().verify(draft, target, noise)


class _ByAnchor(type(RULES["coupled"])):
    """Every row races at the root's position."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                TokenTree,
                "depths",
                lambda self: torch.nn.functional.pad(self.tokens_BN, (1, 0)) * 0,
            )
            return super().verify(draft, target, noise)


class _LastOfEquals(type(RULES["greedy"])):
    """The highest id of several likeliest tokens."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                TargetLaws,
                "argmax",
                lambda self, at: self.shape[2] - 1 - self.probs(at).flip(1).argmax(1),
            )
            return super().verify(draft, target, noise)


@pytest.mark.parametrize(
    ("mutant", "style"),
    [
        (_Thrifty(), "with replacement"),
        (_FirstPath(), "paths"),
        (_ByRow(), "top K"),
        (_ByAnchor(), "raced"),
        (_LastOfEquals(), "top K"),
    ],
)
def test_a_mutant_of_any_rule_leaves_the_path(mutant: Rule, style: str):
    counts = [
        compare_trees(mutant.name, seed, 150, style, "dense", torch.float64, mutant)
        for seed in range(4)
    ]
    # What breaks ties otherwise is within any margin; in float64 even that must not happen.
    assert sum(count.wrong + count.excused for count in counts) > 0


def test_a_mutant_leaves_the_path(monkeypatch: pytest.MonkeyPatch):
    """What was refused stays in R; the law is the base law; the share is not brought up to date.

    Row by row as on a host, and all rows at once as elsewhere.
    """
    refuse, child_law = residual.Family.refuse, residual.Family._child_law
    refuse_one, child_of = rowwise.Row.refuse, rowwise.Row.child

    def forgets(self, *_):
        pass

    def base_law(self, k):
        own_nW, left_n = child_law(self, k)
        return own_nW, torch.ones_like(left_n)

    def base_law_of_one(self, k):
        return replace(child_of(self, k), left=1.0)

    def keeps_share(self, *refused):
        share_n = self.share_n
        refuse(self, *refused)
        self.share_n = share_n

    def keeps_share_of_one(self, *refused):
        share = self.share
        refuse_one(self, *refused)
        self.share = share

    for name, method, mutant, of_one in (
        ("recursive", "refuse", forgets, forgets),
        ("recursive", "_child_law", base_law, base_law_of_one),
        ("traversal", "_child_law", base_law, base_law_of_one),
        ("traversal", "refuse", keeps_share, keeps_share_of_one),
    ):
        assert wrong_rounds(RULES[name], name) == 0
        with monkeypatch.context() as patch, nobody_left_out():
            patch.setattr(residual.Family, method, mutant)
            assert wrong_rounds(RULES[name], name) > 0, (name, method)
        with monkeypatch.context() as patch:
            patch.setattr(rowwise.Row, method.replace("_child_law", "child"), of_one)
            assert wrong_rounds(RULES[name], name) > 0, (name, method)


def chains(seed: int, num_texts: int, rule: str) -> tuple[Draft, torch.Tensor, RoundNoise]:
    """Ragged chains drawn from dense laws, and a table of the target's."""
    chance = np.random.default_rng(seed)
    depth, width = 4, 6
    law = Law.dense(torch.from_numpy(law_rows(chance, (num_texts * depth, width))))
    target = law_rows(chance, (num_texts, depth + 1, width))
    same = chance.random((num_texts, depth)) < 0.2
    target[:, :depth][same] = law.probs.view(num_texts, depth, width).numpy()[same]
    addresses, everyone = noise_of(num_texts, seed), torch.arange(num_texts)
    draws = Draws(RULES[rule], addresses)
    columns = [draws.draw(law.select(everyone * depth + i), i, everyone) for i in range(depth)]
    lengths = torch.from_numpy(chance.integers(0, depth + 1, num_texts))
    return Draft.chain(torch.stack(columns, 1), lengths, law), torch.from_numpy(target), addresses


@pytest.mark.parametrize("kind", [Kind.IID, Kind.WITHOUT, Kind.TAIL, Kind.POINT])
@pytest.mark.parametrize(
    ("name", "chain"), [("recursive", "token"), ("traversal", "block"), ("hybrid", "token")]
)
def test_on_chains_it_is_the_chain_rule(name: str, chain: str, kind: Kind):
    """Whichever way it is taken: as a chain, as a tree like any other, on an accelerator."""
    for seed in range(3):
        draft, target, addresses = chains(seed, 500, chain)
        law = None if kind == Kind.POINT else draft.law
        draft = Draft(draft.tree, law, kinds=frozenset({kind}))
        expected = RULES[chain].verify(draft, TargetLaws(target), addresses)
        tree = TokenTree(
            draft.tree.tokens_BN, draft.tree.parents_BN, draft.tree.counts_B, draft.tree.depth, 2
        )
        written_out = Draft(tree, law, draft.law_rows(), draft.node_kinds(), draft.kinds)
        for form in (draft, written_out):
            same_verdict(RULES[name].verify(form, TargetLaws(target), addresses), expected)
            with nobody_left_out():
                same_verdict(RULES[name].verify(form, TargetLaws(target), addresses), expected)


def same_verdict(left: Verdict, right: Verdict) -> None:
    assert torch.equal(left.num_accepted_B, right.num_accepted_B)
    assert torch.equal(left.token_B, right.token_B)
    assert torch.equal(left.path_BD, right.path_BD)


@pytest.mark.parametrize("name", WALKS)
def test_rows_of_a_batch_are_what_they_are_alone(name: str):
    case = random_case(3, "every kind", num_texts=40)
    whole = RULES[name].verify(case.draft, TargetLaws(torch.from_numpy(case.target)), case.noise)
    for b, one in enumerate(case.trees):
        count = len(one.tokens)
        assert case.draft.law_rows_BN is not None and case.draft.kinds_BN is not None
        alone = Draft(
            TokenTree.of([one.tokens], [one.parents]),
            case.draft.law,
            case.draft.law_rows_BN[b : b + 1, :count],
            case.draft.kinds_BN[b : b + 1, :count],
            case.draft.kinds,
        )
        rows = torch.from_numpy(case.target[b : b + 1, : count + 1])
        verdict = RULES[name].verify(alone, TargetLaws(rows), case.noise.select(torch.tensor([b])))
        assert verdict.token_B[0] == whole.token_B[b]
        kept = int(verdict.num_accepted_B[0])
        assert verdict.path_BD[0, :kept].tolist() == whole.path_BD[b, :kept].tolist()
        assert kept == int(whole.num_accepted_B[b])


@pytest.mark.parametrize("name", WALKS)
def test_padding_is_not_read(name: str):
    """Neither tokens, parents, laws and kinds of padding nor the target's rows behind them."""
    case = random_case(4, "without replacement", num_texts=60)
    draft, target = case.draft, torch.from_numpy(case.target)
    expected = RULES[name].verify(draft, TargetLaws(target), case.noise)
    beyond = ~draft.tree.is_node()
    chance = torch.Generator().manual_seed(0)

    def junk(part: torch.Tensor, below: int | torch.Tensor) -> torch.Tensor:
        made = torch.randint(0, 2**40, part.shape, generator=chance) % below
        return torch.where(beyond, made, part)

    count = draft.tree.num_nodes
    tree = TokenTree(
        junk(draft.tree.tokens_BN, target.shape[2]),
        junk(draft.tree.parents_BN, torch.arange(1, count + 1)),
        draft.tree.counts_B,
        draft.tree.depth,
        draft.tree.width,
    )
    assert draft.law is not None
    other = Draft(
        tree,
        draft.law,
        junk(draft.law_rows(), len(draft.law)),
        junk(draft.node_kinds(), 4),
        draft.kinds,
    )
    spoilt = target.clone()
    spoilt[:, 1:][beyond] = torch.nan
    same_verdict(RULES[name].verify(other, TargetLaws(spoilt), case.noise), expected)
    with nobody_left_out():
        same_verdict(RULES[name].verify(other, TargetLaws(target), case.noise), expected)


class NoHostReads(TorchDispatchMode):
    """Fails where a tensor's value would reach the host or shape another tensor."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert name not in self.READS, func
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert not any(i is not None and i.dtype == torch.bool for i in indices), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("style", ["two drafters", "top K", "every kind"])
@pytest.mark.parametrize("name", WALKS)
def test_on_an_accelerator_the_host_reads_nothing(name: str, style: str):
    case = random_case(5, style)
    rows = TargetLaws(torch.from_numpy(case.target))
    expected = RULES[name].verify(case.draft, rows, case.noise)
    with pytest.raises(AssertionError), NoHostReads():
        RULES[name].verify(case.draft, rows, case.noise)
    with nobody_left_out(), NoHostReads():
        verdict = RULES[name].verify(case.draft, rows, case.noise)
    same_verdict(verdict, expected)


def at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every accept test is made with u = 0."""

    uniforms = base.round_uniforms

    def zeros(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tests_BN, extra_B = uniforms(*arguments)
        return torch.zeros_like(tests_BN), extra_B

    monkeypatch.setattr(recursive, "round_uniforms", zeros)
    monkeypatch.setattr(traversal, "round_uniforms", zeros)


@pytest.mark.parametrize("style", list(STYLES))
@pytest.mark.parametrize("name", WALKS)
def test_a_forbidden_token_never_comes_out(name: str, style: str, monkeypatch: pytest.MonkeyPatch):
    """Neither kept, not even at u = 0, nor added."""
    at_zero(monkeypatch)
    forbidden = 0
    for seed, dtype in ((0, torch.float64), (1, torch.float32)):
        case = random_case(seed, style)
        draft = with_law(case.draft, dtype, "dense")
        rows = torch.from_numpy(case.target).to(dtype)
        verdict = RULES[name].verify(draft, TargetLaws(rows), case.noise)
        for b in range(len(rows)):
            row = 0
            for child in verdict.path_BD[b, : int(verdict.num_accepted_B[b])].tolist():
                assert rows[b, row, draft.tree.tokens_BN[b, child - 1]] > 0
                row = child
            assert rows[b, row, verdict.token_B[b]] > 0
            forbidden += int((rows[b] == 0).sum())
    assert forbidden > 0


@pytest.mark.parametrize("name", WALKS)
def test_sure_tokens_come_out_right(name: str):
    """Temperature 0: the target's argmax, kept while it was drafted, whatever the noise."""
    tree = TokenTree.of([[2, 1, 0, 3]] * 20, [[0, 0, 1, 2]] * 20)
    draft = Draft(tree, None)
    target = torch.eye(4)[torch.tensor([1, 0, 3, 0, 2])].expand(20, 5, 4)
    verdict = RULES[name].verify(draft, TargetLaws(target), noise_of(20))
    assert verdict.num_accepted_B.tolist() == [2] * 20
    assert verdict.path_BD.tolist() == [[2, 4]] * 20
    assert verdict.token_B.tolist() == [2] * 20


@pytest.mark.parametrize("name", WALKS)
def test_without_a_draft_it_is_plain_decoding(name: str):
    nothing = Draft(TokenTree.of([[]] * 5, [[]] * 5), None)
    target = torch.eye(5)[:, None]
    verdict = RULES[name].verify(nothing, TargetLaws(target), noise_of(5))
    assert verdict.token_B.tolist() == list(range(5))
    assert verdict.path_BD.shape == (5, 0)
    empty = Draft(
        TokenTree(
            torch.zeros(0, 3, dtype=torch.int64),
            torch.zeros(0, 3, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
            2,
            2,
        ),
        None,
    )
    target = torch.zeros(0, 4, 5)
    assert len(RULES[name].verify(empty, TargetLaws(target), noise_of(0)).token_B) == 0


@pytest.mark.parametrize("name", WALKS)
def test_logits_give_what_their_laws_give(name: str):
    """Half precision too: its rows are laws of float32."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 7, 50, generator=chance) * 3
    q = torch.softmax(torch.randn(64, 7, 50, generator=chance) + logits, -1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rows = logits.to(dtype)
        draft = grown(name, full(2, 2), q, noise_of(64))
        probs = torch.softmax(rows.double(), -1)
        fused = RULES[name].verify(draft, TargetLogits(rows), noise_of(64))
        apart = RULES[name].verify(draft, TargetLaws(probs), noise_of(64))
        same_verdict(fused, apart)


def grown(name: str, shape: tuple[int, ...], q_BTV: torch.Tensor, addresses: RoundNoise) -> Draft:
    """Trees drawn from laws by row of the tree."""
    texts = torch.arange(len(q_BTV))[:, None]
    draws = Draws(RULES[name], addresses)
    return grow(draws, shape, lambda tree, rows: Law.dense(q_BTV[texts, rows].flatten(0, 1)))


def chi_square(name: str, rule: Rule, rounds: int = 8_000) -> float:
    """How far two-token texts are from the target's law, in standard deviations of chi-square."""
    chance = np.random.default_rng(1)
    p0, q0 = law_rows(chance, (4,)) * 0.9 + 0.025, law_rows(chance, (4,)) * 0.9 + 0.025
    p1, q1 = law_rows(chance, (4, 4)) * 0.9 + 0.025, law_rows(chance, (4, 4)) * 0.9 + 0.025
    addresses, texts = noise_of(rounds, 7), torch.arange(rounds)
    draws = Draws(RULES[name], addresses)

    def expand(tree: TokenTree, rows: torch.Tensor) -> Law:
        if tree.depth == 0:
            return Law.dense(torch.from_numpy(q0).expand(rounds, 4))
        tokens = tree.tokens_BN.gather(1, (rows - 1).clamp(min=0))
        return Law.dense(torch.from_numpy(q1)[tokens.flatten()])

    draft = grow(draws, full(2, 2), expand)
    above = torch.from_numpy(p1)[draft.tree.tokens_BN]
    target = torch.cat((torch.from_numpy(p0).expand(rounds, 1, 4), above), 1)
    verdict = rule.verify(draft, TargetLaws(target), addresses)
    tokens = torch.nn.functional.pad(draft.tree.tokens_BN, (1, 0))
    kept = verdict.num_accepted_B
    path = tokens.gather(1, verdict.path_BD)
    first = torch.where(kept > 0, path[:, 0], verdict.token_B)
    second = torch.where(kept > 1, path[:, 1], verdict.token_B)
    # A text that ends after one token is gone on with by the target itself.
    plain = noise.uniforms53(addresses.seed_B, 1, noise.STREAM_VERIFY, 0, 0)
    drawn = (torch.from_numpy(p1)[first].cumsum(1) < plain[:, None]).sum(1).clamp(max=3)
    second = torch.where(kept > 0, second, drawn)
    seen = torch.bincount(first * 4 + second, minlength=16).numpy()
    expected = (p0[:, None] * p1).flatten() * rounds
    assert len(texts) == seen.sum()
    return float((((seen - expected) ** 2 / expected).sum() - 15) / math.sqrt(30))


class _FromTarget(Rule):
    """Adds a token of the whole target where children were refused."""

    def __init__(self, inner: Rule) -> None:
        self._inner = inner

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rowwise.Row, "write", lambda self, out: out.copy_(self.weights_V))
            return self._inner.verify(draft, target, noise)


def test_the_law_of_what_comes_out_is_the_targets():
    for name in WALKS:
        assert chi_square(name, RULES[name]) < 4.5, name
        assert chi_square(name, _FromTarget(RULES[name])) > 4.5, name


@pytest.mark.parametrize("name", WALKS)
def test_every_address_is_used_once(name: str):
    """Drawing and verifying, some supports used up, and the next round of the same texts."""
    q = torch.softmax(torch.randn(8, 15, 5, generator=torch.Generator().manual_seed(0)), -1)
    q[::2, 0, 1:] = 0
    q[1::2, 1, 2:] = 0
    q /= q.sum(-1, keepdim=True)
    target = torch.softmax(torch.randn(8, 15, 5), -1)
    anchor = torch.full((8,), 5)
    with noise.NoiseLedger() as ledger:
        for _ in range(3):
            addresses = RoundNoise(noise.as_key(range(8)), torch.zeros_like(anchor), anchor)
            draft = grown(name, full(2, 3), q, addresses)
            verdict = RULES[name].verify(draft, TargetLaws(target), addresses)
            anchor = anchor + verdict.num_accepted_B + 1
    assert {stream for _, _, stream, _, _ in ledger.addresses} == {2, 3, 4}


def test_more_than_one_child_keeps_more():
    """On average: two children more than one, `traversal` at least `recursive`."""
    chance = torch.Generator().manual_seed(3)
    target = torch.softmax(torch.randn(1, 7, 8, generator=chance) * 2, -1).expand(4000, 7, 8)
    q = torch.softmax(torch.randn(1, 7, 8, generator=chance) * 2, -1).expand(4000, 7, 8)

    def kept_by(name: str, width: int) -> float:
        draft = grown(name, full(width, 2), q, noise_of(4000))
        rows = TargetLaws(target[:, : draft.tree.num_nodes + 1])
        return float(RULES[name].verify(draft, rows, noise_of(4000)).num_accepted_B.double().mean())

    kept = {(name, width): kept_by(name, width) for name in WALKS for width in (1, 2)}
    for name in WALKS:
        assert kept[name, 2] > kept[name, 1] + 0.05
    assert kept["traversal", 2] > kept["recursive", 2] - 0.02


@pytest.mark.parametrize("name", WALKS)
def test_wide_rows_in_half_the_digits_decide_alike(name: str):
    """float32 and float64, left out or not: the same paths, a few in a thousand added tokens off.

    The added token sits in a row of thousands, where two sums may part by a token.
    """
    chance = torch.Generator().manual_seed(1)
    logits = torch.randn(300, 7, 5000, generator=chance, dtype=torch.float64) * 3
    near = torch.randn(300, 7, 5000, generator=chance, dtype=torch.float64)
    draft = grown(name, full(2, 2), torch.softmax(logits + near, -1), noise_of(300))
    verdicts = [
        RULES[name].verify(
            with_law(draft, dtype, form), TargetLogits(logits.to(dtype)), noise_of(300)
        )
        for dtype in (torch.float64, torch.float32)
        for form in ("dense", "sparse")
    ]
    with nobody_left_out():
        rows = TargetLogits(logits)
        verdicts.append(RULES[name].verify(draft, rows, noise_of(300)))
    for verdict in verdicts[1:]:
        assert torch.equal(verdict.path_BD, verdicts[0].path_BD)
        assert int((verdict.token_B != verdicts[0].token_B).sum()) <= 1
    assert 0 < int(verdicts[0].num_accepted_B.sum()) < 600


def test_coupled_trees_write_the_plain_text():
    """Whatever the tree: the target's own seeded draws; wider trees only keep more of them."""
    chance = torch.Generator().manual_seed(2)
    target = torch.softmax(torch.randn(500, 15, 30, generator=chance) * 2, -1)
    q = torch.softmax(target.log() + torch.randn(500, 15, 30, generator=chance), -1)
    at, everyone = noise_of(500), torch.arange(500)
    kept = []
    for shape in ((0, 1), full(2, 2), full(3, 2)):
        draft = grown("coupled", shape, q[:, :1].expand(500, 15, 30), at)
        rows = torch.cat((target[:, :1], target[:, 1:2].expand(500, len(shape), 30)), 1)
        verdict = RULES["coupled"].verify(draft, TargetLaws(rows), at)
        tokens = torch.nn.functional.pad(draft.tree.tokens_BN, (1, 0))
        text = torch.cat((tokens.gather(1, verdict.path_BD), verdict.token_B[:, None]), 1)
        own = [
            gumbel_race(rows[:, min(i, 1)], None, at.seed_B, at.sample_B, at.anchor_B + i)
            for i in range(3)
        ]
        for b in everyone.tolist():
            count = int(verdict.num_accepted_B[b])
            written = [*text[b, :count].tolist(), int(verdict.token_B[b])]
            assert written == [int(own[i][b]) for i in range(count + 1)]
        kept.append(float(verdict.num_accepted_B.double().mean()))
    assert kept[0] + 0.1 < kept[1] < kept[2]
