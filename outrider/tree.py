"""Token trees: what was drafted, who follows whom; a chain is a tree.

Row 0 of a tree is its root, the text as it stands; node j, counted from 0, is row j + 1. A parent
is named by its row and stands before its children; siblings stand in the order in which they were
drawn and are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import host
from outrider.config import check_whole
from outrider.errors import DraftShapeMismatch, InvalidConfig

if TYPE_CHECKING:
    from jaxtyping import Bool, Int64

MAX_BITS = 64
"""Nodes an ancestor bitmask has room for."""
MAX_NODES = MAX_BITS - 1
"""Nodes of a tree that is scored: with the token they hang from they share a bitmask."""
DRAWN = ("certain", "iid", "without")
"""How siblings may have been drawn: the likeliest or a look-up, with and without replacement."""


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """How large a round's trees may be.

    Attributes:
        width: children of a row at most, and rows of a level that get any; at least 2.
        nodes: nodes of a tree at most, 2 to 63.
        shape: the parent's row per node of the one shape that every round's tree has; None grows
            trees where the draft thinks that they are worth most.

    Raises:
        InvalidConfig: numbers that make no tree.
    """

    width: int
    nodes: int
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_whole("width", self.width, 2)
        check_whole("nodes", self.nodes, 2, MAX_NODES + 1)

    @classmethod
    def of_shape(cls, parents: Sequence[int]) -> TreeBudget:
        """The budget of one shape.

        Raises:
            InvalidConfig: rows that make no tree, or a chain, which needs no shape.
        """
        for j, parent in enumerate(parents):
            check_whole("shape", parent, 0)
            if parent > j:
                raise InvalidConfig(
                    f"shape: node {j} follows row {parent}; rows 0 (the root) to {j} stand before "
                    "it"
                )
        width = max(map(list(parents).count, parents), default=0)
        if width < 2:
            raise InvalidConfig(
                f"shape={tuple(parents)} is a chain; leave it out and set k={len(parents)}"
            )
        return cls(width, len(parents), tuple(parents))

    @property
    def levels(self) -> int | None:
        """Nodes on the shape's longest path; None without a shape."""
        return None if self.shape is None else _depth(self.shape)

    def shaped(self, depth: int) -> tuple[int, ...] | None:
        """Parent rows of the shape's first `depth` levels; None without a shape."""
        if self.shape is None:
            return None
        depths, rows, kept = [0], {0: 0}, list[int]()
        for j, parent in enumerate(self.shape):
            depths.append(depths[parent] + 1)
            if depths[-1] <= depth:
                kept.append(rows[parent])
                rows[j + 1] = len(kept)
        return tuple(kept)

    def paths(self, depth: int) -> tuple[int, ...]:
        """Parent rows of `width` paths of one depth side by side, level by level."""
        levels = max(1, min(depth, self.nodes // self.width))
        count = min(self.nodes, self.width * levels) if depth else 0
        return tuple(max(0, j + 1 - self.width) for j in range(count))


@dataclass(frozen=True, slots=True)
class TokenTree:
    """B token trees, padded to N nodes.

    Attributes:
        tokens_BN: int64; entries from `counts_B` on are padding, any valid token.
        parents_BN: int64 rows, `parents[b, j] <= j`; padding may hold any such row.
        counts_B: int64, nodes of each tree, 0 to N.
        depth: the most nodes on any path, known without reading a tensor.
        width: the most children of any row, likewise; 1 means that every tree is a chain whose
            node j has parent j.
    """

    tokens_BN: Int64[Tensor, "B N"]
    parents_BN: Int64[Tensor, "B N"]
    counts_B: Int64[Tensor, " B"]
    depth: int
    width: int

    @classmethod
    def chain(cls, tokens_BK: Int64[Tensor, "B K"], lengths_B: Int64[Tensor, " B"]) -> TokenTree:
        """Each token follows the one before it."""
        num_texts, depth = tokens_BK.shape
        device = tokens_BK.device
        # What a device has may be of a graph under capture.
        along_K = _along(depth) if device.type == "cpu" else torch.arange(depth, device=device)
        parents_BK = along_K.expand(num_texts, depth)
        return cls(tokens_BK, parents_BK, lengths_B, depth, 1)

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> TokenTree:
        """Trees of plain lists, one list of tokens and one of parent rows per text.

        Raises:
            DraftShapeMismatch: lists of different lengths, or a parent that does not stand before
                its child.
        """
        for b, (row, above) in enumerate(zip(tokens, parents, strict=True)):
            if len(row) != len(above):
                raise DraftShapeMismatch(
                    f"tree {b} has {len(row)} tokens and {len(above)} parents; give one parent "
                    "row per token"
                )
            for j, parent in enumerate(above):
                if not 0 <= parent <= j:
                    raise DraftShapeMismatch(
                        f"tree {b}: node {j} has parent row {parent}; rows 0 (the root) to {j} "
                        "stand before it"
                    )
        num_nodes = max(map(len, tokens), default=0)

        def padded(rows: Sequence[Sequence[int]]) -> Tensor:
            full = [[*row, *[0] * (num_nodes - len(row))] for row in rows]
            return torch.tensor(full, dtype=torch.int64).reshape(len(full), num_nodes)

        counts = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        depth = max((_depth(above) for above in parents), default=0)
        width = max((max(map(above.count, above), default=0) for above in parents), default=0)
        chains = all(list(above) == list(range(len(above))) for above in parents)
        # Chains are told apart by their layout: padding follows it too.
        if chains:
            return cls.chain(padded(tokens), counts)
        return cls(padded(tokens), padded(parents), counts, depth, max(2, width))

    @property
    def is_chain(self) -> bool:
        """Whether node j follows node j - 1 in every tree."""
        return self.width <= 1

    @property
    def num_nodes(self) -> int:
        """N, padding included."""
        return self.tokens_BN.shape[1]

    def to(self, device: torch.device) -> TokenTree:
        """The same trees on a device."""
        if device == self.tokens_BN.device:
            return self
        parts = self.tokens_BN, self.parents_BN, self.counts_B
        tokens_BN, parents_BN, counts_B = host.sent(parts, device)
        return TokenTree(tokens_BN, parents_BN, counts_B, self.depth, self.width)

    def is_node(self) -> Bool[Tensor, "B N"]:
        """Which entries are nodes and no padding."""
        index = torch.arange(self.num_nodes, device=self.tokens_BN.device)
        return index < self.counts_B[:, None]

    def depths(self) -> Int64[Tensor, "B T"]:
        """Tokens on the path to each row: 0 for the root. Added to the anchor it is a position."""
        depths_BT = self._row_zero(torch.int64)
        for _ in range(self.depth):
            above_BN = depths_BT.gather(1, self.parents_BN)
            depths_BT = torch.nn.functional.pad(above_BN + 1, (1, 0))
        return depths_BT

    def levels(self) -> Int64[Tensor, " B"]:
        """Tokens on the longest path of each tree."""
        return (self.depths() * torch.nn.functional.pad(self.is_node(), (1, 0))).amax(1)

    def ranks(self) -> Int64[Tensor, "B N"]:
        """Each node's place among its siblings, from 0."""
        same_BNN = self.parents_BN[:, :, None] == self.parents_BN[:, None, :]
        size = self.num_nodes, self.num_nodes
        earlier = torch.ones(size, dtype=torch.bool, device=same_BNN.device).tril(-1)
        return (same_BNN & earlier & self.is_node()[:, None, :]).sum(2)

    def children(self) -> Int64[Tensor, "B T W"]:
        """Rows of each row's children in drawing order, 0 where there are no more."""
        num_texts, num_nodes = self.tokens_BN.shape
        num_rows, width = num_nodes + 1, max(1, self.width)
        rows_BN = torch.arange(1, num_rows, device=self.tokens_BN.device).expand(num_texts, -1)
        # Padding is written behind the table and cut off.
        places_BN = torch.where(
            self.is_node(), self.parents_BN * width + self.ranks(), num_rows * width
        )
        table = rows_BN.new_zeros(num_texts, num_rows * width + 1)
        return table.scatter_(1, places_BN, rows_BN)[:, :-1].view(num_texts, num_rows, width)

    def ancestors(self) -> Int64[Tensor, "B N"]:
        """One bitmask per node: bit i is set where node i is on its path, itself included.

        Raises:
            DraftShapeMismatch: more than 64 nodes.
        """
        if self.num_nodes > MAX_BITS:
            raise DraftShapeMismatch(
                f"a tree of {self.num_nodes} nodes; an ancestor bitmask has room for {MAX_BITS}: "
                "draft fewer"
            )
        index_N = torch.arange(self.num_nodes, device=self.parents_BN.device)
        own_N = torch.ones_like(index_N) << index_N
        masks_BT = self._row_zero(torch.int64)
        for _ in range(self.depth):
            masks_BT = torch.nn.functional.pad(masks_BT.gather(1, self.parents_BN) | own_N, (1, 0))
        return masks_BT[:, 1:]

    def paths(self) -> list[list[tuple[int, ...]]]:
        """For each tree the rows from below the root to each leaf, leaves in order of their row."""
        rows = zip(self.parents_BN.tolist(), self.counts_B.tolist(), strict=True)
        return [_paths(parents[:count]) for parents, count in rows]

    def _row_zero(self, dtype: torch.dtype) -> Tensor:
        size = len(self.tokens_BN), self.num_nodes + 1
        return torch.zeros(size, dtype=dtype, device=self.tokens_BN.device)


def full(branch_factor: int, depth: int) -> tuple[int, ...]:
    """Parent rows of the tree in which every row above `depth` has `branch_factor` children."""
    parents: list[int] = []
    level = [0]
    for _ in range(depth):
        grown = [row for row in level for _ in range(branch_factor)]
        level = list(range(len(parents) + 1, len(parents) + 1 + len(grown)))
        parents += grown
    return tuple(parents)


def from_paths(
    paths: Sequence[Sequence[int]], *, merge: bool, drawn: str = "certain"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parent rows of the tree of some paths, in the paths' order.

    With `merge` common prefixes become one path; without it every path stands for itself. Rules
    that read draft laws count how often a token was drawn, and where its duplicates are merged
    they write another law than the target's; so drawn paths are not merged.

    Args:
        paths: tokens from the root down.
        merge: whether paths that begin alike share their beginning.
        drawn: how siblings were drawn, as in `verify_token_trees`: `certain`, `iid`, `without`.

    Raises:
        InvalidConfig: drawn paths that are to be merged; an unknown word.
    """
    if drawn not in DRAWN:
        raise InvalidConfig(f"drawn={drawn!r}: one of {', '.join(DRAWN)} is due")
    if merge and drawn != "certain":
        raise InvalidConfig(
            f"merge=True with drawn={drawn!r}: of drawn paths every duplicate counts; say "
            "merge=False, or drawn='certain' for match, greedy and coupled, which look at tokens "
            "alone"
        )
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for path in paths:
        row = 0
        for token in path:
            place = known.get((row, token)) if merge else None
            if place is None:
                tokens.append(token)
                parents.append(row)
                place = len(tokens)
                known[row, token] = place
            row = place
    return tuple(tokens), tuple(parents)


def best_first(values: Sequence[float], parents: Sequence[int], num_nodes: int) -> tuple[int, ...]:
    """The `num_nodes` nodes of highest value that hang together with the root, in node order.

    A node counts with the least value on its path, so that a child never stands without its
    parent; among equals the earlier node is taken.
    """
    along: list[float] = []
    for value, parent in zip(values, parents, strict=True):
        along.append(value if parent == 0 else min(value, along[parent - 1]))
    order = sorted(range(len(along)), key=lambda j: (-along[j], j))
    return tuple(sorted(order[:num_nodes]))


@lru_cache(maxsize=256)
def _along(depth: int) -> Int64[Tensor, " K"]:
    """Parents of a chain's nodes on the host; nobody writes to them."""
    return torch.arange(depth, device="cpu")


def _depth(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def _paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    inner = set(parents)
    found: list[tuple[int, ...]] = []
    for row in range(1, len(parents) + 1):
        if row in inner:
            continue
        path: list[int] = []
        at = row
        while at:
            path.append(at)
            at = parents[at - 1]
        found.append(tuple(reversed(path)))
    return found
