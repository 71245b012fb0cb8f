"""Medusa: heads that guess several tokens ahead from one hidden state (arXiv 2401.10774).

A level's law is one head's, whatever was drafted before it: a real law, so that rules in law work.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding import Draft
from outrider.drafters.base import Node, RoundDraws
from outrider.drafters.tapped import TappedDrafter
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.medusa import MedusaHeads


class MedusaDrafter(TappedDrafter["MedusaHeads"]):
    """Drafts chains or trees of as many levels as there are heads."""

    def __init__(self, heads: MedusaHeads, *, name: str = "medusa") -> None:
        super().__init__(heads, name)
        # How many tokens of a text are read, and the state behind the last of them.
        self._last: dict[int, tuple[int, Tensor]] = {}

    @property
    def model(self) -> MedusaHeads:
        """The heads."""
        return self._given

    def notice(self, text: Sequence, first: int, hidden_nF: Float[Tensor, "n F"]) -> None:
        """Keeps the last state."""
        if len(hidden_nF):
            self._last[text.key] = first + len(hidden_nF), hidden_nF[-1]

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """Draws up to `depths[b]` tokens after each text the target has read, a head per level."""
        self._asked = self._asked or any(depths)
        most = self.model.shape.num_heads
        depths = [
            min(depth, most) if self._is_up(text) else 0
            for text, depth in zip(texts, depths, strict=True)
        ]
        members = [b for b, depth in enumerate(depths) if depth > 0]
        if not members:
            return draws.drawn()
        h_nD = self.model.features(torch.stack([self._last[texts[b].key][1] for b in members]))
        if draws.trees is not None:
            return self._grown(members, depths, draws, h_nD)
        for index in range(max(depths)):
            going = [i for i, b in enumerate(members) if depths[b] > index]
            members, h_nD = [members[i] for i in going], h_nD[going]
            draws.sample(self._logits(index, h_nD), members, index)
        return draws.drawn()

    def _grown(
        self, members: list[int], depths: Sequenced[int], draws: RoundDraws, h_nD: Tensor
    ) -> Draft:
        """Trees, level by level: what follows a node is what follows any of its level."""
        places, level = {b: i for i, b in enumerate(members)}, 0

        def expand(nodes: Sequenced[Node]) -> Tensor:
            nonlocal level
            level += 1
            return self._logits(level, h_nD)[[places[node.member] for node in nodes]]

        return draws.grown(self._logits(0, h_nD), depths, expand)

    def _logits(self, head: int, h_nD: Tensor) -> Tensor:
        return self.model.logits(head, h_nD)

    def _is_up(self, text: Sequence) -> bool:
        """Whether the state of the last token but one is known."""
        known = self._last.get(text.key)
        return known is not None and known[0] == len(text.tokens) - 1

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        self._last.pop(text.key, None)
