"""What the rows of a forward see, as integers in one tensor that kernels on a GPU read.

The rows of a span are worked on in tiles. A tile's keys are blocks of the cache, and no length of a
text is anywhere but in the numbers: kernels, and graphs of them, are the same for all.

The numbers of R rows and T tiles: where each row's key goes (-1: nowhere, it only pads), how many
tokens it sees, the lowest of them, and the bits of the staged nodes it sees behind them, R each;
then five for each tile: its first row, its rows, where its text's blocks begin, its lowest and its
last token; then the blocks of all texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outrider import host
from outrider.cache import BLOCK_SLOTS
from outrider.models.plan import Plan, Span
from outrider.models.reach import Reach

if TYPE_CHECKING:
    from jaxtyping import Int64

IntArray = NDArray[np.int64]

PER_ROW, PER_TILE = 4, 5
TILE = 64
"""Queries of one tile: rows times the query heads of a key head, unless a row alone has more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many rows and tiles there are, and how many rows a tile has at most."""

    rows: int
    tiles: int
    per_tile: int

    @property
    def size(self) -> int:
        """Numbers of a table but for the blocks."""
        return PER_ROW * self.rows + PER_TILE * self.tiles


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of a forward's rows under one reach, on the device."""

    numbers: Int64[torch.Tensor, " n"]
    layout: Layout


class Tables(ABC):
    """Where a body finds the tables of a forward."""

    @abstractmethod
    def of(
        self, plan: Plan, reach: Reach | None, rows: int, per_group: int, device: torch.device
    ) -> Table:
        """The table of a plan's rows, padded to `rows`, for `per_group` query heads a key head."""


class FreshTables(Tables):
    """Made once for each plan, and shared by the layers of its forward."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._made: dict[tuple[Reach | None, int, torch.device], Table] = {}

    def of(
        self, plan: Plan, reach: Reach | None, rows: int, per_group: int, device: torch.device
    ) -> Table:
        """The table, made where this plan has none yet."""
        if self._plan is not plan:
            self._plan = plan
            self._made.clear()
        found = self._made.get((reach, per_group, device))
        if found is None:
            layout = layout_of(plan, rows, per_group)
            blocks = sum(len(span.slots.blocks) for span in plan.spans)
            numbers = np.empty(layout.size + blocks, np.int64)
            write_numbers(numbers, plan, reach, layout)
            there = host.send(torch.from_numpy(numbers), device)
            found = self._made[reach, per_group, device] = Table(there, layout)
        return found


def rows_per_tile(longest: int, per_group: int) -> int:
    """Rows of a tile where the longest span has so many."""
    return min(power_of_two(longest), max(1, TILE // per_group))


def power_of_two(number: int) -> int:
    """The first power of two that is no less."""
    return 1 << (number - 1).bit_length()


def layout_of(plan: Plan, rows: int, per_group: int) -> Layout:
    """The tiles of a plan."""
    counts = [span.num_rows for span in plan.spans]
    per_tile = rows_per_tile(max(counts, default=1), per_group)
    return Layout(rows, sum(-(-count // per_tile) for count in counts), per_tile)


def write_numbers(out: IntArray, plan: Plan, reach: Reach | None, layout: Layout) -> int:
    """Writes the numbers of a table, and returns how many.

    Rows and tiles that the plan does not have are empty.
    """
    slots, upto, lowest, bits = [-1] * layout.rows, *([0] * layout.rows for _ in range(3))
    tiles: list[int] = []
    end = layout.size
    for span in plan.spans:
        own, held, count = slice(span.first, span.last), span.slots.blocks, span.slots.count
        slots[own] = (
            held[token // BLOCK_SLOTS] * BLOCK_SLOTS + token % BLOCK_SLOTS
            for token in range(count - span.num_rows, count)
        )
        upto[own], lowest[own], bits[own] = _seen(span, reach)
        for first in range(span.first, span.last, layout.per_tile):
            last = min(first + layout.per_tile, span.last)
            # Behind its last row a chain sees nothing; in a tree nobody asks for the order.
            upmost = max(upto[first:last]) if span.ancestors is None else count
            begin = min(span.length, *lowest[first:last])
            tiles += (first, last - first, end - layout.size, begin, upmost)
        behind = end + len(held)
        is_run = isinstance(held, range)
        out[end:behind] = np.arange(held.start, held.stop) if is_run else held
        end = behind
    tiles += [0] * (PER_TILE * layout.tiles - len(tiles))
    out[: layout.size] = [*slots, *upto, *lowest, *bits, *tiles]
    return end


def write_each(out_Kn: IntArray, plan: Plan, reach: Reach | None, layout: Layout) -> int:
    """Writes K tables of one row each, and returns how many numbers each has.

    The last is the plan's only row; the others are those right before it, in a chain. They are as
    if all before a row were committed: it sees the same when it is staged.
    """
    assert layout.rows == layout.tiles == 1
    end = write_numbers(out_Kn[-1], plan, reach, layout)
    out_Kn[:-1, :end] = out_Kn[-1, :end]
    count = plan.spans[0].slots.count
    places_K = np.arange(count - len(out_Kn), count)
    blocks_K = out_Kn[-1, layout.size + places_K // BLOCK_SLOTS]
    lowest = _lowest(range(count - len(out_Kn), count), reach)
    slot, upto, low, _, _, _, _, begin, upmost = out_Kn[:, : layout.size].T
    slot[:] = blocks_K * BLOCK_SLOTS + places_K % BLOCK_SLOTS
    upto[:] = upmost[:] = places_K + 1
    low[:] = begin[:] = lowest
    return end


def _seen(span: Span, reach: Reach | None) -> tuple[list[int], list[int], list[int]]:
    """Of each row: the tokens it sees before its nodes, the lowest of them, and its nodes."""
    rows, count, length = span.num_rows, span.slots.count, span.length
    if span.ancestors is None or span.positions is None:
        places = range(count - rows, count)
        return [place + 1 for place in places], _lowest(places, reach), [0] * rows
    positions: list[int] = span.positions.tolist()
    bits: list[int] = span.ancestors[-rows:].tolist()
    lowest = _lowest(positions[-rows:], reach)
    for row, low in enumerate(lowest):
        if low > length:
            # A node of 64 never leaves itself out, so that the sign stays.
            bits[row] &= ~sum(1 << node for node, place in enumerate(positions) if place < low)
    return [length] * rows, lowest, bits


def _lowest(positions: range | list[int], reach: Reach | None) -> list[int]:
    if reach is None:
        return [0] * len(positions)
    return [max(0, reach.lowest(position)) for position in positions]
