"""One token from one law: by inverse cdf of a uniform, or by the Gumbel race on shared noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import noise

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

# A support above this share of the row is raced over the whole row, where noise costs half.
_DENSE_SHARE = 0.5


def inverse_cdf(
    weights_RV: Float[Tensor, "R V"], uniform_R: Float[Tensor, " R"]
) -> Int64[Tensor, " R"]:
    """The first index whose cumulative weight exceeds `u * total`, sums taken in float64.

    Weights need not sum to one. Where rounding leaves no such index it is the last with positive
    weight; a token without weight never comes out. Rows without any weight give V - 1.
    """
    upto_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    point_R1 = uniform_R.to(weights_RV.device).double()[:, None] * upto_RV[:, -1:]
    drawn_R1 = torch.searchsorted(upto_RV, point_R1, right=True).clamp_(max=upto_RV.shape[1] - 1)
    empty_R1 = weights_RV.gather(1, drawn_R1) <= 0
    if empty_R1.any():
        # The end of the row, or a device that sums in parallel and steps where there is no weight.
        drawn_R1 = torch.where(empty_R1, _careful(weights_RV, upto_RV, point_R1), drawn_R1)
    return drawn_R1.squeeze(1)


def _careful(weights_RV: Tensor, upto_RV: Tensor, point_R1: Tensor) -> Tensor:
    positive_RV = weights_RV > 0
    above_RV = (upto_RV > point_R1) & positive_RV
    last_R1 = weights_RV.shape[1] - 1 - positive_RV.flip(-1).byte().argmax(-1, keepdim=True)
    first_R1 = above_RV.byte().argmax(-1, keepdim=True)
    return torch.where(above_RV.any(-1, keepdim=True), first_R1, last_R1)


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
    seed_R, sample_R, position_R = (
        part.to(probs_RM.device) for part in (seed_R, sample_R, position_R)
    )
    support_RM = probs_RM > 0
    counts_R = support_RM.sum(-1)
    if ids_RM is None and counts_R.sum() > _DENSE_SHARE * probs_RM.numel():
        gumbels_RV = noise.gumbel_rows(seed_R, sample_R, position_R, probs_RM.shape[1])
        return gumbels_RV.add_(probs_RM.double().log()).argmax(-1)
    rows, columns = support_RM.nonzero(as_tuple=True)
    tokens = columns if ids_RM is None else ids_RM[rows, columns]
    gumbels = noise.gumbels(seed_R[rows], sample_R[rows], position_R[rows], tokens)
    values = gumbels.add_(probs_RM[rows, columns].double().log())
    places = torch.arange(len(rows), device=rows.device) - (counts_R.cumsum(0) - counts_R)[rows]
    width = int(counts_R.max()) if len(counts_R) else 0
    values_RS = values.new_full((len(probs_RM), max(width, 1)), -torch.inf)
    tokens_RS = tokens.new_zeros(values_RS.shape)
    values_RS[rows, places], tokens_RS[rows, places] = values, tokens
    return tokens_RS.gather(1, values_RS.argmax(-1, keepdim=True)).squeeze(1)
