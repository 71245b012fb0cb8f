"""One drafted token: how often each rule keeps it.

p is the target's law, q the draft's. Fractions in, Fractions out; floats in, floats out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = Fraction | float
LawRow: TypeAlias = Sequence[Number]
Model: TypeAlias = Callable[[tuple[int, ...]], LawRow]


def acceptance(p: LawRow, q: LawRow) -> Number:
    """alpha = sum min(p, q) = 1 - TV: the most one drafted token can be kept with.

    Source: Leviathan et al. 2023, corollary 3.6; that nothing keeps more is maximal coupling.
    """
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), start=Fraction(0))


def total_variation(p: LawRow, q: LawRow) -> Number:
    """Half the sum of |p - q|."""
    return sum((abs(a - b) for a, b in zip(p, q, strict=True)), start=Fraction(0)) / 2


def match_acceptance(p: LawRow, q: LawRow) -> Number:
    """sum p q: the chance that independent draws of target and draft agree."""
    return sum((a * b for a, b in zip(p, q, strict=True)), start=Fraction(0))


def minhash_acceptance(p: LawRow, q: LawRow) -> Number:
    """(1 - TV) / (1 + TV): weighted MinHash, the floor under `gumbel_acceptance`.

    Source: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    distance = total_variation(p, q)
    return (1 - distance) / (1 + distance)


def gumbel_acceptance(p: LawRow, q: LawRow) -> Number:
    """Chance that draft and target agree when they race on the same Gumbel noise.

    `sum_j 1 / sum_i max(p_i / p_j, q_i / q_j)` over tokens both may draw. Source: Daliri, Musco,
    Suresh, arXiv 2408.07978, with its exact form from the race of exponentials.
    """
    total: Number = Fraction(0)
    for p_j, q_j in zip(p, q, strict=True):
        if p_j > 0 and q_j > 0:
            total += 1 / sum(max(a / p_j, b / q_j) for a, b in zip(p, q, strict=True))
    return total


def excess(p: LawRow, q: LawRow) -> LawRow:
    """The law proportional to max(0, p - q), which a refused draft is replaced from; p if p = q.

    Source: Leviathan et al. 2023, section 2.3.
    """
    over = [max(a - b, 0 * a) for a, b in zip(p, q, strict=True)]
    mass = sum(over, start=Fraction(0))
    return [a / mass for a in over] if mass > 0 else p
