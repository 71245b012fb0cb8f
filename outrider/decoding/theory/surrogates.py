"""Laws a lossy rule may declare: verify exactly towards pi instead of p, and state the distance.

Both laws here lie on the one line that any trade of exactness against acceptance is bounded by:
a refused draft costs TV(pi, q), and TV(p, q) - TV(p, pi) is the least that can be.
"""

from __future__ import annotations

from fractions import Fraction

from outrider.decoding.theory.one_draft import LawRow, Number, acceptance, excess, total_variation


def lenience_acceptance(p: LawRow, q: LawRow, lenience: Number) -> Number:
    """`sum min(p / l, q)`: what min(1, p / (l q)) keeps, 0 < l <= 1.

    Source: Leviathan et al. 2023, appendix A.5.
    """
    return sum((min(a / lenience, b) for a, b in zip(p, q, strict=True)), start=Fraction(0))


def lenience_law(p: LawRow, q: LawRow, lenience: Number) -> LawRow:
    """pi of one token verified with lenience l and replaced from norm(max(0, p - q)).

    No token has more than p / l (Leviathan et al. 2023, appendix A.5). Where p > q, pi <= p, so
    TV(pi, p) is exactly the acceptance gained, and never above 1 - l.
    """
    kept = [min(a / lenience, b) for a, b in zip(p, q, strict=True)]
    refused = 1 - sum(kept, start=Fraction(0))
    # Where p = q nothing is refused, and where floats say otherwise it is rounding.
    return [k + max(refused, 0 * refused) * r for k, r in zip(kept, excess(p, q), strict=True)]


def mixture_law(p: LawRow, q: LawRow, distance: Number) -> LawRow:
    """`pi = p + min(1, distance / TV(p, q)) (q - p)`: as near q as `distance` from p allows.

    Source: Yin et al., NeurIPS 2024 (the linear Pareto front of rejection against bias).
    """
    apart = total_variation(p, q)
    share = distance / apart if distance < apart else Fraction(1)
    return [a + share * (b - a) for a, b in zip(p, q, strict=True)]


def mixture_acceptance(p: LawRow, q: LawRow, distance: Number) -> Number:
    """`min(1, alpha + distance)`: the most any law within `distance` of p lets one draft keep.

    Attained by `mixture_law`. Source: Yin et al., NeurIPS 2024.
    """
    return min(acceptance(p, q) + distance, Fraction(1))


def sequence_bound(distance: Number, num_tokens: int) -> Number:
    """`1 - (1 - d)^T`: how far T tokens can be off if every row is within d; at most `T d`.

    Drawn from a maximal coupling row by row, all T tokens agree with chance (1 - d)^T or more.
    """
    return 1 - (1 - distance) ** num_tokens
