"""Closed forms against published values, enumeration, and each other."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify import pairs
from outrider.decoding import theory


def model(*law: Fraction):
    return lambda prefix: law


SUN = model(Fraction(1, 3), Fraction(2, 3)), model(Fraction(2, 3), Fraction(1, 3))


@pytest.mark.parametrize(
    ("depth", "token", "block", "ceiling"),
    [
        (1, Fraction(2, 3), Fraction(2, 3), Fraction(2, 3)),
        (2, Fraction(10, 9), Fraction(11, 9), Fraction(12, 9)),
        (3, Fraction(38, 27), Fraction(5, 3), Fraction(50, 27)),
        (4, Fraction(130, 81), Fraction(166, 81), Fraction(64, 27)),
    ],
)
def test_sun_toy(depth: int, token: Fraction, block: Fraction, ceiling: Fraction):
    assert theory.token_expected_accepted(*SUN, depth) == token
    assert theory.block_expected_accepted(*SUN, depth) == block
    assert theory.accepted_ceiling(*SUN, depth) == ceiling


@pytest.mark.parametrize(
    ("p", "q", "token", "block", "ceiling"),
    [
        (
            (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)),
            (Fraction(1, 5), Fraction(2, 5), Fraction(2, 5)),
            Fraction(119, 100),
            Fraction(5, 4),
            Fraction(131, 100),
        ),
        (
            (Fraction(3, 5), Fraction(3, 10), Fraction(1, 10)),
            (Fraction(1, 10), Fraction(3, 10), Fraction(3, 5)),
            Fraction(3, 4),
            Fraction(4, 5),
            Fraction(17, 20),
        ),
        (
            (Fraction(2, 3), Fraction(1, 6), Fraction(1, 6)),
            (Fraction(1, 6), Fraction(1, 6), Fraction(2, 3)),
            Fraction(3, 4),
            Fraction(5, 6),
            Fraction(11, 12),
        ),
    ],
)
def test_more_toys_at_depth_two(p, q, token: Fraction, block: Fraction, ceiling: Fraction):
    assert theory.token_expected_accepted(model(*p), model(*q), 2) == token
    assert theory.block_expected_accepted(model(*p), model(*q), 2) == block
    assert theory.accepted_ceiling(model(*p), model(*q), 2) == ceiling


def test_block_of_the_running_example():
    """p = (.1, .2, .3, .4) against its reverse, three drafted: 673/500 against 147/125."""
    law = tuple(Fraction(i, 10) for i in (1, 2, 3, 4))
    p, q = model(*law), model(*law[::-1])
    assert theory.block_expected_accepted(p, q, 3) == Fraction(673, 500)
    assert theory.token_expected_accepted(p, q, 3) == Fraction(147, 125)


@pytest.mark.parametrize(
    ("alpha", "depth", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_leviathan_table_1(alpha: float, depth: int, operations: float, speed: float):
    tokens = theory.expected_tokens_iid(alpha, depth)
    assert theory.speedup(tokens, depth, 0) == pytest.approx(speed, abs=0.005)
    assert theory.operations_factor(tokens, depth, 0) == pytest.approx(operations, abs=0.005)


FIGURE_3 = {
    0.02: {0.5: (4, 1.794), 0.6: (6, 2.170), 0.7: (8, 2.758), 0.8: (11, 3.817), 0.9: (19, 6.365)},
    0.05: {0.5: (3, 1.630), 0.6: (4, 1.921), 0.7: (6, 2.353), 0.8: (8, 3.092), 0.9: (13, 4.674)},
    0.1: {0.5: (2, 1.458), 0.6: (3, 1.674), 0.7: (4, 1.981), 0.8: (6, 2.470), 0.9: (10, 3.431)},
    0.125: {0.3: (1, 1.1556), 0.5: (2, 1.4), 0.6: (3, 1.5825), 0.8: (5, 2.2703)},
    0.2: {0.5: (1, 1.250), 0.6: (2, 1.400), 0.7: (3, 1.583), 0.8: (4, 1.868), 0.9: (7, 2.373)},
}
"""By cost ratio and alpha: the optimal depth (Leviathan et al. 2023, figure 3), its speed-up."""


@pytest.mark.parametrize(
    ("cost", "alpha", "depth", "speed"),
    [(c, a, *best) for c, by_alpha in FIGURE_3.items() for a, best in by_alpha.items()],
)
def test_optimal_depth(cost: float, alpha: float, depth: int, speed: float):
    best = theory.optimal_depth(alpha, cost)
    assert best.depth == depth
    assert best.speedup == pytest.approx(speed, abs=6e-4)


@pytest.mark.parametrize(
    ("alpha", "depth", "cost", "speed", "digits"),
    [
        (0.2, 3, 0, 1.25, 0.005),
        (0.75, 8, 0.015, 3.3, 0.05),
        (0.80, 8, 0.015, 3.9, 0.05),
        (0.87, 8, 0.015, 4.9, 0.05),
    ],
)
def test_leviathan_other_figures(alpha: float, depth: int, cost: float, speed: float, digits):
    """The bigram's 1.25X, and the table of lenience in appendix A.5."""
    found = theory.speedup(theory.expected_tokens_iid(alpha, depth), depth, cost)
    assert found == pytest.approx(speed, abs=digits)


