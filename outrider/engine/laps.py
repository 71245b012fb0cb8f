"""Laps: where a round's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Self

from outrider.types import SpeculativeMetrics

Stage = Literal["draft_s", "score_s", "verify_s", "commit_s"]


class Laps:
    """Adds the time since the last lap to one stage of the metrics.

    `shared` are the metrics of the round's texts: each counts the whole round it took part in.
    """

    def __init__(self, metrics: SpeculativeMetrics, shared: Iterable[SpeculativeMetrics]) -> None:
        self._metrics = metrics
        self._all = (metrics, *shared)
        self._started = self._last = 0.0

    def __enter__(self) -> Self:
        self._started = self._last = time.perf_counter()
        return self

    def __call__(self, stage: Stage) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        for metrics in self._all:
            setattr(metrics, stage, getattr(metrics, stage) + now - self._last)
        self._last = now

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.wall_s += time.perf_counter() - self._started
