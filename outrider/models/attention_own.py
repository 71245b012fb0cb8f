"""Attention by Outrider's own code, `attention.cpp`, compiled beside its products.

Keys and values are written to their places in the pools and read from there, of all sequences of a
forward in one call. In float32 and bfloat16 on processors with AVX2 and FMA, or AVX-512; everything
is summed in float32. What a row becomes does not depend, to the bit, on the rows beside it.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.cache import LayerPool
from outrider.errors import OutOfMemory
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Options, PoolBody
from outrider.models.attention_trial import errors_over_pools
from outrider.models.plan import Plan, Span
from outrider.models.reach import Reach

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.product import Product

LANES = 16
"""Heads are a multiple of so many numbers wide."""
ALONE = 1 << 16
"""Multiplications up to which one thread is as fast as several."""
DTYPES = (torch.float32, torch.bfloat16)
LEAST_NUMBERS = 1 << 12
"""Numbers that are kept to point at, at first; powers of two as pools grow."""

# `Layer` and `Span` of attention.cpp.
_LAYER, _SPAN = struct.Struct("@7P12q2f"), struct.Struct("@5q2P")


@dataclass(frozen=True, slots=True)
class Spans:
    """A forward's spans under one reach, as the library reads them.

    Attributes:
        table: one entry a span.
        count: how many.
        rows: of all of them.
        scores: of each query head, in all.
        kept: what the table points into.
    """

    table: bytes
    count: int
    rows: int
    scores: int
    kept: tuple[Tensor, ...]


class OwnAttention(PoolBody):
    """Attention over the pools; what it does not take is `attend_cpu`'s.

    Args:
        products: whose library it is in.
    """

    dtypes = DTYPES

    def __init__(self, products: Product) -> None:
        self._products = products
        self.takes_all = True
        # The last plan, and its spans by reach: all layers of a forward share them.
        self._known: tuple[Plan | None, dict[Reach | None, Spans]] = None, {}

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy knows no plan: addresses are not copied.
        return OwnAttention, (self._products,)

    __call__ = staticmethod(attend_cpu)

    def over_pool(
        self,
        pool: LayerPool,
        plan: Plan,
        rows_QKV: tuple[Tensor, Tensor, Tensor],
        reach: Reach | None,
        options: Options,
    ) -> Float[Tensor, "1 R H E"] | None:
        """Write the rows' keys and values and return their attention; None: not taken."""
        query, _, values = rows_QKV
        heads, rows, _ = query.shape
        spans = self.spans(plan, reach)
        if spans.rows > rows or not _takes(rows_QKV, pool, options):
            self.takes_all = False
            return None
        shape = 1, rows, heads, values.shape[2]
        out = query.new_empty(shape) if spans.rows == rows else query.new_zeros(shape)
        self.fill(out, pool, spans, rows_QKV, options)
        return out

    def fill(
        self,
        out: Float[Tensor, "1 R H E"],
        pool: LayerPool,
        spans: Spans,
        rows_QKV: tuple[Tensor, Tensor, Tensor],
        options: Options,
    ) -> None:
        """Write the rows' keys and values, and their attention into `out`."""
        # Some linear layers give some numbers of rows turned about.
        query, keys, values = (t if t.stride(2) == 1 else t.contiguous() for t in rows_QKV)
        heads, _, width = query.shape
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        layer = _LAYER.pack(
            query.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            pool.keys.data_ptr(),
            pool.values.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            *query.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            pool.keys.stride(0),
            pool.values.stride(0),
            heads,
            len(keys),
            width,
            values.shape[2],
            options.scaling,
            options.softcap or 0.0,
        )
        several = spans.scores * heads * (width + values.shape[2]) > ALONE
        threads = torch.get_num_threads() if several else 1
        run = self._products.run_attention
        if run(layer, spans.table, spans.count, query.dtype is torch.bfloat16, threads):
            raise OutOfMemory(
                "there is no memory for the scores of a few rows; free some, or shorten the texts"
            )

    @property
    def address(self) -> int:
        """Of the code, for machine code that calls it by itself."""
        return ctypes.cast(self._products.run_attention, ctypes.c_void_p).value or 0

    def spans(self, plan: Plan, reach: Reach | None) -> Spans:
        """A plan's spans under a reach, worked out once for all layers of a forward."""
        known = self._known
        if known[0] is not plan:
            known = self._known = plan, {}
        found = known[1].get(reach)
        if found is None:
            found = known[1][reach] = spans_of(plan, reach)
        return found


