"""Batches of which few texts gain, and rounds in which nobody is asked."""

from __future__ import annotations

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.control import Controller, ControlSettings
from outrider.control.chooser import MOST, PLAIN, SAMPLED, Chooser
from outrider.control.controller import SEASONED, SEASONED_LEAST
from outrider.control.guard import ASKED, ASKED_TEXTS, LONGEST_REST, Rest
from outrider.control.knowledge import RESTING, Knowledge
from outrider.control.live import FIXED, LiveRounds
from outrider.control.plans import Class, Drawing, Plan, Times, certain, drawn, least_of
from outrider.control.rounds import Choice, Offer, Round, Stake
from outrider.drafters import NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.sequence import Sequence
from outrider.types import Request, StageTimes
from tests.control.clocked import Chant, Slow, World, fixed, plain, view_of
from tests.control.test_offers import Knower

EIGHT = [(1, 2, text) for text in range(8)]


def left_out(rest: Rest, rounds: int, texts: int = 1, share: float = 0.9) -> list[int]:
    """Rounds that are left out, in lengths of each time, where asking takes this share of them."""
    lengths = [0]
    for now in range(1, rounds + 1):
        if rest.holds(now):
            lengths[-1] += 1
        else:
            rest.saw(now, texts, -share, 1.0)
            lengths += [0] if lengths[-1] else []
    return lengths


