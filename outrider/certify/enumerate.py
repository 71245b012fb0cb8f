"""The exact law of whole multi-round runs, by replaying every choice the noise can make.

A noise address is one undecided uniform. Comparing it with a threshold splits its interval in two
and both sides are visited; an address used again meets the interval it was left with. So a
misuse of addresses shows as bias, in exact fractions, and nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from outrider.certify import reference
from outrider.certify.reference import Noise, Outcome, ReferenceRule, Round
from outrider.decoding.theory import LawRow, Model, Number
from outrider.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_EXTRA

Address: TypeAlias = tuple[int, int, int]
"""(stream, anchor, index)."""
Text: TypeAlias = tuple[int, ...]

MAX_LEAVES = 20_000


class TooManyLeaves(Exception):
    """The case has more leaves than it was allowed."""


class Replay:
    """Replays one script of decisions and continues it with first choices.

    Attributes:
        trace: decisions met so far; True is the side below the cut.
        weight: probability of the path so far.
    """

    def __init__(self, script: list[bool], grid: int | None) -> None:
        self.weight = Fraction(1)
        self.trace: list[bool] = []
        self._script = script
        self._grid = grid
        self._intervals: dict[Address, tuple[Fraction, Fraction]] = {}

    def uniform(self, stream: int, anchor: int, index: int) -> Undecided:
        """The uniform at an address, as far as it is decided."""
        return Undecided(self, (stream, anchor, index))

    def below(self, address: Address, bound: Number, *, strict: bool) -> bool:
        """Whether the address's uniform is below (or, not strict, at) `bound`."""
        cut = Fraction(bound)
        if self._grid is not None:
            steps = cut * self._grid
            cut = Fraction(math.ceil(steps) if strict else math.floor(steps) + 1, self._grid)
        low, high = self._intervals.get(address, (Fraction(0), Fraction(1)))
        if cut <= low:
            return False
        if cut >= high:
            return True
        place = len(self.trace)
        taken = self._script[place] if place < len(self._script) else True
        self.trace.append(taken)
        self._intervals[address] = (low, cut) if taken else (cut, high)
        share = (cut - low) / (high - low)
        self.weight *= share if taken else 1 - share
        return taken


@dataclass(frozen=True, slots=True)
class Undecided:
    """`scale` times the uniform of an address; comparing it makes a choice."""

    replay: Replay
    address: Address
    scale: Number = 1

    def __mul__(self, factor: Number) -> Undecided:
        return Undecided(self.replay, self.address, self.scale * factor)

    def __lt__(self, bound: Number) -> bool:
        return self._compare(bound, strict=True)

    def __le__(self, bound: Number) -> bool:
        return self._compare(bound, strict=False)

    def _compare(self, bound: Number, *, strict: bool) -> bool:
        if self.scale == 0:
            return bound > 0 if strict else bound >= 0
        return self.replay.below(self.address, bound / self.scale, strict=strict)


def identity(law: LawRow) -> LawRow:
    """The law as it is."""
    return law


@dataclass(frozen=True, slots=True)
class Scheme:
    """A verification rule and how a round feeds it; the defaults are the right way.

    Attributes:
        rule: the decision on a round.
        reported: the draft law told to the rule, given the law sampled from.
        test_address, extra_address, draft_address: anchor and index of a uniform, given the
            round's anchor and the index asked for; stream first.
        dropped: whether the last drafted token is taken back, given its law and value.
        grid: number of values a uniform can take; None = the continuum.
    """

    name: str
    rule: ReferenceRule
    reported: Callable[[LawRow], LawRow] = identity
    test_address: Callable[[int, int], Address] = lambda anchor, i: (STREAM_ACCEPT, anchor, i)
    extra_address: Callable[[int, int], Address] = lambda anchor, i: (STREAM_EXTRA, anchor, i)
    draft_address: Callable[[int, int], Address] = lambda anchor, i: (STREAM_DRAFT, anchor, i)
    dropped: Callable[[LawRow, int], bool] | None = None
    grid: int | None = None

    def noise(self, replay: Replay, anchor: int) -> Noise:
        """The uniforms of the round that begins with `anchor` tokens."""
        return Noise(
            test=lambda i: replay.uniform(*self.test_address(anchor, i)),
            extra=lambda i: replay.uniform(*self.extra_address(anchor, i)),
            draft=lambda i: replay.uniform(*self.draft_address(anchor, i)),
        )


