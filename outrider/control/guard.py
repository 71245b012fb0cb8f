"""Whether what was chosen pays as measured, whatever the models of cost and acceptance say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

STEP = 0.1
"""Share of the ledger that the last round makes."""
ENOUGH, ENOUGH_OF_TEXT = 8, 16
MARGIN, MARGIN_OF_TEXT = 0.02, 0.1
"""A single text's rounds scatter more than those of all."""
SHORTEST, LONGEST = 32, 512
"""Rounds of a pause; each that follows another is twice as long."""
SLOWEST = 2.0
"""A round counts with this many times the time that was expected of it at most: a neighbour on the
machine is no fault of the drafter's."""
REMEMBERED = 7
"""Rounds of whose times, over what was expected of them, the low median counts: that is how plain
rounds are timed, and a mean beside a median would hold every noise against the drafter."""


@dataclass(slots=True)
class Guard:
    """The ledger of one choice: time saved against plain decoding's measured time per token.

    Attributes:
        enough: rounds before a verdict.
        margin: of the time spent, that may be lost without a pause.
    """

    enough: int = ENOUGH
    margin: float = MARGIN
    saved_s: float = 0.0
    spent_s: float = 0.0
    rounds: int = 0
    paused_until: int = 0
    pause: int = SHORTEST
    num_pauses: int = 0
    _slow: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def saw(self, now: int, plain_s: float, took_s: float, expected_s: float) -> None:
        """A round that took `took_s`, and for whose tokens plain decoding takes `plain_s`."""
        self._slow.append(min(took_s / expected_s, SLOWEST))
        took_s = expected_s * median_low(self._slow)
        self.saved_s += STEP * (plain_s - took_s - self.saved_s)
        self.spent_s += STEP * (took_s - self.spent_s)
        self.rounds += 1
        if self.rounds < self.enough:
            return
        if self.saved_s < -self.margin * self.spent_s:
            self.paused_until = now + self.pause
            self.pause = min(LONGEST, 2 * self.pause)
            self.num_pauses += 1
            self.saved_s = self.spent_s = 0.0
            self.rounds = 0
        elif self.rounds >= 4 * self.enough:
            self.pause = SHORTEST

    def allows(self, now: int) -> bool:
        """Whether it may be chosen in this round."""
        return now >= self.paused_until
