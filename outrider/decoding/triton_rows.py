"""Fused bodies for rows of logits on GPUs, in Triton: every row is read where it is.

Imported only where tensors are on a GPU and Triton is there; the plain bodies are the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers a program works on at once.
_BLOCK = 2048


@triton.jit
def _log_norm(rows, at, temperature, out, width, BLOCK: tl.constexpr):
    """Running log-sum-exp of one row: the largest so far, and the sum relative to it."""
    n = tl.program_id(0)
    row = rows + tl.load(at + n) * width
    heat = tl.load(temperature + n)
    top = -float("inf")
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < width, other=-float("inf")).to(tl.float32) / heat
        higher = tl.maximum(top, tl.max(x, 0))
        # Where all so far is -inf there is nothing to rescale.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = higher
    tl.store(out + n, top + tl.log(total))


@triton.jit
def _excess_mass(
    rows,
    at,
    temperature,
    log_norm,
    scale,
    law,
    law_rows,
    out,
    width,
    BLOCK: tl.constexpr,
):
    """`sum max(0, scale * p - q)` of one row."""
    n = tl.program_id(0)
    row = rows + tl.load(at + n) * width
    own = law + tl.load(law_rows + n) * width
    heat = tl.load(temperature + n)
    norm = tl.load(log_norm + n)
    times = tl.load(scale + n)
    mass = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < width
        x = tl.load(row + column, mask=there, other=-float("inf")).to(tl.float32) / heat
        q = tl.load(own + column, mask=there, other=0.0)
        mass += tl.sum(tl.maximum(times * tl.exp(x - norm) - q, 0.0), 0)
    tl.store(out + n, mass)


@triton.jit
def _less_law(weights, scale, law, law_rows, out, mass, width, BLOCK: tl.constexpr):
    """One step of a law-per-child test: `max(0, scale * weights - q)` of one row, and its mass."""
    n = tl.program_id(0)
    own = law + tl.load(law_rows + n) * width
    times = tl.load(scale + n)
    total = 0.0
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < width
        w = tl.load(weights + n * width + column, mask=there, other=0.0)
        q = tl.load(own + column, mask=there, other=0.0)
        left = tl.maximum(times * w - q, 0.0)
        tl.store(out + n * width + column, left, mask=there)
        total += tl.sum(left, 0)
    tl.store(mass + n, total)


def log_norm(rows_RV: Tensor, at_n: Tensor, temperature_n: Tensor | None) -> Tensor:
    """log-sum-exp of some rows under their temperatures, float32."""
    out_n = torch.empty(len(at_n), dtype=torch.float32, device=rows_RV.device)
    if len(at_n):
        heat_n = _heat(temperature_n, out_n)
        with torch.cuda.device_of(rows_RV):
            _log_norm[(len(at_n),)](rows_RV, at_n, heat_n, out_n, rows_RV.shape[1], BLOCK=_BLOCK)
    return out_n


def prob_of(
    rows_RV: Tensor, at_n: Tensor, tokens_n: Tensor, temperature_n: Tensor | None
) -> Tensor:
    """The float64 probability of one token in each of some rows of logits."""
    norm_n = log_norm(rows_RV, at_n, temperature_n)
    picked_n = rows_RV[at_n, tokens_n].float() / _heat(temperature_n, norm_n)
    return (picked_n.double() - norm_n.double()).exp()


def excess_mass(
    rows_RV: Tensor,
    at_n: Tensor,
    temperature_n: Tensor | None,
    scale_n: Tensor,
    law_LV: Tensor,
    law_rows_n: Tensor,
) -> Tensor:
    """`sum max(0, scale * p - q)` of some rows of logits and of dense float32 laws, float64."""
    norm_n = log_norm(rows_RV, at_n, temperature_n)
    out_n = torch.empty_like(norm_n)
    if len(at_n):
        heat_n, times_n = _heat(temperature_n, norm_n), scale_n.float()
        with torch.cuda.device_of(rows_RV):
            _excess_mass[(len(at_n),)](
                rows_RV,
                at_n,
                heat_n,
                norm_n,
                times_n,
                law_LV,
                law_rows_n,
                out_n,
                rows_RV.shape[1],
                BLOCK=_BLOCK,
            )
    return out_n.double()


def less_law(
    weights_nV: Tensor, scale_n: Tensor, law_LV: Tensor, law_rows_n: Tensor
) -> tuple[Tensor, Tensor]:
    """`max(0, scale * weights - q)` of float32 rows, and the mass of each, in one pass."""
    out_nV, mass_n = torch.empty_like(weights_nV), torch.empty_like(weights_nV[:, 0])
    if len(weights_nV):
        with torch.cuda.device_of(weights_nV):
            _less_law[(len(weights_nV),)](
                weights_nV,
                scale_n.float(),
                law_LV,
                law_rows_n,
                out_nV,
                mass_n,
                weights_nV.shape[1],
                BLOCK=_BLOCK,
            )
    return out_nV, mass_n


def _heat(temperature_n: Tensor | None, like_n: Tensor) -> Tensor:
    return torch.ones_like(like_n) if temperature_n is None else temperature_n.to(like_n.dtype)
