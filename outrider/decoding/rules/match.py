"""`match`: the target draws for itself, drafted tokens stay while they are what it drew."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.children import Drawing, Top
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, extra_uniforms
from outrider.decoding.rules.walking import follow
from outrider.decoding.sampling import inverse_cdf


class MatchRule(Rule):
    """The target draws its own token at every row it reaches, and goes on while a child bears it.

    It keeps a child x with chance p(x): drafts that are the likeliest tokens serve it best.
    Source: the baseline of Miao et al. (SpecInfer), ASPLOS 2024.
    """

    name = "match"
    source = "Miao et al. (SpecInfer), ASPLOS 2024, arXiv 2305.09781, naive sampling"
    trees = True
    reads = "path"
    drawing: Drawing = Top()

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Row t is drawn by inverse cdf on stream EXTRA, index t."""
        index_T = torch.arange(draft.tree.num_nodes + 1, device=noise.seed_B.device)
        uniform_BT = host.send(extra_uniforms(noise, index_T), target.device)

        def own(texts_n: Tensor, at_n: Tensor, flat_n: Tensor) -> Tensor:
            return inverse_cdf(target.probs(flat_n), uniform_BT[texts_n, at_n])

        return follow(draft, target, own)
