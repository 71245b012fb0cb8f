"""Who is served: a queue of waiting texts, and those the target holds a cache for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outrider.engine.memory import out_of_memory
from outrider.models.base import Target
from outrider.sequence import Sequence


class Scheduler:
    """First come, first served, up to `max_texts` at a time.

    A text sent back to the queue keeps its tokens: its cache is rebuilt from them. One that begins
    like an active text waits until that has read what they share, instead of reading it too.
    """

    def __init__(self, target: Target, max_texts: int) -> None:
        self.target = target
        self.limit = self._most = max_texts
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []

    def submit(self, texts: Iterable[Sequence]) -> None:
        """Queues new texts; where none was left, memory is as it was at first."""
        if not self.active and not self.waiting:
            self.limit = self._most
        self.waiting.extend(texts)

    def admit(self) -> list[Sequence]:
        """Gives waiting texts a cache while there is room; returns all that have one.

        A text that does not fit even alone fails.
        """
        while self.waiting and len(self.active) < self.limit:
            text = self.waiting[0]
            if text.finished:
                self.waiting.popleft()
                continue
            if self._comes_too_early(text):
                break
            try:
                # An interrupt may have come between this and the queue: never open twice.
                if text.handle is None:
                    text.handle = self.target.open_for(text.tokens, text.expected)
            except Exception as error:
                if out_of_memory(error) and self.active:
                    break
                self.waiting.popleft().error = error
                continue
            if text not in self.active:
                self.active.append(text)
            self.waiting.popleft()
        return list(self.active)

    def _comes_too_early(self, text: Sequence) -> bool:
        """Whether some active text has not read yet what the two could share."""
        block = self.target.prefix_block
        if block is None or text.handle is not None:
            return False
        tokens = text.tokens[:-1]
        if len(tokens) < block:
            return False
        return any(
            _num_common(tokens, other.tokens, block) > self.target.length(other.handle)
            for other in self.active
            if other.handle is not None
        )

    def suspend_last(self) -> Sequence | None:
        """Sends the newest text back to the queue and admits one less; None where one is left."""
        if len(self.active) < 2:
            return None
        text = self.active[-1]
        self._drop(text)
        self.waiting.appendleft(text)
        self.limit = len(self.active)
        return text

    def withdraw(self) -> list[Sequence]:
        """Sends every active text back to the head of the queue; returns them."""
        texts = list(self.active)
        self.waiting.extendleft(reversed(texts))
        for text in texts:
            self._drop(text)
        return texts

    def release(self, text: Sequence) -> None:
        """Takes a text out, wherever it is."""
        if text in self.waiting:
            self.waiting.remove(text)
        self._drop(text)

    def _drop(self, text: Sequence) -> None:
        handle, text.handle = text.handle, None
        if handle is not None:
            self.target.close(handle)
        if text in self.active:
            self.active.remove(text)


def _num_common(ours: list[int], theirs: list[int], block: int) -> int:
    """Tokens in the whole blocks that both begin with."""
    common = 0
    while len(ours) >= common + block:
        piece = slice(common, common + block)
        if ours[piece] != theirs[piece]:
            break
        common += block
    return common
