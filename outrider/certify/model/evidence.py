"""What texts say against the law they should have, and whose fault it looks like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.certify.bets import RATIO_STAKES, Interval, Means, Wealth
from outrider.certify.model.looks import looks
from outrider.certify.model.signatures import Category, Page, signatures

FORBIDDEN = "token that the law forbids"
POINTS = 200
"""Of a path that is kept for a report."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The alternative that fits best; of no known fault the number that is furthest off."""

    name: str
    category: Category
    log_e: float
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A text and what it added: the log-likelihood ratio of each fault, the sum of each look."""

    number: int
    tokens: tuple[int, ...]
    of_fault: NDArray[np.float64]
    of_look: NDArray[np.float64]


class Evidence:
    """Everything that is bet on the texts of one request's controls.

    Args:
        looked: names of what is looked at.
        alpha: the chance of a false alarm, and of an interval that misses.
        horizon: tokens at which intervals are to be narrowest.
        seed: of the points within each token's mass.
        near: logits closer than this may change places by rounding alone.

    Attributes:
        told: what each text added.
        edges: tokens just outside a cut-off, where rounding puts them; no fault is tried on them.
        asked: texts that were asked for, empty ones too: the next one's number.
        tokens: how many were looked at.
        read_tokens: how many came, those too that nothing is known about.
    """

    def __init__(
        self, looked: Sequence[str], alpha: float, horizon: int, seed: int, near: float = 0.0
    ) -> None:
        self._alpha, self._near = alpha, near
        self._looks, self._means = Wealth(looked), Means(looked, alpha, horizon)
        self._faults: Wealth | None = None
        self._known: dict[str, tuple[Category, bool]] = {}
        self._rng = np.random.default_rng(seed)
        self.told: list[Told] = []
        self.asked = self.tokens = self.read_tokens = self.edges = 0

    def read(self, page: Page, numbers: Sequence[int]) -> None:
        """Takes in some texts, which have these numbers."""
        looked_NF = looks(page, page.tokens(), self._rng.random(len(page.p_NV)))
        found = list(signatures(page))
        own_N = page.at(page.p_NV).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [one.probs_N.numpy() / own_N - 1 for one in found]
        # Where the law gives nothing no alternative is needed.
        ratios.append(np.where(own_N > 0, 0.0, np.inf))
        edges_N = page.edges(self._near).numpy()
        self.edges += int(edges_N.sum())
        # The law itself gives no such token, so that leaving them out favours no alternative.
        ratios_NS = np.where(edges_N[:, None], 0.0, np.stack(ratios, 1))
        if self._faults is None:
            self._faults = Wealth([*(one.name for one in found), FORBIDDEN], RATIO_STAKES)
            self._known = {one.name: (one.category, one.guessed) for one in found}
        judged_N = page.target.judged(page.texts).numpy()
        self._looks.bet(looked_NF[judged_N])
        self._means.add(looked_NF[judged_N])
        self._faults.bet(ratios_NS[judged_N])
        shown_NS = np.log1p(0.9 * np.nan_to_num(ratios_NS, nan=0.0, posinf=1e6))
        stop = 0
        for number, text in zip(numbers, page.texts, strict=True):
            start, stop = stop, stop + len(text.output)
            sums = (part[start:stop].sum(0) for part in (shown_NS, looked_NF))
            self.told.append(Told(number, text.output, *sums))
        self.tokens += int(judged_N.sum())
        self.read_tokens += stop

    @property
    def value(self) -> float:
        """The largest e-value there was: half is set on known faults, half on all others."""
        return max(self._looks.most, 1.0 if self._faults is None else self._faults.most) / 2

    @property
    def path(self) -> list[tuple[int, float]]:
        """`value` on the way: tokens that were looked at, and what it was then."""
        paths = [self._looks.path, *([] if self._faults is None else [self._faults.path])]
        return thinned(np.max(paths, axis=0) / 2)

    @property
    def against(self) -> bool:
        """Whether the law is refuted; false alarms come with a chance of at most alpha."""
        return self.value >= 1 / self._alpha

    def intervals(self) -> dict[str, Interval]:
        """How far each number that was looked at is from where it should be."""
        return self._means.intervals()

    def suspect(self) -> Suspect:
        """Whose fault it looks like: the known one that fits best, if it refutes the law itself."""
        faults = {} if self._faults is None else self._faults.logs
        known = {name: log_e for name, log_e in faults.items() if name in self._known}
        others = self._looks.logs | {name: faults[name] for name in faults if name not in known}
        name = max(known, key=lambda name: known[name], default="")
        other = max(others, key=lambda name: others[name])
        # A token that the law forbids refutes it at once, and says little about why.
        beats = other == FORBIDDEN or known.get(name, 0.0) >= others[other]
        if beats and known.get(name, 0.0) >= math.log(1 / self._alpha):
            category, guessed = self._known[name]
            return Suspect(name, category, known[name], guessed)
        return Suspect(other, "rule bias", others[other])

    def worst(self, name: str) -> Told:
        """The text that says most for a suspect."""
        faults = () if self._faults is None else self._faults.names
        if name in faults:
            column = faults.index(name)
            return max(self.told, key=lambda told: float(told.of_fault[column]))
        column, sign = self._looks.names.index(name), self.intervals()[name].mean
        return max(self.told, key=lambda told: float(np.sign(sign) * told.of_look[column]))


def within(intervals: Sequence[Interval], bound: float) -> bool:
    """Whether every mean is known to be within a bound of 0."""
    return all(interval.most <= bound for interval in intervals)


def thinned(path_N: NDArray[np.float64]) -> list[tuple[int, float]]:
    """Observations and the value after each, at `POINTS` places at most, the last one too."""
    places = np.unique(np.linspace(0, len(path_N) - 1, POINTS).round().astype(int))
    return [(int(i) + 1, float(path_N[i])) for i in places if len(path_N)]
