"""Paired timing: the order cancels drift, ratios are per prompt, intervals cover the mean."""

import numpy as np
import pytest

from outrider.bench.paired import Arm, Interval, Run, measure, median_rate, order, ratios


class Clock:
    """A machine that slows down by a fixed share with every text decoded."""

    def __init__(self, drift: float) -> None:
        self.slowness, self.drift = 1.0, drift

    def arm(self, name: str, seconds: float) -> Arm:
        """An arm that takes `seconds` on the machine as it was at first."""

        def decode(prompt):
            self.slowness *= self.drift
            return Run((1, 2, 3, 4), 0.0, seconds * self.slowness)

        return Arm(name, decode)


def test_order_is_mirrored():
    assert order(3, 0, mirrored=True) == [0, 1, 2, 2, 1, 0]
    assert order(3, 0, mirrored=False) == [0, 1, 2]
    assert order(3, 1, mirrored=False) == [2, 1, 0]


@pytest.mark.parametrize("mirrored", [True, False])
def test_drift_cancels(mirrored):
    clock = Clock(1.05)
    arms = [clock.arm("slow", 2.0), clock.arm("fast", 1.0)]
    runs = measure(arms, [[0]] * 8, mirrored=mirrored, tick=lambda label: None)
    assert Interval.of(ratios(runs[0], runs[1])).mean == pytest.approx(2.0, rel=5e-3)


def test_drift_would_show_in_a_fixed_order():
    """The negative control: the same drift biases arms that always run in one order."""
    clock = Clock(1.05)
    arms = [clock.arm("slow", 2.0), clock.arm("fast", 1.0)]
    runs = [measure(arms, [[0]], mirrored=False, tick=lambda label: None) for _ in range(8)]
    slow, fast = ([found[which][0] for found in runs] for which in (0, 1))
    assert Interval.of(ratios(slow, fast)).mean < 1.95


def test_ratio_and_rates():
    base = [[Run((1, 2, 3), 1.0, 3.0), Run((1, 2, 3), 1.0, 3.0)]]
    other = [[Run((1, 2, 3), 1.0, 2.0)]]
    assert ratios(base, other) == [pytest.approx(1.5)]
    assert ratios(base, other, decode_only=True) == [pytest.approx(2.0)]
    assert median_rate(base) == pytest.approx(1.0)
    assert median_rate(base, decode_only=True) == pytest.approx(1.0)


def test_interval_covers_the_mean():
    """About 95 of 100 intervals of 20 ratios hold the true mean; a shifted mean is missed."""
    draw = np.random.default_rng(1)
    found = [Interval.of(np.exp(draw.normal(0.5, 0.2, 20)).tolist()) for _ in range(100)]
    covered = sum(i.low <= np.exp(0.5) <= i.high for i in found)
    assert 86 <= covered <= 100
    assert sum(i.low <= np.exp(0.8) <= i.high for i in found) < 5
    same = Interval.of([1.5, 1.5, 1.5])
    assert (same.num, same.median, same.low, same.high) == (3, *[pytest.approx(1.5)] * 3)
