"""Who reads how much in a step, so that no text waits for more than one chunk of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """What the active texts do in one step: those in `ready` go through a round, `reader` reads.

    The others wait for their turn to read.
    """

    ready: list[Sequence]
    reader: Sequence | None

    @classmethod
    def of(cls, texts: Iterable[Sequence], unread: Callable[[Sequence], int], chunk: int) -> Turn:
        """First come, first served: at most `chunk` rows of prompts for all texts together.

        A prompt that fits into what is left is read in its text's first round; one that does not
        is read by itself, a chunk in each step. What a round leaves unread is no prompt.
        """
        ready: list[Sequence] = []
        reader, room = None, chunk
        for text in texts:
            rows = unread(text)
            if rows <= text.depth + 1:
                ready.append(text)
            elif rows <= room:
                ready.append(text)
                room -= rows
            elif room == chunk:
                reader, room = text, 0
        return cls(ready, reader)
