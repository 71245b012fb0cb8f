"""What a request's grammar forces: tokens beside which no other may come, for nothing."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.sequence import Sequence


class GrammarDrafter(Drafter):
    """Drafts while the text's grammar lets one token alone come; every token is certain.

    Such a token is the target's too, whatever its rows say. A text without a grammar gets no draft.
    """

    name = "grammar"
    certain = True

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The forced tokens after each text."""
        return draws.points(self.chains(texts, depths))

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]]:
        """The same in plain numbers."""
        return [_forced(text, depth) for text, depth in zip(texts, depths, strict=True)]


def _forced(text: Sequence, depth: int) -> list[int]:
    if text.guide is None or depth < 1:
        return []
    text.guide.follow(text.tokens)
    return text.guide.forced(depth)
