"""Texts of a model whose rotary frequencies change at a length (`longrope`): two caches a text.

Transformers chooses the frequencies of a whole forward by its longest row, and cached keys were
made with those of their own day. Here a row is read as in a plain forward of its own text alone: a
row below the switch with the short frequencies, a row from there on with the long ones for all of
its text, whatever goes along. So a text that comes near the switch is read twice: once, when its
first row passes it, the text so far is read again into a second cache, and the first is closed when
no row of the text can need it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.cache import CacheManager
from outrider.errors import not_open
from outrider.models.base import Rows

REREAD_CHUNK = 512
"""Rows of one forward when a text is read again."""


@dataclass(slots=True)
class _Text:
    """A text's tokens, its staged rows, and the caches that hold them.

    `in_short` are the staged nodes the short cache holds, ascending; the long one, where it has
    staged rows, holds all. `masks` are the staged nodes' ancestors, None for a chain.
    """

    short: int | None
    long: int | None = None
    tokens: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])
    masks: list[int] | None = None
    in_short: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class _New:
    """The rows a call adds to a text: flat index, token, ancestors (None: a chain), position."""

    text: _Text
    flat: range
    tokens: list[int]
    masks: list[int] | None
    positions: list[int]


@dataclass(slots=True)
class _Call:
    """One forward in the making: the rows of one regime, and which flat rows they are."""

    seqs: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    masks: list[int] = field(default_factory=list[int])
    flat: list[int | None] = field(default_factory=list["int | None"])

    def add(
        self, seq: int, tokens: list[int], masks: list[int] | None, flat: list[int | None]
    ) -> None:
        self.seqs.append(seq)
        self.counts.append(len(tokens))
        self.tokens += tokens
        self.masks += masks or []
        self.flat += flat


class TwoRegimes:
    """The texts of one model: opened, scored, committed and closed like those of its cache.

    `read(rows, long)` runs one forward over the cache's sequences in one regime.
    """

    def __init__(
        self, cache: CacheManager, read: Callable[[Rows, bool], Tensor], switch: int
    ) -> None:
        self._cache, self._read, self._switch = cache, read, switch
        self._texts: dict[int, _Text] = {}
        self._next = 0

    def open(self, reserve: int) -> int:
        """Return the handle of a new empty text."""
        self._next += 1
        self._texts[self._next] = _Text(self._cache.open(min(reserve, self._switch)))
        return self._next

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return len(self._text(seq).tokens)

    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""
        return len(self._text(seq).staged)

    def score(self, rows: Rows) -> Tensor:
        """Stage the rows and return the wanted logits, each in its row's own regime."""
        new = self._sorted(rows)
        wanted = range(len(rows.tokens_R)) if rows.logits_rows is None else rows.logits_rows
        wanted = [int(row) for row in wanted]
        short, long = _Call(), _Call()
        for each in new:
            self._into_short(each, short)
        passing = [each for each in new if max(each.positions) >= self._switch]
        try:
            for each in passing:
                self._into_long(each, long)
            found = self._run(long, True, wanted) | self._run(short, False, wanted)
        except BaseException:
            # Nothing of this call may stay staged: the long cache can be read again.
            for each in passing:
                self._drop_long(each.text)
            raise
        for each in new:
            self._note(each)
        if found:
            return torch.stack([found[row] for row in wanted])
        return torch.empty(0, 0)

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or those it names; forget the others."""
        text = self._text(seq)
        nodes = list(range(path)) if isinstance(path, int) else list(path)
        if text.short is not None:
            held = {node: index for index, node in enumerate(text.in_short)}
            self._cache.commit(text.short, [held[node] for node in nodes if node in held])
        if text.long is not None:
            if self._cache.num_staged(text.long) == len(text.staged):
                self._cache.commit(text.long, nodes)
            else:
                self._cache.discard(text.long)
        text.tokens += [text.staged[node] for node in nodes]
        text.staged, text.masks, text.in_short = [], None, []
        if text.short is not None and len(text.tokens) >= self._switch:
            self._cache.close(text.short)
            text.short = None

    def discard(self, seq: int) -> None:
        """Forget every staged row of the text."""
        text = self._text(seq)
        for handle in (text.short, text.long):
            if handle is not None:
                self._cache.discard(handle)
        text.staged, text.masks, text.in_short = [], None, []

    def close(self, seq: int) -> None:
        """Give back the text's blocks."""
        text = self._text(seq)
        del self._texts[seq]
        for handle in (text.short, text.long):
            if handle is not None:
                self._cache.close(handle)

    def _text(self, seq: int) -> _Text:
        text = self._texts.get(seq)
        if text is None:
            raise not_open(seq)
        return text

    def _sorted(self, rows: Rows) -> list[_New]:
        tokens, first, new = rows.tokens_R.tolist(), 0, list[_New]()
        masks = None if rows.ancestors_R is None else rows.ancestors_R.tolist()
        for seq, count in zip(rows.seqs, rows.counts, strict=True):
            text, own = self._text(seq), range(first, first + count)
            if masks is None:
                begin = len(text.tokens) + len(text.staged)
                new.append(
                    _New(text, own, [tokens[row] for row in own], None,
                         list(range(begin, begin + count)))
                )  # fmt: skip
            else:
                bits = [masks[row] % (1 << 64) for row in own]
                places = [len(text.tokens) + mask.bit_count() - 1 for mask in bits]
                new.append(_New(text, own, [tokens[row] for row in own], bits, places))
            first += count
        return new

    def _into_short(self, new: _New, call: _Call) -> None:
        text = new.text
        own = [i for i, place in enumerate(new.positions) if place < self._switch]
        if not own or text.short is None:
            return
        masks = None
        if new.masks is not None:
            # A row's ancestors stand before it, so the short cache holds them all.
            nodes = text.in_short + [len(text.staged) + i for i in own]
            index = {node: place for place, node in enumerate(nodes)}
            masks = [
                sum(1 << place for node, place in index.items() if new.masks[i] >> node & 1)
                for i in own
            ]
        call.add(text.short, [new.tokens[i] for i in own], masks, [new.flat[i] for i in own])

    def _into_long(self, new: _New, call: _Call) -> None:
        text = new.text
        if text.long is None:
            text.long = self._cache.open(len(text.tokens) + REREAD_CHUNK)
        nothing = torch.empty(0, dtype=torch.int64)
        while (read := self._cache.length(text.long)) < len(text.tokens):
            part = torch.tensor(text.tokens[read : read + REREAD_CHUNK])
            self._read(Rows((text.long,), (len(part),), part, None, nothing), True)
            self._cache.commit(text.long, len(part))
        if (read := self._cache.num_staged(text.long)) < len(text.staged):
            part = torch.tensor(text.staged[read:])
            masks = None if text.masks is None else _as_masks(text.masks[read:])
            self._read(Rows((text.long,), (len(part),), part, masks, nothing), True)
        flat = [
            row if place >= self._switch else None
            for row, place in zip(new.flat, new.positions, strict=True)
        ]
        call.add(text.long, new.tokens, new.masks, flat)

    def _run(self, call: _Call, long: bool, wanted: list[int]) -> dict[int, Tensor]:
        if not call.seqs:
            return {}
        asked = set(wanted)
        picked = [place for place, row in enumerate(call.flat) if row in asked]
        masks = _as_masks(call.masks) if call.masks else None
        logits = self._read(
            Rows(
                tuple(call.seqs), tuple(call.counts), torch.tensor(call.tokens), masks,
                torch.tensor(picked, dtype=torch.int64),
            ),
            long,
        )  # fmt: skip
        rows = [call.flat[place] for place in picked]
        return {row: each for row, each in zip(rows, logits, strict=True) if row is not None}

    def _note(self, new: _New) -> None:
        text, first = new.text, len(new.text.staged)
        if text.short is not None:
            text.in_short += [
                first + i for i, place in enumerate(new.positions) if place < self._switch
            ]
        text.staged += new.tokens
        if new.masks is not None:
            # A tree may stand on a staged chain, whose nodes see all before them.
            chain = [(1 << (node + 1)) - 1 for node in range(first)]
            text.masks = (chain if text.masks is None else text.masks) + new.masks

    def _drop_long(self, text: _Text) -> None:
        if text.long is not None:
            self._cache.close(text.long)
            text.long = None


def _as_masks(bits: list[int]) -> Tensor:
    return torch.tensor([mask - (1 << 64) if mask >= 1 << 63 else mask for mask in bits])
