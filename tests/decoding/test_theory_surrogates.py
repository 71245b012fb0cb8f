"""Declared laws of lossy rules: what they are, how far from the target, what they gain."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.certify import pairs
from outrider.decoding import theory

P = tuple(Fraction(i, 20) for i in (2, 12, 6))
Q = tuple(Fraction(i, 20) for i in (10, 7, 3))


def laws_of(count: int):
    def of_width(width: int):
        weights = st.lists(st.integers(0, 9), min_size=width, max_size=width).filter(any)
        return st.tuples(*[weights.map(pairs.fractions_of)] * count)

    return st.integers(2, 5).flatmap(of_width)


shares_ = st.fractions(Fraction(1, 10), 1, max_denominator=10)


def test_lenience_of_one_half():
    law = theory.lenience_law(P, Q, Fraction(1, 2))
    assert law == [Fraction(1, 5), Fraction(43, 80), Fraction(21, 80)]
    assert theory.lenience_acceptance(P, Q, Fraction(1, 2)) == Fraction(7, 10)
    assert theory.total_variation(law, P) == Fraction(1, 10)


@given(laws_of(2), shares_)
@settings(max_examples=150, deadline=None)
def test_lenience_by_enumeration(rows, lenience: Fraction):
    p, q = rows
    written, kept = [Fraction(0)] * len(p), Fraction(0)
    residual = theory.excess(p, q)
    for x, drafted in enumerate(q):
        keep = min(Fraction(1), p[x] / (lenience * drafted)) if drafted > 0 else Fraction(0)
        kept += drafted * keep
        written[x] += drafted * keep
        for y, replaced in enumerate(residual):
            written[y] += drafted * (1 - keep) * replaced
    assert theory.lenience_law(p, q, lenience) == written
    assert theory.lenience_acceptance(p, q, lenience) == kept
    assert theory.lenience_law(p, q, Fraction(1)) == list(p)


@given(laws_of(2), shares_)
@settings(max_examples=150, deadline=None)
def test_lenience_costs_what_it_gains(rows, lenience: Fraction):
    p, q = rows
    law = theory.lenience_law(p, q, lenience)
    distance = theory.total_variation(law, p)
    gained = theory.lenience_acceptance(p, q, lenience) - theory.acceptance(p, q)
    assert distance == gained <= 1 - lenience
    assert all(x <= a / lenience for x, a in zip(law, p, strict=True))
    # An exact rule towards the declared law keeps as much as the lenient one.
    assert theory.acceptance(law, q) == theory.lenience_acceptance(p, q, lenience)


@given(laws_of(3), st.fractions(0, 1, max_denominator=12))
@settings(max_examples=150, deadline=None)
def test_the_mixture_is_the_best_law_within_its_distance(rows, distance: Fraction):
    p, q, other = rows
    law = theory.mixture_law(p, q, distance)
    assert sum(law) == 1 and min(law) >= 0
    apart = theory.total_variation(p, q)
    assert theory.total_variation(law, p) == min(distance, apart)
    most = theory.mixture_acceptance(p, q, distance)
    assert theory.acceptance(law, q) == most == 1 - max(apart - distance, 0)
    if theory.total_variation(other, p) <= distance:
        assert theory.acceptance(other, q) <= most


@given(laws_of(2), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_sequences_are_within_their_bound(rows, num_tokens: int):
    p, other = rows
    distance = theory.total_variation(p, other)
    apart = Fraction(0)
    for text in itertools.product(range(len(p)), repeat=num_tokens):
        apart += abs(math.prod(p[x] for x in text) - math.prod(other[x] for x in text)) / 2
    assert apart <= theory.sequence_bound(distance, num_tokens) <= num_tokens * distance
    # The bound is reached where the law gives mass to what the target never writes.
    never, always = (Fraction(1), Fraction(0)), (Fraction(3, 4), Fraction(1, 4))
    assert theory.total_variation(never, always) == Fraction(1, 4)
    assert theory.sequence_bound(Fraction(1, 4), 2) == 1 - Fraction(3, 4) ** 2
