"""`token`: each drafted token is tested by itself."""

from __future__ import annotations

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import (
    ChainRejection,
    Sifted,
    chain_probs,
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
        p_BK, q_BK = chain_probs(draft, target)
        passed_BK = (tests_BK * q_BK < p_BK) & draft.tree.is_node()
        return left_over(draft, target, run_length(passed_BK), None)
