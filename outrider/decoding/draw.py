"""Draws: the one place where drafted tokens are drawn: the law reported is the law sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.decoding.children import Children, Drawing, Places, Raced
from outrider.decoding.draft import RoundNoise
from outrider.decoding.laws import Law
from outrider.decoding.rules import Rule
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor


class Draws:
    """Draws the drafted tokens of one round.

    Args:
        rule: decides how drafts are drawn: rules in law by inverse cdf on stream DRAFT, `coupled`
            by the race on the target's own noise, `greedy` takes the likeliest token.
        noise: the round's noise of B sequences.
        drawing: how children are drawn, where not as the rule does by default.

    Raises:
        InvalidConfig: a race for a rule in law.
    """

    def __init__(self, rule: Rule, noise: RoundNoise, drawing: Drawing | None = None) -> None:
        self._rule = rule
        self._noise = noise
        self.drawing = drawing or rule.drawing
        if isinstance(self.drawing, Raced) and not rule.seeded:
            raise InvalidConfig(
                f"rule={rule.name!r} takes no children raced on the target's own noise, which "
                "other rounds use too; take rule='coupled'"
            )

    @property
    def num_texts(self) -> int:
        """B."""
        return len(self._noise.seed_B)

    @property
    def device(self) -> torch.device:
        """Where the addresses are."""
        return self._noise.seed_B.device

    def draw(self, law: Law, index: int, rows: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Token number `index` of the drafts of the sequences `rows`, one per row of `law`.

        A law of one certain token is that token and uses no noise.
        """
        if law.ids is not None and law.ids.shape[1] == 1:
            return law.ids.squeeze(1)
        return self._rule.draw(law, self._noise.select(rows), index)

    def children(
        self,
        law: Law,
        rows: Int64[Tensor, " n"],
        nodes_nK: Int64[Tensor, "n K"],
        depth: int,
    ) -> Children:
        """Up to K children of one row in the trees of each of the sequences `rows`.

        Args:
            law: one law per sequence named.
            rows: sequences; one may stand there several times, with as many rows of its tree.
            nodes_nK: the number each child will have in its tree; where a law's support has no
                child for a place, any number that is no node's.
            depth: drafted tokens on the paths to these rows.
        """
        places = Places(self._noise.select(rows), nodes_nK, depth)
        return self.drawing.children(law, nodes_nK.shape[1], places)
