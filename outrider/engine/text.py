"""Tokens to text: whole characters only, and nothing that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BROKEN = "\ufffd"
LONGEST_CHARACTER = 4
"""Tokens one UTF-8 character can be spread over in a byte-level vocabulary."""
WINDOW = 16
"""Settled tokens from which on only the last few are decoded again with those that come."""


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
        # What the settled tokens are, and what of that is whole: a prompt may end in a character.
        self._window, self._before, self._whole = self._read(list(prompt[-WINDOW:]))
        self._settled = len(self._window)
        self._held = ""
        self._searched = 0

    def copy(self) -> TextAssembler:
        """The same state, to go on from by itself."""
        # Made for every text in every round: `copy.copy` takes many times as long.
        other = object.__new__(TextAssembler)
        other.__dict__.update(self.__dict__)
        other._window = self._window.copy()
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
        self._held += self._new(text)
        if len(self._window) >= WINDOW:
            self._window, text = self._end_of(self._window)
        self._before = self._whole = text
        self._settled = len(self._window)

    def _read(self, prompt: list[int]) -> tuple[list[int], str, str]:
        """A prompt's last tokens, their text, and that of those before the last whole character."""
        for rest in range(min(LONGEST_CHARACTER, len(prompt) + 1)):
            first = len(prompt) - rest
            window, whole = self._end_of(prompt[:first])
            if not whole.endswith(BROKEN):
                window = [*window, *prompt[first:]]
                return window, self._tokenizer.decode(window) if rest else whole, whole
        window, text = self._end_of(prompt)
        return window, text, text

    def _end_of(self, tokens: list[int]) -> tuple[list[int], str]:
        """The last few tokens, from the beginning of a character on where there is one; as text."""
        for size in range(LONGEST_CHARACTER, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[-size:])
            if not text.startswith(BROKEN):
                return tokens[-size:], text
        tokens = tokens[-LONGEST_CHARACTER:]
        return tokens, self._tokenizer.decode(tokens)

    def _new(self, text: str) -> str:
        """What the waiting tokens add to what was there before them.

        Once a prompt's last character is complete, it is new. Some tokenizers break all bytes in a
        row where one of them is broken, also those that were text before: then the waiting ones are
        read by themselves.
        """
        for known in (self._before, self._whole):
            if text.startswith(known):
                return text[len(known) :]
        return self._tokenizer.decode(self._window[self._settled :])

    def _give_up_first(self) -> None:
        """The oldest waiting token cannot begin a character any more: it is broken text."""
        broken = self._tokenizer.decode(self._window[: self._settled + 1])
        same = broken.startswith(self._before)
        self._held += (broken[len(self._before) :] if same else "") or BROKEN
        self._window = self._window[self._settled + 1 :]
        self._settled, self._before, self._whole = 0, "", ""
        # Those behind it may be whole by themselves.
        text = self._tokenizer.decode(self._window)
        if not text.endswith(BROKEN):
            self._settle(text)

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
