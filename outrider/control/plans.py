"""The arithmetic of a choice: tokens a second promised by drafting nothing, or this, or that deep.

A round of B texts promises B tokens and, for each drafted token, the chance that it and all before
it are kept; it takes the target's time for its rows and the drafter's for its levels. Everything
read here is known before the round's first token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from statistics import NormalDist

from outrider.tree import TreeBudget

CHANCE = 0.5
"""By so many times the root of its rounds a text may yet be overtaken that has most to make."""
LEAST = 0.05
"""A drafted token less likely to be kept than this is not weighed at all."""

ALIKE, PLACES = 0.06, (1, 2, 4, 6, 8, 12, 16)
"""Share by which times may differ in the mean of so many rows, beside a plain round's."""
APART = 0.2
"""Share by which one of them may, and a plain round: a drafter becomes slower along with it."""


@dataclass(slots=True)
class Plan:
    """What a round is to draft.

    Attributes:
        arm: the drafter that draws, by its number; None where nobody does.
        depth: levels it is asked for.
        lengths: tokens taken of each text's certain offer, where certain drafters serve.
        rate_tok_s: tokens a second that are promised.
        expected_s: seconds that the round is to take.
        only: the one text that is drawn for; None where all are.
        trees: how large the drafter's trees may be; None where it drafts chains.
        last: tokens that it promises beyond the target's to the text that will end last.
        lag: how many less these are than what the texts that may be that one gain in the mean.
        ending: these texts, by their numbers.
        along: of one text the tokens and the seconds that each depth up to this one promises.
    """

    arm: int | None
    depth: int
    rate_tok_s: float
    expected_s: float
    lengths: Sequenced[int] = ()
    only: int | None = None
    trees: TreeBudget | None = None
    last: float = 0.0
    lag: float = 0.0
    ending: Sequenced[int] = ()
    along: Sequenced[tuple[float, float]] = ()

    def up_to(self, depth: int) -> Plan | None:
        """The best of one text's shorter ones, by as many tokens at most; None for none."""
        promised = [(tokens / seconds, tokens, seconds) for tokens, seconds in self.along[:depth]]
        if not promised:
            return None
        rate, _, seconds = best = max(promised)
        own = promised.index(best) + 1
        lengths = (own,) if self.lengths else ()
        return Plan(self.arm, own, rate, seconds, lengths, along=self.along[:own])

    def counted_tok_s(self, texts: int, uneven: float) -> float:
        """Its rate in a round of so many texts, as if all gained like those that will end last.

        That is so for the share `uneven` of what a round takes; the rest is each text's own.
        """
        together = texts * (1.0 + self.last) / self.expected_s
        return self.rate_tok_s + uneven * (together - self.rate_tok_s)


@dataclass(slots=True)
class Times:
    """What a round of these texts takes.

    Attributes:
        texts: how many.
        plain_s: of a round that drafts nothing.
        curve: seconds by rows, up to the most rows asked for, or a few times the most ever timed.
        most: rows of all texts that are weighed at most: what is not measured is come to in steps.
        fixed: the share of `plain_s` that a round takes however many texts are left.
    """

    texts: int
    plain_s: float
    curve: Sequenced[float]
    most: int = 1 << 30
    fixed: float = 0.5
    _plain: Plan | None = field(default=None, init=False, repr=False)

    @property
    def plain(self) -> Plan:
        """Drafting nothing."""
        if self._plain is None:
            self._plain = Plan(None, 0, self.texts / self.plain_s, self.plain_s)
        return self._plain

    def like(self, other: Times) -> bool:
        """Whether plans by these times are as good by the others, within noise.

        What they promise goes by what rows take beside a plain round.
        """
        if self is other:
            return True
        if self.texts != other.texts or self.most != other.most:
            return False
        own, others = self.curve, other.curve
        if len(own) != len(others):
            return False
        places = [row for row in PLACES if row < len(own)]
        faster = self.plain_s / other.plain_s
        if not 1 - APART <= faster <= 1 + APART:
            return False
        off = [abs(own[row] - faster * others[row]) for row in places]
        if any(one > APART * own[row] for one, row in zip(off, places, strict=True)):
            return False
        return sum(off) <= ALIKE * sum([own[row] for row in places])

    def turns(self, first: int, end: int) -> list[int]:
        """Rows between these two at which the curve turns; it is straight elsewhere."""
        along, least = self.curve[first : end + 1], 1e-9 * self.curve[-1]
        near = enumerate(zip(along, along[1:], along[2:], strict=False), start=first + 1)
        return [row for row, (a, b, c) in near if abs(a - 2 * b + c) > least]

    def target_s(self, drafted: float) -> float:
        """Of the target, with so many drafted rows beside the texts' own.

        Beyond the curve it goes on as it ends.
        """
        rows = min(self.texts + int(drafted), len(self.curve) - 2)
        found = self.curve[rows]
        more = self.texts + drafted - rows
        if more:
            found += more * (self.curve[rows + 1] - found)
        return self.plain_s + max(0.0, found - self.curve[self.texts])