def _takes(rows_QKV: tuple[Tensor, Tensor, Tensor], pool: LayerPool, options: Options) -> bool:
    """Whether addresses may be handed over; it looks at nothing behind one."""
    # Asked in every layer: written out it takes half as long as a loop over the three.
    query, keys, values = rows_QKV
    dtype, sinks = query.dtype, options.sinks
    heads, rows, width = query.shape
    groups, _, value_width = values.shape
    slots = pool.keys.shape[1]
    return (
        dtype in DTYPES
        and keys.dtype is dtype
        and values.dtype is dtype
        and pool.keys.dtype is dtype
        and pool.values.dtype is dtype
        and keys.shape == (groups, rows, width)
        and values.shape[1] == rows
        and pool.keys.shape == (groups, slots, width)
        and pool.values.shape == (groups, slots, value_width)
        and heads % groups == 0
        and query.is_cpu
        and keys.is_cpu
        and values.is_cpu
        and width % LANES == 0
        and value_width % LANES == 0
        and (sinks is None or (sinks.is_cpu and sinks.numel() == heads))
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in rows_QKV))
    )


def errors_of(own: OwnAttention) -> dict[torch.dtype, float]:
    """Its largest errors, as a share of the largest number; endless where nothing was written."""

    def attend(
        pool: LayerPool,
        plan: Plan,
        rows_QKV: tuple[Tensor, Tensor, Tensor],
        reach: Reach | None,
        options: Options,
    ) -> Tensor:
        query, _, values = rows_QKV
        shape = 1, query.shape[1], len(query), values.shape[2]
        out = query.new_full(shape, float("nan"))
        own.fill(out, pool, spans_of(plan, reach), rows_QKV, options)
        return out

    return errors_over_pools(attend, DTYPES, torch.device("cpu"))


def _places_of(span: Span) -> tuple[Tensor, int]:
    """A tensor that holds the slots of a span's tokens, and the address of the first."""
    start = span.slots.start
    if start is None:
        places = span.places(torch.device("cpu"))
        return places, places.data_ptr()
    numbers = _numbers(max(LEAST_NUMBERS, 1 << (start + span.slots.count).bit_length()))
    return numbers, numbers.data_ptr() + start * numbers.element_size()


@lru_cache(maxsize=64)
def _numbers(count: int) -> Tensor:
    """0, 1, 2, ... for all who want to point at a run of them; not to be written to."""
    return torch.arange(count, device="cpu")


def spans_of(plan: Plan, reach: Reach | None) -> Spans:
    """The plan's spans under a reach."""
    cpu = torch.device("cpu")
    parts: list[bytes] = []
    kept: list[Tensor] = []
    rows = scores = 0
    for span in plan.spans:
        visible, (places, start) = span.visible(reach, cpu), _places_of(span)
        count, hidden, address = span.slots.count, visible.hidden, 0
        if hidden is not None:
            hidden = hidden.contiguous()
            kept.append(hidden)
            address = hidden.data_ptr()
        kept.append(places)
        own = span.first, span.num_rows, visible.first, count, visible.masked
        parts.append(_SPAN.pack(*own, address, start))
        rows += span.num_rows
        scores += span.num_rows * (count - visible.first)
    return Spans(b"".join(parts), len(parts), rows, scores, tuple(kept))
