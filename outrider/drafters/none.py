"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.sequence import Sequence


class NoDrafter(Drafter):
    """Proposes nothing, so that every round adds the one token the target draws."""

    name = "none"
    certain = True

    def pauses(self, texts: Sequenced[Sequence]) -> bool:
        """Always."""
        return True

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """An empty draft."""
        return draws.points(self.chains(texts, depths))

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]]:
        """Nothing for each."""
        return [[] for _ in texts]
