"""Tokens to text: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

BROKEN = "\ufffd"
LONGEST_CHARACTER = 4
"""Tokens one UTF-8 character can be spread over in a byte-level vocabulary."""


class Decodes(Protocol):
    """The half of a tokenizer that makes text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...


class TextAssembler:
    """Turns one text's tokens into characters and finds stop strings, also across tokens.

    Decoding starts some tokens back, because a token's text may depend on its neighbours.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._window = list(prompt[-LONGEST_CHARACTER:])
        self._settled = len(self._window)
        self._before = tokenizer.decode(self._window)
        self._held = ""
        self._searched = 0

    def copy(self) -> TextAssembler:
        """The same state, to go on from by itself."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    def push(self, token: int, *, watch: bool = True) -> str | None:
        """Adds a token; returns the stop string it completes, if any.

        With `watch` off no stop string that ends with this token acts, now or later, so that what
        is found depends on the tokens alone and not on how they came in rounds.
        """
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(BROKEN):
            self._settle(text)
        elif len(self._window) - self._settled >= LONGEST_CHARACTER:
            self._give_up_first()
        stop = self._cut() if watch else None
        self._searched = len(self._held)
        return stop

    def _settle(self, text: str) -> None:
        self._held += text[self._known(text) :]
        self._window = self._window[-LONGEST_CHARACTER:]
        self._settled = len(self._window)
        self._before = self._tokenizer.decode(self._window)

    def _known(self, text: str) -> int:
        """How much of the text was there before the waiting tokens.

        A prompt may end inside a character: once that is complete, it is new.
        """
        if text.startswith(self._before):
            return len(self._before)
        return len(self._before.rstrip(BROKEN))

    def _give_up_first(self) -> None:
        """The oldest waiting token cannot begin a character any more: it is broken text."""
        broken = self._tokenizer.decode(self._window[: self._settled + 1])
        self._held += broken[len(self._before) :] or BROKEN
        self._window = self._window[self._settled + 1 :]
        self._settled, self._before = 0, ""

    def _cut(self) -> str | None:
        starts = {
            stop: self._held.find(stop, max(0, self._searched - len(stop) + 1))
            for stop in self._stops
        }
        found = [(at, stop) for stop, at in starts.items() if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._held = self._held[:at]
        return stop

    def take(self) -> str:
        """The characters that are certain by now."""
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        self._searched = max(0, self._searched - cut)
        return out

    def _overlap(self, stop: str) -> int:
        """How much of the end of the held text is the beginning of `stop`."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0

    def finish(self, *, stopped: bool) -> str:
        """All that is left; a character still incomplete shows as U+FFFD."""
        if not stopped and len(self._window) > self._settled:
            self._settle(self._tokenizer.decode(self._window))
        out, self._held = self._held, ""
        return out
