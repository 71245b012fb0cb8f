"""Growing trees of a given shape, level by level: one call of the drafter for each level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, Kind
from outrider.decoding.draw import Draws
from outrider.decoding.laws import Law, one_table
from outrider.errors import DraftShapeMismatch
from outrider.tree import TokenTree

if TYPE_CHECKING:
    from jaxtyping import Int64

Expand: TypeAlias = Callable[[TokenTree, Tensor], Law]
"""The drafter's laws after some rows `[B, L]` of the trees so far: `b * L + l` is the row of
`rows[b, l]`. Where a row is missing from a tree the root stands in its place; its law is unused."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens.

    Attributes:
        levels: for each level, its rows' numbers of children, from the root down, breadth first.
    """

    levels: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parents: Sequence[int]) -> Shape:
        """The shape of parent rows, which name the root 0 and node j row j + 1.

        Raises:
            DraftShapeMismatch: a parent that does not stand before its child.
        """
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for j, parent in enumerate(parents):
            if not 0 <= parent <= j:
                raise DraftShapeMismatch(
                    f"node {j} has parent row {parent}; rows 0 (the root) to {j} stand before it"
                )
            children[parent].append(j + 1)
        levels: list[tuple[int, ...]] = []
        level = [0]
        while level:
            levels.append(tuple(len(children[row]) for row in level))
            level = [child for row in level for child in children[row]]
        return cls(tuple(levels[:-1]))

    @property
    def num_nodes(self) -> int:
        """Nodes where every support is wide enough."""
        return sum(map(sum, self.levels))

    @property
    def width(self) -> int:
        """The most children of any row."""
        return max((num for level in self.levels for num in level), default=0)


def grow(draws: Draws, parents: Sequence[int], expand: Expand) -> Draft:
    """Trees of one shape for every text of the round, as far as the laws' supports go.

    Nodes stand breadth first, siblings in drawing order, whatever order `parents` has them in.
    Where a support is used up the missing nodes, and all below them, leave no gap: those behind
    them move up, and padding is last. A node's noise index is its number in the tree as it comes
    out. That is known before the node is drawn, because how many children a row has is a matter of
    supports; and no index serves twice, because the numbers of one tree are different.

    Args:
        draws: the round's draws; they decide how children are drawn.
        parents: parent rows of the shape, as of `tree.full`.
        expand: the drafter.
    """
    return _Growing(draws, Shape.of(parents)).grown(expand)


def clipped(draft: Draft, depths_B: Int64[Tensor, " B"]) -> Draft:
    """The first `depths_B[b]` levels of each tree; nodes stand level by level."""
    tree = draft.tree
    deep_BN = tree.depths()[:, 1:] > depths_B.to(tree.counts_B.device)[:, None]
    counts_B = (tree.is_node() & ~deep_BN).sum(1)
    kept = TokenTree(tree.tokens_BN, tree.parents_BN, counts_B, tree.depth, tree.width)
    return replace(draft, tree=kept)


class _Growing:
    """Trees under construction; column N of the tables takes what is not there."""

    def __init__(self, draws: Draws, shape: Shape) -> None:
        self._draws, self._shape = draws, shape
        num_texts, num_nodes = draws.num_texts, shape.num_nodes
        self._device = draws.device
        # Padding of a chain goes on as the chain does.
        above = torch.arange(num_nodes + 1) if shape.width <= 1 else torch.zeros(num_nodes + 1)
        self._parents = above.long().to(self._device).repeat(num_texts, 1)
        self._tokens, self._kinds, self._laws = (torch.zeros_like(self._parents) for _ in range(3))
        self._counts = self._parents.new_zeros(num_texts)
        self._made: list[Law] = []
        self._spare = num_nodes

    def grown(self, expand: Expand) -> Draft:
        """The draft."""
        rows_BL = self._counts[:, None]
        real_BL = torch.ones_like(rows_BL, dtype=torch.bool)
        for depth, widths in enumerate(self._shape.levels):
            inner = [place for place, num in enumerate(widths) if num]
            widths = [widths[place] for place in inner]
            rows_BL, real_BL = rows_BL[:, inner], real_BL[:, inner]
            law = expand(self._tree(depth), rows_BL)
            rows_BL, real_BL = self._level(law, widths, rows_BL, real_BL, depth)
            self._made.append(law)
        return self._draft()

    def _level(
        self, law: Law, widths: list[int], rows_BL: Tensor, real_BL: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Draws the children of one level's rows; the next level's rows and which are there."""
        drawing, (num_texts, num_rows) = self._draws.drawing, rows_BL.shape
        base = torch.arange(num_texts * num_rows, device=self._device).view(num_texts, num_rows)
        groups = {num: [place for place, n in enumerate(widths) if n == num] for num in set(widths)}
        laws = {num: law.select(base[:, at].flatten()) for num, at in groups.items()}
        counts_BL = torch.zeros_like(rows_BL)
        for num, at in groups.items():
            counts_BL[:, at] = (
                drawing.counts(laws[num], num).view(num_texts, len(at)).to(self._device)
            )
        counts_BL = counts_BL * real_BL
        first_BL = self._counts[:, None] + counts_BL.cumsum(1) - counts_BL
        offset = sum(map(len, self._made))
        nodes: list[Tensor] = [rows_BL] * num_rows
        for num, at in groups.items():
            first_Bg = first_BL[:, at]
            texts = torch.arange(num_texts, device=self._device).repeat_interleave(len(at))
            index_BgK = first_Bg[:, :, None] + torch.arange(num, device=self._device)
            there_BgK = index_BgK < (first_Bg + counts_BL[:, at])[:, :, None]
            # What is not there is drawn beside what is, at an address that no node has.
            spare_K = torch.arange(num, device=self._device) + self._spare
            spare_gK = spare_K + num * torch.arange(len(at), device=self._device)[:, None]
            self._spare += num * len(at)
            drawn_BgK = torch.where(there_BgK, index_BgK, spare_gK)
            made = self._draws.children(laws[num], texts, drawn_BgK.flatten(0, 1), depth)
            index_BgK = torch.where(there_BgK, index_BgK, self._shape.num_nodes)
            flat_BM = index_BgK.flatten(1)
            for table, part in (
                (self._tokens, made.tokens_nK.to(self._device)),
                (self._kinds, made.kinds_nK.to(self._device)),
                (self._parents, rows_BL[:, at, None].expand_as(index_BgK)),
                (self._laws, offset + base[:, at, None].expand_as(index_BgK)),
            ):
                table.scatter_(1, flat_BM, part.reshape(flat_BM.shape))
            for g, place in enumerate(at):
                nodes[place] = index_BgK[:, g]
        self._counts = self._counts + counts_BL.sum(1)
        next_BL = torch.cat(nodes, 1)
        real_BL = next_BL < self._shape.num_nodes
        return torch.where(real_BL, next_BL + 1, 0), real_BL

    def _tree(self, depth: int) -> TokenTree:
        columns = slice(0, self._shape.num_nodes)
        return TokenTree(
            self._tokens[:, columns],
            self._parents[:, columns],
            self._counts,
            depth,
            self._shape.width,
        )

    def _draft(self) -> Draft:
        """The trees with the laws of all levels."""
        tree, kinds = self._tree(len(self._shape.levels)), self._draws.drawing.kinds
        if kinds == {Kind.POINT} or not self._made:
            return Draft(tree, None)
        columns = slice(0, tree.num_nodes)
        kinds_BN = self._kinds[:, columns] if len(kinds) > 1 else None
        if tree.is_chain:
            return Draft(tree, _side_by_side(self._made, len(self._counts)), None, kinds_BN, kinds)
        return Draft(tree, one_table(self._made), self._laws[:, columns], kinds_BN, kinds)


def _side_by_side(laws: Sequence[Law], num_texts: int) -> Law:
    """A chain's layout: row `b * K + i` is level i's of text b."""
    whole = one_table(laws)
    order = torch.arange(len(whole), device=whole.probs.device).view(len(laws), num_texts)
    return whole.select(order.T.flatten())