@dataclass(slots=True)
class Class:
    """Texts with the same chances: which, and how deep they may be drafted for."""

    survival: Sequenced[float]
    depth: int
    members: Sequenced[int]

    @property
    def num(self) -> int:
        """How many."""
        return len(self.members)


@dataclass(slots=True)
class Drawing:
    """A drafter that draws, as it stands for these texts.

    Attributes:
        arm: its number.
        level_s: seconds of a level.
        classes: the texts it would draft for.
        offered: P(level i is drafted | so many levels are asked for): confidence may stop earlier.
        rows: nodes of a text's draft by levels, from 0; None where drafts are chains.
        extra_s: seconds for what it has to read first, spread over the tokens still to come: those
            of each token that every text gains.
        trees: how large its trees may be; None for chains.
        start_s: seconds before the first level.
        lefts: tokens that each text of the round has to make, where the one that ends last counts.
    """

    arm: int
    level_s: float
    classes: Sequenced[Class]
    offered: Sequenced[float]
    rows: Sequenced[int] | None = None
    extra_s: float = 0.0
    trees: TreeBudget | None = None
    start_s: float = 0.0
    lefts: Sequenced[float] = ()


def drawn(times: Times, drawing: Drawing) -> Plan | None:
    """The best depth of a drafter that draws; None without a text to draft for."""
    classes, rows_by_level, level_s = drawing.classes, drawing.rows, drawing.level_s
    most = max((one.depth for one in classes), default=0)
    offered = [*drawing.offered[:most], *[1.0] * (most - len(drawing.offered))]
    num = sum(one.num for one in classes)
    read_s = drawing.extra_s / times.texts
    tokens, rows, spent = float(times.texts), 0.0, drawing.start_s
    seconds, best_rate, best_depth, best_s = times.plain_s, 0.0, 0, 0.0
    curve, last, plain_s = times.curve, len(times.curve) - 2, times.plain_s
    beside_s = plain_s - curve[times.texts]
    # The least that a further level takes.
    more_s = level_s if num > 4 else level_s * min(offered, default=1.0)
    alone = classes[0].survival if len(classes) == 1 else None
    along: list[tuple[float, float]] = []
    for level in range(most):
        if alone is not None:
            gained, texts = num * alone[level], num
        else:
            gained, texts = 0.0, 0
            for one in classes:
                if one.depth > level:
                    gained += one.num * one.survival[level]
                    texts += one.num
        # No later level gains more than this one, and each takes so long at least: all of them
        # together, or none, would have to promise more than the best.
        left = most - level
        enough = best_rate * (seconds + left * more_s)
        if (
            gained < LEAST
            or max(tokens - best_rate * seconds, tokens + left * gained - enough) <= 0
        ):
            break
        if best_depth and times.texts + rows > times.most:
            break
        tokens += gained
        new = 1 if rows_by_level is None else rows_by_level[level + 1] - rows_by_level[level]
        rows += texts * offered[level] * new
        # The level is drafted while any text goes on.
        spent += level_s * (1.0 if num > 4 else 1.0 - (1.0 - offered[level]) ** texts)
        # As `target_s`, without the call.
        at = times.texts + rows
        row = min(int(at), last)
        target_s = beside_s + curve[row] + (at - row) * (curve[row + 1] - curve[row])
        seconds = spent + max(plain_s, target_s) + read_s * tokens
        along.append((tokens, seconds))
        if tokens > best_rate * seconds:
            best_rate, best_depth, best_s = tokens / seconds, level + 1, seconds
    if not best_depth:
        return None
    plan = Plan(drawing.arm, best_depth, best_rate, best_s, trees=drawing.trees)
    if times.texts == 1:
        plan.along = along[:best_depth]
    if drawing.lefts:
        gains, squares = [0.0] * times.texts, [0.0] * times.texts
        for one in classes:
            own = one.survival[: min(best_depth, one.depth)]
            gained, square = sum(own), _square(own)
            for b in one.members:
                gains[b], squares[b] = gained, square
        plan.last, plan.lag, plan.ending = least_of(drawing.lefts, gains, squares)
    return plan


