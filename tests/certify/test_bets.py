"""Bets and intervals: valid whenever one looks, and nearly as quick as a test of fixed size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.certify.bets import RATIO_STAKES, Interval, Means, Wealth, needed

ALPHA = 0.05


def surprises(rng: np.random.Generator, num: int, off: float = 0.0, wide: int = 3) -> np.ndarray:
    """Whether something of known chance came, less the chance; in truth it is off by a little."""
    chance = rng.uniform(0.2, 0.8, (num, wide))
    return (rng.random((num, wide)) < chance + off) - chance


def false_alarms(runs: int) -> int:
    alarms = 0
    for run in range(runs):
        rng, wealth = np.random.default_rng(run), Wealth("abc")
        wealth.bet(surprises(rng, 1500))
        # `most` is the largest of the looks after every single observation.
        alarms += wealth.most >= 1 / ALPHA
    return alarms


def test_looking_after_every_observation_raises_no_more_alarms_than_declared() -> None:
    assert false_alarms(200) <= 200 * ALPHA + 2 * math.sqrt(200 * ALPHA)


@pytest.mark.slow
def test_two_thousand_null_runs_keep_the_level() -> None:
    assert false_alarms(2000) <= 2000 * ALPHA


def test_summing_alarms_of_a_plain_z_test_does_not() -> None:
    """The negative control: peeking at 1.96 deviations is wrong far more often than one in 20."""
    alarms = 0
    for run in range(100):
        drawn = surprises(np.random.default_rng(run), 1500, wide=1)[:, 0]
        z = np.abs(drawn.cumsum()) / np.sqrt(0.22 * np.arange(1, 1501))
        alarms += z[20:].max() > 1.96
    assert alarms > 20


def test_a_bias_of_two_hundredths_is_found_within_twice_the_fixed_size() -> None:
    """At the level 0.05 a fixed test needs (1.645 + 1.282)^2 / 4 / 0.02^2 for a power of 0.9."""
    fixed = (1.645 + 1.282) ** 2 * 0.25 / 0.02**2
    stops: list[int] = []
    for run in range(60):
        rng, wealth, num = np.random.default_rng(run), Wealth("a"), 0
        while wealth.most < 1 / ALPHA:
            wealth.bet(np.where(rng.random((100, 1)) < 0.52, 0.5, -0.5))
            num += 100
        stops.append(num)
    assert np.mean(stops) < 2 * fixed


def test_a_named_alternative_is_found_sooner_than_by_any_look() -> None:
    rng = np.random.default_rng(0)
    p, other = np.full(8, 1 / 8), np.array([3, 1, 1, 1, 1, 1, 1, 3]) / 12
    tokens = rng.choice(8, 400, p=0.5 * p + 0.5 * other)
    named, looked = Wealth(["other"], RATIO_STAKES), Wealth(["first"])
    named.bet((other[tokens] / p[tokens] - 1)[:, None])
    looked.bet(((tokens == 0) - p[0])[:, None].astype(float))
    assert named.value > looked.value
    assert named.logs["other"] > 3


def test_what_refuted_is_told_of_when_it_did() -> None:
    wealth = Wealth(["steady", "once"], RATIO_STAKES)
    wealth.bet(np.array([[0.1, 50.0], [0.1, 50.0], *[[0.1, -0.9]] * 30]))
    wealth.bet(np.array([[0.1, -0.9]] * 30))
    assert (wealth.value < 50, wealth.most > 300) == (True, True)
    assert wealth.logs["once"] > math.log(wealth.most) > wealth.logs["steady"]
    # Beyond what a number can hold, too, whoever grew to it last is the one.
    wealth.bet(np.array([[0.1, 50.0]] * 400))
    before = wealth.logs
    wealth.bet(np.array([[50.0, 0.0]] * 600))
    assert before["once"] > before["steady"] and wealth.logs["steady"] > wealth.logs["once"] > 700


def test_intervals_hold_the_mean_at_all_times_and_shrink() -> None:
    missed, means = 0, Means("abc", ALPHA, 2000)
    for run in range(100):
        rng, means = np.random.default_rng(run), Means("abc", ALPHA, 2000)
        for _ in range(8):
            means.add(surprises(rng, 250, off=0.05))
            missed += any(not one.low <= 0.05 <= one.high for one in means.intervals().values())
    assert missed <= 100 * ALPHA
    last = means.intervals()["a"]
    assert last.high - last.low < 0.12
    assert Means("a", ALPHA, 10).intervals()["a"].most == 1


def test_needed_observations_suffice_for_the_bound() -> None:
    num = needed(3, ALPHA, 0.05)
    means = Means("abc", ALPHA, num)
    means.add(surprises(np.random.default_rng(3), num))
    assert all(one.most < 0.05 for one in means.intervals().values())


def test_one_impossible_token_does_not_ruin_an_account() -> None:
    wealth = Wealth(["alternative"], RATIO_STAKES)
    wealth.bet(np.array([[np.inf], [np.nan], [-1.0]]))
    assert 0 < wealth.value < 50


def test_intervals_meet_where_their_means_may_be_one() -> None:
    low, high = Interval(0.0, -0.1, 0.1), Interval(0.3, 0.1, 0.5)
    assert low.meets(high) and high.meets(low)
    assert not low.meets(Interval(0.3, 0.2, 0.5))
