"""Attention over the pools on GPUs, in Triton: every key and value is read where it lies, once.

A program has one tile: some rows of one text with the query heads of one key head, over a share of
the text's blocks. A second kernel merges the shares by log-sum-exp. All sums are float32. Imported
only where tensors are on a GPU and Triton is there; `attend_cpu` is the reference.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider import host
from outrider.cache import BLOCK_SLOTS, LayerPool
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Options, PoolBody
from outrider.models.plan import Plan
from outrider.models.reach import Reach
from outrider.models.tables import FreshTables, Table, Tables, power_of_two

MOST_SHARES = 32
"""Programs at most that share a tile's keys."""
STAGED_BYTES = 1 << 15
"""Bytes of a block's keys and values up to which the next block is fetched ahead."""
_NARROWEST = 16
"""What a side of a product has at least."""


@triton.jit(do_not_specialize=["rows"])
def _write(
    table,
    keys,
    values,
    pool_keys,
    pool_values,
    rows,
    key_head,
    key_row,
    value_head,
    value_row,
    pool_key_head,
    pool_value_head,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One row's key and value of one head to their slot."""
    row, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(table + row)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    # A row that only pads has nothing.
    in_d, in_e = d < tl.where(slot < 0, 0, WIDTH), e < tl.where(slot < 0, 0, VALUES)
    key = tl.load(keys + group * key_head + row * key_row + d, mask=in_d)
    tl.store(pool_keys + group * pool_key_head + slot * WIDTH + d, key, mask=in_d)
    value = tl.load(values + group * value_head + row * value_row + e, mask=in_e)
    tl.store(pool_values + group * pool_value_head + slot * VALUES + e, value, mask=in_e)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    """`a @ b` in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "tiles"])
def _attend(
    table,
    query,
    pool_keys,
    pool_values,
    parts,
    tops,
    sums,
    rows,
    tiles,
    query_head,
    query_row,
    pool_key_head,
    pool_value_head,
    scaling,
    softcap,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARES: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A share of one tile's keys under one key head: weighed values, largest scores, sums."""
    group, share = tl.program_id(1).to(tl.int64), tl.program_id(2)
    tile = table + 4 * rows + 5 * tl.program_id(0)
    first, count = tl.load(tile), tl.load(tile + 1)
    blocks = table + 4 * rows + 5 * tiles + tl.load(tile + 2)
    begin, end = tl.load(tile + 3) // SLOTS, tl.load(tile + 4)
    last = (end + SLOTS - 1) // SLOTS
    each = (last - begin + SHARES - 1) // SHARES
    start = begin + share * each
    stop = tl.minimum(start + each, last)

    m = tl.arange(0, BLOCK_M)
    d, e, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, SLOTS)
    there = m // PER_GROUP < count
    row, head = first + m // PER_GROUP, group * PER_GROUP + m % PER_GROUP
    upto = tl.load(table + rows + row, mask=there, other=0)
    lowest = tl.load(table + 2 * rows + row, mask=there, other=0)
    bits = tl.load(table + 3 * rows + row, mask=there, other=0)
    # Blocks between these all rows see whole.
    lowest_end = tl.min(tl.where(there, upto, end), 0)
    highest_begin = tl.max(tl.where(there, lowest, 0), 0)
    place = head * query_head + row * query_row
    q = tl.load(
        query + place[:, None] + d[None, :], mask=there[:, None] & (d < WIDTH)[None, :], other=0.0
    )
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for i in range(start, stop):
        token = i * SLOTS + n
        slot = tl.load(blocks + i) * SLOTS + n
        # What lies behind the text's last token may be no number, which no weight of 0 hides.
        held = token < end
        key = tl.load(
            pool_keys + group * pool_key_head + slot[None, :] * WIDTH + d[:, None],
            mask=held[None, :] & (d < WIDTH)[:, None],
            other=0.0,
        )
        scores = _product(q, key, WIDEN) * scaling
        if CAPPED:
            # tanh, of numbers of any size.
            away = tl.exp(-2.0 * tl.abs(scores) / softcap)
            capped = softcap * (1.0 - away) / (1.0 + away)
            scores = tl.where(scores < 0, -capped, capped)
        if (i * SLOTS < highest_begin) | ((i + 1) * SLOTS > lowest_end):
            node = token[None, :] - upto[:, None]
            bit = (bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63)) & 1
            seen = tl.where(node < 0, token[None, :] >= lowest[:, None], (node < 64) & (bit == 1))
            scores = tl.where(seen & there[:, None] & held[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Where all so far is -inf there is nothing to rescale.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        scale = tl.exp(top - base)
        value = tl.load(
            pool_values + group * pool_value_head + slot[:, None] * VALUES + e[None, :],
            mask=held[:, None] & (e < VALUES)[None, :],
            other=0.0,
        )
        total = total * scale + tl.sum(weights, 1)
        out = out * scale[:, None] + _product(weights.to(value.dtype), value, WIDEN)
        top = higher
    at = (share * rows + row) * HEADS + head
    tl.store(tops + at, top, mask=there)
    tl.store(sums + at, total, mask=there)
    tl.store(
        parts + at[:, None] * VALUES + e[None, :],
        out,
        mask=there[:, None] & (e < VALUES)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def _merge(
    table,
    parts,
    tops,
    sums,
    sinks,
    out,
    rows,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    SHARES: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One row's head: its shares as one, or zeros where the row only pads."""
    row, head = tl.program_id(0), tl.program_id(1)
    share, e = tl.arange(0, SHARES), tl.arange(0, BLOCK_E)
    # Of a row that only pads nothing was written: its values are zeros, and their sum is not.
    real = share < tl.where(tl.load(table + row) < 0, 0, SHARES)
    at = (share.to(tl.int64) * rows + row) * HEADS + head
    top = tl.load(tops + at, mask=real, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weight = tl.exp(top - highest)
    total = tl.sum(weight * tl.load(sums + at, mask=real, other=1.0), 0)
    if SINKS:
        total += tl.exp(sink - highest)
    in_e = e < VALUES
    written = real[:, None] & in_e[None, :]
    part = tl.load(parts + at[:, None] * VALUES + e[None, :], mask=written, other=0.0)
    merged = tl.sum(weight[:, None] * part, 0) / total
    place = (row.to(tl.int64) * HEADS + head) * VALUES + e
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=in_e)


class TritonAttention(PoolBody):
    """Attention over the pools; what it does not take is `attend_cpu`'s.

    Args:
        tables: where the rows of a forward are looked up; None: made for each forward.
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, tables: Tables | None = None) -> None:
        self.takes_all = True
        self._tables = FreshTables() if tables is None else tables

    __call__ = staticmethod(attend_cpu)

    def over_pool(
        self,
        pool: LayerPool,
        plan: Plan,
        rows_QKV: tuple[Tensor, Tensor, Tensor],
        reach: Reach | None,
        options: Options,
    ) -> Tensor | None:
        """Write the rows' keys and values and return their attention `[1, R, H, E]`, or None."""
        if not _takes(rows_QKV, pool, options):
            self.takes_all = False
            return None
        query, keys, _ = rows_QKV
        (heads, rows, _), groups = query.shape, len(keys)
        table = self._tables.of(plan, reach, rows, heads // groups, query.device)
        with torch.cuda.device_of(query):
            return attend(table, pool, rows_QKV, options)


def attend(
    table: Table, pool: LayerPool, rows_QKV: tuple[Tensor, Tensor, Tensor], options: Options
) -> Tensor:
    """Write the rows' keys and values and return the attention `[1, R, H, E]` of a table's rows."""
    query, keys, values = (t if t.stride(2) == 1 else t.contiguous() for t in rows_QKV)
    (heads, rows, width), (groups, _, wide) = query.shape, values.shape
    tiles, per_tile = table.layout.tiles, table.layout.per_tile
    shares = _shares(query.device, tiles * groups)
    out = query.new_empty(1, rows, heads, wide)
    parts = query.new_empty(shares, rows, heads, wide, dtype=torch.float32)
    tops, sums = (parts.new_empty(shares, rows, heads) for _ in range(2))
    numbers, pool_heads = table.numbers, (pool.keys.stride(0), pool.values.stride(0))
    block_d, block_e, block_m = (
        max(_NARROWEST, power_of_two(size)) for size in (width, wide, per_tile * heads // groups)
    )
    blocks = {"BLOCK_D": block_d, "BLOCK_E": block_e}
    widths = {"WIDTH": width, "VALUES": wide}
    _write[(rows, groups)](
        numbers,
        keys,
        values,
        pool.keys,
        pool.values,
        rows,
        *keys.stride()[:2],
        *values.stride()[:2],
        *pool_heads,
        **widths,
        **blocks,
    )
    ahead = BLOCK_SLOTS * (block_d + block_e) * query.element_size() <= STAGED_BYTES
    _attend[(tiles, groups, shares)](
        numbers,
        query,
        pool.keys,
        pool.values,
        parts,
        tops,
        sums,
        rows,
        tiles,
        *query.stride()[:2],
        *pool_heads,
        float(options.scaling),
        float(options.softcap or 0.0),
        HEADS=heads,
        PER_GROUP=heads // groups,
        SLOTS=BLOCK_SLOTS,
        SHARES=shares,
        CAPPED=bool(options.softcap),
        # Triton's interpreter multiplies numbers of bfloat16 as if they were whole.
        WIDEN=not query.is_cuda,
        BLOCK_M=block_m,
        num_warps=4 if block_m * block_e <= 8192 else 8,
        num_stages=2 if ahead else 1,
        **widths,
        **blocks,
    )
    _merge[(rows, heads)](
        numbers,
        parts,
        tops,
        sums,
        parts if options.sinks is None else options.sinks,
        out,
        rows,
        HEADS=heads,
        VALUES=wide,
        SHARES=shares,
        SINKS=options.sinks is not None,
        BLOCK_E=block_e,
    )
    return out


def _takes(rows_QKV: tuple[Tensor, Tensor, Tensor], pool: LayerPool, options: Options) -> bool:
    """Whether addresses may be handed over; it looks at nothing behind one."""
    query, keys, values = rows_QKV
    (heads, rows, width), (groups, _, wide) = query.shape, values.shape
    tensors = *rows_QKV, pool.keys, pool.values
    slots, sinks = pool.keys.shape[1], options.sinks
    return (
        host.on_gpu(query.device)
        and query.dtype in TritonAttention.dtypes
        and all(t.dtype is query.dtype and t.device == query.device for t in tensors)
        and keys.shape == (groups, rows, width)
        and values.shape[1] == rows
        and pool.keys.shape == (groups, slots, width)
        and pool.values.shape == (groups, slots, wide)
        and pool.keys.is_contiguous()
        and pool.values.is_contiguous()
        and heads % groups == 0
        and (
            sinks is None
            or (sinks.device == query.device and sinks.shape == (heads,) and sinks.is_contiguous())
        )
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in rows_QKV))
    )


def _shares(device: torch.device, programs: int) -> int:
    """Into how many shares keys are cut, so that all of a GPU works: 1 where rows are many."""
    if device.type != "cuda":
        return 2
    return min(MOST_SHARES, power_of_two(max(1, 2 * _processors(device) // programs)))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
