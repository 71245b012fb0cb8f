"""The best plan is found without looking at all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.control.knowledge import Knowledge
from outrider.control.live import AGE, AT_LAST, EVERY, LiveRounds, _through
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
    classes = [Class(falling(chance), MOST, [b]) for b in range(texts)]
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
def test_the_best_depth_is_found_of_drafts_that_may_stop_earlier(seed: int) -> None:
    chance = random.Random(seed)
    texts = chance.choice((1, 2, 8))
    times = times_of(chance, texts)
    classes = [Class(falling(chance), MOST, [b]) for b in range(texts)]
    offered = sorted((chance.uniform(0.3, 1.0) for _ in range(MOST)), reverse=True)
    drawing = Drawing(0, chance.choice((0.01, 0.2)), classes, offered)
    tokens, rows, spent, rates = float(texts), 0.0, 0.0, list[float]()
    for level, share in enumerate(offered):
        tokens += sum(one.survival[level] for one in classes)
        rows += texts * share
        spent += drawing.level_s * (1.0 if texts > 4 else 1 - (1 - share) ** texts)
        rates.append(tokens / (spent + times.target_s(rows)))
    found = drawn(times, drawing)
    assert found is not None
    assert found.rate_tok_s == pytest.approx(max(rates))


@pytest.mark.parametrize("alike", [1, 2, 8, 32], ids="{} texts share a list".format)
@pytest.mark.parametrize("seed", range(40))
def test_as_much_of_offers_is_taken_as_pays(seed: int, alike: int) -> None:
    chance = random.Random(seed)
    texts = chance.choice((1, 2, 8, 32))
    times = times_of(chance, texts)
    lists = [falling(chance) for _ in range(-(-texts // alike))]
    offers = [lists[b // alike] for b in range(texts)]
    worth = sorted((one for own in offers for one in own), reverse=True)
    rates = [
        (texts + sum(worth[:taken])) / times.target_s(taken) for taken in range(1, len(worth) + 1)
    ]
    found = certain(times, offers)
    assert found is not None
    assert found.rate_tok_s == pytest.approx(max(rates))
    taken = [own[:length] for own, length in zip(offers, found.lengths, strict=True)]
    tokens, rows = texts + sum(map(sum, taken)), sum(map(len, taken))
    assert tokens / times.target_s(rows) == pytest.approx(found.rate_tok_s)


@pytest.mark.parametrize("room", [1, 4, 11, 64])
def test_no_more_is_taken_than_there_is_room_for(room: int) -> None:
    """Though every row costs nothing."""
    lists = [falling(random.Random(room + one)) for one in range(2)]
    offers = [lists[b % 2] for b in range(8)]
    found = certain(Times(8, 1.0, [1.0] * 200, 8 + room), offers)
    assert found is not None and sum(found.lengths) == room
    known = sorted((one for own in offers for one in own), reverse=True)[:room]
    assert found.rate_tok_s == pytest.approx(8 + sum(known))


def test_the_curve_goes_on_as_it_ends() -> None:
    times = Times(2, 1.0, [0.9, 0.95, 1.0, 1.0, 1.5])
    assert [times.target_s(rows) for rows in (0, 1, 2, 3, 8)] == [1.0, 1.0, 1.5, 2.0, 4.5]
    assert times.target_s(1.5) == pytest.approx(1.25)
    assert times.turns(0, 4) == [2, 3] and times.turns(2, 9) == [3]


def test_a_first_level_of_trees_is_priced_though_no_row_of_it_was_timed() -> None:
    """Eight texts, of which plain rounds alone were timed, and trees of sixteen children."""
    known = Knowledge([NgramDrafter()], None)
    for now in range(1, 21):
        known._live.saw(8, 8, 0, 1.0, now, plain=True)
    times = known.times(8, 0, 8 * 63, 16)
    assert times is not None and len(times.curve) > 8 * 17
    slope = times.target_s(8) - times.target_s(0)
    assert times.target_s(128) == pytest.approx(1.0 + 16 * slope)
    assert slope > 0.01


@pytest.mark.parametrize("seed", range(30))
def test_a_curve_goes_through_its_points_and_never_down(seed: int) -> None:
    chance = random.Random(seed)
    places = sorted(chance.sample(range(1, 60), chance.randint(1, 8)))
    points = [(place, chance.random()) for place in places]
    rows = chance.randint(0, places[-1])
    wanted, top = list[float](), points[0][1]
    for row in range(rows + 1):
        before = max((p for p in points if p[0] <= row), default=points[0])
        behind = min((p for p in points if p[0] >= row), default=points[-1])
        width = behind[0] - before[0]
        part = (row - before[0]) / width if width > 0 else 0.0
        top = max(top, before[1] + part * (behind[1] - before[1]))
        wanted.append(top)
    found = _through(points, rows)
    assert found == pytest.approx(wanted) and found == sorted(found)


def test_a_borrowed_curve_is_not_kept() -> None:
    """What eight texts take is thought of by two, until these are slower or four are timed."""
    live = LiveRounds()

    def rounds(texts: int, seconds: float, first: int) -> float:
        for now in range(first, first + 200):
            live.saw(texts, texts, 0, seconds, now, plain=True)
        found = live.plain_s(8, 0)
        assert found is not None
        return found

    assert rounds(2, 1.0, 1) < 1.5
    assert rounds(2, 10.0, 201) > 9
    assert rounds(4, 3.0, 401) < 4


def test_a_plain_round_is_known_at_once() -> None:
    """What is kept of times is what would be worked out anew."""
    known = Knowledge([NgramDrafter()], None)
    for now in range(1, 30):
        known.now = now
        known._live.saw(1, 1, 0, 1.0 + 0.5 * (now < 20), now, plain=True)
        told = known.times(1, 0, 4)
        assert told is not None and told.plain_s == known._live.plain_s(1, 0)
    assert told.plain_s == 1.0


def test_plain_rounds_that_take_as_long_as_ever_change_nothing_that_was_told() -> None:
    """Noise of a percent; what is worked out once is kept until a value has moved."""
    known = Knowledge([NgramDrafter()], None)
    told: list[Times | None] = []
    for now in range(1, 200):
        known.now = now
        known._live.saw(1, 1, 0, (1.0, 1.01, 1.02)[now % 3], now, plain=True)
        told.append(known.times(1, 0, 4))
    assert len({id(one) for one in told[10:]}) <= 190 // AT_LAST + 2


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
