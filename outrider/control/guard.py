"""Whether what was chosen pays as measured, whatever the models of cost and acceptance say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
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
ASKED = 64
"""Rounds of one text in which drafters are asked before any is left out."""
ASKED_TEXTS = 16
"""Of so many texts or more a sixteenth of that: they tell as much."""
LONGEST_REST = 16
"""Rounds left out one after another at most."""
REST_STEP = 0.05
"""Share of what asking has come to that the last round makes."""
WORTH = 0.01
"""The share of the time that asking may lose without being worth a rest."""


class Pace:
    """What rounds of one kind take beside what was expected of them: the low median of the last.

    So plain rounds are timed. A mean beside a median would hold all noise against the drafter.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def usual_s(self, took_s: float, expected_s: float) -> float:
        """Seconds of a round that took `took_s`, without what is not usual of such rounds."""
        self._last.append(min(took_s / expected_s, SLOWEST))
        return expected_s * median_low(self._last)


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

    def saw(self, now: int, plain_s: float, took_s: float) -> None:
        """A round that took `took_s`, and for whose tokens plain decoding takes `plain_s`."""
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


class Rest:
    """Rounds in which nobody is asked: where drafts save less than asking for them takes.

    The ledger of asking: of rounds that drafted what they saved, of others what asking took. Where
    it has lost, one round is left out, then two, and so on, but no more than it takes to lose
    `WORTH` of the time; between them is one round as ever.
    """

    def __init__(self) -> None:
        self._asked = self._until = 0
        self._length = 1
        self._saved_s = self._spent_s = 0.0

    def holds(self, now: int) -> bool:
        """Whether this round is left out."""
        return now < self._until

    def saw(self, now: int, texts: int, saved_s: float, spent_s: float) -> None:
        """Round `now`, of so many texts, was not left out; it saved so much of so much time."""
        self._saved_s += REST_STEP * (saved_s - self._saved_s)
        self._spent_s += REST_STEP * (spent_s - self._spent_s)
        self._asked += min(texts, ASKED_TEXTS)
        # A clock may be too coarse to see a round at all.
        lost = -self._saved_s / max(self._spent_s, 1e-9)
        longest = min(LONGEST_REST, int(lost / WORTH))
        if saved_s > 0 or longest < 1:
            # What has just paid is likely to pay at once again.
            self._length = 1
        elif self._asked >= ASKED:
            self._until = now + 1 + min(self._length, longest)
            self._length = min(LONGEST_REST, 2 * self._length)
