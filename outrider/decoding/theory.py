"""What speculation should give, in closed form: expected tokens, best depth, acceptance.

Arithmetic is the caller's: Fractions give exact answers, floats quick ones. p is the target's law,
q the draft's, a law a sequence of probabilities, a model a function from a prefix to a law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

Number: TypeAlias = Fraction | float
LawRow: TypeAlias = Sequence[Number]
Model: TypeAlias = Callable[[tuple[int, ...]], LawRow]


def acceptance(p: LawRow, q: LawRow) -> Number:
    """alpha = sum min(p, q) = 1 - TV: the most one drafted token can be kept with."""
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), start=Fraction(0))


def total_variation(p: LawRow, q: LawRow) -> Number:
    """Half the sum of |p - q|."""
    return sum((abs(a - b) for a, b in zip(p, q, strict=True)), start=Fraction(0)) / 2


def match_acceptance(p: LawRow, q: LawRow) -> Number:
    """sum p q: the chance that independent draws of target and draft agree."""
    return sum((a * b for a, b in zip(p, q, strict=True)), start=Fraction(0))


def minhash_acceptance(p: LawRow, q: LawRow) -> Number:
    """(1 - TV) / (1 + TV): weighted MinHash, the floor under `gumbel_acceptance`."""
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


def speedup(tokens: Number, depth: int, cost_ratio: Number) -> Number:
    """Tokens per round over its cost in target forwards. Leviathan et al. 2023, theorem 3.8."""
    return tokens / (1 + depth * cost_ratio)


def operations_factor(tokens: Number, depth: int, operations_ratio: Number) -> Number:
    """Arithmetic done per token, plain decoding being 1. Leviathan et al. 2023, theorem 3.11."""
    return (depth * operations_ratio + depth + 1) / tokens


@dataclass(frozen=True, slots=True)
class BestDepth:
    """A draft length and the speed-up it promises."""

    depth: int
    speedup: Number


def optimal_depth(
    conditional_rates: Number | Sequence[Number], cost_ratio: Number, max_depth: int = 64
) -> BestDepth:
    """The depth of the largest `speedup`, the smallest of several; 0 = do not speculate.

    Args:
        conditional_rates: one rate for all positions, or one per position (which bounds the depth).
        cost_ratio: one draft forward over one target forward.
        max_depth: the largest depth looked at.
    """
    rates = (
        conditional_rates[:max_depth]
        if isinstance(conditional_rates, Sequence)
        else [conditional_rates] * max_depth
    )
    best = BestDepth(0, Fraction(1))
    for depth in range(1, len(rates) + 1):
        gain = speedup(expected_tokens(rates[:depth]), depth, cost_ratio)
        if gain > best.speedup:
            best = BestDepth(depth, gain)
    return best


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
