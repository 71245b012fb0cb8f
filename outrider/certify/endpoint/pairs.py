"""Two sets of texts of the same prompts: evidence, at any time, that their laws are two."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.certify.bets import Interval, Means, Wealth
from outrider.certify.endpoint.wire import Name

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LOOKS = (
    "likeliest token",
    "place by probability, 1",
    "place by probability, 2",
    "place by id, 1",
    "place by id, 2",
    "place of neighbours",
    "came before",
    "length",
    "likelier with speculation",
    "likelier with speculation, after this one",
)
"""What is looked at in each text; the last two learn where the texts differed so far."""
FITS = {
    "likeliest token": (
        "texts too sure: temperature or a draft's likeliest token kept",
        "too flat",
    ),
    "came before": ("penalties ignored or told late", "penalties counted twice"),
    "length": ("an end of text passed over", "texts cut short"),
}
"""What a look that is too high, or too low, is a sign of."""
STAKES = tuple(sign * size for size in (0.95, 0.5, 0.25, 0.12, 0.06, 0.03) for sign in (1, -1))
"""Means over texts vary little, so that much may be set on each."""
BOLDEST = 0.7
CONTEXTS, WIDTH = 128, 512
"""Tokens before and tokens, up to collisions, that are told apart."""
NONE = -1
SHY, FEW = 8.0, 4.0
"""Observations that a difference, and a law, are taken to be nothing by."""
GROWN = 1.25
"""What is learned is looked through anew when there is so much more of it."""


def coded(tokens: Sequence[Name], length: int) -> IntArray:
    """A text as small numbers `[L]`, -1 behind its end; the same token has the same one."""
    codes = [_code(token, WIDTH) for token in tokens[:length]]
    return np.array(codes + [NONE] * (length - len(codes)), dtype=np.int64)


def _code(token: Name, width: int) -> int:
    return zlib.crc32(str(token).encode()) % width


class Habits:
    """How often each token came after each, on both sides; and what can be looked at with that."""

    def __init__(self) -> None:
        self._counts_2CW = np.zeros((2, CONTEXTS, WIDTH))
        self._seen = self._looked = 0.0
        self._look()

    def learn(self, on_NL: IntArray, off_NL: IntArray) -> None:
        """Takes in texts that have been bet on."""
        for counts_CW, texts_NL in zip(self._counts_2CW, (on_NL, off_NL), strict=True):
            there_NL = texts_NL != NONE
            np.add.at(counts_CW, (_before(texts_NL)[there_NL], texts_NL[there_NL]), 1)
            self._seen += there_NL.sum()
        if self._seen > GROWN * self._looked:
            self._look()

    def _look(self) -> None:
        self._looked = self._seen
        both_CW = self._counts_2CW.sum(0)
        general_W = (both_CW.sum(0) + 1) / (both_CW.sum() + WIDTH)
        law_CW = both_CW + FEW * general_W
        law_CW /= law_CW.sum(1, keepdims=True)
        rows_C1 = np.arange(CONTEXTS)[:, None]
        order_CW = np.argsort(-law_CW, axis=1, kind="stable")
        sorted_CW = law_CW[rows_C1, order_CW]
        self._by_mass_CW = np.empty_like(law_CW)
        self._by_mass_CW[rows_C1, order_CW] = sorted_CW.cumsum(1) - sorted_CW / 2
        self._by_id_CW = law_CW.cumsum(1) - law_CW / 2
        self._likeliest_C = order_CW[:, 0]
        on_CW, off_CW = self._counts_2CW
        self._apart_CW = (on_CW - off_CW) / (both_CW + SHY)
        on_W, off_W = on_CW.sum(0), off_CW.sum(0)
        self._apart_W = (on_W - off_W) / (on_W + off_W + SHY)

    def likely(self, texts_NL: IntArray) -> IntArray:
        """What comes most often in the place of each token."""
        return self._likeliest_C[_before(texts_NL)]

    def copy(self) -> Habits:
        """One that learns by itself from now on."""
        return copy.deepcopy(self)

    def looks(self, texts_NL: IntArray) -> FloatArray:
        """Means over each text's tokens `[N, F]`, each within [-1/2, 1/2]."""
        there_NL = texts_NL != NONE
        at = _before(texts_NL), np.where(there_NL, texts_NL, 0)
        turn_NL = np.cos(np.pi * self._by_id_CW[at])
        neighbours_NL = np.zeros_like(turn_NL)
        neighbours_NL[:, 1:] = turn_NL[:, 1:] * turn_NL[:, :-1]
        same_NLL = texts_NL[:, :, None] == texts_NL[:, None, :]
        again_NL = np.tril(same_NLL, -1).any(2)
        columns = [
            (at[1] == self._likeliest_C[at[0]]) - 0.5,
            *(np.cos(np.pi * wave * self._by_mass_CW[at]) / 2 for wave in (1, 2)),
            *(np.cos(np.pi * wave * self._by_id_CW[at]) / 2 for wave in (1, 2)),
            neighbours_NL / 2,
            again_NL - 0.5,
            there_NL - 0.5,
            self._apart_W[at[1]] / 2,
            self._apart_CW[at] / 2,
        ]
        looked_NLF = np.stack(columns, 2)
        keep_NLF = there_NL[:, :, None] | (np.array(LOOKS) == "length")
        return np.where(keep_NLF, looked_NLF, 0.0).mean(1)


