"""What one forward must know about its flat rows, worked out once and shared by all layers.

A span is the rows of one sequence: where they stand among the flat rows, where the sequence's
tokens lie in the pools, and which of them each row may see. Dimension key: R flat rows, r rows of a
span, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import host
from outrider.cache import CacheManager, Slots
from outrider.errors import InvalidConfig
from outrider.models.base import MAX_TREE_NODES, Rows
from outrider.models.reach import Reach

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64


FEW_ROWS = 16
"""Rows of a text up to which numbers in a list take less time than a tensor of their own."""


@dataclass(frozen=True, slots=True)
class Visible:
    """The keys a span may see: tokens `first..n-1`.

    `hidden` (bool `[r, n - masked]`, None: nothing is hidden) marks what a row must not see among
    tokens `masked..n-1`; tokens `first..masked-1` are seen by every row. `length` tokens are
    committed; `paths` are each row's own staged nodes, in order, wherever the reach begins; None
    for a chain, and where no canonical order asks for them.
    """

    first: int
    masked: int
    hidden: Bool[Tensor, "r m"] | None
    length: int
    paths: tuple[Int64[Tensor, " _"], ...] | None = None
    _masks: dict[tuple[int, int, torch.dtype], Tensor] = field(
        default_factory=dict[tuple[int, int, torch.dtype], Tensor], init=False, repr=False
    )

    def mask(
        self, folded: int, count: int, dtype: torch.dtype
    ) -> Float[Tensor, "folded count"] | None:
        """What is added to the scores of `count` keys, the rows as often as `folded` has them.

        0 or -inf, made once for all layers; None: nothing is hidden.
        """
        hidden = self.hidden
        if hidden is None:
            return None
        found = self._masks.get((folded, count, dtype))
        if found is None:
            rows = len(hidden)
            mask = torch.zeros(folded // rows, rows, count, dtype=dtype, device=hidden.device)
            mask[..., self.masked - self.first :].masked_fill_(hidden, float("-inf"))
            found = self._masks[folded, count, dtype] = mask.view(folded, count)
        return found


@dataclass(slots=True)
class Span:
    """The rows `first..last-1` of a forward, all of one sequence.

    `length` tokens are committed, `slots` says where these, the rows staged before and the new rows
    lie; the span's own rows are tokens `slots.count - (last - first) .. slots.count - 1`.
    `positions` are the positions of all staged rows, `ancestors` their bitmasks; both None for a
    chain. What the rows see begins at a multiple of `align`. All tensors are the host's.
    """

    first: int
    last: int
    length: int
    slots: Slots
    positions: Tensor | None
    ancestors: Tensor | None
    align: int
    _visible: dict[tuple[Reach | None, torch.device], Visible] = field(default_factory=dict)
    _places: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])

    @property
    def num_rows(self) -> int:
        """The span's rows, r."""
        return self.last - self.first

    @property
    def num_staged(self) -> int:
        """Rows staged since the last commit, the span's own included."""
        return self.slots.count - self.length

    @property
    def lowest_position(self) -> int:
        """The smallest position among the span's rows."""
        if self.positions is None:
            return self.slots.count - self.num_rows
        return int(self.positions[-self.num_rows :].min())

    @property
    def highest_position(self) -> int:
        """The largest position among the span's rows."""
        if self.positions is None:
            return self.slots.count - 1
        return int(self.positions[-self.num_rows :].max())

    def places(self, device: torch.device) -> Int64[Tensor, " n"]:
        """Return the slots of the sequence's tokens, made once for all layers on a device."""
        found = self._places.get(device)
        if found is None:
            found = self._places[device] = self.slots.index(0, self.slots.count, device)
        return found

    def visible(self, reach: Reach | None, device: torch.device) -> Visible:
        """Return what the rows see under a reach (None: everything before them), on a device."""
        found = self._visible.get((reach, device))
        if found is None:
            found = self._visible[reach, device] = _moved(self._work_out(reach), device)
        return found

    def _work_out(self, reach: Reach | None) -> Visible:
        count, rows = self.slots.count, self.num_rows
        # The first key any row sees, moved back to where a block of the canonical order begins.
        lowest = 0 if reach is None else max(0, reach.lowest(self.lowest_position))
        first = min(lowest, self.length) // self.align * self.align
        # Whether some row's reach leaves out a key of these; else the reach says nothing.
        cut = reach if reach is not None and reach.lowest(count - 1) > first else None
        if self.ancestors is None:
            # A chain's committed and earlier staged rows are seen by all of its new ones.
            masked = first if cut is not None else count - rows
            if rows == 1 and cut is None:
                return Visible(first, count, None, self.length)
            row = _positions(self)
            key = torch.arange(masked, count)
            hidden = key > row[:, None]
            if cut is not None:
                hidden |= key < cut.lowest(row)[:, None]
            return Visible(first, masked, hidden, self.length)
        assert self.positions is not None
        row, nodes = _positions(self), torch.arange(self.num_staged)
        own = (self.ancestors[-rows:, None] >> nodes & 1).bool()
        paths = tuple(path.nonzero().flatten() for path in own) if self.align > 1 else None
        hidden = ~own
        masked = first if cut is not None else self.length
        if cut is not None:
            hidden |= self.positions < cut.lowest(row)[:, None]
            before = torch.arange(masked, self.length) < cut.lowest(row)[:, None]
            hidden = torch.cat((before, hidden), -1)
        return Visible(first, masked, hidden, self.length, paths)


