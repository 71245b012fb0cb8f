"""A run's figures are what came between two states of the engine's metrics."""

from __future__ import annotations

from copy import deepcopy

from outrider.cli.timing import _since
from outrider.types import SpeculativeMetrics


def test_figures_are_those_of_the_run_alone() -> None:
    metrics, alone = SpeculativeMetrics(), SpeculativeMetrics()
    metrics.record_round(4, 4, 5)
    before = deepcopy(metrics)
    for counts in ((0, 0, 1), (2, 1, 2), (3, 0, 1)):
        metrics.record_round(*counts)
        alone.record_round(*counts)
    metrics.record_alpha(1.5, 3)
    alone.record_alpha(1.5, 3)
    assert _since(before, metrics).as_dict() == alone.as_dict()


def test_a_plain_run_after_a_speculative_one_has_no_positions() -> None:
    metrics = SpeculativeMetrics()
    metrics.record_round(4, 2, 3)
    before = deepcopy(metrics)
    metrics.record_round(0, 0, 1)
    assert _since(before, metrics).as_dict()["acceptance_per_pos"] == []
