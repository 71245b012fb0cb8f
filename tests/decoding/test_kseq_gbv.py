"""`kseq` and `gbv`: exact laws by enumeration, the reference path by path, what they refuse."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider import noise
from outrider.certify import reference_gbv, reference_trees
from outrider.certify.reference_trees import TreeRule
from outrider.decoding import Draft, Kind, Law, Rule, TargetLaws, TargetLogits, Verdict
from outrider.decoding.rules import gbv, kseq
from outrider.decoding.rules.base import Sifted
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.gbv import GbvRule, Ranked
from outrider.decoding.rules.kseq import KseqRule
from outrider.decoding.rules.token import TokenRule
from outrider.errors import InvalidConfig
from outrider.tree import TokenTree, full
from tests.decoding.toy_trees import Case, Model, Watched, drawn, nobody_left_out, paths_shape

REFERENCES: dict[str, TreeRule] = {
    "kseq": partial(
        reference_trees.kseq, rho_of=partial(reference_trees.enough, halvings=kseq.HALVINGS)
    ),
    "gbv": reference_gbv.gbv,
}
KSEQ_SHAPES = [full(2, 2), full(3, 1), (0, 1, 2), (0, 0, 1, 1, 1, 4, 4), (0,), (0, 0, 0, 2), ()]
GBV_SHAPES = [paths_shape(k, d) for k, d in ((2, 2), (3, 2), (4, 1), (3, 3), (1, 3))]
# Levels first: the paths' nodes lie between each other.
GBV_SHAPES += [(0, 0, 0, 1, 2, 3), ()]
CASES = [
    (rule, shapes, seed)
    for rule, shapes in ((KseqRule(), KSEQ_SHAPES), (GbvRule(), GBV_SHAPES))
    for seed in range(3)
]


def outcomes(verdict: Verdict) -> list[tuple[tuple[int, ...], int]]:
    counts, paths = verdict.num_accepted_B.tolist(), verdict.path_BD.tolist()
    assert all(not any(path[count:]) for count, path in zip(counts, paths, strict=True))
    tokens = verdict.token_B.tolist()
    return [(tuple(p[:n]), t) for p, n, t in zip(paths, counts, tokens, strict=True)]


@pytest.mark.parametrize(("rule", "shapes", "seed"), CASES)
def test_production_is_the_reference_path_by_path(rule: Rule, shapes: list, seed: int):
    here = drawn([shape for shape in shapes for _ in range(150)], 2 + seed, seed)
    reference = REFERENCES[rule.name]
    wanted = [(one.path, one.token) for one in map(reference, here.rounds())]
    assert outcomes(rule.verify(here.draft, here.target, here.noise)) == wanted
    assert len({len(path) for path, _ in wanted}) > 2
    with nobody_left_out():
        assert outcomes(rule.verify(here.draft, here.target, here.noise)) == wanted


@pytest.mark.parametrize("rule", [KseqRule(), GbvRule()])
def test_float32_and_logits_decide_alike(rule: Rule):
    """Up to rounding: of a thousand rounds one may differ."""
    shape = full(2, 2) if rule.name == "kseq" else paths_shape(3, 2)
    here = drawn([shape] * 1000, 6, 21)
    wanted = outcomes(rule.verify(here.draft, here.target, here.noise))
    assert here.draft.law is not None
    law = Law.dense(here.draft.law.probs.float())
    narrow = Draft(here.draft.tree, law, here.draft.law_rows_BN, None, here.draft.kinds)
    logits = here.target_BTV.log().float()
    for target in (TargetLaws(here.target_BTV.float()), TargetLogits(logits)):
        with noise.NoiseLedger():
            got = outcomes(rule.verify(narrow, target, here.noise))
        assert sum(a != b for a, b in zip(got, wanted, strict=True)) <= 1


@pytest.mark.parametrize(("rule", "shapes", "seed"), CASES)
def test_sparse_laws_decide_like_dense_ones(rule: Rule, shapes: list, seed: int):
    """Support in any order, padding with probability 0 beside it."""
    here = drawn([shape for shape in shapes for _ in range(30)], 5, 10 + seed)
    assert here.draft.law is not None
    order = torch.rand(here.draft.law.probs.shape).argsort(1)
    law = Law.sparse(order, here.draft.law.probs.gather(1, order))
    sparse = Draft(here.draft.tree, law, here.draft.law_rows_BN, None, here.draft.kinds)
    assert outcomes(rule.verify(sparse, here.target, here.noise)) == outcomes(
        rule.verify(here.draft, here.target, here.noise)
    )


@pytest.mark.parametrize(
    ("rule", "chain_rule"), [(KseqRule(), TokenRule()), (GbvRule(), BlockRule())]
)
@pytest.mark.parametrize("certain", [False, True])
def test_of_one_child_each_it_is_the_chain_rule(rule: Rule, chain_rule: Rule, certain: bool):
    here = drawn([tuple(range(n)) for n in (3, 2, 1, 0) for _ in range(200)], 4, 7)
    assert here.draft.tree.is_chain
    law = None if certain else here.draft.law
    draft = Draft.chain(here.draft.tree.tokens_BN, here.draft.tree.counts_B, law)
    wanted = chain_rule.verify(draft, here.target, here.noise)
    verdict = rule.verify(draft, here.target, here.noise)
    assert torch.equal(verdict.path_BD, wanted.path_BD)
    # Up to rounding the residuals are the same: the same uniform draws the same token.
    assert (verdict.token_B != wanted.token_B).sum() == 0


@pytest.mark.parametrize("rule", [KseqRule(), GbvRule()])
def test_only_rows_of_one_path_are_read(rule: Rule):
    shape = full(2, 2) if rule.name == "kseq" else paths_shape(3, 2)
    here = drawn([shape] * 40, 4, 3)
    target = Watched(here.target_BTV)
    verdict = rule.verify(here.draft, target, here.noise)
    rows = torch.tensor(target.asked)
    per_text = [sorted((rows[rows // 7 == b] % 7).tolist()) for b in range(40)]
    for read, (path, _) in zip(per_text, outcomes(verdict), strict=True):
        # gbv chooses a whole path first and reads it to its end.
        assert len(read) == (3 if rule.name == "gbv" else len(path) + 1)
        assert set(path) < set(read)


def every_draw(width: int, num_paths: int, depth: int, seed: int) -> tuple[Case, Tensor]:
    """All draws of `num_paths` unmerged paths, and the probability of each."""
    shape = paths_shape(num_paths, depth)
    target, q = Model(2 * seed, width), Model(2 * seed + 1, width)
    draws = list(itertools.product(range(width), repeat=len(shape)))
    target_BTV = torch.zeros(len(draws), len(shape) + 1, width, dtype=torch.float64)
    q_BNV = torch.zeros(len(draws), len(shape), width, dtype=torch.float64)
    chance_B = torch.ones(len(draws), dtype=torch.float64)
    for b, tokens in enumerate(draws):
        texts = [()]
        target_BTV[b, 0] = target(())
        for j, parent in enumerate(shape):
            law = q(texts[parent])
            texts.append((*texts[parent], tokens[j]))
            q_BNV[b, j], target_BTV[b, j + 1] = law, target(texts[-1])
            chance_B[b] *= law[tokens[j]]
    drawn_B = chance_B > 0
    tree = TokenTree.of(
        [draw for draw, can in zip(draws, drawn_B.tolist(), strict=True) if can],
        [shape] * int(drawn_B.sum()),
    )
    q_BNV, target_BTV = q_BNV[drawn_B], target_BTV[drawn_B]
    first = torch.tensor([shape.index(parent) for parent in shape])
    rows = torch.arange(len(q_BNV))[:, None] * len(shape) + first
    draft = Draft(tree, Law.dense(q_BNV.flatten(0, 1)), rows, None, frozenset({Kind.IID}))
    shapes = [shape] * len(q_BNV)
    return Case(draft, target_BTV, q_BNV, None, shapes), chance_B[drawn_B]  # type: ignore[arg-type]


def law_of_a_round(case: Case, chance_B: Tensor, seed: int, rule: GbvRule) -> Tensor:
    """The exact law of the first D + 1 tokens: a round of `gbv`, completed with the target.

    Each test's threshold is found by bisection of its uniform, all other tests failing.
    """
    best = rule.best(case.draft, case.target)
    tokens_BD = best.chain.tree.tokens_BN
    num_texts, depth = tokens_BD.shape
    width = case.target.shape[2]

    def sifted(tests_BD: Tensor) -> Sifted:
        return BlockRule().sift(best.chain, best.rows, tests_BD)

    fail_BD = torch.ones(num_texts, depth, dtype=torch.float64)
    target = Model(2 * seed, width)
    law = torch.zeros((width,) * (depth + 1), dtype=torch.float64)
    later_B = torch.ones(num_texts, dtype=torch.float64)
    for kept in range(depth, -1, -1):
        tests_BD, pass_B = fail_BD.clone(), torch.ones_like(later_B)
        if kept:
            low, high = torch.zeros(num_texts).double(), torch.ones(num_texts).double()
            for _ in range(55):
                middle = (low + high) / 2
                tests_BD[:, kept - 1] = middle
                passed = sifted(tests_BD).num_accepted_B == kept
                low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
            pass_B = high
            tests_BD[:, kept - 1] = 0
        end = sifted(tests_BD)
        share_B = chance_B * later_B * pass_B
        weights_BV = end.weights_BV / end.weights_BV.sum(1, keepdim=True)
        for b in range(num_texts):
            if end.num_accepted_B[b] != kept:
                assert share_B[b] < 1e-12
                continue
            prefix = tuple(tokens_BD[b, :kept].tolist())
            for x in range(width):
                if share_B[b] * weights_BV[b, x] > 0:
                    text = (*prefix, x)
                    law[text] += share_B[b] * weights_BV[b, x] * _rest(target, text, depth + 1)
        later_B = later_B * (1 - pass_B)
    return law


def _rest(target: Model, text: tuple[int, ...], length: int) -> Tensor:
    """The target's law of the tokens after `text`."""
    if len(text) == length:
        return torch.ones((), dtype=torch.float64)
    p = target(text)
    return torch.stack([p[x] * _rest(target, (*text, x), length) for x in range(len(p))])


