"""Rounds of several drafted tokens: what each rule is expected to keep of a chain or a tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from outrider.decoding.theory.one_draft import LawRow, Model, Number, total_variation


def expected_tokens_iid(alpha: Number, depth: int) -> Number:
    """`(1 - alpha^(depth + 1)) / (1 - alpha)`: tokens per round at one acceptance rate.

    Source: Leviathan et al. 2023, equation 1.
    """
    return sum((alpha**i for i in range(1, depth + 1)), start=Fraction(1))


def expected_tokens(conditional_rates: Iterable[Number]) -> Number:
    """`1 + sum_i prod_{j<=i} rate_j`, rate j given that the tokens before j stayed."""
    products = itertools.accumulate(conditional_rates, lambda a, b: a * b)
    return sum(products, start=Fraction(1))


def expected_tokens_marginal(marginal_rates: Iterable[Number]) -> Number:
    """`1 + sum_i rate_i`, rate i the unconditional chance that token i stays (what servers log)."""
    return sum(marginal_rates, start=Fraction(1))


def expected_tokens_tree(parents: Sequence[int], node_rates: Sequence[Number]) -> Number:
    """`1 + sum over nodes of the product of the rates on its path`: tokens per round of a tree.

    Args:
        parents: the parent's row per node; row 0 is the root and node j is row j + 1.
        node_rates: the chance that the walk goes on to this node, given that it reached its parent.
    """
    reached: list[Number] = [Fraction(1)]
    for parent, rate in zip(parents, node_rates, strict=True):
        reached.append(reached[parent] * rate)
    return sum(reached, start=Fraction(0))


def expected_tokens_by_rank(parents: Sequence[int], rank_rates: Sequence[Number]) -> Number:
    """`F(T) = 1 + sum over nodes of prod rate[rank]`: a node's rank is its place among siblings.

    `rank_rates[k]` is the chance that child k is the one kept, the earlier ones refused; ranks
    beyond its end are never kept. Source: Chen et al. (Sequoia), NeurIPS 2024, proposition 3.4.
    """
    children = [0] * (len(parents) + 1)
    node_rates: list[Number] = []
    for parent in parents:
        rank = children[parent]
        node_rates.append(rank_rates[rank] if rank < len(rank_rates) else Fraction(0))
        children[parent] += 1
    return expected_tokens_tree(parents, node_rates)


def match_expected_accepted(p: Model, q: Model, depth: int) -> Number:
    """Drafted tokens the `match` rule keeps of a chain: w(x) = w(parent) p(x) q(x), summed."""
    return _sum_over_prefixes(p, q, depth, lambda kept, _, p_x, q_x: kept * p_x * q_x)


def token_expected_accepted(p: Model, q: Model, depth: int) -> Number:
    """Drafted tokens the `token` rule keeps of a chain: w(x) = w(parent) min(p, q)(x), summed."""
    return _sum_over_prefixes(p, q, depth, lambda kept, _, p_x, q_x: kept * min(p_x, q_x))


def block_expected_accepted(p: Model, q: Model, depth: int) -> Number:
    """Drafted tokens the `block` rule keeps, which is the most any rule can keep of a chain.

    w(x^i) = min(q(x^i), p(x_i | before) w(before)), summed over prefixes of 1 to `depth` tokens;
    q(x^i) is the chance of drafting the prefix. Source: Sun et al., ICLR 2025, theorem 2.
    """
    return _sum_over_prefixes(
        p, q, depth, lambda kept, drafted, p_x, q_x: min(drafted * q_x, kept * p_x)
    )


def accepted_ceiling(p: Model, q: Model, depth: int) -> Number:
    """sum min(p(x), q(x)) over prefixes: no less than what any valid rule keeps of a chain."""

    def walk(prefix: tuple[int, ...], p_path: Number, q_path: Number) -> Number:
        if len(prefix) == depth:
            return Fraction(0)
        total: Number = Fraction(0)
        for x, (p_x, q_x) in enumerate(zip(p(prefix), q(prefix), strict=True)):
            paths = p_path * p_x, q_path * q_x
            if min(paths) > 0:
                total += min(paths) + walk((*prefix, x), *paths)
        return total

    return walk((), Fraction(1), Fraction(1))


def expected_rejections(p: Model, q: Model, num_tokens: int) -> Number:
    """Refused drafts in T tokens of the `token` rule: `sum_{t<T} E_{prefix ~ p} TV(p, q)`.

    However far ahead is drafted, every token written was tested once. No valid rule that decides
    token by token refuses fewer. Source: Yin et al., NeurIPS 2024.
    """

    def walk(prefix: tuple[int, ...], p_path: Number) -> Number:
        if len(prefix) == num_tokens:
            return Fraction(0)
        row: LawRow = p(prefix)
        total = p_path * total_variation(row, q(prefix))
        for x, p_x in enumerate(row):
            if p_x > 0:
                total += walk((*prefix, x), p_path * p_x)
        return total

    return walk((), Fraction(1))


def _sum_over_prefixes(
    p: Model, q: Model, depth: int, keep: Callable[[Number, Number, Number, Number], Number]
) -> Number:
    """Sums `keep(w(parent), q(parent path), p(x), q(x))` over all prefixes it leaves alive."""

    def walk(prefix: tuple[int, ...], kept: Number, drafted: Number) -> Number:
        if len(prefix) == depth:
            return Fraction(0)
        total: Number = Fraction(0)
        for x, (p_x, q_x) in enumerate(zip(p(prefix), q(prefix), strict=True)):
            here = keep(kept, drafted, p_x, q_x)
            if here > 0:
                total += here + walk((*prefix, x), here, drafted * q_x)
        return total

    return walk((), Fraction(1), Fraction(1))
