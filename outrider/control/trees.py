"""The best trees for measured acceptance and measured costs: their size, depth and shape.

A static tree has one shape for every round. Where child k of a row is the one that stays with
probability `rank_rates[k]`, whatever the row, a round is expected to write F(T) = 1 + the sum over
nodes of the product of the rates on their paths, and the best shape of any size is found by dynamic
programming (Sequoia: Chen et al., NeurIPS 2024, proposition 3.4 and theorem 3.5). A dynamic tree is
grown anew in each round where the draft thinks it is worth most; there the size alone is to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from outrider.config import check_whole
from outrider.decoding.theory import Number
from outrider.errors import InvalidConfig
from outrider.tree import MAX_NODES


@dataclass(frozen=True, slots=True)
class TreeCosts:
    """What a round costs, in any one unit.

    Attributes:
        verify: one target forward of 1, 2, ... rows; a tree of n nodes is read with n + 1.
        level: what the draft takes for each level.
        node: what the draft takes for each node beside that.
        other: what every round takes that drafts.

    Raises:
        InvalidConfig: no cost of a forward, or one that is not above 0.
    """

    verify: tuple[Number, ...]
    level: Number
    node: Number = 0
    other: Number = 0

    def __post_init__(self) -> None:
        if not self.verify or min(self.verify) <= 0:
            raise InvalidConfig(
                f"verify={self.verify!r}: the time of a forward of 1, 2, ... rows is due, each "
                "above 0"
            )

    def of(self, nodes: int, levels: int) -> Number:
        """A round with a tree of so many nodes and levels; without any it is a plain step."""
        if nodes == 0:
            return self.verify[0]
        return self.verify[nodes] + levels * self.level + nodes * self.node + self.other


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A shape and what it promises.

    Attributes:
        parents: the parent's row per node, breadth first, siblings in the order of their ranks; row
            0 is the root and node j is row j + 1. Empty: do not draft.
        levels: nodes on the longest path.
        tokens: tokens a round is expected to write, the target's own included.
        speedup: these over their cost, plain decoding being 1; None where no costs were given.
    """

    parents: tuple[int, ...]
    levels: int
    tokens: Number
    speedup: Number | None = None


def best_tree(rank_rates: Sequence[Number], nodes: int, levels: int) -> StaticTree:
    """The shape of exactly so many nodes, and at most so many levels, that keeps the most.

    Args:
        rank_rates: the chance that child 0, 1, ... of a row is the one that stays; a row has as
            many children at most.
        nodes: nodes of the tree.
        levels: nodes on its longest path at most.

    Raises:
        InvalidConfig: numbers that make no tree.
    """
    check_whole("nodes", nodes, 0, MAX_NODES + 1)
    check_whole("levels", levels, 0)
    programme = _Programme(tuple(rank_rates))
    if programme.below(nodes, levels) is None:
        raise InvalidConfig(
            f"nodes={nodes} with levels={levels} and {len(rank_rates)} rates: no tree has so many "
            "nodes; ask for fewer, or give more levels or rates"
        )
    return programme.tree(nodes, levels)


def best_static_tree(
    rank_rates: Sequence[Number], costs: TreeCosts, *, max_nodes: int, max_levels: int
) -> StaticTree:
    """The shape of the most tokens for their cost, over all sizes and depths.

    The smallest of several; without nodes where no tree pays. The curve of costs may dip, so every
    size is looked at. `costs.verify` bounds the size too.

    Raises:
        InvalidConfig: bounds that are no numbers of nodes and levels.
    """
    check_whole("max_nodes", max_nodes, 0, MAX_NODES + 1)
    check_whole("max_levels", max_levels, 0)
    programme = _Programme(tuple(rank_rates))
    best = StaticTree((), 0, 1, 1)
    for nodes in range(1, min(max_nodes, len(costs.verify) - 1) + 1):
        for levels in range(1, min(max_levels, nodes) + 1):
            value = programme.below(nodes, levels)
            if value is None:
                continue
            speedup = (1 + value) * costs.verify[0] / costs.of(nodes, levels)
            assert best.speedup is not None
            if speedup > best.speedup:
                found = programme.tree(nodes, levels)
                best = StaticTree(found.parents, found.levels, found.tokens, speedup)
    return best


def node_budget(values: Sequence[Number], costs: TreeCosts, levels: int) -> int:
    """How many nodes a dynamic tree should have at most; 0 where no tree pays.

    A tree grown best first takes the nodes in the order of their value, so the n-th is worth
    `values[n - 1]` tokens and costs what the n-th row does: where the one falls below the other at
    the going rate, growing ends. All sizes are looked at, because the curve of costs may dip.

    Args:
        values: the chance that the most promising node stays, the second most, and so on.
        costs: of a round.
        levels: levels that the draft grows.
    """
    best, rate, tokens = 0, 1 / costs.verify[0], 1
    for nodes, value in enumerate(values[: len(costs.verify) - 1], start=1):
        tokens = tokens + value
        gained = tokens / costs.of(nodes, min(levels, nodes))
        if gained > rate:
            best, rate = nodes, gained
    return best


class _Programme:
    """The best trees of every size and depth for one vector of rates."""

    def __init__(self, rates: tuple[Number, ...]) -> None:
        self._rates = rates
        self._best = cache(self._found)

    def below(self, nodes: int, levels: int) -> Number | None:
        """What exactly so many nodes below a row promise at most; None: no tree has so many."""
        found = self._best(0, nodes, levels)
        return None if found is None else found[0]

    def _found(self, rank: int, nodes: int, levels: int) -> tuple[Number, int] | None:
        """The value of nodes under children `rank, rank + 1, ...` of a row, and the first's part.

        A child's part is itself and what stands below it.
        """
        if nodes == 0:
            return 0, 0
        if levels == 0 or rank == len(self._rates):
            return None
        best: tuple[Number, int] | None = None
        for part in range(1, nodes + 1):
            inside = self._best(0, part - 1, levels - 1)
            beside = self._best(rank + 1, nodes - part, levels)
            if inside is None or beside is None:
                continue
            value = self._rates[rank] * (1 + inside[0]) + beside[0]
            if best is None or value > best[0]:
                best = value, part
        return best

    def tree(self, nodes: int, levels: int) -> StaticTree:
        """The tree itself, breadth first."""
        parents: list[int] = []
        level, depth = [(0, nodes, levels)], 0
        while any(left for _, left, _ in level):
            below: list[tuple[int, int, int]] = []
            for row, left, room in level:
                rank = 0
                while left:
                    found = self._best(rank, left, room)
                    assert found is not None
                    parents.append(row)
                    below.append((len(parents), found[1] - 1, room - 1))
                    left, rank = left - found[1], rank + 1
            level, depth = below, depth + 1
        value = self.below(nodes, levels)
        assert value is not None
        return StaticTree(tuple(parents), depth, 1 + value)
