"""Who is served: a queue of waiting texts, and those the target holds a cache for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outrider.engine.memory import out_of_memory
from outrider.models.base import Target
from outrider.sequence import Sequence


class Scheduler:
    """First come, first served, up to `max_texts` at a time.

    A text sent back to the queue keeps its tokens: its cache is rebuilt from them.
    """

    def __init__(self, target: Target, max_texts: int) -> None:
        self.target = target
        self.limit = max_texts
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []

    def submit(self, texts: Iterable[Sequence]) -> None:
        """Queues new texts."""
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
            try:
                # An interrupt may have come between this and the queue: never open twice.
                if text.handle is None:
                    text.handle = self.target.open(text.expected)
            except Exception as error:
                if out_of_memory(error) and self.active:
                    break
                self.waiting.popleft().error = error
                continue
            if text not in self.active:
                self.active.append(text)
            self.waiting.popleft()
        return list(self.active)

    def suspend_last(self) -> Sequence | None:
        """Sends the newest text back to the queue and admits one less; None where one is left."""
        if len(self.active) < 2:
            return None
        text = self.active[-1]
        self._drop(text)
        self.waiting.appendleft(text)
        self.limit = len(self.active)
        return text

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
