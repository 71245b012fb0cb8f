"""How large a round's trees may be: what the user allows, halves of that, and what each would keep.

Trees that are grown best first hang together: of the best 16 nodes of a draft the best 8 are the
tree of 8 nodes. So one draft tells of every smaller one whether the path that was kept is in it.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from functools import lru_cache

from outrider.decoding import Draft
from outrider.tree import TreeBudget

LEAST = 4
"""Nodes of the smallest tree: of fewer a chain is as good."""


@lru_cache(maxsize=64)
def sizes_of(trees: TreeBudget, *, ranked: bool) -> tuple[TreeBudget, ...]:
    """Budgets up to the user's, the smallest first.

    `ranked` trees have half as many nodes each time; others are paths side by side, and have half
    as many of these. A shape has one size.
    """
    found = [trees]
    if trees.shape is not None:
        return (trees,)
    if not ranked:
        while (width := found[-1].width // 2) >= 2:
            found.append(TreeBudget(width, trees.nodes))
    else:
        while (nodes := found[-1].nodes // 2) >= LEAST:
            found.append(TreeBudget(min(trees.width, nodes), nodes))
    return tuple(reversed(found))


@lru_cache(maxsize=256)
def rows_of(trees: TreeBudget, depth: int, *, ranked: bool) -> tuple[int, ...]:
    """Nodes of a tree of 0, 1, ... up to `depth` levels."""
    levels = range(depth + 1)
    if trees.shape is not None:
        return tuple(len(trees.shaped(level) or ()) for level in levels)
    if not ranked:
        return tuple(len(trees.paths(level)) for level in levels)
    width, nodes = trees.width, trees.nodes
    return tuple(min(nodes, width + (level - 1) * width**2) if level else 0 for level in levels)


class Grown:
    """A round's ranked trees in plain numbers.

    Args:
        draft: whose nodes have a worth.
        starts: tokens of each text when it was drafted.
    """

    def __init__(self, draft: Draft, starts: Sequenced[int]) -> None:
        assert draft.worth_BN is not None
        tree = draft.tree
        self._starts = starts
        self._trees = list(
            zip(
                tree.tokens_BN.tolist(),
                tree.parents_BN.tolist(),
                draft.worth_BN.tolist(),
                tree.counts_B.tolist(),
                strict=True,
            )
        )

    def kept(self, b: int, text: Sequenced[int], kept: int) -> tuple[list[int], int]:
        """Of text b's kept tokens how many nodes are worth more than each, and the chain's part.

        Nodes of a text that was never drafted for are none. The chain's part is how many of the
        tokens are first children all the way: a chain would have drafted these.
        """
        tokens, parents, worth, count = self._trees[b]
        start, row, firsts = self._starts[b], 0, 0
        places: list[int] = []
        for level, token in enumerate(text[start : start + kept]):
            below = [j for j in range(count) if parents[j] == row]
            found = [j for j in below if tokens[j] == token]
            if not found:
                break
            firsts += firsts == level and found[0] == below[0]
            own, row = worth[found[0]], found[0] + 1
            places.append(
                sum(other > own or (other == own and j < row - 1) for j, other in enumerate(worth))
            )
        return places, firsts
