"""Draws: the one place where drafted tokens are drawn: the law reported is the law sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.decoding.draft import RoundNoise
from outrider.decoding.laws import Law
from outrider.decoding.rules import Rule

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor


class Draws:
    """Draws the drafted tokens of one round.

    Args:
        rule: decides how drafts are drawn: rules in law by inverse cdf on stream DRAFT, `coupled`
            by the race on the target's own noise, `greedy` takes the likeliest token.
        noise: the round's noise of B sequences.
    """

    def __init__(self, rule: Rule, noise: RoundNoise) -> None:
        self._rule = rule
        self._noise = noise

    def draw(self, law: Law, index: int, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Token number `index` of the drafts of the sequences `rows`, one per row of `law`.

        A law of one certain token is that token and uses no noise.
        """
        if law.ids is not None and law.ids.shape[1] == 1:
            return law.ids.squeeze(1)
        return self._rule.draw(law, self._noise.select(rows), index)
