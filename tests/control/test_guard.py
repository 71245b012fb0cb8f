"""A choice is left where it loses beyond chance: not where it pays now and then, nor late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from outrider.control import plans
from outrider.control.guard import ENOUGH, LONGEST, SHORTEST, Guard, scatter_of
from tests.control.clocked import World, fixed, plain

TEXTS = [(1, 2, text) for text in range(3, 7)]


def chains(
    chance: np.random.Generator, rate: float, over: float
) -> tuple[Callable[[], float], float]:
    """Gains of rounds that draft four tokens, and how these are expected to scatter.

    Each is kept with this chance, and all take as long as makes them pay so much in the mean.
    """
    mean = sum(rate**i for i in range(1, 5))
    took = (1 + mean) / (1 + over)
    return lambda: 1 + np.argmin([*(chance.random(4) < rate), False]) - took, scatter_of(mean, 4)


def at_work(guard: Guard, gain: Callable[[], float], scatter: float, rounds: int) -> float:
    """The share of rounds in which the guard lets it through."""
    worked = 0
    for now in range(rounds):
        if guard.allows(now):
            worked += 1
            guard.saw(now, gain(), scatter)
    return worked / rounds


@pytest.mark.parametrize("over", [0.15, 0.25, 0.4])
@pytest.mark.parametrize("rate", [0.4, 0.7])
def test_what_pays_but_not_in_each_round_is_at_work(rate: float, over: float) -> None:
    shares = []
    for seed in range(10):
        gain, scatter = chains(np.random.default_rng(seed), rate, over)
        shares.append(at_work(Guard(), gain, scatter, 1000))
    assert sum(shares) / len(shares) > 0.95


def test_a_prize_that_is_seldom_won_is_waited_for() -> None:
    """Three of ten rounds gain two tokens and pay for the others: eight in vain say nothing."""
    for seed in range(10):
        won = iter(np.random.default_rng(seed).random(500) < 0.3)
        share = at_work(Guard(), lambda won=won: 2.6 * next(won) - 0.6, scatter_of(0.78, 4), 500)
        assert share > 0.9


@pytest.mark.parametrize(("lost", "rounds"), [(0.3, 8), (0.1, 24), (0.05, 60)])
def test_a_steady_loss_is_told_soon(lost: float, rounds: int) -> None:
    """Whatever was expected of it; and each pause is longer than the one before."""
    guard = Guard()
    gains = np.random.default_rng(0).normal(-lost, 0.01, 9999)
    worked = 0
    while guard.allows(worked):
        guard.saw(worked, gains[worked], scatter_of(0.1, 2))
        worked += 1
    assert worked <= rounds
    share = at_work(guard, lambda: -lost, scatter_of(0.1, 2), 8000)
    assert guard.pause == LONGEST and share * lost < 0.01


def test_rounds_chosen_before_a_verdict_count_once() -> None:
    """Rounds that are noted together: some were drafted behind the one that ended it."""
    guard = Guard()
    for now in range(1, 4 * ENOUGH):
        guard.saw(now, -0.5)
    assert guard.num_pauses == 1 and guard.pause == 2 * SHORTEST
    assert (guard.behind, guard.stands, guard.weight) == (0, 0.0, 0.0)
    guard.saw(guard.paused_until, -0.5)
    assert guard.behind == 1


def test_what_was_gained_before_is_no_reason_to_lose() -> None:
    """A drafter that made twice as much, of other text than this."""
    gain, scatter = chains(np.random.default_rng(0), 0.7, 1.0)
    guard = Guard()
    assert at_work(guard, gain, scatter, 300) == 1.0
    gain, scatter = chains(np.random.default_rng(1), 0.2, -0.4)
    assert at_work(guard, gain, scatter, 60) < 0.7


def test_the_next_pause_is_short_where_the_choice_has_paid() -> None:
    guard = Guard()
    for pauses in range(1, 4):
        for now in range(8):
            guard.saw(guard.paused_until + now, -0.5)
        assert guard.num_pauses == pauses
    assert guard.pause == 8 * SHORTEST
    for now in range(20):
        guard.saw(guard.paused_until + now, 0.2)
    assert guard.pause == SHORTEST


def speed(world: World) -> float:
    """Tokens a second of some texts."""
    return len(TEXTS) / sum(1 / world.run(300, [text]) for text in TEXTS)


def test_a_drafter_that_pays_in_bursts_is_at_work(monkeypatch) -> None:
    """It knows one of each three passages of eight tokens; a level takes a quarter of a round."""
    costs = {
        "draft_s": lambda rows: 0.25,
        "wrong": lambda place: 0.15 if place // 8 % 3 == 0 else 0.75,
    }
    slow = speed(World(monkeypatch, drafter=plain, **costs))
    best = speed(World(monkeypatch, drafter=fixed(1), **costs))
    world = World(monkeypatch, **costs)
    found = speed(world)
    assert best > 1.09 * slow and found > 0.96 * best
    told = world.controller.report()
    assert told["draft"]["rounds"] > 0.75 * world.controller._known.now


def test_a_drafter_that_loses_is_left_whatever_is_promised(monkeypatch) -> None:
    """Nothing of it is ever kept, it takes five percent of a round, and is thought to gain half."""
    costs = {"draft_s": lambda rows: 0.03, "wrong": lambda place: 1.0}
    world = World(monkeypatch, **costs)
    drawn, promised = plans.drawn, list[int]()

    def flattered(times, drawing):
        plan = drawn(times, drawing)
        promised.append(1)
        return plan and replace(plan, rate_tok_s=1.5 * times.plain.rate_tok_s)

    monkeypatch.setattr(plans, "LEAST", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(plans, "drawn", flattered)
        found = speed(world)
    assert len(promised) > 10
    report = world.controller.report()
    assert report["draft"]["rounds"] > 20, "it was promised much, and tried"
    assert found > 0.98 * speed(World(monkeypatch, drafter=plain, **costs))
