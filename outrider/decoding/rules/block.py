"""`block`: prefixes of the chain are tested, longest first."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_probs,
    excess,
    first_rows,
    left_over,
)


class BlockRule(ChainRejection):
    """Tests prefixes of the chain, longest first; keeps the most any rule can keep of a chain.

    With b[0] = 1 and b[i+1] = min(1, b[i] p(x_i)/q(x_i)), the prefix of length i passes when
    `u[i-1] < h[i]`, where h at the chain's end is b and before it S / (S + 1 - b) for
    S = sum max(0, b[i] P[i] - Q[i]). Source: Sun et al., ICLR 2025, arXiv 2403.10444.
    """

    name = "block"
    source = "Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh, ICLR 2025, arXiv 2403.10444"
    reads = "all"

    def sift(self, draft: Draft, target: TargetRows, tests_BK: Tensor) -> Sifted:
        """The longest prefix that passes stays; `max(0, b P - Q)` adds the token after it."""
        log_b_BT = _log_block(draft, target)
        passed_BK = (tests_BK < _thresholds(draft, target, log_b_BT)) & draft.tree.is_node()
        lengths_K = torch.arange(1, passed_BK.shape[1] + 1, device=passed_BK.device)
        ends_BT = torch.nn.functional.pad(torch.where(passed_BK, lengths_K, 0), (1, 0))
        return left_over(draft, target, ends_BT.amax(1), log_b_BT.exp())


def _thresholds(draft: Draft, target: TargetRows, log_b_BT: Tensor) -> Tensor:
    """h of prefix lengths 1..K, `[B, K]`."""
    depth = draft.tree.num_nodes
    h_BK = log_b_BT[:, 1:].exp()
    inner_BK = torch.arange(1, depth + 1, device=h_BK.device) < draft.tree.counts_B[:, None]
    # Rows whose b is 0 are settled: nothing of the target is left at or behind them.
    rows, ends = (inner_BK & (h_BK > 0)).nonzero(as_tuple=True)
    if len(rows) == 0:
        return h_BK
    # Wide rows stay in their own dtype: float32 rounds S by less than the grain of u.
    p_nV = target.probs(first_rows(target)[rows] + ends + 1)
    b_n = h_BK[rows, ends].to(p_nV.dtype)
    left_n = excess(draft, rows * depth + ends + 1, b_n[:, None] * p_nV)
    mass_n = left_n.sum(-1, dtype=torch.float64)
    short_n = -torch.expm1(log_b_BT[rows, ends + 1])
    # 0 / 0 happens only where the laws agree and everything before was kept: h is 1.
    open_n = mass_n + short_n
    h_BK[rows, ends] = torch.where(open_n > 0, mass_n / open_n, 1.0)
    return h_BK


def _log_block(draft: Draft, target: TargetRows) -> Tensor:
    """log b of prefix lengths 0..K, `[B, K + 1]`: the walk of log p - log q, reflected at 0.

    b = exp(S - max(0, running maximum of S)). Where p = 0 the walk is at -inf for good, where only
    q = 0 (a drafter's rounding) it is carried far above 0.
    """
    p_BK, q_BK = chain_probs(draft, target)
    steps_BK = p_BK.log() - torch.where(q_BK > 0, q_BK, 1e-300).log()
    walk_BT = torch.nn.functional.pad(steps_BK.cumsum(1), (1, 0))
    return walk_BT - walk_BT.cummax(1).values
