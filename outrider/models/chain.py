"""Rows of one text, one after another, each behind the last: what a draft model's chain reads.

Where they will stand is known before the first of them, so that little is left to do between two
forwards but to say which token comes next. The rows are staged together at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.cache import BLOCK_SLOTS, CacheManager, Slots
from outrider.models.ahead import Begun
from outrider.models.attention_op import Body, Forward, running
from outrider.models.compiled import CompiledForward
from outrider.models.doors import InterfaceDoor
from outrider.models.graphs import GraphedForward
from outrider.models.plan import Plan, Span

if TYPE_CHECKING:
    from jaxtyping import Float

CPU = torch.device("cpu")


class _Rows:
    """Room behind a sequence for rows that come one by one, and what has come."""

    def __init__(self, cache: CacheManager, seq: int, most: int) -> None:
        self._cache, self._seq = cache, seq
        self._length = cache.length(seq)
        self._first = self._length + cache.num_staged(seq)
        self._slots = cache.reserve(seq, most)
        self._num_read = 0

    def _span(self, at: int, places: dict[torch.device, Tensor] | None = None) -> Span:
        """That of one row."""
        slots = Slots(self._first + at + 1, self._slots.start, self._slots.table)
        return Span(0, 1, self._length, slots, None, None, 1, _places=places or {})

    def stage(self, tokens: Sequence[int]) -> None:
        """Stages the rows of the tokens that were read; the end of it."""
        assert len(tokens) == self._num_read
        self._cache.stage(self._seq, len(tokens), None, tokens)
        self._num_read = 0


class PackageChain(_Rows):
    """Up to so many rows of a sequence, scored one by one by machine code.

    Args:
        package: the model's forward.
        door: by which its layers come to the cache.
        cache: which holds the sequence.
        body: that attends.
        seq: what it stages must be a chain.
        most: rows there may be.

    Raises:
        OutOfMemory: the cache has no room for them.
    """

    def __init__(
        self,
        package: CompiledForward,
        door: InterfaceDoor,
        cache: CacheManager,
        body: Body,
        seq: int,
        most: int,
    ) -> None:
        super().__init__(cache, seq, most)
        self._package, self._body, self._reaches = package, body, door.reaches
        self._places_n = self._slots.index(0, self._slots.count, CPU)
        self._positions_1K = torch.arange(self._first, self._first + most)[None]
        self._tokens_1K = torch.empty(1, most, dtype=torch.int64)
        self._wanted = torch.zeros(1, dtype=torch.int64)

    @torch.inference_mode()
    def __call__(self, token: int | Tensor) -> Float[Tensor, "1 V"]:
        """The logits behind one token more, which the model's vocabulary holds."""
        at = self._num_read
        span = self._span(at, {CPU: self._places_n[: self._first + at + 1]})
        own_11 = slice(at, at + 1)
        self._tokens_1K[0, at] = token
        positions_11 = self._positions_1K[:, own_11]
        with running(
            Forward(self._cache, Plan((span,), positions_11[0]), self._body, self._reaches)
        ):
            logits, _ = self._package(self._tokens_1K[:, own_11], positions_11, self._wanted)
        self._num_read += 1
        return logits[0]


class GraphChain(_Rows):
    """The same by a graph of one row: all that is known before goes to the GPU at once.

    Args:
        graphs: the model's forwards.
        cache: which holds the sequence.
        seq: what it stages must be a chain.
        most: rows there may be.
        begun: what the first of them may have given already.

    Raises:
        OutOfMemory: the cache has no room for them.
    """

    @torch.inference_mode()
    def __init__(
        self,
        graphs: GraphedForward,
        cache: CacheManager,
        seq: int,
        most: int,
        begun: Begun | None = None,
    ) -> None:
        super().__init__(cache, seq, most)
        places, captures = range(self._first, self._first + most), graphs.captures
        self._row = graphs.row_by_row(cache, seq, places, self._plans)
        # A graph that is captured runs over the first row's place.
        self._begun = begun if graphs.captures == captures else None

    def _plans(self) -> tuple[Plan, Plan]:
        """Of the first row, and of one where its blocks end: chains come one behind another."""
        end = len(self._slots.blocks) * BLOCK_SLOTS
        return self._plan(0), self._plan(end - self._first - 1)

    def _plan(self, at: int) -> Plan:
        return Plan((self._span(at),), torch.tensor([self._first + at]))

    @torch.inference_mode()
    def __call__(self, token: int | Tensor) -> Float[Tensor, "1 V"]:
        """The logits behind one token more, which the model's vocabulary holds.

        It may be `[1]` int64 on the GPU, where the host has not read it.
        """
        at, begun = self._num_read, self._begun
        self._num_read, self._begun = at + 1, None
        if isinstance(token, int) and begun and begun.is_row(self._seq, self._first, token):
            return begun.logits_1V
        return self._row(at, token)
