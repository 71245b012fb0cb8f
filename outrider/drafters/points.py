"""Trees of certain tokens as plain lists: grown best first, merged, and put in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Place = TypeVar("Place")
Successors: TypeAlias = Callable[[Place], Sequence[tuple[int, float, Place]]]
"""What may follow a place: tokens, the chance of each, and the places behind them, likeliest first.
"""


@dataclass(frozen=True, slots=True)
class PointTree:
    """Tokens and parent rows of one tree, as of `TokenTree`: row 0 is the text, node j row j + 1.

    Each row's first child is its likeliest, and the path of first children comes first: attention
    over it is that of a chain. `origins` may say where each token came from; merging keeps it.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()

    @property
    def chain(self) -> list[int]:
        """The path of first children."""
        path: list[int] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            if parent != len(path):
                break
            path.append(token)
        return path


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a tree may grow: nodes, tokens on a path, and the least chance of a path."""

    num_nodes: int
    depth: int
    min_prob: float = 0.0


class _Growth(Generic[Place]):
    """Nodes that could come next, the likeliest path first."""

    def __init__(self, successors: Successors[Place], budget: Budget) -> None:
        self._successors, self._budget = successors, budget
        self._open: list[tuple[float, int, int, int, int, Place]] = []
        self._made = 0

    def offer(self, row: int, depth: int, chance: float, place: Place) -> None:
        if depth >= self._budget.depth:
            return
        for token, share, after in self._successors(place):
            path = chance * share
            if path < self._budget.min_prob:
                break
            # Of equals the one offered first: no places are compared.
            entry = (-path, self._made, row, depth + 1, token, after)
            heapq.heappush(self._open, entry)
            self._made += 1

    def grown(self, place: Place) -> PointTree:
        tokens: list[int] = []
        parents: list[int] = []
        self.offer(0, 0, 1.0, place)
        while self._open and len(tokens) < self._budget.num_nodes:
            path, _, row, depth, token, after = heapq.heappop(self._open)
            tokens.append(token)
            parents.append(row)
            self.offer(len(tokens), depth, -path, after)
        return ordered(tokens, parents)


def grow_likeliest(place: Place, successors: Successors[Place], budget: Budget) -> PointTree:
    """The tree of the likeliest paths from a place: a path's chance is the product along it."""
    return _Growth(successors, budget).grown(place)


def ordered(
    tokens: Sequence[int], parents: Sequence[int], origins: Sequence[int] = ()
) -> PointTree:
    """The same tree depth first, each row's children in the order they had."""
    below: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, parent in enumerate(parents):
        below[parent].append(node + 1)
    rows: list[int] = []
    new_parents: list[int] = []
    stack = [(row, 0) for row in reversed(below[0])]
    while stack:
        row, parent = stack.pop()
        rows.append(row)
        new_parents.append(parent)
        place = len(rows)
        stack += [(child, place) for child in reversed(below[row])]
    return PointTree(
        tuple(tokens[row - 1] for row in rows),
        tuple(new_parents),
        tuple(origins[row - 1] for row in rows) if origins else (),
    )


def merged(trees: Sequence[PointTree], num_nodes: int) -> PointTree:
    """One tree of several, equal paths once; where there is no room the later trees' nodes go."""
    tokens: list[int] = []
    parents: list[int] = []
    origins: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for tree in trees:
        rows = [0]
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above = rows[parent]
            row = -1 if above < 0 else known.get((above, token), -1)
            if row < 0 <= above and len(tokens) < num_nodes:
                tokens.append(token)
                parents.append(above)
                origins += tree.origins[node : node + 1]
                row = known[above, token] = len(tokens)
            rows.append(row)
    return ordered(tokens, parents, origins)