@pytest.mark.parametrize(("alpha", "cost", "gain"), [(0.95, 0.05, 1.554), (0.9, 0.1, 1.534)])
def test_knowing_where_to_stop_would_gain_up_to_60_percent(alpha, cost, gain):
    """Leviathan et al. 2023 say so of an oracle, whose round is 1 + the run of kept drafts."""
    oracle = (1 / (1 - alpha)) / (1 + cost * alpha / (1 - alpha))
    assert oracle / theory.optimal_depth(alpha, cost).speedup == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize(
    ("cost", "depth", "speed"),
    [(0.02, 5, 3.25236), (0.05, 5, 2.86208), (0.1, 4, 2.44743), (0.2, 3, 1.9525)],
)
def test_optimal_depth_of_falling_rates(cost: float, depth: int, speed: float):
    best = theory.optimal_depth((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), cost)
    assert best.depth == depth
    assert best.speedup == pytest.approx(speed, abs=1e-5)


def test_a_dear_draft_is_not_worth_it():
    assert theory.optimal_depth(0.3, 0.5) == theory.BestDepth(0, Fraction(1))


def test_one_draft_is_worth_it_just_above_its_cost():
    """Leviathan et al. 2023, corollary 3.9: if at all, then at least (1 + alpha) / (1 + c)."""
    alpha = Fraction(3, 10)
    assert theory.optimal_depth(alpha, alpha).depth == 0
    best = theory.optimal_depth(alpha, Fraction(29, 100))
    assert best == theory.BestDepth(1, (1 + alpha) / Fraction(129, 100))


@given(
    st.lists(st.fractions(0, 1, max_denominator=9), min_size=1, max_size=6),
    st.lists(st.integers(10, 40), min_size=1, max_size=7),
    st.integers(0, 10),
)
@settings(max_examples=150, deadline=None)
def test_optimal_depth_of_a_measured_curve(rates, costs, draft_cost):
    """Against every depth written out: the tokens that come out, drawn by drawn."""

    def gain(depth: int) -> Fraction:
        tokens, reached = Fraction(0), Fraction(1)
        for place in range(depth):
            tokens += reached * (1 - rates[place]) * (place + 1)
            reached *= rates[place]
        tokens += reached * (depth + 1)
        return tokens * costs[0] / (costs[depth] + depth * draft_cost)

    costs = [Fraction(cost) for cost in costs]
    gains = [gain(depth) for depth in range(min(len(rates), len(costs) - 1) + 1)]
    best = theory.optimal_depth_measured(rates, costs, draft_cost)
    assert best == theory.BestDepth(gains.index(max(gains)), max(gains))


def test_a_step_in_the_cost_curve_moves_the_depth():
    flat, stepped = [10.0] * 9, [10.0] * 4 + [20.0] * 5
    assert theory.optimal_depth_measured(0.8, flat, 0.5) == theory.optimal_depth(0.8, 0.05, 8)
    assert theory.optimal_depth_measured(0.8, stepped, 0.5).depth == 3


