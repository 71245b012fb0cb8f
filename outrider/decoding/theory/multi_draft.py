"""Several drafts for one token: what each rule keeps of them, in closed form or by recursion.

K drafts of q stand side by side under one node; a rule is asked whether one of them is kept.
Arithmetic is the caller's, except where a root has to be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from outrider.decoding.theory.one_draft import LawRow, Number, acceptance, excess


def recursive_acceptance(p: LawRow, laws: Sequence[LawRow]) -> Number:
    """`1 - prod (1 - alpha_k)`, alpha_k = sum min(r_k, law_k), r_1 = p.

    r_{k+1} is norm(max(0, r_k - law_k)). Children are tested in order, each against its own law,
    which no sibling's token may change: drafts of different drafters, certain children (one-hot
    laws), or K draws of one law.
    Source: Miao et al. (SpecInfer), ASPLOS 2024, multi-step speculative sampling.
    """
    refused: Number = Fraction(1)
    residual = p
    for law in laws:
        refused *= 1 - acceptance(residual, law)
        residual = excess(residual, law)
    return 1 - refused


def recursive_acceptance_iid(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """`recursive_acceptance` of K draws of q with replacement. Source: SpecInfer, ASPLOS 2024."""
    return recursive_acceptance(p, [q] * num_drafts)


def recursive_acceptance_without(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """`recursive` with K draws of q without replacement; where the support ends, so do the drafts.

    Exact, over all refused sequences of K - 1 tokens: at most V^(K-1) of them. Source: Jeon et al.
    (recursive rejection sampling, arXiv 2402.14160); Chen et al. (Sequoia), algorithm 2.
    """
    mass = sum(q, start=Fraction(0))
    if num_drafts == 0 or not mass > 0:
        return Fraction(0)
    law = [b / mass for b in q]
    kept = acceptance(p, law)
    residual = excess(p, law)
    for x, (p_x, law_x) in enumerate(zip(p, law, strict=True)):
        if law_x > p_x:
            rest = [*q[:x], 0 * q[x], *q[x + 1 :]]
            kept += (law_x - p_x) * recursive_acceptance_without(residual, rest, num_drafts - 1)
    return kept


def likeliest(q: LawRow, count: int) -> list[int]:
    """The `count` likeliest tokens q can draw, the lowest id of equals first."""
    order = sorted(range(len(q)), key=lambda x: (-q[x], x))
    return [x for x in order[:count] if q[x] > 0]


def top_acceptance(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """p(the K likeliest tokens of q): certain children, whatever the rule."""
    return sum((p[x] for x in likeliest(q, num_drafts)), start=Fraction(0))


def hybrid_acceptance(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """`p(T) + sum_{x not in T} min(p, q~)`, T the K - 1 likeliest, q~ = q without T, normalised.

    The optimum for these drafts. Source: Hu et al., ICLR 2025 (greedy multi-draft).
    """
    if num_drafts == 0:
        return Fraction(0)
    certain = set(likeliest(q, num_drafts - 1))
    tail = [0 * b if x in certain else b for x, b in enumerate(q)]
    mass = sum(tail, start=Fraction(0))
    kept: Number = sum((p[x] for x in certain), start=Fraction(0))
    if mass > 0:
        kept += sum(
            (min(p[x], b / mass) for x, b in enumerate(tail) if x not in certain), start=Fraction(0)
        )
    return kept


def kseq_beta(p: LawRow, q: LawRow, rho: Number) -> Number:
    """`beta = sum min(q, p / rho)`: what one test of K-SEQ keeps. Sun et al. (SpecTr) 2023."""
    return sum((min(b, a / rho) for a, b in zip(p, q, strict=True)), start=Fraction(0))


def kseq_acceptance(p: LawRow, q: LawRow, num_drafts: int, rho: Number) -> Number:
    """`1 - (1 - beta(rho))^K`: K draws of q, each kept with chance min(1, p / (rho q)).

    The rule is exact for rho from `kseq_rho` to K. Source: Sun et al. (SpecTr), NeurIPS 2023.
    """
    return 1 - (1 - kseq_beta(p, q, rho)) ** num_drafts


def kseq_rho(p: LawRow, q: LawRow, num_drafts: int) -> float:
    """rho* in [1, K], where `1 - (1 - beta)^K = rho beta`: the best rho with which K-SEQ is exact.

    By bisection: in rho the left side never rises and the right side never falls. The upper end
    of the last interval is returned, since a rho below rho* is biased and one above is not.
    Source: Sun et al. (SpecTr), NeurIPS 2023.
    """
    p_V, q_V = np.array(p, dtype=np.float64), np.array(q, dtype=np.float64)
    low, high = 1.0, float(max(num_drafts, 1))

    def exact(rho: float) -> bool:
        beta = float(np.minimum(q_V, p_V / rho).sum())
        return 1 - (1 - beta) ** num_drafts <= rho * beta

    if exact(low):
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if exact(middle) else (middle, high)
    return high


def best_of_law(p: LawRow, q: LawRow, num_drafts: int) -> list[Number]:
    """The law of the best of K draws of q, the best having the largest p / q, then the lowest id.

    `(1 - c)^K - (1 - c - q)^K`, c the mass of q on strictly better tokens. Source: Thomas and Pal,
    arXiv 2602.16961 (greedy multi-path block verification at depth 1).
    """
    law: list[Number] = [0 * b for b in q]
    # Worst first, so that what is no better is summed, not left over from 1.
    no_better: Number = Fraction(0)
    for x in by_ratio(p, q):
        law[x] = (no_better + q[x]) ** num_drafts - no_better**num_drafts
        no_better += q[x]
    return law


def best_of_acceptance(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """`sum min(p, best_of_law)`: the best of K drafts, then tested as one draft of that law.

    Not monotone in K: past some K the best draft is favoured beyond p. Source: as `best_of_law`.
    """
    return acceptance(p, best_of_law(p, q, num_drafts))


@dataclass(frozen=True, slots=True)
class BestOf:
    """How many drafts to take the best of, and what is then kept."""

    num_drafts: int
    acceptance: Number


def best_of_guard(p: LawRow, q: LawRow, max_drafts: int) -> BestOf:
    """k*: the number of drafts, up to `max_drafts`, with the largest `best_of_acceptance`.

    A function of the two laws alone, so that stopping at k* drafts leaves the rule exact; the
    smallest of several.
    """
    best = BestOf(0, Fraction(0))
    for count in range(1, max_drafts + 1):
        kept = best_of_acceptance(p, q, count)
        if kept > best.acceptance or count == 1:
            best = BestOf(count, kept)
    return best


def by_ratio(p: LawRow, q: LawRow) -> list[int]:
    """The tokens q can draw in ascending p / q, the highest id of equals first."""
    drawn = (x for x, mass in enumerate(q) if mass > 0)
    return sorted(drawn, key=lambda x: (p[x] / q[x], -x))
