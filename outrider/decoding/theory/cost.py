"""What tokens per round are worth: speed-up, arithmetic, and the draft length that pays best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from outrider.decoding.theory.chains import expected_tokens
from outrider.decoding.theory.one_draft import Number


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
    return _best_depth(conditional_rates, max_depth, lambda depth: 1 + depth * cost_ratio)


def optimal_depth_measured(
    conditional_rates: Number | Sequence[Number],
    verify_costs: Sequence[Number],
    draft_cost: Number,
) -> BestDepth:
    """The depth g of the largest `E(g) t(1) / (t(g + 1) + g c)`, the smallest of several.

    The speed-up of Leviathan et al. 2023, theorem 3.8, without its assumption that the target
    reads any number of rows at the price of one. A dip in the curve may make a depth best though
    the one before it does not pay, so all are looked at.

    Args:
        conditional_rates: one rate for all positions, or one per position (which bounds the depth).
        verify_costs: the time of one target forward over 1, 2, ... rows (which bounds the depth).
        draft_cost: the time of one draft forward, in the same unit.
    """
    plain = verify_costs[0]
    return _best_depth(
        conditional_rates,
        len(verify_costs) - 1,
        lambda depth: (verify_costs[depth] + depth * draft_cost) / plain,
    )


def _best_depth(
    conditional_rates: Number | Sequence[Number], max_depth: int, cost: Callable[[int], Number]
) -> BestDepth:
    rates = (
        conditional_rates[:max_depth]
        if isinstance(conditional_rates, Sequence)
        else [conditional_rates] * max_depth
    )
    best = BestDepth(0, Fraction(1))
    for depth in range(1, len(rates) + 1):
        gain = expected_tokens(rates[:depth]) / cost(depth)
        if gain > best.speedup:
            best = BestDepth(depth, gain)
    return best