def _before(texts_NL: IntArray) -> IntArray:
    """What each token came after: the one before it, or the start."""
    before_NL = np.zeros_like(texts_NL)
    before_NL[:, 1:] = texts_NL[:, :-1] % (CONTEXTS - 1) + 1
    return before_NL


class Paired:
    """Bets that texts of two sides, made of the same prompts, have different laws.

    If they have one law, each look has the same mean on both sides, given all that came before,
    so their difference is a payoff with a mean of 0, whatever the looks have learned from earlier
    texts, and whether or not the two sides share their noise.

    Sources: Podkopaev and Ramdas, arXiv 2302.14250 (betting on a learned difference); Shekhar and
    Ramdas, arXiv 2112.09162 (two samples by betting).

    Args:
        alpha: the chance of a false alarm, and of an interval that misses.
        horizon: pairs at which intervals are to be narrowest.
    """

    def __init__(self, alpha: float, horizon: int, habits: Habits | None = None) -> None:
        self._alpha = alpha
        self._wealth = Wealth(LOOKS, STAKES)
        self._means = Means(LOOKS, alpha, horizon, BOLDEST)
        self.habits = Habits() if habits is None else habits
        self.pairs = 0

    def read(self, on_NL: IntArray, off_NL: IntArray) -> FloatArray:
        """Takes in pairs of texts; returns what each paid `[N, F]`."""
        payoffs_NF = self.habits.looks(on_NL) - self.habits.looks(off_NL)
        self._wealth.bet(payoffs_NF)
        self._means.add(payoffs_NF)
        self.habits.learn(on_NL, off_NL)
        self.pairs += len(on_NL)
        return payoffs_NF

    @property
    def value(self) -> float:
        """The largest e-value there was, looked at after every pair."""
        return self._wealth.most

    @property
    def against(self) -> bool:
        """Whether there are two laws; false alarms come with a chance of at most alpha."""
        return self.value >= 1 / self._alpha

    def intervals(self) -> dict[str, Interval]:
        """How far apart the two sides' means are."""
        return self._means.intervals()

    def suspect(self) -> str:
        """The look that says most."""
        logs = self._wealth.logs
        return max(logs, key=lambda name: logs[name])


def fits(look: str, mean: float) -> str | None:
    """What a look that differs so much is a sign of; None where it is a sign of anything."""
    high, low = FITS.get(look, (None, None))
    return high if mean > 0 else low


def stacked(texts: Iterable[IntArray]) -> IntArray:
    """Coded texts as one array `[N, L]`."""
    return np.stack(list(texts))
