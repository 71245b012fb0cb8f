"""`token`: each drafted token is tested by itself."""

from __future__ import annotations

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_probs,
    run_length,
)
from outrider.decoding.rules.chainwise import Chains
from outrider.decoding.rules.leftover import left_over


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
    """The same row by row: each is weighed once, and none behind a refused token."""
    chains = Chains(draft, target)
    tests, kept = tests_BK.tolist(), [0] * len(tests_BK)
    places = [(text, 0) for text in range(len(kept))]
    while places:
        going: list[tuple[int, int]] = []
        for row in chains.behind(places):
            text, length = row.text, row.length
            if (
                length < chains.counts[text]
                and tests[text][length] * chains.q[text][length] < row.p
            ):
                going.append((text, length + 1))
            else:
                kept[text] = length
                chains.leave(row)
        places = going
    return chains.sifted(kept)
