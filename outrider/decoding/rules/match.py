"""`match`: the target draws for itself, drafted tokens stay while they are what it drew."""

from __future__ import annotations

import torch

from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, all_rows, extra_uniforms, while_equal
from outrider.decoding.sampling import inverse_cdf


class MatchRule(Rule):
    """The target draws its own token at every row; drafted tokens stay while they are the same.

    Source: the baseline of Miao et al. (SpecInfer), ASPLOS 2024.
    """

    name = "match"
    source = "Miao et al. (SpecInfer), ASPLOS 2024, arXiv 2305.09781, naive sampling"
    trees = True
    reads = "path"

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Row t is drawn by inverse cdf on stream EXTRA, index t."""
        at_BT = all_rows(target)
        index_T = torch.arange(at_BT.shape[1], device=noise.seed_B.device)
        uniform_BT = extra_uniforms(noise, index_T)
        drawn = inverse_cdf(target.probs(at_BT.flatten()), uniform_BT.flatten())
        return while_equal(draft, drawn.view_as(at_BT))
