"""The most that any rule can keep of several drafts for one token.

A rule couples the target's token with the set of drafted tokens so that it lies in the set as
often as can be. By max-flow and min-cut the optimum is `1 + min over H of p(H) - Pr[all drafts
in H]`. Sources: Sun et al. (SpecTr), NeurIPS 2023 (transport with membership cost); Hu et al.,
ICLR 2025, arXiv 2502.18779 (the dual as a choice of subset).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

from outrider.decoding.theory.multi_draft import by_ratio
from outrider.decoding.theory.one_draft import LawRow, Number
from outrider.errors import InvalidConfig

SetLaw: TypeAlias = Mapping[frozenset[int], Number]
"""The chance of every set of drafted tokens."""

WIDEST = 20
"""Tokens of the widest law whose subsets `optimal_acceptance` walks."""


def optimal_acceptance(p: LawRow, drafts: SetLaw) -> Number:
    """`alpha* = 1 + min_H p(H) - Pr[drafts in H]` over all 2^V subsets H, for any way of drafting.

    Raises:
        InvalidConfig: the law has more than `WIDEST` tokens.
    """
    if len(p) > WIDEST:
        raise InvalidConfig(
            f"a law of {len(p)} tokens has too many subsets to walk, {WIDEST} is the limit; "
            "use optimal_acceptance_iid or optimal_acceptance_without_quadrature"
        )

    def cut(inside: frozenset[int]) -> Number:
        caught = sum((mass for tokens, mass in drafts.items() if tokens <= inside), Fraction(0))
        return sum((p[x] for x in inside), start=Fraction(0)) - caught

    subsets = (
        frozenset(tokens)
        for size in range(len(p) + 1)
        for tokens in itertools.combinations(range(len(p)), size)
    )
    return 1 + min(map(cut, subsets))


def optimal_acceptance_iid(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """alpha* of K draws of q with replacement: `1 + min_H p(H) - q(H)^K`, in O(V log V).

    x^K is convex: at the best H its tangent has slope s, and the tokens with p / q < s do as well.
    So a prefix of the order of p / q is best. For K = 2 this is the closed form of Khisti et al.,
    ICLR 2025, `min_S p(S) + q(S^c)^2 + 2 q(S) q(S^c)`. Source: Hu et al., ICLR 2025.
    """
    p_inside: Number = Fraction(0)
    q_inside: Number = Fraction(0)
    # H empty: nothing is inside, but without drafts (K = 0) that is certain.
    least = 0 - q_inside**num_drafts
    for x in by_ratio(p, q):
        p_inside += p[x]
        q_inside += q[x]
        least = min(least, p_inside - q_inside**num_drafts)
    return 1 + least


def optimal_acceptance_without(p: LawRow, q: LawRow, num_drafts: int) -> Number:
    """alpha* of K draws of q without replacement, exact, over all C(V, K) sets.

    The best H is a prefix of the order of p / q here too. For wide laws there is
    `optimal_acceptance_without_quadrature`. Source: Hu et al., ICLR 2025.
    """
    order = by_ratio(p, q)
    place = {x: i for i, x in enumerate(order)}
    caught: list[Number] = [Fraction(0)] * (len(order) + 1)
    for tokens, mass in set_law_without(q, num_drafts).items():
        # The shortest prefix that holds the whole set.
        caught[max((place[x] + 1 for x in tokens), default=0)] += mass
    inside, least = Fraction(0), -caught[0]
    all_caught = caught[0]
    for length, x in enumerate(order, start=1):
        inside += p[x]
        all_caught += caught[length]
        least = min(least, inside - all_caught)
    return 1 + least


def set_law_without(q: LawRow, num_drafts: int) -> SetLaw:
    """The law of the set of K draws of q without replacement (Plackett-Luce), C(V, K) sets.

    Where the support has fewer than K tokens, it is the support.
    """
    support = [x for x, mass in enumerate(q) if mass > 0]
    reached: dict[frozenset[int], Number] = {frozenset(): Fraction(1)}
    for _ in range(min(num_drafts, len(support))):
        longer: defaultdict[frozenset[int], Number] = defaultdict(Fraction)
        for tokens, mass in reached.items():
            left = [x for x in support if x not in tokens]
            rest = sum((q[x] for x in left), start=Fraction(0))
            for x in left:
                longer[tokens | {x}] += mass * q[x] / rest
        reached = dict(longer)
    return reached
