"""Plans for a text by itself that stand for some rounds: what finding one takes is spared then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.control.acceptance import Counts
from outrider.control.book import Book
from outrider.control.knowledge import Knowledge
from outrider.control.plans import Plan, Times
from outrider.drafters.stop import Stop

FIRST, STANDS = 2, 32
"""Drafts of such texts behind which a plan for a text by itself is found anew, as finding it takes
longer than all else of a choice: so many and as many as were seen before, up to the second."""
LATEST, NO_BETTER = 256, 16
"""Rounds after which it is found anew in any case: what a drafter's levels take may have changed.
Second where it promises no more than plain decoding, which is decoded so until then."""


@dataclass(slots=True)
class Stands:
    """A plan for a text by itself, found where `most` tokens might be drafted.

    It stands until so many drafts of its class were counted, until some round, or until a further
    sample of its drafter. `gain` is what it promises beside plain decoding: both go with the
    machine. `short` are those for fewer tokens.
    """

    plan: Plan | None
    stop: Stop | None
    counts: Counts
    until: int
    latest: int
    sampled: int
    most: int
    depth: int
    gain: float
    short: dict[int, Stands] = field(default_factory=dict[int, "Stands"])

    def up_to(self, most: int) -> Stands:
        """The plan where no more tokens may be drafted than these."""
        found = self.short.get(most)
        if found is None:
            plan, gain = None if self.plan is None else self.plan.up_to(most), 0.0
            if self.plan is not None and plan is not None:
                gain = self.gain * plan.rate_tok_s / self.plan.rate_tok_s
            found = self.short[most] = replace(
                self, plan=plan, most=most, depth=most, gain=gain, short={}
            )
        return found

    def now(self, times: Times) -> Plan | None:
        """The plan, with what it promises beside plain decoding at what that takes now."""
        plan = self.plan
        if plan is None:
            return None
        rate = self.gain / times.plain_s
        return replace(plan, rate_tok_s=rate, expected_s=plan.expected_s * plan.rate_tok_s / rate)


class Alone:
    """Plans for rounds of one text that stand for a while, whichever text it is.

    By who drafts, and by the class of what is known of the text: a plan is the same for all who are
    of one. They go by one record of times, and end with it.

    Attributes:
        times: what they are for.
        certain: whether look-ups are let through.
        books: the drafters that draw and are let through, and what is known of them.
    """

    def __init__(self, times: Times, known: Knowledge) -> None:
        self.times = times
        self.certain = False
        self.books: list[tuple[int, Book]] = []
        self._known = known
        self._like = times
        self._plans: dict[tuple[bool, int, int], Stands] = {}

    def goes_by(self, times: Times) -> bool:
        """Whether these are as good; of the same ones again that is not looked at anew."""
        if times is self._like:
            return True
        alike = self.times.like(times)
        if alike:
            self._like = times
        return alike

    def get(self, key: tuple[bool, int, int], most: int) -> Stands | None:
        """What stands for a round in which so many tokens may be drafted at most.

        The key is whether it is of look-ups, whose, and the class of the text.
        """
        found, known = self._plans.get(key), self._known
        if found is None or found.counts.count >= found.until or known.now >= found.latest:
            return None
        if found.sampled != known.sampled[key[1]]:
            return None
        if found.depth > most:
            return found.up_to(most)
        # Where it might have gone further it may be another one.
        return found if most <= found.most else None

    def put(
        self,
        key: tuple[bool, int, int],
        times: Times,
        most: int,
        counts: Counts,
        plan: Plan | None,
        stop: Stop | None,
    ) -> Stands:
        """It stands from now on, the longer the more drafts of such texts were counted."""
        now, sampled, seen = self._known.now, self._known.sampled[key[1]], counts.count
        until = seen + min(STANDS, FIRST + seen)
        depth, gain = (0, 0.0) if plan is None else (plan.depth, plan.rate_tok_s)
        gain *= times.plain_s
        latest = now + (LATEST if gain > 1.0 else NO_BETTER)
        found = Stands(plan, stop, counts, until, latest, sampled, most, depth, gain)
        self._plans[key] = found
        return found
