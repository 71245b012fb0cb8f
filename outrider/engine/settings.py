"""How to speculate: the rule of a request, the size of its trees, SpeculativeDecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.config import (
    SAMPLING,
    SamplingParams,
    check_between,
    check_flag,
    check_rule,
    check_whole,
    known_options,
)
from outrider.decoding import RULES, rule_named
from outrider.errors import InvalidConfig
from outrider.tree import MAX_NODES, TreeBudget

DEFAULT_TREE_RULE = "traversal"
"""What verifies trees where neither a rule nor a seed is asked for: docs/trees.md says why."""

ALIASES = {
    "depth": "k",
    "eos_token_id": "eos_token",
    "num_assistant_tokens": "k",
    "num_speculative_tokens": "k",
    "sampling_params": "sampling",
}
"""What others call the fields of SpeculativeDecoderConfig."""

MAX_EXPANDED = 56
"""Tokens of one tree that a drafter can read beside what its text has pending."""


def tree_budget(
    k: int, width: int = 1, nodes: int | None = None, shape: Sequence[int] | None = None
) -> TreeBudget | None:
    """How large trees may be; None where chains are drafted.

    Raises:
        InvalidConfig: numbers that make no tree, nodes without a width, a shape with either.
    """
    check_whole("width", width, 1)
    if shape is not None:
        return _of_shape(shape, width, nodes)
    if width > 1:
        if width * (k - 1) > MAX_EXPANDED:
            raise InvalidConfig(
                f"width={width} with k={k} makes a drafter read {width * (k - 1)} tokens of one "
                f"tree, and there is room for {MAX_EXPANDED}; lower one of them"
            )
        return TreeBudget(width, min(MAX_NODES, width * k) if nodes is None else nodes)
    if nodes is not None:
        raise InvalidConfig(f"nodes={nodes} with width=1, which drafts chains; set width too")
    return None


def _of_shape(shape: Sequence[int], width: int, nodes: int | None) -> TreeBudget:
    if width > 1 or nodes is not None:
        raise InvalidConfig(
            f"shape={tuple(shape)} has its own width and nodes; leave width={width} and "
            f"nodes={nodes} out"
        )
    trees = TreeBudget.of_shape(shape)
    inner = len({*shape} - {0})
    if inner > MAX_EXPANDED:
        raise InvalidConfig(
            f"a shape of which {inner} nodes have children makes a drafter read as many tokens of "
            f"one tree, and there is room for {MAX_EXPANDED}; give a smaller one"
        )
    return trees


def resolve_rule(
    rule: str | None,
    sampling: SamplingParams,
    *,
    trees: TreeBudget | None = None,
    lossless: bool = True,
) -> str:
    """The verification rule of a request.

    By default `greedy` at temperature 0, `coupled` under a given seed, so that a seed means what
    it says, and otherwise `block` for chains, `DEFAULT_TREE_RULE` for trees.

    Raises:
        InvalidConfig: an unknown rule, a lossy one that is not asked for, `greedy` at a temperature
            above 0, or trees for a rule that verifies chains.
    """
    check_rule(rule)
    if rule is None:
        if sampling.temperature == 0:
            return "greedy"
        if sampling.seed is not None:
            return "coupled"
        return "block" if trees is None else DEFAULT_TREE_RULE
    found = rule_named(rule, lossless=lossless)
    if rule == "greedy" and sampling.temperature > 0:
        raise InvalidConfig(
            f"rule='greedy' with temperature={sampling.temperature} would change the law; "
            "use temperature=0, or rule='block'"
        )
    if trees is not None and not found.trees:
        able = ", ".join(name for name, other in RULES.items() if other.trees)
        raise InvalidConfig(
            f"rule={rule!r} verifies chains, and width={trees.width} drafts trees; use width=1, or "
            f"one of {able}"
        )
    return rule


@dataclass(frozen=True, slots=True)
class SpeculativeDecoderConfig:
    """How a SpeculativeDecoder drafts, verifies and samples.

    Attributes:
        k: tokens drafted per round at most, and levels of a drafted tree.
        rule: verification rule; None chooses `greedy` at temperature 0, `coupled` under a given
            seed, otherwise `block` for chains and `DEFAULT_TREE_RULE` for trees.
        width: children of a drafted token at most; 1 drafts chains, more drafts trees.
        nodes: nodes of a drafted tree at most; None is `width * k`, at most 63.
        shape: the parent's row per node of the one shape of all drafted trees, instead of `width`
            and `nodes`; row 0 is the text and node j row j + 1. Of its levels `k` are drafted.
        lossless: False lets rules through that change the law of the text.
        sampling: the law of every request of this decoder.
        eos_token: the end-of-text token id, acted on when `stop_on_eos`.
        stop_on_eos: end a text at `eos_token`.
        cost_ratio: one draft forward's cost over one target forward's, for `speedup_estimate`.

    Raises:
        InvalidConfig: k below 1, an unknown or a lossy rule, a tree that is none, a negative cost
            ratio, an end without a token.
    """

    k: int = 4
    rule: str | None = None
    width: int = 1
    nodes: int | None = None
    shape: tuple[int, ...] | None = None
    lossless: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_token: int | None = None
    stop_on_eos: bool = False
    cost_ratio: float = 0.125

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1)
        check_flag("lossless", self.lossless)
        check_rule(self.rule)
        if self.rule is not None:
            rule_named(self.rule, lossless=self.lossless)
        tree_budget(self.k, self.width, self.nodes, self.shape)
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidConfig(f"sampling={self.sampling!r}: SamplingParams(...) is due")
        check_between("cost_ratio", self.cost_ratio, 0.0, math.inf)
        if self.eos_token is not None:
            check_whole("eos_token", self.eos_token, 0)
        check_flag("stop_on_eos", self.stop_on_eos)
        if self.stop_on_eos and self.eos_token is None:
            raise InvalidConfig("stop_on_eos=True needs eos_token; use with_eos(token)")

    @property
    def trees(self) -> TreeBudget | None:
        """How large drafted trees may be; None where chains are drafted."""
        return tree_budget(self.k, self.width, self.nodes, self.shape)

    def with_k(self, k: int) -> SpeculativeDecoderConfig:
        """The same configuration with another draft length."""
        return replace(self, k=k)

    def with_eos(self, eos_token: int) -> SpeculativeDecoderConfig:
        """The same configuration, ending at `eos_token`."""
        return replace(self, eos_token=eos_token, stop_on_eos=True)

    def with_cost_ratio(self, cost_ratio: float) -> SpeculativeDecoderConfig:
        """The same configuration with another draft-to-target cost ratio."""
        return replace(self, cost_ratio=cost_ratio)


SpeculativeDecoderConfig.__init__ = known_options(
    *SAMPLING, aliases=ALIASES, note="; sampling=SamplingParams(...) has the others"
)(SpeculativeDecoderConfig.__init__)
