"""What rounds take here and now: low medians of the last few, believed once there are three.

Noise is slow, never fast. So of one or two values the least counts, a first slow one is bounded by
what was to be expected, and what more rows took is a bound for fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate, combinations, repeat
from statistics import median

from outrider.control.costs import Costs

REMEMBERED = 7
AGE = 512
"""Rounds after which a value is dropped when there is a newer one, and a cell is one value less
certain when there is none."""
BELIEVED = 3
"""Values from which on they are taken at their word."""
DOUBT = 3.0
"""A single value is worth at most so many times what was expected, two this often as much."""
SPREAD = 1.25
"""Fewer rows cost at most so many times what more rows took: four may be faster than one."""
ROW_SHARE = 0.01
"""What a further row is taken to cost, of a round of one row, before it was measured: little, so
that it is tried and then known."""
CONTEXT = 512
"""Contexts up to this length are of one class; then each doubling makes a class."""
LEAST_OF_LEVEL = 0.4
"""Share of what rounds take by their levels that a level is taken to cost at least; the rest is the
round's, however deep."""
USUAL = 4
"""Levels over which what a drafter takes in any round is spread."""
EVERY = 32
"""Rounds after which the curve is drawn anew where something in it has moved; of what was seldom
timed it is at once."""
MOVED = 0.02
"""Share by which a cell's value has to differ for that from what it was."""
FIXED = 0.5
"""Share of a plain round that it is taken to take at least however many texts are left."""
AT_LAST = 64
"""Rounds after which it is drawn anew in any case: values grow old."""


