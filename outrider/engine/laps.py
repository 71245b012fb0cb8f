"""Laps: where a round's time goes."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Literal, Self

from outrider.types import SpeculativeMetrics

Stage = Literal["draft_s", "score_s", "verify_s", "commit_s"]


class Laps:
    """Adds the time since the last lap to one stage of the metrics."""

    def __init__(self, metrics: SpeculativeMetrics) -> None:
        self._metrics = metrics
        self._started = self._last = 0.0

    def __enter__(self) -> Self:
        self._started = self._last = time.perf_counter()
        return self

    def __call__(self, stage: Stage) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        setattr(self._metrics, stage, getattr(self._metrics, stage) + now - self._last)
        self._last = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.wall_s += time.perf_counter() - self._started
