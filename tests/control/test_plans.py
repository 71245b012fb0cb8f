"""The best plan is found without looking at all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.control.knowledge import Knowledge
from outrider.control.live import AGE, AT_LAST, EVERY, LiveRounds
from outrider.control.plans import LEAST, Class, Drawing, Times, certain, drawn
from outrider.drafters import NgramDrafter

MOST = 16


def times_of(chance: random.Random, texts: int) -> Times:
    """Rounds that cost more in steps, now steep and now flat."""
    curve = [1.0]
    for _ in range(texts * (MOST + 2)):
        curve.append(curve[-1] + chance.choice((0.0, 0.0, 0.01, 0.4)))
    return Times(texts, curve[texts], curve)


def falling(chance: random.Random) -> list[float]:
    """Chances along a draft."""
    along, left = list[float](), 1.0
    for _ in range(MOST):
        left *= chance.uniform(0.6, 1.0)
        along.append(max(LEAST, left))
    return along


@pytest.mark.parametrize("seed", range(60))
def test_the_best_depth_is_found(seed: int) -> None:
    chance = random.Random(seed)
    texts = chance.choice((1, 2, 8))
    times = times_of(chance, texts)
    classes = [Class(falling(chance), MOST, 1) for _ in range(texts)]
    drawing = Drawing(0, chance.choice((0.01, 0.2)), classes, ())
    rates = []
    for depth in range(1, MOST + 1):
        tokens = texts + sum(sum(one.survival[:depth]) for one in classes)
        rates.append(tokens / (depth * drawing.level_s + times.target_s(texts * depth)))
    found = drawn(times, drawing)
    assert found is not None
    assert found.rate_tok_s == pytest.approx(max(rates))
    assert found.depth == rates.index(max(rates)) + 1


@pytest.mark.parametrize("seed", range(60))
def test_as_much_of_offers_is_taken_as_pays(seed: int) -> None:
    chance = random.Random(seed)
    texts = chance.choice((1, 2, 8))
    times = times_of(chance, texts)
    offers = [falling(chance) for _ in range(texts)]
    worth = sorted((one for own in offers for one in own), reverse=True)
    rates = [
        (texts + sum(worth[:taken])) / times.target_s(taken) for taken in range(1, len(worth) + 1)
    ]
    found = certain(times, offers)
    assert found is not None
    assert found.rate_tok_s == pytest.approx(max(rates))


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_one_class_are_given_as_much_each(seed: int) -> None:
    """As far as there is room: the last of them get less."""
    chance = random.Random(seed)
    texts, along = 8, [falling(chance) for _ in range(2)]
    offers = [along[b % 2] for b in range(texts)]
    times = times_of(chance, texts)
    found = certain(times, offers)
    assert found is not None
    assert all(found.lengths[b] == found.lengths[b % 2] for b in range(texts))
    # Every row costs nothing, and there is room for so many.
    for room in (1, 4, 11, 64):
        free = Times(texts, 1.0, [1.0] * 200, texts + room)
        found = certain(free, offers)
        assert found is not None and sum(found.lengths) == room
        taken = (offers[b][:length] for b, length in enumerate(found.lengths))
        assert found.rate_tok_s == pytest.approx(texts + sum(map(sum, taken)))
    known = sorted((one for own in offers for one in own), reverse=True)[:64]
    assert found.rate_tok_s == pytest.approx(texts + sum(known))


def test_a_plain_round_is_known_at_once() -> None:
    """What is kept of times is what would be worked out anew."""
    known = Knowledge([NgramDrafter()], None)
    for now in range(1, 30):
        known.now = now
        known._live.saw(1, 1, 0, 1.0 + 0.5 * (now < 20), now, plain=True)
        told = known.times(1, 0, 4)
        assert told is not None and told.plain_s == known._live.plain_s(1, 0)
    assert told.plain_s == 1.0


def seen(live: LiveRounds, rows: Sequence[int], seconds: float, now: int) -> int:
    """Rounds of some row counts after another, one text each; the last one's number."""
    for num in rows:
        now += 1
        live.saw(1, num, 0, seconds, now, plain=num == 1)
        live.curve(1, 0, 12)
    return now


@pytest.mark.parametrize("phase", range(0, 33, 3))
def test_a_curve_learns_of_what_was_slow_and_is_not_seen_again(phase: int) -> None:
    live = LiveRounds()
    now = seen(live, [1, 5, 9] * 20 + [5] * phase, 1.0, 0)
    now = seen(live, [9] * 4, 4.0, now)
    seen(live, [5] * EVERY, 1.0, now)
    curve = live.curve(1, 0, 12)
    assert curve is not None and curve[9] > 2


@pytest.mark.parametrize("phase", range(0, AT_LAST, 3))
def test_a_curve_learns_though_others_are_drawn_anew_meanwhile(phase: int) -> None:
    """Rounds of eight texts between those of one: each kind knows by itself what has moved."""
    live = LiveRounds()

    def eight(now: int) -> int:
        for _ in range(EVERY):
            now += 1
            live.saw(8, 8, 0, 2.0, now, plain=True)
            live.curve(8, 0, 12)
        return now

    now = seen(live, [1, 5] * 20 + [1] * phase, 1.0, eight(0))
    now = eight(seen(live, [5] * 4, 4.0, now))
    seen(live, [1] * EVERY, 1.0, now)
    curve = live.curve(1, 0, 8)
    assert curve is not None and curve[5] == 4.0


def test_a_curve_believes_anew_what_was_not_seen_for_long() -> None:
    live = LiveRounds()
    now = seen(live, [1, 5] * 10, 1.0, 0) + AGE
    now = seen(live, [1] * 100, 1.0, now)
    seen(live, [5] * EVERY, 6.0, now)
    curve = live.curve(1, 0, 8)
    assert curve is not None and curve[5] == 6.0
