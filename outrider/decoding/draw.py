"""Draws: the tokens of a drafter's laws, so that the law reported is the law sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from outrider import noise
from outrider.decoding.laws import Law, inverse_cdf
from outrider.decoding.rules import RoundNoise, Rule, gumbel_argmax

if TYPE_CHECKING:
    from jaxtyping import Int


class Draws:
    """Draws drafted tokens of one round: inverse cdf on the draft stream, or the shared Gumbel noise."""

    def __init__(self, rule: Rule, noise_B: RoundNoise) -> None:
        self._rule = rule
        self._noise = noise_B

    def draw(self, law: Law, index: int, rows: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """Token `index` of the drafts of sequences `rows`, one per row of `law` (dense rows)."""
        at = self._noise.of(rows)
        if self._rule.seeded:
            return gumbel_argmax(law.probs, at, rows.new_full(rows.shape, index))
        points = noise.uniforms53(
            at.seed_B, at.sample_B, noise.STREAM_DRAFT, at.anchor_B, rows.new_full(rows.shape, index)
        )
        return inverse_cdf(law.probs, points)