class Recent:
    """The last few values and the rounds they are of; asked for often, worked out when one comes.

    Attributes:
        count: values there ever were.
        at: the round of the last one.
        drawn: the value that was told last, a curve's that was drawn through it.
    """

    __slots__ = ("_last", "_value", "at", "count", "drawn")

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._value: float | None = None
        self.count = self.at = 0
        self.drawn = 0.0

    def add(self, value: float, now: int) -> None:
        """One more; those of long ago are forgotten."""
        while self._last and now - self._last[0][0] > AGE:
            self._last.popleft()
        self._last.append((now, value))
        self._value = None
        self.count += 1
        self.at = now

    @property
    def value(self) -> float:
        """The low median, of few values the least; only once there is one."""
        if self._value is None:
            values = sorted([value for _, value in self._last])
            self._value = values[0 if self.few else (len(values) - 1) // 2]
        return self._value

    @property
    def believed(self) -> bool:
        """Whether there are enough."""
        return len(self._last) >= BELIEVED

    @property
    def few(self) -> bool:
        """Whether each one more changes what may be thought of them."""
        return len(self._last) <= BELIEVED

    @property
    def moved(self) -> bool:
        """Whether it is another value than was told."""
        return self.few or abs(self.value - self.drawn) > MOVED * self.drawn

    def worth(self, guess: float, now: int) -> float:
        """The value, within what may be thought of few or old ones where `guess` was expected."""
        trust = len(self._last) - (now - self.at) // AGE
        return self.value if trust >= BELIEVED else min(self.value, guess * DOUBT ** max(0, trust))


def context_class(tokens: int) -> int:
    """Which class a context of so many tokens is of, from 0."""
    return (tokens // CONTEXT).bit_length()


def _place(rows: int) -> int:
    """Rows that share a cell: each number up to 16, then in steps of a quarter."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return rows // step * step


class _Kind:
    """What is known of one kind of rounds.

    Attributes:
        cells, plain: what rounds took by their rows, and plain ones by their texts.
        plain_count, plain_at: how many plain ones, and the last of them.
        curve: seconds by rows; None where it is to be drawn.
        given_up: the round after which it was given up last.
        heard: cells that had values since it was looked which of them moved.
        most: the most rows that were timed, or measured before.
    """

    __slots__ = (
        "cells",
        "curve",
        "given_up",
        "heard",
        "most",
        "plain",
        "plain_at",
        "plain_count",
    )

    def __init__(self, most: int) -> None:
        self.cells: dict[int, Recent] = {}
        self.plain: dict[int, Recent] = {}
        self.plain_count = self.plain_at = self.given_up = 0
        self.curve: list[float] | None = None
        self.heard: set[Recent] = set()
        self.most = most

    def gives_up(self, cell: Recent, now: int) -> bool:
        """Whether the curve is to be drawn anew after a value of this cell."""
        if self.curve is None or cell.few:
            return True
        stood = now - self.given_up
        self.heard.add(cell)
        if stood < EVERY:
            return False
        moved = any(one.moved for one in self.heard)
        self.heard.clear()
        return moved or stood >= AT_LAST


class LiveRounds:
    """Seconds of the target's part of a round (score, verify, commit), by texts, rows and context.

    A kind of rounds is a class of contexts and an octave of texts; each has its curve over rows.

    Args:
        costs: measured before; None where all comes from the rounds themselves.

    Attributes:
        version: another one whenever something that is told here has changed.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._measured_rows = 0 if costs is None else max(one.rows for one in costs.forwards)
        self._now = 0
        self.version = 0
        self.prompt_token_s: float | None = None if costs is None else costs.prompt_token_s

    def saw(
        self, texts: int, rows: int, context: int, seconds: float, now: int, *, plain: bool
    ) -> None:
        """Round `now`, of `texts` texts, scored `rows` rows in all; `plain`: one of each text."""
        key, self._now = (context, texts.bit_length()), now
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(self._measured_rows)
        place = _place(rows)
        if place > kind.most:
            kind.most = place
            self.version += 1
        cell = kind.cells.get(place)
        if cell is None:
            cell = kind.cells[place] = Recent()
        cell.add(seconds, now)
        if plain:
            kind.plain_count += 1
            kind.plain_at = now
            own = kind.plain.setdefault(_place(texts), Recent())
            own.add(seconds, now)
            if own.moved:
                own.drawn = own.value
                self.version += 1
        if kind.gives_up(cell, now):
            kind.given_up, kind.curve = now, None
            kind.heard.clear()
            self.version += 1

    def plain_seen(self, texts: int, context: int) -> tuple[int, int]:
        """Plain rounds of this kind that were timed, and the last one."""
        kind = self._kinds.get((context, texts.bit_length()))
        return (0, 0) if kind is None else (kind.plain_count, kind.plain_at)

    def plain_s(self, texts: int, context: int) -> float | None:
        """Seconds of a plain round; None where none was ever timed, nor measured before."""
        curve = self.curve(texts, context, texts)
        if curve is None:
            return None
        kind = self._kinds.get((context, texts.bit_length()))
        found = None if kind is None else kind.plain.get(_place(texts))
        return curve[texts] if found is None else min(found.value, curve[texts])

    def fixed(self, texts: int, context: int) -> float:
        """The share of a plain round that it takes when a few texts are less, half at least."""
        if texts < 2:
            # There is nothing less.
            return FIXED
        whole_s = self.plain_s(texts, context)
        kinds = (self._kinds.get((context, n)) for n in range(texts.bit_length() - 1, 0, -1))
        fewer = next((kind.plain for kind in kinds if kind is not None and kind.plain), None)
        if whole_s is None or fewer is None:
            return FIXED
        few = min(fewer)
        rest_s = (texts * fewer[few].value - few * whole_s) / (texts - few)
        return min(max(rest_s / whole_s, FIXED), 1.0)

    def most_rows(self, texts: int, context: int) -> int:
        """The most rows of a round of this kind that was timed, or measured before."""
        kind = self._kinds.get((context, texts.bit_length()))
        return self._measured_rows if kind is None else kind.most

    def curve(self, texts: int, context: int, rows: int) -> list[float] | None:
        """Seconds by rows, at least up to `rows`; entry 0 is that of one row.

        Straight lines between the cells known, and never down.
        """
        return self._curve((context, texts.bit_length()), rows)

    def _curve(self, key: tuple[int, int], rows: int) -> list[float] | None:
        kind = self._kinds.get(key)
        if kind is None:
            # Another one's, and not to be kept: that one is drawn anew, and nearer ones come.
            return self._elsewhere(key, rows)
        known = kind.curve
        if known is None or len(known) <= rows:
            most = max(rows + rows // 8, 64)
            known = kind.curve = self._drawn(kind.cells, self._measured(key), most)
        return known

    def _drawn(
        self, cells: dict[int, Recent], measured: Callable[[int], float] | None, rows: int
    ) -> list[float]:
        places = sorted(cells)
        heights = [cells[place].value for place in places]
        for place, height in zip(places, heights, strict=True):
            cells[place].drawn = height
        least = heights[-1]
        for i in reversed(range(len(places))):
            heights[i] = min(heights[i], SPREAD * least)
            least = min(least, heights[i])
        line = _Line(places[0], heights[0], measured)
        for i, place in enumerate(places[1:], start=1):
            heights[i] = min(heights[i], cells[place].worth(line.at(place), self._now))
            if cells[place].believed:
                line.through(place, heights[i])
        table = dict(zip(places, heights, strict=True))
        more = [*(1, 2, 4, 8, 16, 32), rows] if measured is not None else list[int]()
        for place in (*more, rows + 1):
            if place not in table and (measured is not None or place > places[-1]):
                table[place] = line.at(place)
        return _through(sorted(table.items()), rows)

    def _measured(self, key: tuple[int, int]) -> Callable[[int], float] | None:
        """Seconds by rows as they were measured before, for texts and contexts in the middle."""
        costs, (context, octave) = self._costs, key
        if costs is None:
            return None
        texts, tokens = max(1, 3 << octave >> 2), 3 * CONTEXT << context >> 2

        def seconds(rows: int) -> float:
            drafted = max(0, rows - texts)
            beside = texts * costs.verify_text_s + drafted * costs.verify_row_s
            return costs.score_s(max(1, rows), texts, tokens) + beside

        return seconds

    def _elsewhere(self, key: tuple[int, int], rows: int) -> list[float] | None:
        """What was measured before, or the curve of the nearest kind: of as many texts first."""
        measured = self._measured(key)
        if measured is not None:
            return [measured(place) for place in range(rows + 1)]
        context, octave = key
        near = min(
            self._kinds,
            key=lambda own: (abs(own[1] - octave), abs(own[0] - context)),
            default=None,
        )
        return None if near is None else self._curve(near, rows)


def _through(points: list[tuple[int, float]], rows: int) -> list[float]:
    """Straight lines through the points, level before the first, and never down; up to `rows`."""
    place, height = points[0]
    drawn, top = [height] * (place + 1), height
    for far, end in points[1:]:
        num, step = far - place, (end - height) / (far - place)
        if end <= top:
            drawn += [top] * num
        else:
            line = [*accumulate(repeat(step, num - 1), initial=height)][1:]
            drawn += line if height >= top else [max(top, found) for found in line]
            drawn.append(end)
            top = end
        place, height = far, end
    return drawn[: rows + 1]


class _Line:
    """What rounds of more rows are expected to take, from those believed so far.

    The measured curve, scaled, where there is one; otherwise a straight line.
    """

    def __init__(self, place: int, height: float, measured: Callable[[int], float] | None) -> None:
        self._places, self._heights = [place], [height]
        self._measured = measured
        self._least = ROW_SHARE * height / (1 + ROW_SHARE * (place - 1))

    def through(self, place: int, height: float) -> None:
        """A further point."""
        self._places.append(place)
        self._heights.append(height)

    def at(self, place: int) -> float:
        """The height there."""
        if self._measured is not None:
            known = zip(self._places, self._heights, strict=True)
            found = median(height / max(self._measured(own), 1e-12) for own, height in known)
            return found * self._measured(place)
        width = self._places[-1] - self._places[0]
        slope = (self._heights[-1] - self._heights[0]) / width if width else 0.0
        return self._heights[-1] + (place - self._places[-1]) * max(self._least, slope)


class LiveDraft:
    """Seconds of one drafter's rounds, and of the tokens it has to read first.

    A round of so many levels takes so long before the first of them, and for each: told apart as
    soon as rounds of different depths were seen.

    Args:
        name: of the drafter.
        costs: measured before.
        beside: what is known of its chains, where this is of trees.
    """

    def __init__(
        self, name: str, costs: Costs | None = None, beside: LiveDraft | None = None
    ) -> None:
        self._beside = beside
        self._known = None if costs is None else costs.drafts.get(name)
        self._levels: dict[int, Recent] = {}
        self._rounds: dict[int, dict[int, Recent]] = {}
        self._lines: dict[int, tuple[int, float, float]] = {}
        self._prompt = Recent()

    def saw(self, texts: int, levels: int, seconds: float, now: int) -> None:
        """Round `now`, of `texts` texts, that read no more than the last round left."""
        if levels:
            place = _place(texts)
            if place not in self._levels:
                self._levels[place], self._rounds[place] = Recent(), {}
            self._levels[place].add(seconds / levels, now)
            depths = self._rounds[place]
            if levels not in depths:
                depths[levels] = Recent()
            depths[levels].add(seconds, now)

    def saw_prompt(self, tokens: int, seconds: float, now: int) -> None:
        """So many tokens were read beside, or ahead of, a round."""
        self._prompt.add(max(0.0, seconds) / tokens, now)

    def seconds(self, texts: int, plain_s: float, now: int) -> tuple[float, float]:
        """Seconds before the first level for so many texts, of trees for so many rows; of each.

        A tenth of a plain round for each where nothing is known.
        """
        place = _place(texts)
        found = self._levels.get(place)
        if found is not None and found.believed and now - found.at <= AGE:
            return self._line(place, found.value, now)
        others = [n for n, one in self._levels.items() if one.believed and n != place]
        if others:
            near = min(others, key=lambda num: abs(num - texts))
            guess = self._levels[near].value * max(1.0, (texts / near) ** 0.5)
        elif self._known is not None:
            guess = self._known.seconds(USUAL) / USUAL + (texts - 1) * self._known.node_s
        elif found is not None and found.believed:
            # Old, and nothing speaks against it; samples do, in time.
            guess = found.value
        elif self._beside is not None:
            guess = sum(self._beside.seconds(texts, plain_s, now))
        else:
            guess = 0.1 * plain_s
        return 0.0, guess if found is None else found.worth(guess, now)

    def _line(self, place: int, usual_s: float, now: int) -> tuple[float, float]:
        """From rounds of different depths; `usual_s` is what a level took lately, all told."""
        known = self._lines.get(place)
        if known is None or now - known[0] >= EVERY:
            cells = self._rounds[place].items()
            points = [(n, own.value) for n, own in cells if own.believed and now - own.at <= AGE]
            known = self._lines[place] = (now, *_line_through(points, usual_s))
        return known[1:]

    def prompt_token_s(self, guess: float) -> float:
        """Seconds of each token that it has to read."""
        guess = guess if self._known is None else self._known.prompt_token_s
        return self._prompt.worth(guess, self._prompt.at) if self._prompt.count else guess


def _line_through(points: list[tuple[int, float]], usual_s: float) -> tuple[float, float]:
    """Where seconds begin and how they grow by level, `usual_s` each at most: Theil and Sen's line.

    A depth timed on a quiet machine and one that was not may stand the wrong way round.
    """
    pairs = combinations(points, 2)
    slopes = [(above - below) / (high - low) for (low, below), (high, above) in pairs]
    if not slopes:
        return 0.0, usual_s
    level_s = min(max(median(slopes), LEAST_OF_LEVEL * usual_s), usual_s)
    return max(0.0, median(seconds - levels * level_s for levels, seconds in points)), level_s
