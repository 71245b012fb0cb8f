"""`token`: each drafted token is tested by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_draft_probs,
    chain_probs,
    first_rows,
    left_of,
    left_over,
    run_length,
)


class TokenRule(ChainRejection):
    """Keeps token x while `u * q(x) < p(x)`, then adds one from `max(0, p - q)`.

    Source: Leviathan, Kalman, Matias, ICML 2023; Chen et al., arXiv 2302.01318.
    """

    name = "token"
    source = "Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192; Chen et al., 2302.01318"

    def sift(self, draft: Draft, target: TargetRows, tests_BK: Tensor) -> Sifted:
        """`u = 0` never lets through what the target forbids; no division, no epsilon."""
        if target.on_host:
            return _walk(draft, target, tests_BK)
        p_BK, q_BK = chain_probs(draft, target)
        passed_BK = (tests_BK * q_BK < p_BK) & draft.tree.is_node()
        return left_over(draft, target, run_length(passed_BK), None)


def _walk(draft: Draft, target: TargetRows, tests_BK: Tensor) -> Sifted:
    """The same row by row: each is normalised once, and none behind a refused token."""
    tokens_BK, counts_B = draft.tree.tokens_BN, draft.tree.counts_B
    depth, first_B = tokens_BK.shape[1], first_rows(target)
    # Behind the last token nothing passes.
    bars_BT = torch.nn.functional.pad(tests_BK * chain_draft_probs(draft), (0, 1))
    bars_BT[torch.arange(len(counts_B)), counts_B] = torch.inf
    tokens_BT = torch.nn.functional.pad(tokens_BK, (0, 1))
    kept_B = torch.zeros_like(counts_B)
    weights_BV: Tensor | None = None
    texts_n = torch.arange(len(counts_B))
    for i in range(depth + 1):
        going: list[Tensor] = []
        for part in target.parts(len(texts_n)):
            texts_m = texts_n[part]
            rows_mV, sums_m1 = target.weighed(first_B[texts_m] + i)
            p_m1 = rows_mV.gather(1, tokens_BT[texts_m, i, None])
            p_m1 = p_m1 if sums_m1 is None else p_m1 / sums_m1
            passed_m = bars_BT[texts_m, i] < p_m1.squeeze(1).double()
            going.append(texts_m[passed_m])
            if len(going[-1]) < len(texts_m):
                if len(going[-1]) > 0:
                    stopped = (~passed_m).nonzero().squeeze(1)
                    texts_m, rows_mV = texts_m[stopped], rows_mV.index_select(0, stopped)
                    sums_m1 = None if sums_m1 is None else sums_m1[stopped]
                rows_mV = rows_mV if sums_m1 is None else rows_mV.div_(sums_m1)
                kept_m = torch.full_like(texts_m, i)
                left_mV = left_of(draft, texts_m, kept_m, rows_mV, None)
                if weights_BV is None:
                    weights_BV = left_mV.new_empty(len(counts_B), left_mV.shape[1])
                weights_BV.index_copy_(0, texts_m, left_mV)
        if not going:
            break
        texts_n = torch.cat(going)
        kept_B[texts_n] = i + 1
    if weights_BV is None:
        weights_BV = target.probs(first_B)
    return Sifted(kept_B, weights_BV)
