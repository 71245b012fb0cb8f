"""`block`: prefixes of the chain are tested, longest first."""

from __future__ import annotations

from dataclasses import dataclass

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
)
from outrider.decoding.rules.leftover import excess_mass, excess_mass_of, left_over

# Room for what rounding may add to a threshold that equals its bound.
_ROUNDING = 1 + 1e-3


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
        if target.on_host:
            return left_over(draft, target, *_walk(draft, target, tests_BK))
        log_b_BT = _log_block(draft, target)
        kept_B = _longest(draft, target, tests_BK, log_b_BT)
        return left_over(draft, target, kept_B, log_b_BT.exp())


def _longest(draft: Draft, target: TargetRows, tests_BK: Tensor, log_b_BT: Tensor) -> Tensor:
    """The longest prefix that passes, `[B]`; every threshold is worked out."""
    depth = draft.tree.num_nodes
    lengths_K = torch.arange(1, depth + 1, device=tests_BK.device)
    inner_BK = lengths_K < draft.tree.counts_B[:, None]
    h_BK = log_b_BT[:, 1:].exp()
    if depth > 1:
        # The last prefix of the longest chains has no row of the draft behind it.
        texts_n1 = torch.arange(len(h_BK), device=h_BK.device)[:, None]
        flat_nJ, places_nJ = (
            (texts_n1 * stride + lengths_K[:-1]).flatten() for stride in (depth + 1, depth)
        )
        inner_h = _inner_thresholds(
            draft, target, flat_nJ, places_nJ, log_b_BT[:, 1:-1].flatten()
        ).view(len(h_BK), depth - 1)
        inner_h = torch.nn.functional.pad(inner_h, (0, 1))
        h_BK = torch.where(inner_BK, inner_h, h_BK)
    passed_BK = (tests_BK < h_BK) & draft.tree.is_node()
    ends_BT = torch.nn.functional.pad(torch.where(passed_BK, lengths_K, 0), (1, 0))
    return ends_BT.amax(1)


def _inner_thresholds(
    draft: Draft, target: TargetRows, flat_n: Tensor, places_n: Tensor, log_b_n: Tensor
) -> Tensor:
    """h of prefixes that end before their chain does, at a flat row and a flat place behind it."""
    mass_n = excess_mass(draft, target, flat_n, places_n, log_b_n.exp())
    return _threshold(mass_n, log_b_n)


def _threshold(mass_n: Tensor, log_b_n: Tensor) -> Tensor:
    open_n = mass_n - torch.expm1(log_b_n)
    # 0 / 0 happens only where the laws agree and everything before was kept: h is 1.
    return torch.where(open_n > 0, mass_n / open_n, 1.0)


def _walk(draft: Draft, target: TargetRows, tests_BK: Tensor) -> tuple[Tensor, Tensor]:
    """The longest prefix that passes `[B]` and b `[B, T]`, row by row.

    Each row is weighed once, and none where b is 0; S is taken where the test may pass: as
    S <= b, no threshold exceeds its b.
    """
    counts_B, depth = draft.tree.counts_B, draft.tree.num_nodes
    tests_KB, tokens_KB = tests_BK.t().contiguous(), draft.tree.tokens_BN.t().contiguous()
    log_q_KB, first_B = _log_q(chain_draft_probs(draft)).t().contiguous(), first_rows(target)
    kept_B, texts_n = torch.zeros_like(counts_B), (counts_B > 0).nonzero().squeeze(1)
    b_BT = torch.zeros(len(counts_B), depth + 1, dtype=torch.float64)
    b_BT[:, 0] = 1.0
    walk_n = torch.zeros(len(texts_n), dtype=torch.float64)
    top_n = walk_n
    for i in range(depth):
        log_b_n = walk_n - top_n
        flat_n, tokens_n1 = first_B[texts_n] + i, tokens_KB[i][texts_n][:, None]
        found: list[Tensor] = []
        for part in target.parts(len(texts_n)):
            rows_mV, sums_m1 = target.weighed(flat_n[part])
            p_m1 = rows_mV.gather(1, tokens_n1[part])
            p_m1 = p_m1 if sums_m1 is None else p_m1 / sums_m1
            found.append(p_m1.squeeze(1).double())
            if i > 0:
                test = _Test(texts_n[part], log_b_n[part], tests_KB[i - 1][texts_n[part]])
                kept_B[test.passed(draft, i, rows_mV, sums_m1)] = i
        if not found:
            break
        walk_n = walk_n + (torch.cat(found).log() - log_q_KB[i][texts_n])
        top_n = torch.maximum(top_n, walk_n)
        b_n = (walk_n - top_n).exp()
        b_BT[texts_n, i + 1] = b_n
        ended_n = counts_B[texts_n] == i + 1
        kept_B[texts_n[ended_n & (tests_KB[i][texts_n] < b_n)]] = i + 1
        going_n = ~ended_n & (b_n > 0)
        if not going_n.all():
            texts_n, walk_n, top_n = texts_n[going_n], walk_n[going_n], top_n[going_n]
    return kept_B, b_BT


@dataclass(frozen=True, slots=True)
class _Test:
    """Prefixes of equal length in some texts: log b behind each, and its uniform."""

    texts_m: Tensor
    log_b_m: Tensor
    tests_m: Tensor

    def passed(self, draft: Draft, length: int, rows_mV: Tensor, sums_m1: Tensor | None) -> Tensor:
        """The texts whose prefix passes, given the target's rows behind it, times their sums."""
        b_m = self.log_b_m.exp()
        may = (self.tests_m < b_m * _ROUNDING).nonzero().squeeze(1)
        if len(may) == 0:
            return may
        texts_m, log_b_m, tests_m = self.texts_m[may], self.log_b_m[may], self.tests_m[may]
        scale_m = (b_m if sums_m1 is None else b_m / sums_m1.squeeze(1).double())[may]
        places_m = texts_m * draft.tree.num_nodes + length
        mass_m = excess_mass_of(draft, places_m, rows_mV, may, scale_m)
        return texts_m[tests_m < _threshold(mass_m, log_b_m)]


def _log_block(draft: Draft, target: TargetRows) -> Tensor:
    """log b of prefix lengths 0..K, `[B, K + 1]`: the walk of log p - log q, reflected at 0.

    b = exp(S - max(0, running maximum of S)). Where p = 0 the walk is at -inf for good, where only
    q = 0 (a drafter's rounding) it is carried far above 0.
    """
    p_BK, q_BK = chain_probs(draft, target)
    steps_BK = p_BK.log() - _log_q(q_BK)
    walk_BT = torch.nn.functional.pad(steps_BK.cumsum(1), (1, 0))
    return walk_BT - walk_BT.cummax(1).values


def _log_q(q_BK: Tensor) -> Tensor:
    return torch.where(q_BK > 0, q_BK, 1e-300).log()
