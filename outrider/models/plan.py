"""What one forward must know about its flat rows, worked out once and shared by all layers.

A span is the rows of one sequence: where they stand among the flat rows, where the sequence's tokens lie in
the pools, and which of them each row may see. Dimension key: R flat rows, r rows of a span, n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache import CacheManager, Slots
from outrider.errors import InvalidConfig
from outrider.models.base import MAX_TREE_NODES, Rows


@dataclass(frozen=True, slots=True)
class Visible:
    """The keys a span may see: tokens `first..n-1`; `hidden` (bool `[r, n - masked]`, None: nothing is
    hidden) marks what a row must not see among tokens `masked..n-1`. Tokens `first..masked-1` are seen by
    every row."""

    first: int
    masked: int
    hidden: Tensor | None


@dataclass(slots=True)
class Span:
    """The rows `first..last-1` of a forward, all of one sequence.

    `length` tokens are committed, `slots` says where these, the rows staged before and the new rows lie;
    the span's own rows are tokens `slots.count - (last - first) .. slots.count - 1`. `positions` are the
    positions of all staged rows, `ancestors` their bitmasks or None for a chain.
    """

    first: int
    last: int
    length: int
    slots: Slots
    positions: Tensor | None
    ancestors: Tensor | None
    _visible: dict[int | None, Visible] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The span's rows, r."""
        return self.last - self.first

    @property
    def num_staged(self) -> int:
        """Rows staged since the last commit, the span's own included."""
        return self.slots.count - self.length

    def visible(self, window: int | None) -> Visible:
        """Return what the rows see of the sequence under a sliding window (None: everything before them)."""
        found = self._visible.get(window)
        if found is None:
            found = self._visible[window] = self._work_out(window)
        return found

    def _work_out(self, window: int | None) -> Visible:
        count, rows = self.slots.count, self.num_rows
        if self.ancestors is None:
            first_row = count - rows
            if window is None or count <= window:
                if rows == 1:
                    return Visible(0, count, None)
                key, row = torch.arange(first_row, count), torch.arange(first_row, count)[:, None]
                return Visible(0, first_row, key > row)
            first = max(0, first_row - window + 1)
            if rows == 1:
                return Visible(first, count, None)
            key, row = torch.arange(first, count), torch.arange(first_row, count)[:, None]
            return Visible(first, first, (key > row) | (key <= row - window))
        assert self.positions is not None
        bits = self.ancestors[-rows:, None] >> torch.arange(self.num_staged) & 1
        hidden = bits == 0
        if window is None:
            return Visible(0, self.length, hidden)
        row = self.positions[-rows:, None]
        first = max(0, int(row.min()) - window + 1)
        first = min(first, self.length)
        prefix = torch.arange(first, self.length) <= row - window
        hidden |= self.positions <= row - window
        return Visible(first, first, torch.cat((prefix, hidden), -1))


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward: its spans, in row order, and the rows' positions `[R]` int64."""

    spans: tuple[Span, ...]
    positions: Tensor


def make_plan(cache: CacheManager, rows: Rows, pad: int = 0) -> Plan:
    """Reserve slots for the rows and work out who sees what; stages nothing.

    `pad` junk rows are added at the end with position 0 and no span: attention gives them zeros.

    Raises:
        InvalidConfig: rows that contradict each other or the staged rows.
        ModelError: the cache is full.
    """
    _check(rows)
    spans: list[Span] = []
    positions: list[Tensor] = []
    first = 0
    for seq, count in zip(rows.seqs, rows.counts, strict=True):
        last = first + count
        own = None if rows.ancestors_R is None else rows.ancestors_R[first:last]
        span = _span(cache, seq, first, last, own)
        positions.append(_positions(span))
        spans.append(span)
        first = last
    if pad:
        positions.append(torch.zeros(pad, dtype=torch.int64))
    return Plan(tuple(spans), positions[0] if len(positions) == 1 else torch.cat(positions))


def _span(cache: CacheManager, seq: int, first: int, last: int, own: Tensor | None) -> Span:
    length, staged = cache.length(seq), cache.num_staged(seq)
    before = cache.ancestors(seq)
    if own is None and before is None:
        return Span(first, last, length, cache.reserve(seq, last - first), None, None)
    if own is None:
        raise InvalidConfig(
            f"sequence {seq} has a staged tree of {staged} nodes, and rows without ancestors continue a chain; "
            "give the rows' ancestors, or commit first"
        )
    total = staged + last - first
    if total > MAX_TREE_NODES:
        raise InvalidConfig(f"a tree of {total} staged nodes; at most {MAX_TREE_NODES} fit, draft fewer")
    ancestors = torch.cat((chain_ancestors(staged) if before is None else before, own))
    nodes = torch.arange(total)
    if bool(((ancestors >> nodes) != 1).any()):
        raise InvalidConfig(
            "a row's ancestors must hold the row itself as their highest bit; "
            "give bit j for the j-th row staged since the last commit"
        )
    depth = (ancestors[:, None] >> nodes & 1).sum(-1)
    return Span(first, last, length, cache.reserve(seq, last - first), length + depth - 1, ancestors)


def chain_ancestors(count: int) -> Tensor:
    """Return the bitmasks of a chain of `count` nodes, int64: node j sees nodes 0..j."""
    bits = [(1 << (node + 1)) - 1 for node in range(count)]
    return torch.tensor([b if b < 1 << 63 else b - (1 << 64) for b in bits], dtype=torch.int64)


def _positions(span: Span) -> Tensor:
    if span.positions is None:
        return torch.arange(span.slots.count - span.num_rows, span.slots.count)
    return span.positions[-span.num_rows :]


def _check(rows: Rows) -> None:
    total = sum(rows.counts)
    if not rows.seqs or len(rows.seqs) != len(rows.counts) or min(rows.counts) < 1:
        raise InvalidConfig(f"{len(rows.seqs)} sequences with row counts {rows.counts}; give each at least one row")
    if len(set(rows.seqs)) != len(rows.seqs):
        raise InvalidConfig(f"sequences {rows.seqs} name one twice; put a sequence's rows together")
    if rows.tokens_R.shape != (total,):
        raise InvalidConfig(f"{tuple(rows.tokens_R.shape)} tokens for {total} rows; give one token a row")
    if rows.ancestors_R is not None and rows.ancestors_R.shape != (total,):
        raise InvalidConfig(f"{tuple(rows.ancestors_R.shape)} ancestors for {total} rows; give one bitmask a row")


def last_rows(counts: Sequence[int]) -> Tensor:
    """Return the index of each sequence's last row, int64."""
    return torch.tensor(counts).cumsum(0) - 1