def _moved(visible: Visible, device: torch.device) -> Visible:
    """Return the same on the device a layer computes on."""
    hidden, paths = visible.hidden, visible.paths
    if hidden is None or hidden.device == device:
        return visible
    return replace(
        visible,
        hidden=host.send(hidden, device),
        paths=None if paths is None else tuple(host.send(path, device) for path in paths),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward: its spans, in row order, and the rows' positions `[R]` int64, on its device."""

    spans: tuple[Span, ...]
    positions: Int64[Tensor, " R"]


def make_plan(
    cache: CacheManager, rows: Rows, device: torch.device, *, align: int = 1, pad: int = 0
) -> Plan:
    """Reserve slots for the rows and work out who sees what; stages nothing.

    It is worked out on the host, which waits for no device; the positions are sent to `device`.
    `pad` rows without a span follow at position 0: attention gives them zeros. What a span sees
    begins at a multiple of `align` tokens.

    Raises:
        InvalidConfig: rows that contradict each other or the staged rows.
        OutOfMemory: the cache is full.
    """
    check_rows(rows)
    spans: list[Span] = []
    first = 0
    for seq, count in zip(rows.seqs, rows.counts, strict=True):
        last = first + count
        own = None if rows.ancestors_R is None else rows.ancestors_R[first:last].cpu()
        nodes, places = _tree(cache, seq, count, own)
        slots = cache.reserve(seq, count)
        spans.append(Span(first, last, cache.length(seq), slots, places, nodes, align))
        first = last
    return Plan(tuple(spans), host.send(_all_positions(spans, pad), device))


def chains_behind(
    cache: CacheManager, seqs: Sequence[int], counts: Sequence[int], align: int
) -> Plan:
    """The plan of so many rows of each sequence, as it will be when all that is staged is kept.

    Raises:
        OutOfMemory: the cache is full.
    """
    spans: list[Span] = []
    first = 0
    for seq, count in zip(seqs, counts, strict=True):
        length = cache.length(seq) + cache.num_staged(seq)
        slots = cache.reserve(seq, count)
        spans.append(Span(first, first + count, length, slots, None, None, align))
        first += count
    return Plan(tuple(spans), _all_positions(spans, 0))


def _tree(
    cache: CacheManager, seq: int, count: int, own: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return bitmasks and positions of all staged nodes, new ones included; None for a chain."""
    length, staged = cache.length(seq), cache.num_staged(seq)
    before = cache.ancestors(seq)
    if own is None and before is None:
        return None, None
    if own is None:
        raise InvalidConfig(
            f"sequence {seq} has a staged tree of {staged} nodes, and rows without ancestors "
            "continue a chain; "
            "give the rows' ancestors, or commit first"
        )
    total = staged + count
    if total > MAX_TREE_NODES:
        raise InvalidConfig(
            f"a tree of {total} staged nodes; at most {MAX_TREE_NODES} fit, draft fewer"
        )
    nodes = torch.arange(total)
    ancestors = torch.cat((chain_ancestors(staged) if before is None else before, own))
    bits = ancestors[:, None] >> nodes & 1
    beyond = ancestors >> total if total < MAX_TREE_NODES else torch.zeros(())
    if bool((bits.diagonal() != 1).any() | torch.triu(bits, 1).any() | beyond.any()):
        raise InvalidConfig(
            "a row's ancestors must hold the row itself as their highest bit; "
            "give bit j for the j-th row staged since the last commit"
        )
    return ancestors, length + bits.sum(-1) - 1


def chain_ancestors(count: int) -> Tensor:
    """Return the bitmasks of a chain of `count` nodes, int64: node j sees nodes 0..j."""
    bits = [(1 << (node + 1)) - 1 for node in range(count)]
    return torch.tensor([b if b < 1 << 63 else b - (1 << 64) for b in bits], dtype=torch.int64)


def _all_positions(spans: Sequence[Span], pad: int) -> Tensor:
    """Those of every span's rows, and `pad` zeros."""
    few = len(spans) > 1 and spans[-1].last <= FEW_ROWS * len(spans)
    if few and all(span.positions is None for span in spans):
        # One tensor takes less than a short one for each.
        numbers = [
            position
            for span in spans
            for position in range(span.slots.count - span.num_rows, span.slots.count)
        ]
        return torch.tensor([*numbers, *[0] * pad], dtype=torch.int64)
    positions = [_positions(span) for span in spans]
    if pad:
        positions.append(torch.zeros(pad, dtype=torch.int64))
    return positions[0] if len(positions) == 1 else torch.cat(positions)


def _positions(span: Span) -> Tensor:
    if span.positions is None:
        return torch.arange(span.slots.count - span.num_rows, span.slots.count)
    return span.positions[-span.num_rows :]


def check_rows(rows: Rows) -> None:
    """Refuse rows whose parts disagree in number.

    Raises:
        InvalidConfig: naming what disagrees.
    """
    total = sum(rows.counts)
    if not rows.seqs or len(rows.seqs) != len(rows.counts) or min(rows.counts) < 1:
        raise InvalidConfig(
            f"{len(rows.seqs)} sequences with row counts {rows.counts}; give each at least one row"
        )
    if len(set(rows.seqs)) != len(rows.seqs):
        raise InvalidConfig(f"sequences {rows.seqs} name one twice; put a sequence's rows together")
    if rows.tokens_R.shape != (total,):
        raise InvalidConfig(
            f"{tuple(rows.tokens_R.shape)} tokens for {total} rows; give one token a row"
        )
    if rows.ancestors_R is not None and rows.ancestors_R.shape != (total,):
        raise InvalidConfig(
            f"{tuple(rows.ancestors_R.shape)} ancestors for {total} rows; give one bitmask a row"
        )


def last_rows(counts: Sequence[int]) -> Tensor:
    """Return the index of each sequence's last row, int64."""
    return torch.tensor(counts).cumsum(0) - 1
