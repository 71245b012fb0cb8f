"""`token`: each drafted token is tested by itself."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_draft_probs,
    chain_probs,
    first_rows,
    run_length,
)
from outrider.decoding.rules.leftover import left_over, put_rows, room_beside, take_law


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
    """The same row by row: each is weighed once, and none behind a refused token.

    Single numbers are numpy's, whose calls take a fraction of torch's time.
    """
    num_texts, depth = draft.tree.tokens_BN.shape
    tokens_TB = torch.nn.functional.pad(draft.tree.tokens_BN, (0, 1)).t().contiguous()
    # Behind the last token nothing passes.
    bars_BT = np.pad((tests_BK * chain_draft_probs(draft)).numpy(), ((0, 0), (0, 1)))
    texts_n, first_B = np.arange(num_texts), first_rows(target).numpy()
    bars_BT[texts_n, draft.tree.counts_B.numpy()] = np.inf
    kept_B = np.zeros_like(texts_n)
    weights_BV: Tensor | None = None
    sums_B1: Tensor | None = None
    for i in range(depth + 1):
        going: list[NDArray[np.int64]] = []
        for part in target.parts(len(texts_n)):
            texts_m = texts_n[part]
            rows_mV, sums_m1 = target.weighed(torch.from_numpy(first_B[texts_m] + i))
            p_m1 = rows_mV.gather(1, tokens_TB[i][texts_m, None])
            p_m1 = p_m1 if sums_m1 is None else p_m1 / sums_m1
            passed_m = bars_BT[texts_m, i] < p_m1.double().numpy()[:, 0]
            going.append(texts_m[passed_m])
            if weights_BV is None:
                weights_BV = room_beside(draft, rows_mV, num_texts)
                sums_B1 = None if sums_m1 is None else sums_m1.new_empty(num_texts, 1)
            if not passed_m.all():
                stopped = torch.from_numpy(np.flatnonzero(~passed_m))
                texts = torch.from_numpy(texts_m)[stopped]
                put_rows(weights_BV, texts, rows_mV, stopped)
                if sums_B1 is not None and sums_m1 is not None:
                    sums_B1[texts] = sums_m1[stopped]
        if not going:
            break
        texts_n = np.concatenate(going)
        kept_B[texts_n] = i + 1
    kept = torch.from_numpy(kept_B)
    if weights_BV is None:
        weights_BV = target.probs(torch.from_numpy(first_B))
    if depth:
        for part in target.parts(num_texts):
            sums_n1 = None if sums_B1 is None else sums_B1[part]
            texts = torch.arange(part.start, part.stop)
            take_law(draft, target, texts, kept[part], weights_BV[part], sums_n1, None)
    return Sifted(kept, weights_BV)
