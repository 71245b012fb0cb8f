"""Log-probabilities of a round's tokens, for those who ask: from the target's rows alone."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

import torch
from torch import Tensor

from outrider.decoding import Draft, TargetRows, Verdict
from outrider.engine.group import Group, Scores
from outrider.types import TokenLogprob

Logprobs = tuple[TokenLogprob, ...]


def logprobs(
    group: Group, draft: Draft, scores: Scores, laws: TargetRows, verdict: Verdict
) -> list[Logprobs | None]:
    """For each text those of its kept tokens and the added one; None for who did not ask.

    A token's row is that of its parent: the one it was chosen from, also where it was drafted.
    """
    asked = [b for b, text in enumerate(group.texts) if text.request.sampling.logprobs is not None]
    told: list[Logprobs | None] = [None] * len(group.texts)
    for b in asked:
        path = verdict.path_BD[b, : int(verdict.num_accepted_B[b])].tolist()
        drafted = draft.tree.tokens_BN[b].tolist()
        tokens = [*(drafted[row - 1] for row in path), int(verdict.token_B[b])]
        params = group.texts[b].request.sampling
        if params.logprobs_mode == "raw":
            rows_nV = scores.rows(b, [0, *path])
            rows_nV = rows_nV if rows_nV.dtype == torch.float64 else rows_nV.float()
            rows_nV = torch.log_softmax(rows_nV, -1)
        else:
            rows_nV = sampled(group, laws, b, [0, *path]).log()
        told[b] = of_rows(rows_nV, tokens, params.logprobs or 0)
    return told


def sampled(group: Group, laws: TargetRows, text: int, rows: list[int]) -> Tensor:
    """The laws that tokens behind some rows of one text are sampled from."""
    at_n = torch.tensor(rows, device=laws.device) + text * laws.shape[1]
    rows_nV = laws.probs(at_n)
    # Rules that need order alone were given scores.
    return rows_nV if group.rule.needs_probs else group.controls.probs(rows_nV, [text] * len(rows))


def of_rows(logprobs_nV: Tensor, tokens: Sequenced[int], num_top: int) -> Logprobs:
    """One record per row; among equals the lowest ids stand first, what has no mass is left out."""
    own_n1 = logprobs_nV.gather(1, torch.tensor(tokens, device=logprobs_nV.device)[:, None])
    ranks = ((logprobs_nV > own_n1).sum(-1) + 1).tolist()
    own = own_n1.squeeze(1).tolist()
    tops = [_top(row_V, num_top) for row_V in logprobs_nV]
    return tuple(TokenLogprob(*one) for one in zip(tokens, own, ranks, tops, strict=True))


def _top(row_V: Tensor, num: int) -> tuple[tuple[int, float], ...]:
    if num == 0:
        return ()
    least = row_V.topk(min(num, len(row_V))).values[-1]
    ids = ((row_V >= least) & (row_V > -torch.inf)).nonzero().squeeze(1)
    best = row_V[ids].sort(descending=True, stable=True)
    pairs = zip(ids[best.indices[:num]].tolist(), best.values[:num].tolist(), strict=True)
    return tuple(pairs)
