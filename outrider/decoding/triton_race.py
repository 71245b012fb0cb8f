"""The Gumbel race on GPUs, in Triton: Philox, the logarithms and the argmax in one pass.

Imported only where tensors are on a GPU and Triton is there; `sampling` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider import noise

_BLOCK = 1024


@triton.jit
def _race(probs, seed, sample, anchor, out, width, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """The first token of the largest `log p + G` of one row; G as of `noise.gumbels`."""
    n = tl.program_id(0)
    key = tl.load(seed + n)
    best = tl.full((), -float("inf"), tl.float64)
    winner = tl.full((), 0, tl.int64)
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK)
        c0 = (token // 2).to(tl.uint32)
        c1 = tl.zeros_like(c0) + tl.load(sample + n).to(tl.uint32)
        c2 = tl.zeros_like(c0) + tl.load(anchor + n).to(tl.uint32)
        c3 = tl.full((BLOCK,), STREAM, tl.uint32)
        k0 = (key & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
        for _ in tl.static_range(10):
            m0 = tl.full((BLOCK,), 0xD2511F53, tl.uint32)
            m2 = tl.full((BLOCK,), 0xCD9E8D57, tl.uint32)
            high0, low0 = tl.umulhi(c0, m0), c0 * m0
            high2, low2 = tl.umulhi(c2, m2), c2 * m2
            c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
            k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
            k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
        odd = token % 2 == 1
        high, low = tl.where(odd, c2, c0).to(tl.int64), tl.where(odd, c3, c1).to(tl.int64)
        bits = (high << 21) | (low >> 11)
        u = tl.minimum((bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)
        p = tl.load(probs + n * width + token, mask=token < width, other=0.0).to(tl.float64)
        log_p = tl.log(tl.where(p > 0, p, 1.0))
        value = tl.where(p > 0, log_p - tl.log(-tl.log(u)), -float("inf"))
        top = tl.max(value, 0)
        place = tl.min(tl.where(value == top, token, width), 0)
        winner = tl.where(top > best, place.to(tl.int64), winner)
        best = tl.maximum(best, top)
    tl.store(out + n, winner)


def race(probs_RV: Tensor, seed_R: Tensor, sample_R: Tensor, position_R: Tensor) -> Tensor:
    """`sampling.gumbel_race` of dense rows."""
    out_R = torch.zeros_like(seed_R)
    if len(out_R):
        rows_RV = probs_RV.contiguous()
        address = seed_R, sample_R, position_R
        with torch.cuda.device_of(rows_RV):
            _race[(len(out_R),)](
                rows_RV,
                *address,
                out_R,
                rows_RV.shape[1],
                STREAM=noise.STREAM_TARGET,
                BLOCK=_BLOCK,
            )
    return out_R
