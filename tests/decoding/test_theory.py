"""Closed forms against published values, enumeration, and each other."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify import pairs
from outrider.decoding import theory


def model(*law: F):
    return lambda prefix: law


SUN = model(F(1, 3), F(2, 3)), model(F(2, 3), F(1, 3))


@pytest.mark.parametrize(
    ("depth", "token", "block", "ceiling"),
    [
        (1, F(2, 3), F(2, 3), F(2, 3)),
        (2, F(10, 9), F(11, 9), F(12, 9)),
        (3, F(38, 27), F(5, 3), F(50, 27)),
        (4, F(130, 81), F(166, 81), F(64, 27)),
    ],
)
def test_sun_toy(depth: int, token: F, block: F, ceiling: F):
    assert theory.token_expected_accepted(*SUN, depth) == token
    assert theory.block_expected_accepted(*SUN, depth) == block
    assert theory.accepted_ceiling(*SUN, depth) == ceiling


@pytest.mark.parametrize(
    ("p", "q", "token", "block", "ceiling"),
    [
        ((F(1, 2), F(1, 4), F(1, 4)), (F(1, 5), F(2, 5), F(2, 5)), F(119, 100), F(5, 4), F(131, 100)),
        ((F(3, 5), F(3, 10), F(1, 10)), (F(1, 10), F(3, 10), F(3, 5)), F(3, 4), F(4, 5), F(17, 20)),
        ((F(2, 3), F(1, 6), F(1, 6)), (F(1, 6), F(1, 6), F(2, 3)), F(3, 4), F(5, 6), F(11, 12)),
    ],
)
def test_more_toys_at_depth_two(p, q, token: F, block: F, ceiling: F):
    assert theory.token_expected_accepted(model(*p), model(*q), 2) == token
    assert theory.block_expected_accepted(model(*p), model(*q), 2) == block
    assert theory.accepted_ceiling(model(*p), model(*q), 2) == ceiling


def test_block_of_the_running_example():
    """p = (.1, .2, .3, .4) against its reverse, three drafted: 673/500 against 147/125."""
    law = tuple(F(i, 10) for i in (1, 2, 3, 4))
    p, q = model(*law), model(*law[::-1])
    assert theory.block_expected_accepted(p, q, 3) == F(673, 500)
    assert theory.token_expected_accepted(p, q, 3) == F(147, 125)


@pytest.mark.parametrize(
    ("alpha", "depth", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69),
     (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)],
)
def test_leviathan_table_1(alpha: float, depth: int, operations: float, speed: float):
    tokens = theory.expected_tokens_iid(alpha, depth)
    assert theory.speedup(tokens, depth, 0) == pytest.approx(speed, abs=0.005)
    assert theory.operations_factor(tokens, depth, 0) == pytest.approx(operations, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "cost", "depth", "speed"),
    [(0.8, 0.125, 5, 2.2703), (0.6, 0.125, 3, 1.5825), (0.9, 0.05, 13, 4.6741),
     (0.5, 0.125, 2, 1.4), (0.3, 0.125, 1, 1.1556), (0.5, 0.02, 4, 1.794), (0.9, 0.02, 19, 6.365),
     (0.8, 0.1, 6, 2.470), (0.7, 0.2, 3, 1.583)],
)
def test_optimal_depth(alpha: float, cost: float, depth: int, speed: float):
    best = theory.optimal_depth(alpha, cost)
    assert best.depth == depth
    assert best.speedup == pytest.approx(speed, abs=6e-4)


@pytest.mark.parametrize(("cost", "depth", "speed"), [(0.02, 5, 3.25236), (0.05, 5, 2.86208),
                                                      (0.1, 4, 2.44743), (0.2, 3, 1.9525)])
def test_optimal_depth_of_falling_rates(cost: float, depth: int, speed: float):
    best = theory.optimal_depth((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), cost)
    assert best.depth == depth
    assert best.speedup == pytest.approx(speed, abs=1e-5)


def test_a_dear_draft_is_not_worth_it():
    assert theory.optimal_depth(0.3, 0.5) == theory.BestDepth(0, F(1))


def test_conditional_and_marginal_rates():
    assert theory.expected_tokens((F(4, 5), F(4, 5))) == F(61, 25)
    assert theory.expected_tokens_marginal((F(4, 5), F(16, 25))) == F(61, 25)
    assert theory.expected_tokens_iid(F(4, 5), 2) == F(61, 25)
    assert theory.expected_tokens(()) == theory.expected_tokens_iid(F(1, 2), 0) == 1


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
