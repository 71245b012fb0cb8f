"""`block`: prefixes of the chain are tested, longest first."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_probs,
)
from outrider.decoding.rules.chainwise import Chains
from outrider.decoding.rules.leftover import excess_mass, left_over

# Room for what rounding may add to a threshold that equals its bound.
_ROUNDING = 1 + 1e-3
# For a drafted token of no chance, which only a drafter's rounding makes.
_LEAST_Q = 1e-300


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
            return _walk(draft, target, tests_BK)
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


def _walk(draft: Draft, target: TargetRows, tests_BK: Tensor) -> Sifted:
    """The longest prefix of each text that passes, row by row.

    Each row is weighed once, and none where b is 0; S is taken where the test may pass: as
    S <= b, no threshold exceeds its b. What the last prefix that was tested leaves is at hand.
    """
    chains, tests = Chains(draft, target), tests_BK.tolist()
    kept, ready = [0] * len(tests), [False] * len(tests)
    shares, walk, top = ([start] * len(tests) for start in (1.0, 0.0, 0.0))
    places = [(text, 0) for text, count in enumerate(chains.counts) if count]
    while places:
        going: list[tuple[int, int]] = []
        for row in chains.behind(places):
            text, length = row.text, row.length
            log_b = walk[text] - top[text]
            share = math.exp(log_b)
            if length and tests[text][length - 1] < share * _ROUNDING:
                mass = chains.excess(row, share)
                ready[text] = tests[text][length - 1] < _threshold_of(mass, log_b)
                if ready[text]:
                    kept[text], shares[text], ready[text] = length, share, mass > 0
            walk[text] += _log(row.p) - _log(chains.q[text][length] or _LEAST_Q)
            top[text] = max(top[text], walk[text])
            share = math.exp(walk[text] - top[text])
            if length + 1 < chains.counts[text]:
                if share > 0:
                    going.append((text, length + 1))
            elif tests[text][length] < share:
                kept[text], shares[text], ready[text] = length + 1, share, False
        places = going
    for row in chains.behind([(text, kept[text]) for text in range(len(kept)) if not ready[text]]):
        chains.leave(row, shares[row.text])
    return chains.sifted(kept)


def _threshold_of(mass: float, log_b: float) -> float:
    room = mass - math.expm1(log_b)
    return mass / room if room > 0 else 1.0


def _log(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


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
    return torch.where(q_BK > 0, q_BK, _LEAST_Q).log()