@dataclass(frozen=True, slots=True)
class OutputLaw:
    """The exact law of a scheme's texts.

    Attributes:
        probs: text to probability.
        leaves: paths enumerated.
        first_kept: expected drafted tokens kept in the first round.
        most_rounds: rounds of the longest path.
    """

    probs: dict[Text, Fraction]
    leaves: int
    first_kept: Fraction
    most_rounds: int


def output_law(
    scheme: Scheme, p: Model, q: Model, depth: int, length: int, max_leaves: int = MAX_LEAVES
) -> OutputLaw:
    """The law of the first `length` tokens written in rounds of up to `depth` drafted ones.

    As in the engine, with n tokens left at most n - 1 are drafted.

    Raises:
        TooManyLeaves: the case is larger than `max_leaves`.
    """
    probs: dict[Text, Fraction] = {}
    leaves, first_kept, most_rounds = 0, Fraction(0), 0
    for replay, text, outcomes in _paths(scheme, p, q, depth, length):
        leaves += 1
        if leaves > max_leaves:
            raise TooManyLeaves(f"{scheme.name}: depth {depth}, {length} tokens")
        probs[text] = probs.get(text, Fraction(0)) + replay.weight
        first_kept += replay.weight * outcomes[0].kept
        most_rounds = max(most_rounds, len(outcomes))
    return OutputLaw(probs, leaves, first_kept, most_rounds)


def _paths(
    scheme: Scheme, p: Model, q: Model, depth: int, length: int
) -> Iterator[tuple[Replay, Text, list[Outcome]]]:
    """Every path once, depth first: the last decision still open is turned over next."""
    script: list[bool] = []
    while True:
        replay = Replay(script, scheme.grid)
        text, outcomes = _run(scheme, replay, p, q, depth, length)
        yield replay, text, outcomes
        script = replay.trace
        while script and not script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = False


def _run(
    scheme: Scheme, replay: Replay, p: Model, q: Model, depth: int, length: int
) -> tuple[Text, list[Outcome]]:
    text: Text = ()
    outcomes: list[Outcome] = []
    while len(text) < length:
        noise = scheme.noise(replay, len(text))
        drafted: Text = ()
        for i in range(min(depth, length - len(text) - 1)):
            law = q(text + drafted)
            drafted += (reference.inverse_cdf(law, noise.draft(i)),)
            if scheme.dropped is not None and scheme.dropped(law, drafted[-1]):
                drafted = drafted[:-1]
                break
        before = [text + drafted[:i] for i in range(len(drafted) + 1)]
        outcome = scheme.rule(
            Round(
                drafted,
                [p(prefix) for prefix in before],
                [scheme.reported(q(prefix)) for prefix in before[:-1]],
                noise,
            )
        )
        text += (*drafted[: outcome.kept], outcome.token)
        outcomes.append(outcome)
    return text, outcomes


def target_law(p: Model, length: int) -> dict[Text, Fraction]:
    """The target's own law of texts of `length` tokens."""
    probs: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        probs = {
            (*text, x): mass * Fraction(p_x)
            for text, mass in probs.items()
            for x, p_x in enumerate(p(text))
            if p_x > 0
        }
    return probs


def distance(left: dict[Text, Fraction], right: dict[Text, Fraction]) -> Fraction:
    """Total variation between two laws of texts."""
    texts = left.keys() | right.keys()
    zero = Fraction(0)
    return sum((abs(left.get(t, zero) - right.get(t, zero)) for t in texts), start=zero) / 2