def test_conditional_and_marginal_rates():
    assert theory.expected_tokens((Fraction(4, 5), Fraction(4, 5))) == Fraction(61, 25)
    assert theory.expected_tokens_marginal((Fraction(4, 5), Fraction(16, 25))) == Fraction(61, 25)
    assert theory.expected_tokens_iid(Fraction(4, 5), 2) == Fraction(61, 25)
    assert theory.expected_tokens(()) == theory.expected_tokens_iid(Fraction(1, 2), 0) == 1


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_a_tree_by_enumeration(seed: int):
    """Every place a walk can end, times the tokens it then has written."""
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    parents = [rng.randint(0, node) for node in range(size)]
    ranks = [Fraction(4, 9), Fraction(2, 9), Fraction(1, 9)]
    children = [[n + 1 for n in range(size) if parents[n] == row] for row in range(size + 1)]

    def walk(row: int, depth: int) -> Fraction:
        goes_on = list(zip(children[row], ranks, strict=False))
        ends = 1 - sum(rate for _, rate in goes_on)
        return ends * (depth + 1) + sum(rate * walk(child, depth + 1) for child, rate in goes_on)

    assert theory.expected_tokens_by_rank(parents, ranks) == walk(0, 0)


def test_a_chain_is_a_tree_and_branches_add_less_than_one():
    """Sequoia: a chain never passes 1 / (1 - P_1), and k chains add at most one token."""
    ranks = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]
    chain = theory.expected_tokens_by_rank(range(12), ranks)
    assert chain == theory.expected_tokens_iid(ranks[0], 12) < 2
    three = [0, 0, 0, *range(1, 34)]
    assert theory.expected_tokens_by_rank(three, ranks) == 1 + Fraction(7, 8) * chain_of(12)
    assert chain < theory.expected_tokens_by_rank(three, ranks) <= chain + 1


def chain_of(nodes: int) -> Fraction:
    return sum((Fraction(1, 2**i) for i in range(nodes)), start=Fraction(0))


@pytest.mark.parametrize("seed", range(12))
def test_expected_rejections_by_enumeration(seed: int):
    pair = pairs.random_pair(seed)

    def refused(prefix: tuple[int, ...]) -> Fraction:
        """Drafts, tests and replaces for real, and counts."""
        if len(prefix) == 3:
            return Fraction(0)
        p, q = pair.target(prefix), pair.draft(prefix)
        residual = theory.excess(p, q)
        total = Fraction(0)
        for x, drafted in enumerate(q):
            if drafted == 0:
                continue
            keep = min(Fraction(1), p[x] / drafted)
            total += drafted * keep * refused((*prefix, x))
            for y, replaced in enumerate(residual):
                if replaced > 0 and keep < 1:
                    total += drafted * (1 - keep) * replaced * (1 + refused((*prefix, y)))
        return total

    assert theory.expected_rejections(pair.target, pair.draft, 3) == refused(())


laws_ = st.integers(2, 6).flatmap(
    lambda width: st.tuples(
        *[st.lists(st.integers(0, 9), min_size=width, max_size=width).filter(any) for _ in range(2)]
    )
)


@given(laws_)
@settings(max_examples=200, deadline=None)
def test_inequalities_of_one_token(weights: tuple[list[int], list[int]]):
    p, q = map(pairs.fractions_of, weights)
    alpha = theory.acceptance(p, q)
    assert alpha == 1 - theory.total_variation(p, q)
    assert theory.minhash_acceptance(p, q) <= theory.gumbel_acceptance(p, q) <= alpha
    assert theory.match_acceptance(p, q) <= alpha
    assert theory.acceptance(p, p) == theory.gumbel_acceptance(p, p) == 1


@given(st.integers(0, 400), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_block_keeps_at_least_as_much_as_token(seed: int, depth: int):
    pair = pairs.random_pair(seed)
    by = [
        kept(pair.target, pair.draft, depth)
        for kept in (
            theory.match_expected_accepted,
            theory.token_expected_accepted,
            theory.block_expected_accepted,
            theory.accepted_ceiling,
        )
    ]
    assert by == sorted(by)


@given(laws_)
@settings(max_examples=100, deadline=None)
def test_the_excess_replaces_what_was_refused(weights: tuple[list[int], list[int]]):
    p, q = map(pairs.fractions_of, weights)
    refused = 1 - theory.acceptance(p, q)
    replaced = theory.excess(p, q)
    written = [min(a, b) + refused * r for a, b, r in zip(p, q, replaced, strict=True)]
    assert written == list(p)
