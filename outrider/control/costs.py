"""What a round costs on one machine: measured points, and the lines between them.

Nothing here times anything: `outrider.control.measure` fills these records, the planner reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from outrider.config import check_whole, shown
from outrider.errors import InvalidConfig

FORMAT = 1
"""Of the JSON; another one is not read."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Seconds of one forward of the target.

    Attributes:
        texts: texts that go through it together.
        rows: rows of all texts, each with its logits.
        context: tokens each text has in the cache, in the mean.
        seconds: the median of what was measured.

    Raises:
        InvalidConfig: numbers that no forward has.
    """

    texts: int
    rows: int
    context: int
    seconds: float

    def __post_init__(self) -> None:
        check_whole("texts", self.texts, 1)
        check_whole("rows", self.rows, 1)
        check_whole("context", self.context, 0)
        _check_seconds("seconds", self.seconds)
        if self.seconds == 0:
            raise InvalidConfig("seconds=0: a forward takes time; measure it with a finer clock")


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of drafting a round with one drafter.

    Attributes:
        round_s: of a round whatever is drafted; for a look-up all there is.
        level_s: of each level of the tree, or token of the chain, for one text.
        node_s: of each further node of a level: of more texts, or of siblings.
        prompt_token_s: of each token of a text that the drafter has not read yet.

    Raises:
        InvalidConfig: seconds that are none.
    """

    round_s: float = 0.0
    level_s: float = 0.0
    node_s: float = 0.0
    prompt_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("round_s", "level_s", "node_s", "prompt_token_s"):
            _check_seconds(name, getattr(self, name))

    def seconds(self, levels: int, nodes: int | None = None) -> float:
        """Of so many levels with so many nodes in all; a single chain where nodes are not given."""
        if levels == 0:
            return 0.0
        more = 0 if nodes is None else max(0, nodes - levels)
        return self.round_s + levels * self.level_s + more * self.node_s


@dataclass(frozen=True, slots=True)
class Costs:
    """A target's and its drafters' costs.

    Attributes:
        forwards: measured forwards of the target, at least one.
        drafts: drafters by the name that metrics call them.
        prompt_token_s: the target's seconds for each token of a prompt, read in chunks.
        verify_text_s: laws, rule, commit and text of a round, for each text.
        verify_row_s: the same for each drafted row more.

    Raises:
        InvalidConfig: no forward at all; seconds that are none.
    """

    forwards: tuple[ForwardCost, ...]
    drafts: Mapping[str, DraftCost] = field(default_factory=dict[str, DraftCost])
    prompt_token_s: float = 0.0
    verify_text_s: float = 0.0
    verify_row_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.forwards:
            raise InvalidConfig("costs without a forward of the target; measure at least one")
        for name in _REST:
            _check_seconds(name, getattr(self, name))

    def score_s(self, rows: int, texts: int = 1, context: int = 0) -> float:
        """Seconds of the target's forward of `rows` rows in all.

        Between measured points it is a straight line: over rows, then over contexts, then over
        texts. Beyond the last two the line goes on; it never falls below the nearest point there.
        """

        def at_context(points: Sequenced[ForwardCost]) -> float:
            return along([(one.rows, one.seconds) for one in points], rows)

        def at_texts(points: Sequenced[ForwardCost]) -> float:
            return along(_grouped(points, _context, at_context), context)

        return along(_grouped(self.forwards, _texts, at_texts), texts)

    def draft_s(self, drafter: str, levels: int, nodes: int | None = None) -> float:
        """Seconds of drafting so many levels, with so many nodes in all texts.

        Raises:
            InvalidConfig: a drafter that was not measured.
        """
        if levels == 0:
            return 0.0
        if drafter not in self.drafts:
            raise InvalidConfig(
                f"drafter {drafter!r} was not measured; known are {', '.join(self.drafts) or '-'}"
            )
        return self.drafts[drafter].seconds(levels, nodes)

    def round_s(
        self,
        drafter: str | None = None,
        *,
        levels: int = 0,
        nodes: int = 0,
        texts: int = 1,
        context: int = 0,
    ) -> float:
        """Seconds of a whole round; `levels` and `nodes` are of each text, no drafter is plain."""
        drafted = 0.0 if drafter is None else self.draft_s(drafter, levels, nodes * texts)
        rest = texts * (self.verify_text_s + nodes * self.verify_row_s)
        return drafted + self.score_s(texts * (1 + nodes), texts, context) + rest

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Costs:
        """The costs of `as_dict`.

        Raises:
            InvalidConfig: another format, or no costs at all.
        """
        try:
            if found["format"] != FORMAT:
                raise InvalidConfig(f"costs of format {found['format']}; {FORMAT} is read")
            return cls(
                tuple(ForwardCost(**one) for one in found["forwards"]),
                {name: DraftCost(**one) for name, one in found["drafts"].items()},
                **{name: float(found[name]) for name in _REST},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InvalidConfig):
                raise
            raise InvalidConfig(f"no costs: {error!r}; measure them anew") from error


_REST = ("prompt_token_s", "verify_text_s", "verify_row_s")


def _check_seconds(name: str, value: object) -> None:
    """Refuses what is no time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InvalidConfig(f"{name}={shown(value)}: seconds are due, a number from 0")


def along(points: Iterable[tuple[float, float]], x: float) -> float:
    """The height at `x` of the line through some points, with the median of those at one place.

    Beyond the ends the last piece goes on, but never down: noise must not make more work cheaper.
    """
    at: dict[float, list[float]] = {}
    for place, height in points:
        at.setdefault(place, []).append(height)
    line = [(place, median(heights)) for place, heights in sorted(at.items())]
    if len(line) == 1 or x <= line[0][0]:
        return line[0][1]
    for (x0, y0), (x1, y1) in pairwise(line):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = line[-2:]
    return y1 + max(0.0, y1 - y0) * (x - x1) / (x1 - x0)


def _grouped(
    points: Sequenced[ForwardCost],
    key: Callable[[ForwardCost], int],
    height: Callable[[Sequenced[ForwardCost]], float],
) -> list[tuple[float, float]]:
    return [(place, height(list(own))) for place, own in groupby(sorted(points, key=key), key)]


def _context(point: ForwardCost) -> int:
    return point.context


def _texts(point: ForwardCost) -> int:
    return point.texts