def least_of(
    lefts: Sequenced[float], gains: Sequenced[float], squares: Sequenced[float]
) -> tuple[float, float, list[int]]:
    """What a round brings the end of all texts nearer by, in tokens beyond the target's own.

    Each text has so many tokens to make and gains so many in such a round in the mean, and so many
    squared. The last ends where tokens over gain are most, give or take what chance does. Second
    comes by how much less that is than those that may be it bring their own ends nearer in the
    mean, third who they are.
    """
    rounds = [left / (1.0 + gained) for left, gained in zip(lefts, gains, strict=True)]
    ending, most, left = latest(rounds), max(rounds), max(lefts)
    num = len(ending)
    mean = sum([gains[b] for b in ending]) / num
    variance = max(0.0, sum([squares[b] for b in ending]) / num - mean * mean)
    # Sums that scatter like normal ones: the least of them lies behind their mean by what the root
    # of the number of rounds scatters, times the largest of so many normals.
    last = left / most - 1.0 - _largest(num) * (variance / most) ** 0.5
    return last, sum([left / rounds[b] for b in ending]) / num - 1.0 - last, ending


def latest(rounds: Sequenced[float]) -> list[int]:
    """The texts that may end last: they have so many rounds to go."""
    most = max(rounds)
    least = most - CHANCE * most**0.5
    return [b for b, own in enumerate(rounds) if own >= least]


@lru_cache(maxsize=1024)
def _largest(num: int) -> float:
    """The largest of so many normal numbers in the mean (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


def _square(survival: Sequenced[float]) -> float:
    """The square of how many tokens are kept, in the mean."""
    return sum((2 * i + 1) * chance for i, chance in enumerate(survival))


def certain(
    times: Times,
    chances: Sequenced[Sequenced[float]],
    lefts: Sequenced[float] = (),
) -> Plan | None:
    """How much to take of each text's certain offer, whose tokens survive with these chances.

    A token is worth its chance and costs a row, whichever text it is of; chances fall along an
    offer, so the best so many of all are each text's first ones. Texts that share one list of
    chances are weighed together: along a straight piece of the curve the best is at an end.
    `lefts` are the tokens that each text has to make, where the one that ends last counts.
    """
    alike: dict[int, list[int]] = {}
    for b, own in enumerate(chances):
        if own and own[0] >= LEAST:
            alike.setdefault(id(own), []).append(b)
    steps = [
        (chance, members)
        for members in alike.values()
        for chance in chances[members[0]]
        if chance >= LEAST
    ]
    if not steps:
        return None
    if len(alike) > 1:
        steps.sort(key=itemgetter(0), reverse=True)
    room, left = max(1, times.most - times.texts), sum(len(members) for _, members in steps)
    curve, last = times.curve, len(times.curve) - 2
    beside_s = times.plain_s - curve[times.texts]
    tokens, rows, seconds = float(times.texts), 0, times.plain_s
    best, best_rows, best_rate, best_s = 0, 0, 0.0, 0.0
    along: list[tuple[float, float]] = []
    for taken, (chance, members) in enumerate(steps, start=1):
        num = min(len(members), room - rows)
        if not num or tokens + min(left, room - rows) * chance <= best_rate * seconds:
            break
        first = times.texts + rows
        ends = [*times.turns(first, first + num), first + num] if num > 1 else [first + 1]
        before = tokens - first * chance
        for end in ends:
            tokens = before + end * chance
            # As `target_s` of whole rows.
            seconds = max(times.plain_s, beside_s + curve[min(end, last)])
            along.append((tokens, seconds))
            if tokens > best_rate * seconds:
                best, best_rows = taken, end - times.texts
                best_rate, best_s = tokens / seconds, seconds
        rows += num
        left -= num
    lengths = [0] * times.texts
    for _, members in steps[:best]:
        for b in members[:best_rows]:
            lengths[b] += 1
        best_rows -= len(members)
    plan = Plan(None, max(lengths), best_rate, best_s, tuple(lengths))
    if times.texts == 1:
        plan.along = along[:best]
    if lefts:
        gains, squares = [0.0] * times.texts, [0.0] * times.texts
        for b, length in enumerate(lengths):
            if length:
                taken = chances[b][:length]
                gains[b], squares[b] = sum(taken), _square(taken)
        plan.last, plan.lag, plan.ending = least_of(lefts, gains, squares)
    return plan
