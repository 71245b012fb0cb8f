"""Evidence one may look at after every observation: wealth won against a null, and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SMALL_STAKES = tuple(sign / 2**i for i in range(1, 7) for sign in (1, -1))
"""Shares of the wealth set on payoffs in [-1, 1], for either side."""
RATIO_STAKES = 0.9, 0.25, 0.05
"""Shares set on a named alternative, which may hold at every token or at some of them."""
MOST = 50.0
"""A payoff beyond this counts as this: one token at the edge of a cut-off decides nothing."""


class Wealth:
    """A start of 1, spread over payoffs and stakes, whose mean never grows under the null.

    Every account holds product(1 + stake * payoff). As payoffs have a mean of 0, given what came
    before, the mean of all accounts exceeds 1 / alpha at any time with a chance of at most alpha,
    however often one looks and whenever one stops. A likelihood ratio r of some alternative is
    the payoff r - 1, whose stake is the share of tokens that the alternative is tried on.

    Sources: Ville 1939; Waudby-Smith and Ramdas, JRSS B 2024, arXiv 2010.09686, section 4.

    Args:
        names: of the payoffs.
        stakes: shares of an account that are set each time; 1 + stake * payoff stays above 0.
    """

    def __init__(self, names: Sequence[str], stakes: Sequence[float] = SMALL_STAKES) -> None:
        self.names = tuple(names)
        self._stakes_L = np.asarray(stakes)
        self._log_FL = np.zeros((len(self.names), len(stakes)))
        self._peak_FL, self._top = self._log_FL, math.log(max(1, self._log_FL.size))
        self._path: list[FloatArray] = []
        self.most = 1.0

    def bet(self, payoffs_NF: FloatArray) -> None:
        """Takes N observations in their order; a payoff that is no number does not count."""
        if not self.names or not len(payoffs_NF):
            return
        paid_NF = np.nan_to_num(payoffs_NF, nan=0.0, posinf=MOST).clip(max=MOST)
        steps_NFL = np.log1p(paid_NF[:, :, None] * self._stakes_L)
        logs_NFL = self._log_FL + steps_NFL.cumsum(0)
        self._log_FL = logs_NFL[-1]
        # Mid-way looks count too: the bound is on the largest of all times.
        tops_N = np.logaddexp.reduce(logs_NFL.reshape(len(logs_NFL), -1), axis=1)
        means_N = np.exp(tops_N.clip(max=700.0)) / self._log_FL.size
        if tops_N.max() > self._top:
            self._peak_FL, self._top = logs_NFL[tops_N.argmax()], float(tops_N.max())
        self._path.append(np.maximum.accumulate(means_N).clip(min=self.most))
        self.most = float(self._path[-1][-1])

    @property
    def path(self) -> FloatArray:
        """`most` after each observation."""
        return np.concatenate(self._path) if self._path else np.empty(0)

    @property
    def value(self) -> float:
        """The mean of all accounts now."""
        if not self.names:
            return 1.0
        top = float(np.logaddexp.reduce(self._log_FL, axis=None))
        return math.exp(min(700.0, top)) / self._log_FL.size

    @property
    def logs(self) -> dict[str, float]:
        """The log of each payoff's own accounts, a mean over stakes, when there was `most`.

        What refuted the null is among those, whatever became of it afterwards.
        """
        per_F = np.logaddexp.reduce(self._peak_FL, axis=1) - math.log(len(self._stakes_L))
        return dict(zip(self.names, per_F.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Interval:
    """What a mean may be, at a stated confidence, at every time at once."""

    mean: float
    low: float
    high: float

    @property
    def most(self) -> float:
        """The largest distance from 0 that is left."""
        return max(abs(self.low), abs(self.high))

    def meets(self, other: Interval) -> bool:
        """Whether the two means may be one."""
        return self.low <= other.high and other.low <= self.high


class Means:
    """Intervals for the means of F payoffs in [-1, 1], valid at any time and for all together.

    Source: the predictable plug-in empirical Bernstein sequence of Waudby-Smith and Ramdas, JRSS B
    2024, arXiv 2010.09686, theorem 2.

    Args:
        names: of the payoffs.
        alpha: the chance that any interval ever misses its mean.
        horizon: observations at which intervals are to be narrowest; they are valid at any number.
        boldest: the largest stake; more of it suits payoffs that vary little.
    """

    def __init__(
        self, names: Sequence[str], alpha: float, horizon: int, boldest: float = 0.5
    ) -> None:
        self.names, self._boldest = tuple(names), boldest
        self._horizon = horizon
        num = len(self.names)
        self._log = math.log(2 * max(1, num) / alpha)
        self.count = 0
        self._sum_F, self._square_F = np.zeros(num), np.zeros(num)
        self._stake_F, self._drawn_F, self._cost_F = np.zeros(num), np.zeros(num), np.zeros(num)

    def add(self, payoffs_NF: FloatArray) -> None:
        """Takes N observations in their order."""
        # From [-1, 1] to [0, 1], where the theorem stands.
        at_NF = (np.nan_to_num(payoffs_NF) + 1) / 2
        counts_N1 = self.count + np.arange(1, len(at_NF) + 1)[:, None]
        upto_NF = self._sum_F + at_NF.cumsum(0)
        means_NF = (upto_NF + 0.5) / (counts_N1 + 1)
        before_NF = np.vstack([((self._sum_F + 0.5) / (self.count + 1))[None], means_NF[:-1]])
        squares_NF = self._square_F + ((at_NF - means_NF) ** 2).cumsum(0)
        spread_NF = (squares_NF + 0.25) / (counts_N1 + 1)
        known_NF = np.vstack([((self._square_F + 0.25) / (self.count + 1))[None], spread_NF[:-1]])
        stakes_NF = np.sqrt(2 * self._log / (known_NF * self._horizon)).clip(max=self._boldest)
        self._stake_F = self._stake_F + stakes_NF.sum(0)
        self._drawn_F = self._drawn_F + (stakes_NF * at_NF).sum(0)
        toll_NF = (-np.log1p(-stakes_NF) - stakes_NF) / 4
        self._cost_F = self._cost_F + (4 * (at_NF - before_NF) ** 2 * toll_NF).sum(0)
        self._sum_F, self._square_F = upto_NF[-1], squares_NF[-1]
        self.count += len(at_NF)

    def intervals(self) -> dict[str, Interval]:
        """One of each payoff; before any observation they say nothing."""
        if self.count == 0:
            return {name: Interval(0.0, -1.0, 1.0) for name in self.names}
        centre_F = 2 * self._drawn_F / self._stake_F - 1
        reach_F = 2 * (self._log + self._cost_F) / self._stake_F
        found = zip(self.names, 2 * self._sum_F / self.count - 1, centre_F, reach_F, strict=True)
        return {
            name: Interval(float(mean), float(max(-1, mid - reach)), float(min(1, mid + reach)))
            for name, mean, mid, reach in found
        }


def needed(num_payoffs: int, alpha: float, within: float) -> int:
    """Observations after which an interval reaches half of `within` to either side.

    The rest is room for the mean that is seen; payoffs vary by a quarter at most.
    """
    log = math.log(2 * max(1, num_payoffs) / alpha)
    return math.ceil(2 * log * 0.25 / (within / 2) ** 2)
