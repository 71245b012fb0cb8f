"""One token from one law: by inverse cdf of a uniform, or by the Gumbel race on shared noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import host, noise
from outrider.decoding import laws

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

# A support above this share of the row is raced over the whole row, where noise costs half.
DENSE_SHARE = 0.5
# Numbers in the rows raced at once, and room for the rounding of float32 where they are compared.
_TABLE = 1 << 19
_SLACK = 1 + 1e-4
# -log of the least uniform of 53 bits is 37.4.
_LEAST = 1 / 38
# Rows are summed block by block, and only the block that holds the point token by token.
_BLOCK = 512


def inverse_cdf(
    weights_RV: Float[Tensor, "R V"], uniform_R: Float[Tensor, " R"]
) -> Int64[Tensor, " R"]:
    """The first index whose cumulative weight exceeds `u * total`, sums taken in float64.

    Weights need not sum to one. Where rounding leaves no such index it is the last with positive
    weight; a token without weight never comes out. Rows without any weight give V - 1. In rows of
    more than 512 tokens blocks of 512 are summed first, each in its own dtype, then the one that
    holds the point is gone through: a point within rounding of an index's border (1e-13 of the
    total in float64, 1e-7 in float32) may fall to the other side.
    """
    uniform_R1 = host.send(uniform_R, weights_RV.device).double()[:, None]
    if host.reads_free(weights_RV.device):
        return torch.from_numpy(_on_host(weights_RV, uniform_R1.numpy()))
    width = weights_RV.shape[1]
    if width <= _BLOCK:
        upto_RV = weights_RV.cumsum(-1, dtype=torch.float64)
        return _first_above(upto_RV, uniform_R1 * upto_RV[:, -1:], weights_RV > 0).squeeze(1)
    sums_RN = _block_sums(weights_RV)
    upto_RN = sums_RN.cumsum(-1)
    point_R1 = uniform_R1 * upto_RN[:, -1:]
    block_R1 = _first_above(upto_RN, point_R1, sums_RN > 0)
    start_R1 = block_R1 * _BLOCK
    columns_RC = start_R1 + torch.arange(_BLOCK, device=weights_RV.device)
    block_RC = weights_RV.gather(1, columns_RC.clamp(max=width - 1)).double()
    block_RC = block_RC.masked_fill(columns_RC >= width, 0)
    before_R1 = (upto_RN - sums_RN).gather(1, block_R1)
    found_R1 = _first_above(before_R1 + block_RC.cumsum(-1), point_R1, block_RC > 0)
    return (start_R1 + found_R1).clamp_(max=width - 1).squeeze(1)


def _on_host(weights_RV: Tensor, uniform_R1: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same in numpy, whose calls take a fraction of torch's time."""
    weights, width = weights_RV.numpy(), weights_RV.shape[1]
    if width <= _BLOCK:
        upto_RV = weights.cumsum(1, dtype=np.float64)
        return _first_of(upto_RV, uniform_R1 * upto_RV[:, -1:], weights > 0)
    sums_RN = _block_sums(weights_RV).numpy()
    upto_RN = sums_RN.cumsum(1)
    point_R1 = uniform_R1 * upto_RN[:, -1:]
    block_R = _first_of(upto_RN, point_R1, sums_RN > 0)
    found_R = np.empty_like(block_R)
    for row, block in enumerate(block_R.tolist()):
        start, point = block * _BLOCK, point_R1[row, 0]
        block_C = weights[row, start : start + _BLOCK]
        before = upto_RN[row, block] - sums_RN[row, block]
        upto_C = block_C.cumsum(dtype=np.float64) + before
        found = int(upto_C.searchsorted(point, "right"))
        if found == len(block_C) or not block_C[found] > 0:
            found = int(_first_of(upto_C[None], point, block_C[None] > 0)[0])
        found_R[row] = start + found
    return found_R


