"""Which characters of a text came from which source: deltas say it per token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outrider.types import Delta, Source

if TYPE_CHECKING:
    from outrider.engine.text import Decodes


class SourceSpans:
    """Cuts the text of successive deltas into spans of one source each.

    A character belongs to the token that completed it. Deltas hold back what a stop string may
    take, so their text can lag behind their tokens; it is never ahead.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int]) -> None:
        # Imported here so that `outrider --help` does not wait for torch.
        from outrider.engine.text import TextAssembler

        self._assembler = TextAssembler(tokenizer, prompt, ())
        self._waiting: deque[tuple[int, Source]] = deque()
        self._last: Source = "bonus"

    def of(self, delta: Delta) -> Iterator[tuple[str, Source]]:
        """The delta's text in spans, in order; neighbours may share a source."""
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._assembler.push(token)
            self._waiting.append((len(self._assembler.take()), source))
            self._last = source
        text = delta.text
        while text and self._waiting:
            size, source = self._waiting.popleft()
            if size > len(text):
                self._waiting.appendleft((size - len(text), source))
            if size:
                yield text[:size], source
            text = text[size:]
        if text:
            yield text, self._last
