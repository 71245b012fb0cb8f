"""Whether what was chosen pays as measured, whatever the models of cost and acceptance say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

STEP = 0.02
"""Share that the last round makes of the mean and the scatter of what rounds gained."""
SURE = 2.5
"""By so many times its scatter a sum of gains is told from chance."""
ENOUGH, EXPECTED = 8, 4
"""Rounds before a verdict; those that the scatter which was expected counts for."""
MARGIN = 0.02
"""Of a plain round, that may be lost in each without a pause."""
SHORTEST, LONGEST = 32, 512
"""Rounds of a pause; each that follows another is twice as long."""
SLOWEST = 2.0
"""A round counts with this many times the time that was expected of it at most: a neighbour on the
machine is no fault of the drafter's."""
REMEMBERED = 7
ASKED = 64
"""Rounds of one text in which drafters are asked before any is left out."""
KNOWN = 24
"""Rounds of one text behind which it is thought known that asking pays."""
ASKED_TEXTS = 16
"""Of so many texts or more a sixteenth of that: they tell as much."""
LONGEST_REST = 64
"""Rounds left out one after another at most, however dear asking is."""
REST_STEP = 0.05
"""Share of what asking has come to that the last round makes."""
DEEP = 16
"""Rounds of a rest that tells of new texts, too: of each fewer rounds are looked at."""
WORTH = 0.01
"""The share of the time that asking may lose without being worth a rest, of many texts half."""


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
    """The ledger of one choice: what its rounds gained, in rounds of plain decoding.

    A choice is left where what was lost since the ledger stood highest is more than chance takes
    from one that does not lose: `SURE` times what so many rounds scatter. So one that pays, but not
    in each round, goes on, and a loss that is the same in each round is soon told. What was gained
    before the losses began counts for nothing.

    Attributes:
        behind: rounds since the ledger stood highest.
        stands: what they gained, below 0.
        weight: of the rounds that the mean is of, those of long ago forgotten.
        pause: rounds of the next one; as short as ever once the choice has paid beyond chance.
    """

    behind: int = 0
    stands: float = 0.0
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    paused_until: int = 0
    pause: int = SHORTEST
    num_pauses: int = 0

    def saw(self, now: int, gained: float, scatter: float = 0.0) -> None:
        """A round that gained so many plain ones; gains were expected to have this variance.

        One that was chosen before a pause and is noted within it has brought that about already.
        """
        if now < self.paused_until:
            return
        weight = self.weight = (1.0 - STEP) * self.weight + 1.0
        off = gained - self.mean
        self.mean += off / weight
        self.squares = (1.0 - STEP) * self.squares + off * (gained - self.mean)
        self.stands += gained
        self.behind += 1
        if self.stands >= 0.0:
            self.stands, self.behind = 0.0, 0
        behind, lost = self.behind, -self.stands
        if behind >= ENOUGH:
            if lost > MARGIN * behind and lost * lost > SURE**2 * behind * self._variance(scatter):
                self._leave(now)
        elif self.pause > SHORTEST and self._has_paid(scatter):
            self.pause = SHORTEST

    def _has_paid(self, scatter: float) -> bool:
        """Whether it gained more lately than chance gives."""
        return self.mean > 0.0 and self.mean**2 * self.weight > SURE**2 * self._variance(scatter)

    def _variance(self, scatter: float) -> float:
        """Of gains: as measured, and at first as it was expected."""
        return (self.squares + EXPECTED * scatter) / (self.weight + EXPECTED)

    def _leave(self, now: int) -> None:
        """Begins a pause, and anew after it."""
        self.paused_until = now + self.pause
        self.pause = min(LONGEST, 2 * self.pause)
        self.num_pauses += 1
        self.stands = self.weight = self.mean = self.squares = 0.0
        self.behind = 0

    def allows(self, now: int) -> bool:
        """Whether it may be chosen in this round."""
        return now >= self.paused_until


def scatter_of(mean: float, most: float, texts: int = 1) -> float:
    """The most variance of what texts gain in the mean: of each `mean` of `most` tokens at most.

    Bhatia and Davis 2000.
    """
    return max(0.0, mean * (most - mean)) / texts


def half_of_many(share: float, texts: int) -> float:
    """Such a share of the time with one text, and half of it with many.

    A round of theirs tells more, and all of them wait for what is asked about each.
    """
    return share * (0.5 + 0.5 / texts)


class Rest:
    """Rounds in which nobody is asked: where drafts save less than asking for them takes.

    The ledger of asking: of rounds that drafted what they saved, of others what asking took. Where
    it has lost, one round is left out, then two, and so on, but no more than it takes to lose
    `WORTH` of the time (of many texts half of it); between them is one round as ever.
    """

    def __init__(self) -> None:
        self._asked = self._until = 0
        self._texts = 1
        # Rounds that the next one may have, and that the last one has; until when rounds that read
        # prompts are left out, too.
        self._length, self._last, self._on = 1, 0, 0
        self._saved_s = self._spent_s = 0.0

    def holds(self, now: int) -> bool:
        """Whether this round is left out."""
        return now < self._until

    def goes_on(self, now: int) -> bool:
        """Whether it holds, or one as long behind it would."""
        return now < self._on

    @property
    def pays(self) -> bool:
        """Whether asking has been worth it for long enough."""
        return self._asked >= KNOWN and self._longest < 1

    @property
    def _longest(self) -> int:
        """Rounds that a rest may have by what asking has lost."""
        # A clock may be too coarse to see a round at all.
        lost = -self._saved_s / max(self._spent_s, 1e-9)
        return min(LONGEST_REST, int(lost / half_of_many(WORTH, self._texts)))

    @property
    def deep(self) -> bool:
        """Whether asking has come to nothing for so long that a new text is hardly another one."""
        return self._last >= DEEP

    def saw(
        self, now: int, texts: int, saved_s: float, spent_s: float, *, last: bool = True
    ) -> None:
        """Round `now`, of so many texts, was not left out; it saved so much of so much time.

        No rest begins behind one that is not the last of those noted together.
        """
        self._saved_s += REST_STEP * (saved_s - self._saved_s)
        self._spent_s += REST_STEP * (spent_s - self._spent_s)
        self._asked += min(texts, ASKED_TEXTS)
        self._texts = texts
        if not last:
            return
        longest = self._longest
        if longest < 1:
            self._length = 1
            self._last = self._on = 0
        elif saved_s > 0:
            # What has just paid is likely to pay at once again: no rest now, and a shorter one
            # next; but one round in a while that pays does not make up for all the others.
            self._length = max(1, self._length // 2)
            self._last, self._on = min(self._last, self._length), 0
        elif self._asked >= ASKED:
            self._last = min(self._length, longest)
            self._until = now + 1 + self._last
            self._on = self._until + self._last
            self._length = min(LONGEST_REST, 2 * self._length)
