"""Embeddings and head that predict as the corpus's bigrams do, before the first step of training.

With blocks that add nothing yet, logits are head times normalised embedding: a low-rank factor of
the bigram log-odds makes that a Witten-Bell bigram model, which gradients would take hundreds of
steps to find.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.train.chance import generator

SUBSPACE_ROUNDS = 4
SPARE = 32
FLOOR = 1e-4
"""Added to every token's share when rows are weighted, so that rare tokens stay moderate."""


@torch.no_grad()
def start_from_bigrams(
    model: Any, documents: Iterable[Sequence[int]], end_id: int, seed: int
) -> None:
    """Give an untied model whose blocks add nothing the embeddings and head of the bigrams."""
    embeddings_VD, head_VD = model.model.embed_tokens.weight, model.lm_head.weight
    vocab_size, width = embeddings_VD.shape
    factors = bigram_factors(documents, end_id, vocab_size, width, seed)
    embeddings_VD.copy_(factors[0])
    head_VD.copy_(factors[1])


def bigram_factors(
    documents: Iterable[Sequence[int]], end_id: int, vocab_size: int, width: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Embeddings and head, both `[V, D]`; every embedding has root mean square 1."""
    odds_VV, share_V = bigram_odds(documents, end_id, vocab_size)
    weight_V1 = (share_V + FLOOR).sqrt().unsqueeze(1)
    u, s, v = _low_rank(weight_V1 * odds_VV * weight_V1.T, width - 2, seed)
    # A small vocabulary has fewer directions than the model is wide: the rest stays zero.
    u, s, v = (F.pad(x, (0, width - 2 - s.size(0))) for x in (u, s, v))
    left, right = u * s.sqrt() / weight_V1, v * s.sqrt() / weight_V1
    # Half of each squared norm, width, is for the factors; rows beyond it are shortened.
    scale = (0.5 * width / (left.square().sum(1).quantile(0.9))).sqrt()
    left, right = left * scale, right / scale
    left = left * (0.5 * width / left.square().sum(1, keepdim=True)).sqrt().clamp(max=1.0)
    constant_V1 = torch.full((vocab_size, 1), (0.25 * width) ** 0.5)
    # The slack makes all rows equally long, so that the final norm changes nothing.
    slack_V1 = (width - left.square().sum(1, keepdim=True) - constant_V1.square()).sqrt()
    prior_V1 = (share_V + 0.1 / vocab_size).log().unsqueeze(1)
    embeddings_VD = torch.cat([constant_V1, slack_V1, left], dim=1)
    head_VD = torch.cat([prior_V1 / constant_V1, torch.zeros_like(slack_V1), right], dim=1)
    return _mixed(embeddings_VD, head_VD, seed)


def bigram_odds(
    documents: Iterable[Sequence[int]], end_id: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """log(1 + c(u, v) / (T(u) p(v))) for every pair, and every token's share p of the text.

    Up to a constant of its row this is the log of the Witten-Bell bigram law over p; T(u) is the
    number of distinct tokens seen after u. Pairs never seen are 0.
    """
    count_VV = torch.zeros(vocab_size, vocab_size)
    ones = torch.ones(())
    for ids in documents:
        tokens = torch.tensor([end_id, *ids, end_id])
        count_VV.index_put_((tokens[:-1], tokens[1:]), ones, accumulate=True)
    share_V = count_VV.sum(0) / count_VV.sum()
    distinct_V1 = (count_VV > 0).sum(1, keepdim=True).clamp(min=1)
    return (count_VV / (distinct_V1 * share_V.clamp(min=1e-12))).log1p(), share_V


def _low_rank(a_VV: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular vectors and values, by subspace iteration from a start of the seed."""
    start = torch.randn(a_VV.size(1), rank + SPARE, generator=generator(seed, "bigrams"))
    basis = torch.linalg.qr(a_VV @ start).Q
    for _ in range(SUBSPACE_ROUNDS):
        basis = torch.linalg.qr(a_VV @ (a_VV.T @ basis)).Q
    u, s, vh = torch.linalg.svd(basis.T @ a_VV, full_matrices=False)
    return (basis @ u)[:, :rank], s[:rank], vh.T[:, :rank]


def _mixed(embeddings_VD: Tensor, head_VD: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Both in one random rotation: Adam's rates are per entry, and no direction is special."""
    width = embeddings_VD.size(1)
    turn_DD = torch.linalg.qr(torch.randn(width, width, generator=generator(seed, "turn"))).Q
    return embeddings_VD @ turn_DD, head_VD @ turn_DD
