"""Whether a body over the pools computes what the plain one does, on the machine it is used on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.cache import BLOCK_SLOTS, CacheManager, LayerPool
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Forward, Options
from outrider.models.base import Rows
from outrider.models.plan import Plan, make_plan
from outrider.models.reach import Reach, Window

HEADS, GROUPS, WIDTH, VALUES = 6, 2, 32, 96

Attend = Callable[
    [LayerPool, Plan, tuple[Tensor, Tensor, Tensor], Reach | None, Options], Tensor | None
]
"""Writes rows' keys and values to their places, and gives their attention `[1, R, H, E]`."""


def errors_over_pools(
    attend: Attend, dtypes: Sequence[torch.dtype], device: torch.device
) -> dict[torch.dtype, float]:
    """The largest errors, as a share of the largest number; endless where nothing was written."""
    draw = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(dtypes, 0.0)
    options = Options(0.3, 5.0, torch.linspace(-1, 1, HEADS).to(device))
    for dtype in dtypes:
        # Sequences that grow in turn have blocks in turn. The second step is a tree.
        cache = CacheManager(share_prefixes=False)
        seqs = cache.open(1), cache.open(1)
        for count, tree in ((BLOCK_SLOTS + 2, None), (5, [1, 3, 5, 11, 21] * 2), (1, None)):
            ancestors = None if tree is None else torch.tensor(tree)
            rows = Rows(seqs, (count, count), torch.zeros(2 * count).long(), ancestors)
            plan = make_plan(cache, rows, device)
            # Rows of heads side by side, as layers give them.
            query, keys, values = (
                torch.randn(2 * count, num, wide, generator=draw).to(device, dtype).transpose(0, 1)
                for num, wide in ((HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES))
            )
            pool = cache.pool(0, keys, values)
            for reach in (None, Window(30)):
                out = attend(pool, plan, (query, keys, values), reach, options)
                other = Forward(cache, plan, attend_cpu, {0: reach})
                wanted = other.attend(0, query[None], keys[None], values[None], options)
                worst[dtype] = max(worst[dtype], _off(out, wanted))
            for seq, span in zip(seqs, plan.spans, strict=True):
                cache.stage(seq, count, span.ancestors)
                cache.commit(seq, count if tree is None else [0, 1, 3])
    return worst


def _off(out: Tensor | None, wanted: Tensor) -> float:
    if out is None:
        return float("inf")
    off = (out - wanted).abs().max() / wanted.abs().max()
    return float(off) if off.isfinite() else float("inf")
