"""Lossy rules: what they declare is what they are, and within its bound of the target."""

from __future__ import annotations

from fractions import Fraction

import pytest

from outrider.certify.pairs import fractions_of, tree_pair
from outrider.certify.surrogates import (
    SURROGATES,
    Lenience,
    Mixture,
    Threshold,
    TypicalAcceptance,
)
from outrider.decoding import theory
from outrider.decoding.theory import LawRow


def rows() -> list[tuple[LawRow, LawRow]]:
    drawn = [tree_pair(seed, 2, 1, 2) for seed in range(40)]
    return [(pair.target(()), pair.draft(())) for pair in drawn]


@pytest.mark.parametrize("name", list(SURROGATES))
def test_a_surrogate_is_a_law_within_its_bound(name: str):
    pi = SURROGATES[name]
    lossy = 0
    for p, q in rows():
        declared = pi(p, q)
        assert sum(declared) == 1
        assert min(declared) >= 0
        distance = theory.total_variation(declared, p)
        assert distance <= pi.bound(p)
        lossy += distance > 0
    assert lossy > 10


def test_lenience_is_published_and_keeps_what_it_says():
    """Acceptance sum min(p / l, q); no token above p / l; p = (.1, .6, .3), q = (.5, .35, .15)."""
    p, q = fractions_of([2, 12, 6]), fractions_of([10, 7, 3])
    assert Lenience(Fraction(1, 2))(p, q) == [Fraction(1, 5), Fraction(43, 80), Fraction(21, 80)]
    for p, q in rows():
        for l in (Fraction(1, 2), Fraction(9, 10), Fraction(1)):  # noqa: E741
            declared = Lenience(l)(p, q)
            kept = sum(min(a / l, b) for a, b in zip(p, q, strict=True))
            assert theory.acceptance(declared, q) == kept
            assert all(a <= b / l for a, b in zip(declared, p, strict=True))
            assert list(declared) == list(theory.lenience_law(p, q, l))
        assert list(Lenience(Fraction(1))(p, q)) == list(p)


@pytest.mark.parametrize(
    "pi", [Threshold(Fraction(1, 4)), TypicalAcceptance(Fraction(3, 10), Fraction(3, 5))], ids=str
)
def test_a_set_rule_keeps_the_set_and_writes_nothing_else(pi: Threshold | TypicalAcceptance):
    for p, q in rows():
        declared, kept = pi(p, q), pi.kept(p)
        assert kept[max(range(len(p)), key=lambda x: p[x])]
        inside = sum(b for b, k in zip(q, kept, strict=True) if k)
        assert theory.acceptance(declared, q) == inside
        assert all(k or not mass for k, mass in zip(kept, declared, strict=True))


def test_a_mixture_keeps_as_much_as_its_distance_buys():
    """Nothing where p is within it of q; else alpha + epsilon, at a distance of epsilon."""
    epsilon = Fraction(1, 5)
    near = 0
    for p, q in rows():
        declared = Mixture(epsilon)(p, q)
        assert theory.acceptance(declared, q) == theory.mixture_acceptance(p, q, epsilon)
        apart = theory.total_variation(p, q)
        assert theory.total_variation(declared, p) == min(epsilon, apart)
        near += apart <= epsilon
        assert list(Mixture(Fraction(0))(p, q)) == list(p)
    assert 0 < near < 40
