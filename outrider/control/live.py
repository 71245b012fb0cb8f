"""What rounds take here and now: medians of the last few, which no single slow round turns."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np

from outrider.control.costs import Costs

REMEMBERED = 7
ROW_SHARE = 0.01
"""What a further row is taken to cost, of a round of one row, before it was measured: little, so
that it is tried and then known."""
CONTEXT = 512
"""Contexts up to this length are of one class; then each doubling makes a class."""
EVERY = 8
"""Rounds after which the curve is drawn anew."""


class Recent:
    """The median of the last few values; asked for often, made when one was added."""

    __slots__ = ("_last", "_median", "count")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)
        self._median: float | None = None
        self.count = 0

    def add(self, value: float) -> None:
        """One more."""
        self._last.append(value)
        self._median = None
        self.count += 1

    @property
    def value(self) -> float:
        """The median; only once there is a value."""
        if self._median is None:
            self._median = median(self._last)
        return self._median


def context_class(tokens: int) -> int:
    """Which class a context of so many tokens is of, from 0."""
    return (tokens // CONTEXT).bit_length()


def _place(rows: int) -> int:
    """Rows that share a cell: each number up to 16, then in steps of a quarter."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return rows // step * step


class LiveRounds:
    """Seconds of the target's part of a round (score, verify, commit), by rows and context.

    Args:
        costs: measured before; None where all comes from the rounds themselves.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs
        self._plain: dict[tuple[int, int], Recent] = {}
        self._all: dict[tuple[int, int], Recent] = {}
        self._curves: dict[int, list[float]] = {}
        self._since = 0
        self.prompt_token_s: float | None = None if costs is None else costs.prompt_token_s

    def saw(self, texts: int, rows: int, context: int, seconds: float) -> None:
        """A round of `texts` texts scored `rows` rows in all."""
        cell = (context, _place(rows))
        self._all.setdefault(cell, Recent()).add(seconds)
        if rows == texts:
            self._plain.setdefault((context, _place(texts)), Recent()).add(seconds)
        self._since += 1
        if self._since >= EVERY or self._all[cell].count <= 2:
            self._since = 0
            self._curves.pop(context, None)

    def plain_count(self, texts: int, context: int) -> int:
        """Plain rounds of about so many texts that were timed in this class of contexts."""
        return sum(
            found.count
            for (own, num), found in self._plain.items()
            if own == context and texts <= 2 * num <= 4 * texts
        )

    def plain_s(self, texts: int, context: int) -> float | None:
        """Seconds of a plain round; None where none was ever timed, nor measured before."""
        found = self._plain.get((context, _place(texts)))
        if found is not None:
            return found.value
        curve = self.curve(context, texts)
        return None if curve is None else curve[texts]

    def most_rows(self, context: int) -> int | None:
        """The most rows of a round timed with contexts of this class, or measured before."""
        seen = [place for own, place in self._all if own == context]
        if self._costs is not None:
            seen += [one.rows for one in self._costs.forwards]
        return max(seen, default=None)

    def curve(self, context: int, rows: int) -> list[float] | None:
        """Seconds by rows, at least up to `rows`; entry 0 is that of one row.

        Straight lines between the cells known, and never down.
        """
        known = self._curves.get(context)
        if known is None or len(known) <= rows:
            known = self._drawn(context, max(rows, 64 if known is None else 2 * len(known)))
            if known is None:
                return None
            self._curves[context] = known
        return known

    def _drawn(self, context: int, rows: int) -> list[float] | None:
        cells = {place: one.value for (own, place), one in self._all.items() if own == context}
        if not cells:
            return self._elsewhere(context, rows)
        places = sorted(cells)
        heights = [cells[place] for place in places]
        base = heights[0] / (1 + ROW_SHARE * (places[0] - 1))
        if self._costs is not None:
            cells = self._filled(cells, rows)
            places = sorted(cells)
            heights = [cells[place] for place in places]
        else:
            more = rows + 1 - places[-1]
            if more > 0:
                row_s = ROW_SHARE * base
                if len(places) > 1:
                    row_s = max(row_s, (heights[-1] - heights[0]) / (places[-1] - places[0]))
                places.append(rows + 1)
                heights.append(heights[-1] + more * row_s)
        drawn = np.interp(np.arange(rows + 1), places, heights)
        return np.maximum.accumulate(drawn).tolist()

    def _filled(self, cells: dict[int, float], rows: int) -> dict[int, float]:
        """Cells not seen yet, from the costs measured before, scaled to what is seen."""
        assert self._costs is not None
        scale = float(np.median([cells[n] / self._costs.score_s(n) for n in cells]))
        other = {place: scale * self._costs.score_s(place) for place in (1, 2, 4, 8, 16, 32, rows)}
        return other | cells

    def _elsewhere(self, context: int, rows: int) -> list[float] | None:
        """The curve of the nearest class of contexts, or of what was measured before."""
        others = sorted({own for own, _ in self._all}, key=lambda own: abs(own - context))
        if others:
            return self.curve(others[0], rows)
        if self._costs is None:
            return None
        return [self._costs.score_s(max(1, n)) for n in range(rows + 1)]


class LiveDraft:
    """Seconds of one drafter's levels, and of the tokens it has to read first.

    Args:
        name: of the drafter.
        costs: measured before.
    """

    def __init__(self, name: str, costs: Costs | None = None) -> None:
        self._known = None if costs is None else costs.drafts.get(name)
        self._levels: dict[int, Recent] = {}
        self._prompt = Recent()

    def saw(self, texts: int, levels: int, seconds: float) -> None:
        """A round of `texts` texts that read no more than the last round left."""
        if levels:
            self._levels.setdefault(_place(texts), Recent()).add(seconds / levels)

    def saw_prompt(self, tokens: int, seconds: float) -> None:
        """So many tokens were read beside, or ahead of, a round."""
        self._prompt.add(max(0.0, seconds) / tokens)

    @property
    def count(self) -> int:
        """Rounds timed."""
        return sum(found.count for found in self._levels.values())

    def level_s(self, texts: int, plain_s: float) -> float:
        """Seconds of a level for so many texts; a tenth of a plain round where nothing is known."""
        found = self._levels.get(_place(texts))
        if found is not None:
            return found.value
        if self._levels:
            near = min(self._levels, key=lambda num: abs(num - texts))
            return self._levels[near].value * max(1.0, (texts / near) ** 0.5)
        if self._known is not None:
            return self._known.level_s + (texts - 1) * self._known.node_s
        return 0.1 * plain_s

    def prompt_token_s(self, guess: float) -> float:
        """Seconds of each token that it has to read."""
        if self._prompt.count:
            return self._prompt.value
        return guess if self._known is None else self._known.prompt_token_s