@pytest.mark.parametrize("texts", [1, 4, 100])
def test_rests_grow_and_more_texts_come_to_them_sooner(texts: int) -> None:
    first = -(-ASKED // min(texts, ASKED_TEXTS))
    assert left_out(Rest(), first, texts) == [0]
    assert left_out(Rest(), first + 1, texts) == [1]
    lengths = left_out(Rest(), first + 400, texts)
    assert lengths[:9] == [1, 2, 4, 8, 16, 32, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    # No more than it takes for asking to cost a hundredth of the time, of many texts half of it.
    worth = 0.01 * (0.5 + 0.5 / texts)
    assert left_out(Rest(), first + 200, texts, 5.1 * worth)[:5] == [1, 2, 4, 5, 5]
    assert left_out(Rest(), first + 200, texts, 0.9 * worth) == [0]


def rested(saved: list[float], rounds: int) -> int:
    """How many of the last half of rounds are left out where rounds save these in turn."""
    rest, left, asked = Rest(), 0, 0
    for now in range(rounds):
        if rest.holds(now):
            left += now >= rounds // 2
        else:
            rest.saw(now, 1, saved[asked % len(saved)], 1.0)
            asked += 1
    return left


def test_drafts_have_to_save_what_asking_takes() -> None:
    """One round of ten drafts, and saves half of it or a tenth; in the others asking takes 3 %."""
    assert rested([0.5] + [-0.03] * 9, 2000) == 0
    assert rested([0.1] + [-0.03] * 9, 2000) > 400
    assert rested([-0.2] + [-0.005] * 9, 2000) > 400
    assert rested([-0.005], 2000) == 0
    coarse = Rest()
    coarse.saw(1, 100, 0.0, 0.0)
    assert not coarse.holds(2)


def test_who_pays_again_is_asked_again() -> None:
    """A round that pays has no rest behind it, and some of them end rests."""
    rest = Rest()
    left_out(rest, ASKED + 100)
    now = next(n for n in range(ASKED + 100, ASKED + 200) if not rest.holds(n))
    rest.saw(now, 1, 0.5, 1.0)
    assert not rest.holds(now + 1)
    rest.saw(now + 1, 1, -0.9, 1.0)
    half = LONGEST_REST // 2
    assert rest.holds(now + 1 + half) and not rest.holds(now + 2 + half), "the next one is shorter"
    for n in range(now + 2 + half, now + 60):
        rest.saw(n, 1, 0.5, 1.0)
    rest.saw(now + 60, 1, -0.03, 1.0)
    assert not rest.holds(now + 61)


def test_one_round_in_a_while_that_pays_does_not_end_rests() -> None:
    """One round of eight that is looked at saves a little, and asking in all of them takes more."""
    assert rested([0.05] + [-0.1] * 7, 2000) > 850


def test_what_is_noted_of_a_round_counts_as_asking(monkeypatch) -> None:
    """Asking costs nothing here, and noting what came of it a tenth of a round."""
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    left = []
    for noting_s in (0.0, 0.1):
        world = World(monkeypatch, **hopeless)
        over = world.controller._known.over

        def noted(done, times, world=world, over=over, noting_s=noting_s):
            world.clock.now += noting_s
            return over(done, times)

        monkeypatch.setattr(world.controller._known, "over", noted)
        world.run(300, EIGHT[:1])
        left.append(world.controller.report()["none"]["reasons"].get(RESTING, 0))
    assert left[0] == 0 and left[1] > 60


def test_what_asking_leaves_cold_counts_as_asking_and_for_as_much_at_most(monkeypatch) -> None:
    """Asking takes three hundredths of a round, and the forward behind it so much more."""
    left = []
    for cold in (0.0, 0.03, 0.3):
        world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
        seen, known = looked_at(world, 0.03), world.controller._known
        target = world.engine.target
        assert isinstance(target, Slow)
        seconds = target.seconds

        def timed(rows, seconds=seconds, seen=seen, known=known, cold=cold):
            return seconds(rows) + (cold if seen and seen[-1] == known.now else 0.0)

        target.seconds = timed
        world.run(600)
        left.append(world.controller.report()["none"]["reasons"][RESTING])
    assert left[0] + 30 < left[1] == pytest.approx(left[2], abs=10)


class Silent(NgramDrafter):
    """A look-up that finds nothing."""

    name = "silent"

    def chains(self, texts, depths):
        """Nothing."""
        return [[] for _ in texts]


def looked_at(world: World, seconds: float = 0.1) -> list[int]:
    """The numbers of rounds in which the controller asks anybody, which takes so long."""
    seen: list[int] = []
    choose = world.controller._chooser.choose

    def watched(view):
        seen.append(world.controller._known.now)
        world.clock.now += seconds
        return choose(view)

    world.controller._chooser.choose = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("prompts", [EIGHT[:1], EIGHT], ids=["one", "eight"])
def test_where_nobody_pays_for_long_nobody_is_asked(monkeypatch, prompts) -> None:
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless)
    seen = looked_at(world, 0.3 * len(prompts))
    world.run(300, prompts)
    rest = world.controller._rests[len(prompts).bit_length(), "greedy"]
    assert rest.deep
    # Of a new text the first rounds behind its prompt are looked at, whatever came of others: one
    # where rests are long, a few where they are short.
    for length, first in ((1, max(SEASONED_LEAST, SEASONED // len(prompts))), (64, SEASONED_LEAST)):
        rest._length = rest._last = length
        before, began = len(seen), world.controller._known.now
        world.run(300, prompts)
        rounds = world.controller._known.now - began
        assert len(seen) - before < 0.45 * rounds
        own = [now - began for now in seen if now > began]
        assert set(range(2, first + 1)) <= set(own)
        assert not set(range(2, first + 6)) <= set(own)
        assert length == 1 or first + 1 not in own
    assert rest.deep
    told = world.controller.report()["none"]
    assert told["reasons"][RESTING] > 0.5 * rounds
    assert told["rounds"] == sum(told["reasons"].values())
    everything = world.controller.report().values()
    assert sum(one["rounds"] for one in everything) == world.controller._known.now


def test_rounds_that_are_left_out_tell_what_plain_decoding_takes(monkeypatch) -> None:
    """Asking leaves caches cold: the forward behind it takes a tenth more."""
    world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
    seen, known = looked_at(world), world.controller._known
    target = world.engine.target
    assert isinstance(target, Slow)
    seconds = target.seconds
    target.seconds = lambda rows: seconds(rows) * (1.1 if seen and seen[-1] == known.now else 1.0)
    for text in range(8):
        world.run(120, [(1, 2, text)])
    assert world.controller.report()["none"]["reasons"][RESTING] > 400
    assert known._live.plain_s(1, 0) == pytest.approx(1.0)


@pytest.mark.parametrize("prompt", [30, 90])
@pytest.mark.parametrize("num", [1, 3])
def test_a_round_that_reads_prompts_is_left_out_and_times_nothing(monkeypatch, num, prompt) -> None:
    """Once rounds come to rests; it takes as long as many others."""
    world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
    seen, known, left = looked_at(world), world.controller._known, 0
    plain_s = 0.5 + 0.5 * num
    for text in range(40):
        first = known.now + 1
        world.run(24, [(1, 2, (text + b) % 32, *[5] * (prompt - 3)) for b in range(num)])
        left += first not in seen
        kinds = known._live._kinds.values()
        cells = [cell for kind in kinds for cell in kind.plain.values()]
        assert all(seconds <= plain_s + 1e-9 for cell in cells for _, seconds in cell._last)
        # Nor is the one behind it taken for one that reads them.
        cells = [(rows, cell) for kind in kinds for rows, cell in kind.cells.items()]
        assert all(cell.value >= 0.5 + 0.5 * rows for rows, cell in cells)
        read_s = known._live.prompt_token_s
        assert read_s is None or read_s == pytest.approx(0.5, rel=0.1)
    assert left > 5 and 0 < known.budgets[0] < 2 * plain_s


def test_rests_of_many_texts_are_not_those_of_one(monkeypatch) -> None:
    """Eight texts have come to rests; a single one is looked at for as long as it ever is."""
    world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
    seen = looked_at(world)
    world.run(300, EIGHT)
    began = world.controller._known.now
    world.run(ASKED + 8)
    assert set(range(began + 1, began + ASKED)) <= set(seen)


def test_a_fallback_is_asked_in_every_round(monkeypatch) -> None:
    """It is there for when nobody pays."""
    for fallback, least, most in (("none", 0.0, 0.7), ("silent", 1.0, 1.0)):
        world = World(
            monkeypatch,
            wrong=lambda place: 1.0,
            target_s=lambda rows: float(rows),
            more=[Silent()],
            fallback=fallback,
        )
        seen = looked_at(world)
        world.run(400)
        assert least <= len(seen) / world.controller._known.now <= most


def test_nobody_reads_ahead_for_who_is_not_asked(monkeypatch) -> None:
    """A text that waited to be read when its rounds came to rest waits no longer."""
    world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
    looked_at(world)
    controller, left = world.controller, list[bool]()
    timed = controller.timed

    def watched(texts, times) -> None:
        resting = controller._resting
        if resting:
            left.append(texts[0].key in controller._reading)
        timed(texts, times)
        if not resting:
            controller._reading[texts[0].key] = 0

    controller.timed = watched  # type: ignore[method-assign]
    world.run(300)
    assert len(left) > 50 and not any(left)


def test_who_pays_is_asked_in_every_round(monkeypatch) -> None:
    world = World(monkeypatch)
    asked = list[int]()
    propose = world.model.propose
    monkeypatch.setattr(
        world.model, "propose", lambda *given: asked.append(1) or propose(*given), raising=False
    )
    world.run(400)
    report = world.controller.report()
    assert RESTING not in report["none"]["reasons"]
    assert len(asked) == report["draft"]["rounds"] > 0.9 * world.controller._known.now


def test_what_counts_is_what_the_last_texts_gain() -> None:
    alike = Plan(None, 4, 12.0, 1.0, last=0.5)
    assert alike.counted_tok_s(8, 0.9) == pytest.approx(12.0)
    ahead = Plan(None, 4, 12.0, 1.0, last=0.0)
    assert ahead.counted_tok_s(8, 0.5) == pytest.approx(10.0)
    assert ahead.counted_tok_s(8, 0.0) == pytest.approx(12.0)
    free = Times(4, 1.0, [1.0] * 40)
    offers = [[0.8], [], [0.9, 0.8], []]
    # Those that gain nothing, that alone, or what is left of it when they end.
    for left, ends, last in (
        ([9.0, 9.0, 9.0, 9.0], [1, 3], 0.0),
        ([9.0, 1.0, 1.0, 1.0], [0], 0.8),
        ([90.0, 70.0, 1.0, 1.0], [1], 2 / 7),
        ([1.0, 1.0, 9.0, 1.0], [2], 1.7),
        ([], [], 0.0),
    ):
        found = certain(free, offers, left)
        assert found is not None and list(found.ending) == ends
        assert found.last == pytest.approx(last, abs=1e-3)


def test_of_a_drafter_that_draws_so_does_what_it_promises_them() -> None:
    """One of eight gains: it will end last, or it will not."""
    times = Times(8, 1.0, [1.0 + 0.02 * max(0, row - 8) for row in range(99)])
    gains = [0.9, 0.85, 0.8, 0.75]
    for left, last in (((1e9, 1.0), 0.9), ((1.0, 1e9), 0.01), ((1e9, 1e9), 0.01)):
        classes = [Class(gains, 4, [0]), Class([0.01] * 4, 4, range(1, 8))]
        found = drawn(times, Drawing(0, 0.05, classes, (), lefts=[left[0], *[left[1]] * 7]))
        assert found is not None and found.depth == 1
        assert found.last == pytest.approx(last, abs=1e-3)
        more = found.counted_tok_s(8, 0.5) - found.rate_tok_s
        assert more > 0.1 if last == 0.9 else more < -0.1
    # One that is not drafted for gains nothing.
    found = drawn(times, Drawing(0, 0.05, [Class(gains, 4, range(7))], (), lefts=[1e9] * 8))
    assert found is not None and found.last == 0.0 and found.ending == [7]


@pytest.mark.parametrize(("ends_last", "lost_s"), [(True, 0.0), (False, 0.5)])
def test_a_sample_is_charged_what_it_did_not_save(ends_last: bool, lost_s: float) -> None:
    """Of two texts one gains a token, in half a round more: for who ends last that is a round."""
    ngram = NgramDrafter()
    known = Knowledge([ngram], None)
    known.budgets[None] = 1.0
    texts = [
        Sequence(b, Request((1, 2), SamplingParams()), 0, "greedy", 16, 9, frozenset(), [1, 2])
        for b in range(2)
    ]
    offers = [Offer(0, [5], None, 2, [0.5], 0), None]
    times, ending = Times(2, 1.0, [1.0] * 9), [0 if ends_last else 1]
    view = view_of(texts, times, offers, uneven=1.0, ending=ending)
    plan = Plan(None, 1, 2.0, 1.5, (1, 0), ending=ending)
    done = Round.of(view, Choice(plan, SAMPLED, Stake(0.0, 2.0)))
    done.served, done.taken, done.asked, done.offered = [0, None], [True, False], [1, 0], [1, 0]
    done.kept = {0: 1}
    assert known.over(done, StageTimes(0.0, 1.5, 0.0, 0.0)) is None
    earned_s = 0.02 * 1.5 * (0.5 + 0.5 / 2)
    assert known.budgets[None] == pytest.approx(1.0 + earned_s - lost_s)


@pytest.mark.parametrize("few_s", [1.0, 1.2, 1.9, 3.0])
def test_the_share_of_a_round_that_fewer_texts_take_too_is_timed(few_s: float) -> None:
    """Eight texts take two seconds, four this much; half is thought of it at least."""
    live = LiveRounds()
    for now in range(3):
        live.saw(8, 8, 0, 2.0, now, plain=True)
    assert live.fixed(8, 0) == FIXED
    for now in range(3):
        live.saw(1, 1, 0, 0.1, now, plain=True)
        live.saw(5, 5, 0, 2.0, now, plain=True)
        live.saw(4, 4, 0, few_s, now, plain=True)
    share = (2 * few_s - 2.0) / 2.0
    assert live.fixed(8, 0) == pytest.approx(min(max(share, FIXED), 1.0))


def eight_of_which_four_gain(monkeypatch, num: int = 8) -> float:
    """Speed over plain decoding, at last, where a round takes as long however many texts are left.

    A look-up knows four of each eight texts, and a row drafted costs a twentieth of a round.
    """
    speeds: list[float] = []
    for knower in (None, Knower("knower", texts={0, 2, 4, 6})):
        world = World(monkeypatch)
        target = Slow(
            Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1.0 + 0.05 * max(0, rows - 8)
        )
        drafter = NoDrafter() if knower is None else Controller([knower], clock=world.clock)
        world.engine = Engine(target, drafter, Emitter(None), max_texts=8)
        world.requests = Requests(world.engine, depth=16, end_tokens=frozenset())
        prompts = [(1, 2, text % 8) for text in range(num)]
        for _ in range(6):
            speeds.append(world.run(64, prompts))
    return speeds[-1] / speeds[5]


def test_texts_that_hurry_ahead_save_nothing_where_the_last_one_goes_on(monkeypatch) -> None:
    """Four of eight texts are done early, and the batch takes as long for the others."""
    assert eight_of_which_four_gain(monkeypatch) > 0.95


def test_texts_that_gain_alike_in_the_mean_are_drafted_for(monkeypatch) -> None:
    """Sixteen texts of which one or another lags behind for a while: of all much is kept."""
    rates: list[float] = []
    for drafter in (NoDrafter(), None):
        world = World(monkeypatch, wrong=lambda place: 0.4)
        target = Slow(
            Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1.0 + 0.015 * max(0, rows - 1)
        )
        own = drafter or Controller([world.model], clock=world.clock)
        world.engine = Engine(target, own, Emitter(None))
        world.requests = Requests(world.engine, depth=16, end_tokens=frozenset())
        runs = [world.run(96, [(1, 2, text) for text in range(16)]) for _ in range(8)]
        rates.append(1 / sum(1 / rate for rate in runs[2:]))
    assert rates[1] > 1.02 * rates[0]


@pytest.mark.parametrize(
    ("num", "wrong", "row_s"), [(8, 0.5, 0.037), (16, 0.45, 0.021), (32, 0.4, 0.0125)]
)
def test_texts_that_gain_in_the_mean_and_not_the_last_of_them_are_left(
    monkeypatch, num: int, wrong: float, row_s: float
) -> None:
    """Of 32 tokens a text is behind the others by chance, as far as drafts bring all of them."""
    costs = {
        "target_s": lambda rows: 1.0 + row_s * max(0, rows - num),
        "draft_s": lambda rows: 0.15,
        "wrong": lambda place: wrong,
    }
    rates: list[float] = []
    for drafter in (plain, fixed(1), None):
        world = World(monkeypatch, drafter=drafter, **costs)
        groups = [[(1, 2, (5 * text + 3 * i) % 32) for text in range(num)] for i in range(9)]
        runs = [world.run(32, group) for group in groups]
        rates.append(1 / sum(1 / rate for rate in runs[2:]))
    assert (2 - wrong) / (1.15 + num * row_s) > 1.03, "that is so much in the mean"
    assert rates[1] < 0.983 * rates[0] < rates[2]


@pytest.mark.parametrize("num", [1, 2, 8, 32])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_the_least_of_texts_that_are_drafted_for_alike(num: int, rate: float) -> None:
    """One token each, kept with this chance, until all have 64: beside drawing it many times."""
    chance = np.random.default_rng(0)
    made = (1 + (chance.random((300, 64, num)) < rate)).cumsum(1).min(2)
    rounds = 1 + (made < 64).sum(1).mean()
    last, lag, ending = least_of([64.0] * num, [rate] * num, [rate] * num)
    assert last + lag == pytest.approx(rate) and (lag > 0.03) == (num > 1)
    assert ending == list(range(num))
    assert 1 + last == pytest.approx(64 / rounds, rel=0.03)


@pytest.mark.parametrize(
    ("row_s", "left", "lengths"), [(0.2, 64.0, (1, 1, 0)), (0.1, 84.0, (2, 1, 0))]
)
def test_what_is_not_taken_of_offers_brings_no_end_nearer(row_s: float, left, lengths) -> None:
    offers, lefts = [[0.9, 0.5, 0.06], [0.7, 0.06], [0.06]], [left, 60.0, 20.0]
    times = Times(3, 1.0, [1.0 + row_s * max(0, row - 3) for row in range(99)])
    found = certain(times, offers, lefts)
    assert found is not None and tuple(found.lengths) == lengths
    both = lengths[0] == 2
    # One token at most has its chance for a square in the mean, of a second one 4 - 1 is more.
    gains, squares = [1.4 if both else 0.9, 0.7, 0.0], [2.4 if both else 0.9, 0.7, 0.0]
    last, lag, ending = least_of(lefts, gains, squares)
    assert (found.last, found.lag) == pytest.approx((last, lag))
    assert found.ending == ending == [0, 1]
    assert least_of(lefts, gains, [0.0] * 3)[0] != pytest.approx(last)


@pytest.mark.parametrize("left", [64, 48, 20])
def test_the_least_of_texts_that_differ(left: int) -> None:
    """Four of eight gain next to nothing, and have as much to make as the others, or less."""
    chance = np.random.default_rng(0)
    rates, lefts = [0.9] * 4 + [0.1] * 4, [64.0] * 4 + [float(left)] * 4
    made = (1 + (chance.random((300, 64, 8)) < rates)).cumsum(1)
    rounds = 1 + (made < np.array(lefts)).any(2).sum(1).mean()
    last, _, ending = least_of(lefts, rates, rates)
    assert 1 + last == pytest.approx(64 / rounds, rel=0.03)
    assert ending == ([0, 1, 2, 3] if left == 20 else [4, 5, 6, 7])
    # In the mean of all that have most to make it would be another number.
    assert left == 20 or abs(1 + sum(rates) / 8 - 64 / rounds) > 0.05


def test_a_sample_is_worth_what_it_gains_the_text_that_ends_last(monkeypatch) -> None:
    """Of four one has more to make: it is drafted for, and what others gain is not counted."""
    world = World(monkeypatch)
    known = Knowledge([world.model], None)
    texts = [
        Sequence(b, Request((1, 2), SamplingParams()), 0, "greedy", 16, 99, frozenset(), [1, 2, 3])
        for b in range(4)
    ]
    times = Times(4, 1.0, [1.0] * 99)
    chooser = Chooser([world.model], known, ControlSettings())
    for ending in range(4):
        view = view_of(texts, times, [None] * 4, uneven=0.9, ending=[ending])
        trial = chooser._trial(0, view, times, [0, 1, 2, 3], times.plain, None)
        assert trial.only == ending and trial.last > 0.5
        other = chooser._trial(0, view, times, [(ending + 1) % 4], times.plain, None)
        assert other.last == 0.0
        assert other.counted_tok_s(4, 0.9) < trial.counted_tok_s(4, 0.9) - 0.5


def test_what_is_to_be_read_of_a_text_is_spread_over_its_own_tokens(monkeypatch) -> None:
    world = World(monkeypatch)
    known = Knowledge([world.model], None)
    chooser, times = Chooser([world.model], known, ControlSettings()), Times(2, 1.0, [1.0] * 99)
    params, prompts = SamplingParams(max_tokens=99, temperature=0.0), [[1] * 48, [1] * 24]
    texts = [
        Sequence(b, Request(tuple(prompt), params), 0, "greedy", 16, 99, frozenset(), prompt)
        for b, prompt in enumerate(prompts)
    ]
    view = view_of(texts, times, [None] * 2, uneven=0.5, ending=[0])
    found = chooser._drawing(0, view, times, None, 0)
    token_s = known.token_s(0, found.level_s, times)
    assert token_s > 0 and found.extra_s == pytest.approx(token_s * (48 / 96 + 24 / 24))


def test_where_others_wait_for_their_places_it_pays_that_few_hurry_ahead(monkeypatch) -> None:
    assert eight_of_which_four_gain(monkeypatch, num=64) > 1.1


def chosen(monkeypatch, offers: list[list[float]], ending=(0, 1, 2, 3, 4, 5, 6, 7)) -> str:
    """Why a plan is chosen where a row costs a fiftieth of a round and look-ups say this.

    Samples are due, and nothing may be lost by them.
    """
    ngram, num = NgramDrafter(), len(offers)
    known = Knowledge([ngram], None)
    monkeypatch.setattr(known, "plain_due", lambda num_texts, context: False)
    params = SamplingParams(max_tokens=99, temperature=0.0)
    texts = [
        Sequence(b, Request((1, 2), params), 0, "greedy", 16, 99, frozenset(), [1, 2, 3])
        for b in range(num)
    ]
    found = [Offer(0, [5] * len(own), None, 3, own, 0) if own else None for own in offers]
    times = Times(num, 1.0, [1.0 + 0.02 * max(0, row - num) for row in range(99)])
    view = view_of(texts, times, found, uneven=0.5, ending=[b for b in ending if b < num])
    return Chooser([ngram], known, ControlSettings()).choose(view).why


def test_what_other_texts_gain_than_those_that_end_last_has_to_be_more(monkeypatch) -> None:
    """Eight texts gain seven percent by one of them: that counts where it ends last, alone."""
    assert chosen(monkeypatch, [[0.6]]) == MOST
    assert chosen(monkeypatch, [[0.6]] * 8) == MOST
    one = [[0.6], *[[]] * 7]
    assert chosen(monkeypatch, one) == PLAIN
    assert chosen(monkeypatch, one, ending=(0,)) == MOST
    assert chosen(monkeypatch, one, ending=(0, 1)) == PLAIN
    assert chosen(monkeypatch, [[0.9, 0.9, 0.9], *[[]] * 7], ending=(1, 2)) == MOST
    # All of eight that gain next to nothing are left, too; one is not.
    assert chosen(monkeypatch, [[0.05]] * 8) == PLAIN
    assert chosen(monkeypatch, [[0.05]]) == MOST


class Told(Slow):
    """A target that is told of the rows that come next, and notes whether they came."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.expected = None
        self.came: list[bool] = []
        self.untold = 0

    takes_unread = True

    def expect(self, seqs, counts, tokens_R) -> None:
        """Notes them."""
        self.expected = tuple(seqs), tuple(counts), tokens_R.tolist()

    def score(self, rows):
        """Looks at what was noted."""
        if self.expected is None:
            self.untold += 1
        else:
            self.came.append(self.expected == (rows.seqs, rows.counts, rows.tokens_R.tolist()))
            self.expected = None
        return super().score(rows)


@pytest.mark.parametrize("texts", [1, 8])
def test_in_rests_and_by_nobody_the_next_rows_are_told(
    texts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.control.clocked.Slow", Told)
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless, more=[Silent()])
    controller = world.controller
    over = controller._known.over
    monkeypatch.setattr(
        controller._known,
        "over",
        lambda done, times: (0.0, 1.0) if over(done, times) is None else (-0.2, 1.0),
    )
    world.run(300, EIGHT[:texts])
    target = world.engine.target
    rests = world.controller.report()["none"]["reasons"].get(RESTING, 0)
    assert isinstance(target, Told) and rests > 60
    # Of each rest all but the first round, of which the round before it does not know yet.
    assert all(target.came) and rests / 2 < len(target.came) < rests
    world = World(monkeypatch, drafter=lambda world: NoDrafter())
    world.run(30, EIGHT[:texts])
    target = world.engine.target
    assert isinstance(target, Told) and target.came == [True] * 29 and target.untold == 1
    # What would be told of every round does not come, where no chain is told after it.
    world = World(monkeypatch)
    world.model.confidence = 0.01
    monkeypatch.setattr(world.controller, "pauses", lambda texts: True)
    world.run(60, EIGHT[:texts])
    assert isinstance(world.engine.target, Told) and not all(world.engine.target.came)
    # Of two groups each would be told while the other's rows come.
    world = World(monkeypatch, drafter=lambda world: NoDrafter())
    laws = [SamplingParams(max_tokens=30, temperature=t, seed=1) for t in (0.0, 1.0)]
    world.requests.complete([Request((1, 2, 3), law) for law in laws])
    assert isinstance(world.engine.target, Told) and not world.engine.target.came


def rounds_of(world: World) -> int:
    """Rounds that the report tells of."""
    return sum(one["rounds"] for one in world.controller.report().values())


def test_texts_that_begin_anew_are_looked_at(monkeypatch) -> None:
    """The target has new weights in the midst of a rest: the same texts, and nothing of them."""
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless)
    seen = looked_at(world, 0.6)
    world.run(600)
    controller, engine = world.controller, world.engine
    params = SamplingParams(max_tokens=200, temperature=0.0)
    stream = world.requests.stream(Request((1, 2, 3), params))
    while not (
        controller._quiets and controller._rests[1, "greedy"]._until > controller._known.now + 9
    ):
        next(stream)
    with engine.without_caches():
        pass
    assert not controller._quiets and rounds_of(world) == controller._known.now
    before = controller._known.now
    for _ in range(9):
        next(stream)
    assert before + 2 in seen, "behind the round that reads it again"
    stream.close()


def test_groups_of_two_rules_rest_side_by_side(monkeypatch) -> None:
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless)
    seen = looked_at(world, 0.6)
    choose, rules = world.controller._chooser.choose, list[str]()
    world.controller._chooser.choose = lambda view: (rules.append(view.rule), choose(view))[1]
    noted: list[int] = []
    rested = world.controller._known.rested

    def watched(texts, rounds, *, plain):
        noted.append(len(rounds))
        rested(texts, rounds, plain=plain)

    monkeypatch.setattr(world.controller._known, "rested", watched)
    laws = [SamplingParams(max_tokens=600, temperature=t, seed=1) for t in (0.0, 1.0)]
    world.requests.complete([Request((1, 2, 3), law) for law in laws])
    assert len(seen) < 0.4 * world.controller._known.now
    # Each is asked in its own turn.
    assert min(rules[20:].count(rule) for rule in ("greedy", "coupled")) > 5
    # Neither's rounds are noted one by one for the other's.
    assert max(noted) > 8 and sum(noted) > 5 * len(noted)
    assert rounds_of(world) == world.controller._known.now


@pytest.mark.parametrize("ending", [[1], [0]])
@pytest.mark.parametrize("other", [50.0, 61.0])
def test_tokens_left_to_make_are_no_gain(ending: list[int], other: float) -> None:
    """Of two texts one is drafted for, has more to make, and keeps nothing."""
    known = Knowledge([NgramDrafter()], None)
    params = SamplingParams(max_tokens=99, temperature=0.0)
    texts = [
        Sequence(b, Request((1, 2), params), 0, "greedy", 16, 99, frozenset(), [1, 2])
        for b in range(2)
    ]
    offers = [Offer(0, [5], None, 2, [0.5], 0), None]
    view = view_of(texts, Times(2, 1.0, [1.0] * 9), offers, uneven=1.0, ending=[0, 1])
    view.lefts = [64.0, other]
    plan = certain(view.times, [[0.9], ()], view.lefts)
    assert plan is not None and list(plan.ending) == [1]
    plan.ending = ending
    found = []
    for kept in (0, 1):
        done = Round.of(view, Choice(plan, MOST))
        done.served, done.taken, done.asked, done.offered = [0, None], [True, False], [1, 0], [1, 0]
        done.kept = {0: kept}
        found.append(known.over(done, StageTimes(0.0, 1.0, 0.0, 0.0)))
    # Kept, it brings the end nearer, until the other one ends last.
    assert found[0][0] == pytest.approx(0.0, abs=1e-6) and found[1][0] > 0.04


def test_what_one_rule_has_come_to_leaves_out_no_round_of_another(monkeypatch) -> None:
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless)
    seen = looked_at(world, 0.6)
    world.run(600)
    for temperature, all_of_them in ((1.0, True), (0.0, False)):
        before, began = len(seen), world.controller._known.now
        world.run(40, temperature=temperature, seed=1)
        assert (len(seen) - before == world.controller._known.now - began) == all_of_them


def test_what_a_sample_was_to_lose_is_another_for_other_texts() -> None:
    known = Knowledge([NgramDrafter()], None)
    known.budgets[None] = 1.0
    assert not known.afford(None, 1, 2.5) and known.too_dear(None, 1)
    assert not known.too_dear(None, 8)
    known.budgets[None] = 1.3
    assert not known.too_dear(None, 1)
    known.budgets[None] = 1.0
    text = Sequence(0, Request((1, 2), SamplingParams()), 0, "greedy", 16, 9, frozenset(), [1, 2])
    known.close(text)
    assert not known.too_dear(None, 1)


def test_rounds_noted_together_begin_one_rest() -> None:
    """It has one round, as behind a single one; their ledger is the same."""
    together, single = Rest(), Rest()
    for now in range(1, 101):
        for rest in (together, single):
            rest.saw(now, 1, 0.5, 1.0)
    for now in range(101, 200):
        together.saw(now, 1, -1.0, 1.0, last=False)
        assert not together.holds(now + 1)
    assert not together.pays
    together.saw(200, 1, -1.0, 1.0)
    assert together.holds(201) and not together.holds(202)
