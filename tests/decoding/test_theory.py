"""Closed forms against published values, enumeration, and each other."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("alpha", "cost", "depth", "speed"),
    [
        (0.8, 0.125, 5, 2.2703),
        (0.6, 0.125, 3, 1.5825),
        (0.9, 0.05, 13, 4.6741),
        (0.5, 0.125, 2, 1.4),
        (0.3, 0.125, 1, 1.1556),
        (0.5, 0.02, 4, 1.794),
        (0.9, 0.02, 19, 6.365),
        (0.8, 0.1, 6, 2.470),
        (0.7, 0.2, 3, 1.583),
    ],
)
def test_optimal_depth(alpha: float, cost: float, depth: int, speed: float):
    best = theory.optimal_depth(alpha, cost)
    assert best.depth == depth
    assert best.speedup == pytest.approx(speed, abs=6e-4)


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


def test_conditional_and_marginal_rates():
    assert theory.expected_tokens((Fraction(4, 5), Fraction(4, 5))) == Fraction(61, 25)
    assert theory.expected_tokens_marginal((Fraction(4, 5), Fraction(16, 25))) == Fraction(61, 25)
    assert theory.expected_tokens_iid(Fraction(4, 5), 2) == Fraction(61, 25)
    assert theory.expected_tokens(()) == theory.expected_tokens_iid(Fraction(1, 2), 0) == 1


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