def _first_of(
    upto_RM: NDArray[np.float64],
    point_R1: NDArray[np.float64] | np.float64,
    positive_RM: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """`_first_above` in numpy, `[R]`."""
    above_RM = (upto_RM > point_R1) & positive_RM
    last_R = upto_RM.shape[1] - 1 - positive_RM[:, ::-1].argmax(1)
    return np.where(above_RM.any(1), above_RM.argmax(1), last_R)


def _block_sums(weights_RV: Tensor) -> Tensor:
    """Sums of the blocks, the last as short as it comes, as float64."""
    width = weights_RV.shape[1]
    whole = width - width % _BLOCK
    sums_RN = weights_RV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < width:
        sums_RN = torch.cat((sums_RN, weights_RV[:, whole:].sum(-1, keepdim=True)), 1)
    return sums_RN.double()


def _first_above(upto_RM: Tensor, point_R1: Tensor, positive_RM: Tensor) -> Tensor:
    """The first column with weight whose sum exceeds the point, else the last with weight.

    Where a device sums in parallel, sums may step where there is no weight.
    """
    above_RM = (upto_RM > point_R1) & positive_RM
    last_R1 = upto_RM.shape[1] - 1 - positive_RM.flip(-1).byte().argmax(-1, keepdim=True)
    first_R1 = above_RM.byte().argmax(-1, keepdim=True)
    return torch.where(above_RM.any(-1, keepdim=True), first_R1, last_R1)


def gumbel_race(
    probs_RM: Float[Tensor, "R M"],
    ids_RM: Tensor | None,
    seed_R: Int64[Tensor, " R"],
    sample_R: Int64[Tensor, " R"],
    position_R: Int64[Tensor, " R"],
) -> Int64[Tensor, " R"]:
    """`argmax(log p + G[position, token])` of each row: a draw from the law, fixed by the seed.

    Whoever races at the same position with the same seed shares the noise of each token, which is
    what couples draft and target. Noise is made for the support only; the first of equals wins.
    Source: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    seed_R, sample_R, position_R = host.sent((seed_R, sample_R, position_R), probs_RM.device)
    if not host.reads_free(probs_RM.device):
        return _race_everywhere(probs_RM, ids_RM, seed_R, sample_R, position_R)
    support_RM = probs_RM.numpy() > 0
    if ids_RM is None and np.count_nonzero(support_RM) > DENSE_SHARE * probs_RM.numel():
        return _race_in_bounds(probs_RM, seed_R, sample_R, position_R)
    rows, columns = (torch.from_numpy(part) for part in np.nonzero(support_RM))
    tokens = columns if ids_RM is None else ids_RM[rows, columns]
    gumbels = noise.gumbels(seed_R[rows], sample_R[rows], position_R[rows], tokens)
    values = gumbels.add_(probs_RM[rows, columns].double().log())
    return _best_of_each(rows, tokens, values, len(probs_RM))


def _race_everywhere(
    probs_RM: Tensor, ids_RM: Tensor | None, seed_R: Tensor, sample_R: Tensor, position_R: Tensor
) -> Tensor:
    """The race over whole rows; nothing is read by the host."""
    if ids_RM is None and laws.fused(probs_RM.device):
        from outrider.decoding import triton_race

        return triton_race.race(probs_RM, seed_R, sample_R, position_R)
    log_p_RM = probs_RM.double().log()
    if ids_RM is None:
        gumbels_RV = noise.gumbel_rows(seed_R, sample_R, position_R, probs_RM.shape[1])
        return gumbels_RV.add_(log_p_RM).argmax(-1)
    address = seed_R[:, None], sample_R[:, None], position_R[:, None]
    # The end of a row may be padded with any tokens: without weight they never come first.
    best_R1 = noise.gumbels(*address, ids_RM).add_(log_p_RM).argmax(-1, keepdim=True)
    return ids_RM.gather(1, best_R1).squeeze(1)


def _race_in_bounds(
    probs_RV: Tensor, seed_R: Tensor, sample_R: Tensor, position_R: Tensor
) -> Tensor:
    """The race where most tokens are out of it by the high word of their noise alone.

    The race is won by the least E / p with E = -log u. Of the shortfall s = 1 - u it is between s
    and `s / (1 - s)`, and never above 38 s; so the least s / p sets a bar, and noise is made for
    the few whose shortfall is below it.
    """
    winner_R = torch.empty(len(probs_RV), dtype=torch.int64)
    step = max(1, _TABLE // probs_RV.shape[1])
    for start in range(0, len(probs_RV), step):
        part = slice(start, start + step)
        p_nV, address = probs_RV[part], (seed_R[part], sample_R[part], position_R[part])
        shortfall_nV = noise.shortfall_rows(*address, p_nV.shape[1])
        # Shortfalls are rounded down: one more is above the true one.
        least_n1 = ((shortfall_nV + 1) / p_nV).amin(-1, keepdim=True) * (_SLACK * 2.0**-32)
        bar_n1 = least_n1 / (1 - least_n1).clamp(min=_LEAST)
        bar_n1 *= _SLACK * 2.0**32
        # numpy compares and finds ten times faster than a CPU tensor.
        found = np.flatnonzero(shortfall_nV.numpy() <= (p_nV * bar_n1).numpy())
        places = torch.from_numpy(found)
        rows, tokens = places // p_nV.shape[1], places % p_nV.shape[1]
        seed, sample, position = (part[rows] for part in address)
        gumbels = noise.gumbels(seed, sample, position, tokens)
        values = gumbels.add_(p_nV[rows, tokens].double().log())
        winner_R[part] = _best_of_each(rows, tokens, values, len(p_nV))
    return winner_R


def _best_of_each(rows: Tensor, tokens: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """The token of the largest value of each row, the first of equals; `rows` ascend."""
    counts_R = torch.bincount(rows, minlength=num_rows)
    places = torch.arange(len(rows), device=rows.device) - (counts_R.cumsum(0) - counts_R)[rows]
    width = int(counts_R.max()) if num_rows else 0
    values_RS = values.new_full((num_rows, max(width, 1)), -torch.inf)
    tokens_RS = tokens.new_zeros(values_RS.shape)
    values_RS[rows, places], tokens_RS[rows, places] = values, tokens
    return tokens_RS.gather(1, values_RS.argmax(-1, keepdim=True)).squeeze(1)
