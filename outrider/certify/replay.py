"""Every choice noise can make, one path at a time: undecided uniforms, and races of exponentials.

A noise address is one undecided number. Asking it a question splits what it may still be and both
sides are visited; an address asked again answers within what it was left with. So a misuse of
addresses shows as bias, in exact fractions, and nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias, TypeVar

from outrider.decoding.theory import LawRow, Number

Address: TypeAlias = tuple[int, int, int]
"""(stream, anchor, index)."""
T = TypeVar("T")
UNIT = Fraction(0), Fraction(1)
_Point: TypeAlias = tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A simplex of exponentials, scaled to sum 1, and its share of all of them."""

    mass: Fraction
    corners: tuple[_Point, ...]


class Replay:
    """Replays one script of decisions and continues it with first choices.

    Attributes:
        trace: decisions met so far; True is the side below the cut.
    """

    def __init__(self, script: list[bool], grid: int | None) -> None:
        self.trace: list[bool] = []
        self._script = script
        self._grid = grid
        self._intervals: dict[Address, tuple[Fraction, Fraction]] = {}
        self._cells: dict[Address, list[_Cell]] = {}

    @property
    def weight(self) -> Fraction:
        """Probability of the path so far: what its addresses were left with."""
        weight = Fraction(1)
        for low, high in self._intervals.values():
            weight *= high - low
        for cells in self._cells.values():
            weight *= sum((cell.mass for cell in cells), start=Fraction(0))
        return weight

    def uniform(self, stream: int, anchor: int, index: int) -> Undecided:
        """The uniform at an address, as far as it is decided."""
        return Undecided(self, (stream, anchor, index))

    def below(self, address: Address, bound: Number, *, strict: bool) -> bool:
        """Whether the address's uniform is below (or, not strict, at) `bound`."""
        # Fractions are made of fractions slowly, and nearly all bounds are fractions.
        cut = bound if isinstance(bound, Fraction) else Fraction(bound)
        if self._grid is not None:
            steps = cut * self._grid
            cut = Fraction(math.ceil(steps) if strict else math.floor(steps) + 1, self._grid)
        low, high = self._intervals.get(address, UNIT)
        if cut <= low:
            return False
        if cut >= high:
            return True
        taken = self._choose()
        self._intervals[address] = (low, cut) if taken else (cut, high)
        return taken

    def race(self, address: Address, law: LawRow, count: int) -> tuple[int, ...]:
        """The first `count` tokens by E / law, E one exponential per token at the address.

        It is the order of log law + G with the Gumbel noise G = -log E. Exponentials divided by
        their sum are uniform over a simplex, so each comparison cuts a polytope by a plane.
        """
        order: list[int] = []
        runners = [token for token, mass in enumerate(law) if mass > 0]
        while runners and len(order) < count:
            first = runners[0]
            for other in runners[1:]:
                if self._sooner(address, other, first, law):
                    first = other
            order.append(first)
            runners.remove(first)
        return tuple(order)

    def _sooner(self, address: Address, left: int, right: int, law: LawRow) -> bool:
        """Whether E[left] / law[left] < E[right] / law[right]."""
        weights = Fraction(law[right]), Fraction(law[left])
        below: list[_Cell] = []
        above: list[_Cell] = []
        for cell in self._cells.get(address) or [_whole(len(law))]:
            _cut(cell, left, right, weights, below, above)
        if not below or not above:
            return bool(below)
        taken = self._choose()
        self._cells[address] = below if taken else above
        return taken

    def _choose(self) -> bool:
        place = len(self.trace)
        taken = self._script[place] if place < len(self._script) else True
        self.trace.append(taken)
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
        if self.scale == 1:
            return self.replay.below(self.address, bound, strict=strict)
        if self.scale == 0:
            return bound > 0 if strict else bound >= 0
        return self.replay.below(self.address, bound / self.scale, strict=strict)


def every_path(run: Callable[[Replay], T], grid: int | None = None) -> Iterator[tuple[Replay, T]]:
    """Every path of `run` once, depth first: the last decision still open is turned over next."""
    script: list[bool] = []
    while True:
        replay = Replay(script, grid)
        yield replay, run(replay)
        script = replay.trace
        while script and not script[-1]:
            script.pop()
        if not script:
            return
        script[-1] = False


def _whole(width: int) -> _Cell:
    corners = tuple(tuple(Fraction(int(i == j)) for j in range(width)) for i in range(width))
    return _Cell(Fraction(1), corners)


def _cut(
    cell: _Cell,
    left: int,
    right: int,
    weights: tuple[Fraction, Fraction],
    below: list[_Cell],
    above: list[_Cell],
) -> None:
    """Cuts a simplex where `weights` balance two coordinates, one mixed edge at a time."""
    sides = [weights[0] * c[left] - weights[1] * c[right] for c in cell.corners]
    low, high = min(sides), max(sides)
    if low >= 0 or high <= 0:
        (above if low >= 0 else below).append(cell)
        return
    a, b = sides.index(low), sides.index(high)
    share = -low / (high - low)
    middle = tuple(
        x + share * (y - x) for x, y in zip(cell.corners[a], cell.corners[b], strict=True)
    )
    for moved, part in ((b, share), (a, 1 - share)):
        corners = (*cell.corners[:moved], middle, *cell.corners[moved + 1 :])
        _cut(_Cell(cell.mass * part, corners), left, right, weights, below, above)
