"""Acceptance of drafts that race on exponential noise, by quadrature in float64.

Drawing K tokens without replacement is letting every token i arrive at a time of rate q_i and
taking the first K. Integrals over the time t > 0 of a race are sums over equal steps of log t,
which converge geometrically here: halving the step squares the error.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.theory.multi_draft import by_ratio
from outrider.decoding.theory.one_draft import LawRow

Floats = NDArray[np.float64]

STEP = 1 / 8
"""The step of log t; results move by less than 1e-11 when it is halved."""
EARLIEST = math.log(1e-16)
"""What happens before this time has no more weight than rounding."""
LATEST = 40.0
"""Mean waiting times after which e^-t is below rounding."""


def optimal_acceptance_without_quadrature(p: LawRow, q: LawRow, num_drafts: int) -> float:
    """alpha* of K draws of q without replacement, for wide laws: O(V K) per node of the integral.

    `1 + min_H p(H) - Pr[the first K arrive from H]` over prefixes H of the order of p / q, with
    `Pr = int r e^(-r t) Pr[K or more of H have arrived by t] dt`, r = q(not in H): the first
    arrival from outside comes at t. Source: Hu et al., ICLR 2025, for the minimum.
    """
    order = by_ratio(p, q)
    drawn = min(num_drafts, len(order))
    p_V = np.array([float(p[x]) for x in order])
    q_V = np.array([float(q[x]) for x in order])
    if drawn == 0 or drawn == len(order):
        # Without drafts nothing is kept; with the whole support, what the support holds.
        return float(p_V.sum()) if drawn else 0.0
    outside_V = np.cumsum(q_V[::-1])[::-1]
    t_M, weight_M = _times(LATEST / outside_V[-1])
    few_KM = np.zeros((drawn, len(t_M)))
    few_KM[0] = 1.0
    inside, least = 0.0, 0.0
    for place in range(len(order) - 1):
        _arrive(few_KM, -np.expm1(-q_V[place] * t_M))
        inside += p_V[place]
        if place + 1 >= drawn:
            rate = outside_V[place + 1]
            enough_M = 1 - few_KM.sum(axis=0)
            least = min(least, inside - float(weight_M @ (rate * np.exp(-rate * t_M) * enough_M)))
    return 1 + min(least, float(p_V.sum()) - 1)


def gumbel_rank_rates(p: LawRow, q: LawRow, num_drafts: int) -> list[float]:
    """Chance per rank that the target's token is the draft's k-th, both on the same Gumbel noise.

    The target takes j at the time t, with density p_j e^-t; then token i, which has not arrived
    for the target, is ahead of j for the draft with chance `1 - exp(-(q_i p_j / q_j - p_i)^+ t)`,
    independently: the rank of j is Poisson-binomial. O(V^2 K) per node. The rates are what
    `expected_tokens_by_rank` asks for. Source: derived as in Daliri et al., arXiv 2408.07978,
    where K = 1; Gumbel-top-K is Kool et al., ICML 2019.
    """
    # (q_i p_j / q_j - p_i)^+ = q_i (p_j / q_j - p_i / q_i)^+: a smaller p / q can be ahead only.
    order = by_ratio(p, q)
    p_V = np.array([float(p[x]) for x in order])
    q_V = np.array([float(q[x]) for x in order])
    ratio_V = p_V / q_V
    t_M, weight_M = _times(LATEST)
    few_KVM = np.zeros((max(num_drafts, 1), len(order), len(t_M)))
    few_KVM[0] = 1.0
    for i in range(len(order) - 1):
        later_W = q_V[i] * np.maximum(ratio_V[i + 1 :] - ratio_V[i], 0)
        _arrive(few_KVM[:, i + 1 :], -np.expm1(-later_W[:, None] * t_M))
    rates = np.einsum("v,kvm,m->k", p_V, few_KVM, weight_M * np.exp(-t_M))
    return rates[:num_drafts].tolist()


def gumbel_top_acceptance(p: LawRow, q: LawRow, num_drafts: int) -> float:
    """Chance that the target's token is among the draft's K first on the same Gumbel noise.

    `sum_j int p_j e^-t Pr[at most K - 1 are ahead of j] dt`; K = 1 is `gumbel_acceptance`.
    Source: as `gumbel_rank_rates`.
    """
    return math.fsum(gumbel_rank_rates(p, q, num_drafts))


def _times(latest: float) -> tuple[Floats, Floats]:
    """Times in equal steps of their logarithm, and their weights."""
    t_M = np.exp(np.arange(EARLIEST, math.log(latest), STEP))
    return t_M, STEP * t_M


def _arrive(few: Floats, chance: Floats) -> None:
    """Adds one token to `few[k]` = Pr[exactly k have arrived], in place."""
    arrived = few * chance
    few -= arrived
    few[1:] += arrived[:-1]
