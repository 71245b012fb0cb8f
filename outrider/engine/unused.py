"""A model that was loaded to draft and never does is spoken of, once and by name."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.engine.choice import Choice
from outrider.errors import warn
from outrider.sequence import Sequence

AFTER = 16
"""Texts that must have gone by: a few without drafts say nothing yet."""


class Unused:
    """Counts finished texts until every model loaded for drafts has drafted."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._num_texts = self._num_other = self._num_short = 0
        self._done = False

    def saw(self, texts: Iterable[Sequence]) -> None:
        """Takes note of finished texts; warns where so many are without a draft of some model."""
        if self._done:
            return
        own = self._choice.own
        idle = own.never_asked()
        if not idle:
            self._done = True
            return
        for text in texts:
            self._num_texts += 1
            if text.depth == 0 or self._choice.of(text.request.drafter) is not own:
                self._num_other += 1
            elif text.max_tokens == 1:
                self._num_short += 1
        if self._num_texts >= AFTER:
            self._done = True
            warn(
                f"drafter={own.name!r}: {' and '.join(idle)} was loaded and has guessed in none of "
                f"{self._num_texts} texts so far, as {self._reason()}; leave it out when loading "
                "to have its memory back"
            )

    def _reason(self) -> str:
        if self._num_other == self._num_texts:
            return "each had speculation off (depth=0 or drafter='none') or another drafter"
        if self._num_other + self._num_short == self._num_texts:
            return "none was to have more than the one token that the target adds itself"
        return "others drafted in its place, or there was no memory for it"