class _NotSkewed(GbvRule):
    """Verifies the best path as if it were one draw."""

    def best(self, draft: Draft, target: TargetLaws) -> gbv.Best:
        best = super().best(draft, target)
        plain = gbv.Best(best.path_BD, best.chain, best.rows, best.paths_B)
        nodes_BD = (best.path_BD - 1).clamp(min=0)
        assert draft.law is not None
        law = draft.law.select(draft.law_rows().gather(1, nodes_BD).flatten())
        chain = Draft.chain(best.chain.tree.tokens_BN, best.chain.tree.counts_B, law)
        return gbv.Best(plain.path_BD, chain, plain.rows, plain.paths_B)


@pytest.mark.parametrize(("num_paths", "depth"), [(2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_round_of_gbv_has_the_targets_law(num_paths: int, depth: int, seed: int):
    """All draws of K paths over three tokens, all outcomes of all tests."""
    case, chance_B = every_draw(3, num_paths, depth, seed)
    assert float(chance_B.sum()) == pytest.approx(1)
    wanted = _rest(Model(2 * seed, 3), (), depth + 1)
    law = law_of_a_round(case, chance_B, seed, GbvRule())
    torch.testing.assert_close(law, wanted, rtol=0, atol=1e-12)


def test_the_enumeration_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    case, chance_B = every_draw(3, 2, 2, 0)
    wanted = _rest(Model(0, 3), (), 3)
    used = int(GbvRule().best(case.draft, case.target).paths_B[0])
    assert used == 2
    wrong = law_of_a_round(case, chance_B, 0, _NotSkewed())
    assert float((wrong - wanted).abs().sum()) / 2 > 0.01
    # A number of paths that looks at the tokens is no longer given beforehand.
    right = Ranked.best_count
    first_B = case.draft.tree.tokens_BN[:, 0]

    def by_token(self: Ranked, most_n: Tensor, width: int) -> Tensor:
        return torch.where(first_B == 0, 1, right(self, most_n, width))

    monkeypatch.setattr(Ranked, "best_count", by_token)
    wrong = law_of_a_round(case, chance_B, 0, GbvRule())
    assert float((wrong - wanted).abs().sum()) / 2 > 0.01


def rows_of(*weights: list[int]) -> tuple[Tensor, ...]:
    laws = [torch.tensor([w], dtype=torch.float64) for w in weights]
    return tuple(law / law.sum() for law in laws)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9),
    st.integers(1, 12),
)
def test_kseq_writes_the_target_row(weights: list[tuple[int, int]], count: int):
    """Kept mass plus residual is p, no token gets more; the least rho is at most K."""
    ps, qs = ([a for a, _ in weights], [b for _, b in weights])
    if not sum(ps) or not sum(qs):
        return
    p, q = rows_of(ps, qs)
    num = torch.tensor([float(count)], dtype=torch.float64)
    rho = kseq.least_rho(p, q, num)
    assert 1 <= float(rho) <= count
    for r in (rho, num, (rho + num) / 2):
        kept = torch.minimum(q, p / r)
        beta = float(kept.sum())
        some = 1 - (1 - beta) ** count
        left = kseq.residual(p, Law.dense(q), r, num)
        out = kept * (some / beta if beta else 0.0)
        if some < 1 - 1e-9:
            out = out + (1 - some) * left / left.sum()
        torch.testing.assert_close(out, p, rtol=0, atol=1e-8)


def test_less_than_the_least_rho_is_lossy():
    """The negative control of the test above: rho = 1 for two children gives too much."""
    p, q = rows_of([1, 2], [2, 1])
    kept = torch.minimum(q, p)
    some = 1 - (1 - float(kept.sum())) ** 2
    assert bool((kept * some / kept.sum() > p + 0.01).any())
    assert float(kseq.least_rho(p, q, torch.tensor([2.0]).double())) > 1.01


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_kseq_on_spectrs_uniform_family(count: int):
    """q uniform on r tokens, p on one of them for large r: 1 - (1 - 1/r)^K is the best possible."""
    r = 10
    p, q = rows_of([1] + [0] * (r - 1), [1] * r)
    num = torch.tensor([float(count)]).double()
    rho = kseq.least_rho(p, q, num)
    beta = torch.minimum(q, p / rho[:, None]).sum()
    assert 1 - (1 - float(beta)) ** count == pytest.approx(1 - (1 - 1 / r) ** count, abs=1e-9)


def test_cells_of_the_best_do_not_cancel():
    """Against fractions, down to prefixes of a millionth of a millionth of the mass."""
    p, q = rows_of([1, 5, 3, 0, 2], [4, 3, 3, 1, 0])
    exact_q = [Fraction(w, 11) for w in (4, 3, 3, 1, 0)]
    ranked = Ranked.of(p, Law.dense(q))
    assert ranked.order_nM.tolist() == [[1, 2, 0, 3, 4]]
    for share in (Fraction(1), Fraction(1, 3), Fraction(1, 10**12)):
        for count in (1, 2, 5, 64):
            better = Fraction(0)
            whole = 1 - (1 - share) ** count
            law = ranked.best_law(
                torch.tensor([float(share)], dtype=torch.float64), torch.tensor([count]), 64
            ).probs[0]
            for x in ranked.order_nM[0].tolist():
                cell = (1 - share * better) ** count - (
                    1 - share * better - share * exact_q[x]
                ) ** count
                assert float(law[x]) == pytest.approx(float(cell / whole), rel=1e-13, abs=1e-300)
                better += exact_q[x]
    assert math.isclose(float(law.sum()), 1)


def test_the_order_is_strict_and_one_on_every_device():
    chance = torch.Generator().manual_seed(2)
    for width in (1, 2, 7, 300):
        ratio = torch.randint(-1, 6, (40, width), generator=chance).double() / 3
        ratio[ratio == 5 / 3] = torch.inf
        order = gbv._falling(ratio)
        with nobody_left_out():
            assert torch.equal(order, gbv._falling(ratio))
        assert torch.equal(order, ratio.sort(dim=1, descending=True, stable=True).indices)
        assert torch.equal(order, gbv._falling(ratio.float().double()))


def test_the_guard_takes_fewer_paths_where_the_laws_agree():
    """Of equal laws one path is best; of laws apart all of them are."""
    p, q = rows_of([2, 3, 5], [2, 3, 5])
    most = torch.tensor([4])
    assert Ranked.of(p, Law.dense(q)).best_count(most, 4).tolist() == [1]
    p, q = rows_of([8, 1, 1], [1, 1, 8])
    assert Ranked.of(p, Law.dense(q)).best_count(most, 4).tolist() == [4]
    assert Ranked.of(p, Law.dense(q)).best_count(torch.tensor([2]), 4).tolist() == [2]
    # 5/8, 3/8 against a fair coin: one path and two keep 7/8 alike, so one is taken.
    p, q = rows_of([5, 3], [1, 1])
    assert Ranked.of(p, Law.dense(q)).best_count(most, 4).tolist() == [1]


def iid(tokens: list[list[int]], shape: tuple[int, ...], kinds: frozenset[Kind]) -> Draft:
    tree = TokenTree.of(tokens, [shape] * len(tokens))
    law = Law.dense(torch.full((len(tokens) * len(shape), 4), 0.25))
    first = torch.tensor([shape.index(parent) for parent in shape])
    rows = torch.arange(len(tokens))[:, None] * len(shape) + first
    return Draft(tree, law, rows, None, kinds)


def target_for(draft: Draft) -> TargetLaws:
    num_texts, num_nodes = draft.tree.tokens_BN.shape
    return TargetLaws(torch.full((num_texts, num_nodes + 1, 4), 0.25))


@pytest.mark.parametrize("rule", [KseqRule(), GbvRule()])
@pytest.mark.parametrize("kind", [Kind.POINT, Kind.WITHOUT, Kind.TAIL])
def test_children_not_drawn_independently_are_refused(rule: Rule, kind: Kind):
    draft = iid([[0, 1]], (0, 0), frozenset({kind, Kind.IID}))
    with pytest.raises(InvalidConfig, match=rf"{rule.name}.*{kind.name}.*IID"):
        rule.check(draft)
    certain = Draft(draft.tree, None)
    with pytest.raises(InvalidConfig, match="POINT"):
        rule.check(certain)


@pytest.mark.parametrize("rule", [KseqRule(), GbvRule()])
def test_siblings_of_two_laws_are_refused(rule: Rule):
    draft = iid([[0, 1]], (0, 0), frozenset({Kind.IID}))
    rule.check(draft)
    for rows in (torch.tensor([[0, 1]]), None):
        apart = Draft(draft.tree, draft.law, rows, None, draft.kinds)
        with pytest.raises(InvalidConfig, match=f"{rule.name}.*recursive"):
            rule.check(apart)


def test_gbv_refuses_trees_that_branch_below_the_root():
    with pytest.raises(InvalidConfig, match="merge=False"):
        GbvRule().check(iid([[0, 1, 2]], (0, 1, 1), frozenset({Kind.IID})))


def test_gbv_refuses_paths_of_several_depths():
    with pytest.raises(InvalidConfig, match="one depth"):
        GbvRule().check(iid([[0, 1, 2]], (0, 0, 1), frozenset({Kind.IID})))
    # Trees of a batch may differ: one has two paths of one token, one has one path of two.
    tree = TokenTree.of([[0, 1], [0, 1]], [[0, 0], [0, 1]])
    rows = torch.tensor([[0, 0], [2, 3]])
    GbvRule().check(Draft(tree, Law.dense(torch.ones(4, 2)), rows, None, frozenset({Kind.IID})))


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_laws_have_a_rho_of_one_whatever_they_sum_to(
    on_host: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last bit missing from p's sum would make it 1.004, and refuse tokens of p = q."""
    monkeypatch.setattr(kseq.host, "reads_free", lambda device: on_host)
    generator = torch.Generator().manual_seed(3)
    laws = torch.softmax(torch.randn(300, 6, generator=generator).double() * 2, -1).to(dtype)
    if dtype == torch.float32:
        assert (laws.sum(-1, dtype=torch.float64) < 1 - 1e-9).any(), "some do miss a bit"
    rho = kseq.least_rho(laws, laws, torch.full((300,), 3.0).double())
    assert torch.equal(rho, torch.ones(300).double())
