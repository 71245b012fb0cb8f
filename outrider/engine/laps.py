"""Laps: where a round's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from outrider.sequence import Sequence
from outrider.types import SpeculativeMetrics, StageTimes

Stage = Literal["draft_s", "score_s", "verify_s", "commit_s"]


class Laps:
    """Adds the time since the last lap, at first since it was made, to one stage of the metrics.

    Each of the round's texts counts the whole round it took part in. Its wall time goes on to the
    end of the lap, so that what it counts is part of it. A lap that is broken off is no stage's.

    Attributes:
        times: the seconds of this round alone.
    """

    def __init__(self, metrics: SpeculativeMetrics, texts: Iterable[Sequence]) -> None:
        self.times = StageTimes()
        self._texts = tuple(texts)
        self._all = (metrics, *(text.stats for text in self._texts), self.times)
        self._last = time.perf_counter()

    def __call__(self, stage: Stage) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        for seconds in self._all:
            setattr(seconds, stage, getattr(seconds, stage) + now - self._last)
        for text in self._texts:
            text.stats.wall_s = now - text.started_s
        self._last = now

    def skip(self) -> None:
        """The time since the last lap is no stage's: whoever asks to be told of a round pays it."""
        self._last = time.perf_counter()
