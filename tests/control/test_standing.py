"""What a round of one text leaves standing for the next, and rounds that are noted together."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from operator import mul
from types import SimpleNamespace

import pytest

from outrider.control import Controller, ControlSettings, plans, standing
from outrider.control import controller as module
from outrider.control.chooser import MOST, SAMPLED, TIMED, Chooser
from outrider.control.guard import KNOWN, Guard, Rest
from outrider.control.knowledge import PLAIN_AGAIN, RESTING
from outrider.control.plans import Class, Drawing, Plan, Times
from outrider.control.standing import FIRST, LATEST, NO_BETTER, STANDS
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request, SamplingParams
from tests.control.clocked import World
from tests.control.test_exact import TARGET, Dropper, chosen
from tests.control.test_offers import Knower
from tests.engine.test_law import LENGTH, PREFIX, chi_square
from tests.engine.toys import blurred

LONG = {"tokens": 2000}
PAID = 1400
"""Tokens behind which it is known that asking pays."""


class Seldom(Knower):
    """A look-up that has something to say here and there."""

    def chains(self, texts, depths):
        every = zip(texts, super().chains(texts, depths), strict=True)
        return [said if len(text.tokens) % 5 == 0 else [] for text, said in every]


class Watched:
    """A world whose controller is watched: which rounds are noted when, and chosen when."""

    def __init__(self, monkeypatch, noting_s: float = 0.0, **world) -> None:
        self.world = World(monkeypatch, **world)
        self.controller = controller = self.world.controller
        self.known = known = controller._known
        # Of each noted round: its own number, and that of the round behind which it was noted.
        self.noted: list[tuple[int, int]] = []
        self.chosen: list[int] = []
        over, choose, timed = known.over, controller._chooser.choose, controller.timed
        self._under_way = 0

        def noting(done, times):
            self.noted.append((known.now, self._under_way))
            self.world.clock.now += noting_s
            return over(done, times)

        def choosing(view):
            self.chosen.append(known.now)
            return choose(view)

        def ended(texts, times):
            self._under_way = known.now
            timed(texts, times)

        monkeypatch.setattr(known, "over", noting)
        monkeypatch.setattr(controller._chooser, "choose", choosing)
        monkeypatch.setattr(controller, "timed", ended)


def test_rounds_are_noted_together_where_asking_pays_and_at_once_where_it_does_not(
    monkeypatch,
) -> None:
    pays = Watched(monkeypatch)
    pays.world.run(**LONG)
    rounds = pays.known.now
    # Each once, in their order, under their own numbers.
    assert [own for own, _ in pays.noted] == list(range(1, rounds + 1))
    late = Counter(behind - own for own, behind in pays.noted)
    assert set(late) <= set(range(module.NOTED_TOGETHER))
    assert late[module.NOTED_TOGETHER - 1] > rounds / 20
    # Before it is known that asking pays each round counts at once.
    assert all(own == behind for own, behind in pays.noted[: KNOWN - 1])
    hopeless = Watched(monkeypatch, 0.1, wrong=lambda place: 1.0)
    hopeless.world.run(**LONG)
    assert all(own == behind for own, behind in hopeless.noted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_foreseen_is_told_to_who_drew_where_no_plain_round_is_due(
    monkeypatch, temperature: float
) -> None:
    """A row that is run ahead would be timed with a plain round behind it."""
    one = Watched(monkeypatch, more=[Seldom("knows")], wrong=lambda place: 0.5)
    monkeypatch.setattr(Engine, "_drafts_on", lambda engine, group: True)
    controller, known = one.controller, one.known
    # What drew in each round, and which one was told.
    drew, told, plain = dict[int, int | None](), dict[int, int](), set[int]()
    drafted = controller._drafted

    def drafting(current, *given):
        drew[known.now] = current.plan.arm
        if current.choice.why == TIMED:
            plain.add(known.now)
        found = drafted(current, *given)
        assert current.offered == found.tree.counts_B.tolist()
        return found

    monkeypatch.setattr(controller, "_drafted", drafting)
    for arm, drafter in enumerate(controller.drafters):
        monkeypatch.setattr(
            drafter, "foresee", lambda *_, arm=arm: told.__setitem__(known.now, arm)
        )
    one.world.run(**LONG, temperature=temperature, seed=3)
    drawn = [now for now, arm in drew.items() if arm is not None]
    assert len(told) > 0.8 * len(drawn) > 80
    assert all(drew[now] == arm for now, arm in told.items())
    assert len(plain) > 3 and not any(now - 1 in told for now in plain)


def test_plans_stand_for_some_rounds_where_asking_pays(monkeypatch) -> None:
    always = Watched(monkeypatch, wrong=lambda place: 0.0)
    always.world.run(**LONG)
    mixed = Watched(monkeypatch, wrong=lambda place: 0.5)
    mixed.world.run(**LONG)
    # The first rounds have one each.
    for one in (always, mixed):
        assert len(one.chosen) - KNOWN < 0.15 * (one.known.now - KNOWN)
    hopeless = Watched(monkeypatch, 0.1, wrong=lambda place: 1.0)
    hopeless.world.run(**LONG)
    resting = hopeless.controller.report()["none"]["reasons"][RESTING]
    assert len(hopeless.chosen) == hopeless.known.now - resting


def test_each_class_of_luck_is_weighed_once_while_its_plan_stands(monkeypatch) -> None:
    """And no plan is older than it may be."""
    one = Watched(monkeypatch, wrong=lambda place: 0.5)
    one.world.run(PAID)
    chooser, book, drawn = one.controller._chooser, one.known.book(0, "greedy"), plans.drawn
    weighed, drafted = list[int](), dict[int, list[int]]()
    monkeypatch.setattr(
        plans, "drawn", lambda *given: weighed.append(one.known.now) or drawn(*given)
    )
    put, found_at, apart = standing.Alone.put, dict[tuple[object, ...], int](), list[int]()

    def putting(alone, key, *given):
        now, place = one.known.now, (alone, key, one.known.sampled[0])
        if now > 300 and place in found_at:
            apart.append(now - found_at[place])
        found_at[place] = now
        return put(alone, key, *given)

    monkeypatch.setattr(standing.Alone, "put", putting)
    made, late = one.controller._drawn, list[int]()

    def drafting(current, *given):
        (text,) = current.view.texts
        cell = book.cell(text.key)
        found = chooser._alone._plans.get((False, 0, cell))
        if one.controller._standing is not None and current.choice.lasts and found is not None:
            drafted.setdefault(cell, []).append(one.known.now)
            late.append(found.until - found.counts.count)
        return made(current, *given)

    monkeypatch.setattr(one.controller, "_drawn", drafting)
    one.world.run(**LONG)
    rounds = sum(map(len, drafted.values()))
    assert len(drafted) > 1 and rounds > 500
    assert all(0 < left <= STANDS for left in late) and max(late) == STANDS
    assert len(weighed) < rounds / 2
    assert len(apart) > 20 and min(apart) >= STANDS


def test_a_plan_that_is_known_little_of_stands_for_few_rounds(monkeypatch) -> None:
    """Under a rule that is new, too, however much another one has told of the drafter."""
    one = Watched(monkeypatch, wrong=lambda place: 0.5)
    chooser = one.controller._chooser
    put, left, first = standing.Alone.put, list[int](), dict[int, int]()

    def putting(alone, key, *given):
        found = put(alone, key, *given)
        left.append(found.until - found.counts.count)
        first.setdefault(key[2], left[-1])
        return found

    monkeypatch.setattr(standing.Alone, "put", putting)
    one.world.run(**LONG)
    assert max(left) == STANDS and min(left) == FIRST
    first.clear()
    one.world.run(400, temperature=0.5, seed=3)
    assert ("coupled", 0) in chooser._every and first and max(first.values()) <= 2, first


def test_a_sample_ends_what_stands_of_its_drafter_and_of_nobody_else() -> None:
    world, times = SimpleNamespace(now=10, sampled=[0, 0]), Times(1, 1.0, (1.0, 1.0))
    alone, seen = standing.Alone(times, world), SimpleNamespace(count=STANDS)
    plan = Plan(0, 4, 2.0, 1.0, along=[(1.5, 1.0), (1.8, 1.0), (1.9, 1.0), (2.0, 1.0)])
    for arm in (0, 1):
        alone.put((False, arm, 2), times, 16, seen, plan, None)
    assert alone.get((False, 0, 2), 16).plan is plan and alone.get((False, 0, 1), 16) is None
    # Where fewer tokens may be drafted, and where more may than it was found for.
    short = alone.get((False, 0, 2), 2)
    assert (short.depth, short.plan.depth, short.gain) == (2, 2, pytest.approx(1.8))
    assert alone.get((False, 0, 2), 2) is short
    assert alone.get((False, 0, 2), 20) is None
    world.sampled[0] += 1
    assert alone.get((False, 0, 2), 16) is None and alone.get((False, 0, 2), 2) is None
    assert alone.get((False, 1, 2), 16).plan is plan
    # What promises nothing is found anew sooner.
    alone.put((False, 1, 2), times, 16, seen, None, None)
    world.now += NO_BETTER - 1
    assert alone.get((False, 1, 2), 16).plan is None
    world.now += 1
    assert alone.get((False, 1, 2), 16) is None
    # So many drafts of such texts later, or so many rounds.
    for later, drafts in ((0, STANDS), (LATEST, 0)):
        alone.put((False, 1, 2), times, 16, seen, plan, None)
        seen.count += drafts - (drafts > 0)
        world.now += later - (later > 0)
        assert alone.get((False, 1, 2), 16).plan is plan
        seen.count += drafts > 0
        world.now += later > 0
        assert alone.get((False, 1, 2), 16) is None


def test_what_a_plan_promises_goes_with_the_machine() -> None:
    """Beside plain decoding, whose time is another one by now."""
    times = Times(1, 0.5, (0.5, 0.5))
    alone = standing.Alone(times, SimpleNamespace(now=0, sampled=[0]))
    seen = SimpleNamespace(count=0)
    found = alone.put((False, 0, 2), times, 16, seen, Plan(0, 4, 3.0, 1.0), None)
    now = found.now(Times(1, 0.6, (0.6, 0.6)))
    assert now.rate_tok_s == pytest.approx(2.5) and now.expected_s == pytest.approx(1.2)


def test_who_is_not_let_through_is_sampled_while_a_text_stands(monkeypatch) -> None:
    """A text that turns easy: the draft model kept too little before, and is taken again."""
    one = Watched(monkeypatch, wrong=lambda place: 1.0 if 300 < place < 800 else 0.0)
    controller, known = one.controller, one.known
    controller._chooser._settings = ControlSettings(min_acceptance_rate=0.6)
    one.world.run(PAID)
    report = controller.report()
    assert report["draft"]["reasons"][SAMPLED] > 3
    drafted, propose = list[int](), one.world.model.propose
    stood, drawn = list[bool](), controller._drafted

    def proposing(texts, depths, draws):
        drafted.append(texts[0].num_output)
        return propose(texts, depths, draws)

    def drafting(current, draws):
        if current.choice.why == SAMPLED:
            stood.append(controller._standing is not None)
        return drawn(current, draws)

    monkeypatch.setattr(one.world.model, "propose", proposing)
    monkeypatch.setattr(controller, "_drafted", drafting)
    one.world.run(PAID)
    assert any(stood), stood
    assert sum(place > 900 for place in drafted) > 30
    assert known.rate(0, "greedy") > 0.6


def test_a_look_up_that_kept_too_little_is_heard_while_a_text_stands(monkeypatch) -> None:
    """And taken again as soon as it would keep enough."""
    known = Knower("late", right=0)
    one = Watched(monkeypatch, wrong=lambda place: 0.9, more=[known])
    one.controller._chooser._settings = ControlSettings(min_acceptance_rate=0.6)
    # Asking is taken to pay: rounds stand although nobody drafts.
    monkeypatch.setattr(Rest, "pays", property(lambda _: True, lambda *_: None), raising=False)
    one.world.run(PAID)
    assert one.known.rate(1, "greedy") < 0.1
    taken, before = one.controller.report().get("late", {"rounds": 0})["rounds"], one.known.now
    known._right = 6
    one.world.run(PAID)
    assert one.known.rate(1, "greedy") > 0.6
    report = one.controller.report()["late"]
    assert report["rounds"] - taken > (one.known.now - before) / 2, report


def test_luck_is_forgotten_of_rounds_in_which_a_drafter_stood_idle_and_no_others() -> None:
    chooser = Chooser([ModelDrafter(ProtocolTarget(TARGET))], known := Idle(), ControlSettings())
    times = Times(1, 1.0, (1.0, 1.0))
    view = SimpleNamespace(times=times, rule="greedy", context=0, texts=[SimpleNamespace(key=1)])
    known.now = 20
    chooser.renew(view, 20)
    assert known.forgot == [8]
    # It is at work in the seventh of eight rounds, and a look-up in the last.
    known.now = 27
    chooser._works(0)
    known.now = 28
    chooser._works(None)
    chooser.renew(view, 28)
    chooser.renew(view, 28)
    assert known.forgot == [8, 1]
    # Before the round behind one in which it was at work, and behind that.
    known.now = 29
    chooser._works(0)
    known.now = 30
    chooser.renew(view, 29)
    chooser._works(0)
    chooser.renew(view, 30)
    assert known.forgot == [8, 1]


def test_no_luck_is_forgotten_of_who_drafts_in_every_round(monkeypatch) -> None:
    """Nor where all is weighed anew each time."""
    monkeypatch.setattr(Rest, "pays", property(lambda _: False, lambda *_: None), raising=False)
    one = Watched(monkeypatch, wrong=lambda place: 0.3)
    one.world.run(PAID)
    assert one.controller._standing is None
    book, idle = one.known.book(0, "greedy"), list[int]()
    cells, drafted = book.cells, list[int]()
    propose = one.world.model.propose

    def proposing(*given):
        drafted.append(one.known.now)
        return propose(*given)

    def forgetting(texts, rounds=0):
        if rounds and one.known.now - 1 in drafted:
            idle.append(one.known.now)
        return cells(texts, rounds)

    monkeypatch.setattr(one.world.model, "propose", proposing)
    monkeypatch.setattr(book, "cells", forgetting)
    one.world.run(400)
    assert len(drafted) > 50 and not idle


def test_one_text_needs_no_sample_of_who_was_just_chosen(monkeypatch) -> None:
    """Though that round is not noted yet."""
    one = Watched(monkeypatch)
    one.world.run(PAID)
    known, timed, seen = one.known, one.controller.timed, list[bool]()

    def ended(texts, times):
        done = one.controller._round
        timed(texts, times)
        if done is not None and done.served == [0] and one.controller._over:
            known.due[0] = 0
            seen.append(known.looks(0, 1, beside=True) or not known.looks(0, 1, beside=False))

    monkeypatch.setattr(one.controller, "timed", ended)
    one.world.run(400)
    assert len(seen) > 20 and not any(seen)


class Idle:
    """What is known of a drafter whose luck is told how much of it is forgotten."""

    def __init__(self) -> None:
        self.now, self.forgot = 0, list[int]()

    def book(self, *given):
        return SimpleNamespace(cells=lambda texts, idle: self.forgot.append(idle))

    def allows(self, *given, **named):
        return True


def test_a_look_up_that_may_not_be_taken_does_not_have_all_weighed_anew(monkeypatch) -> None:
    one = Watched(monkeypatch, more=[Knower("hopeless", right=0)])
    one.world.run(PAID)
    before, now = len(one.chosen), one.known.now
    one.world.run(**LONG)
    assert len(one.chosen) - before < 0.2 * (one.known.now - now)


def test_a_text_with_ledgers_of_its_own_and_a_fallback_do_not_stand(monkeypatch) -> None:
    one = Watched(monkeypatch)
    one.world.run(PAID)
    again = list[int]()
    known = one.controller._again
    monkeypatch.setattr(one.controller, "_again", lambda *given: again.append(1) or known(*given))
    one.world.run(100)
    assert again
    again.clear()
    state = one.controller._state

    def guarded(text):
        found = state(text)
        found.guards.setdefault((0, False), Guard())
        return found

    monkeypatch.setattr(one.controller, "_state", guarded)
    one.world.run(100)
    assert not again
    monkeypatch.setattr(one.controller, "_state", state)
    one.controller.settings = ControlSettings(fallback="draft")
    one.world.run(100)
    assert not again


@pytest.mark.parametrize("seed", range(20))
def test_a_shorter_plan_is_the_one_that_is_found_for_so_many_tokens(seed: int) -> None:
    rng = random.Random(seed)
    curve = list(itertools.accumulate(rng.choice([0.0, 0.02, 0.2]) for _ in range(40)))
    times = Times(1, 1.0, [1.0 + more for more in curve])
    chances = list(itertools.accumulate((rng.uniform(0.6, 1.0) for _ in range(16)), mul))
    drawing = Drawing(0, 0.08, [Class(chances, 16, [0])], [], start_s=0.05)
    for whole, found in (
        (
            plans.drawn(times, drawing),
            lambda most: plans.drawn(times, replace(drawing, classes=[Class(chances, most, [0])])),
        ),
        (plans.certain(times, [chances]), lambda most: plans.certain(times, [chances[:most]])),
    ):
        assert whole is not None
        for most in range(whole.depth + 1):
            own, other = whole.up_to(most), found(most)
            if other is None:
                assert own is None
                continue
            assert (own.depth, own.lengths) == (other.depth, other.lengths)
            assert own.rate_tok_s == pytest.approx(other.rate_tok_s)
            assert own.expected_s == pytest.approx(other.expected_s)


@pytest.mark.parametrize("seed", range(20))
def test_what_has_to_be_read_first_changes_the_rate_and_not_the_depth(seed: int) -> None:
    """Found with it and without it, the plan is the same."""
    rng = random.Random(seed)
    times = Times(1, 1.0, [1.0 + 0.03 * row for row in range(40)])
    chances = list(itertools.accumulate((rng.uniform(0.7, 1.0) for _ in range(16)), mul))
    drawing = Drawing(0, 0.08, [Class(chances, 16, [0])], [])
    plan, more_s = plans.drawn(times, drawing), rng.uniform(0.01, 0.5)
    whole = plans.drawn(times, replace(drawing, extra_s=more_s))
    assert plan is not None and whole is not None
    chooser = Chooser([ModelDrafter(ProtocolTarget(TARGET))], Unread(more_s), ControlSettings())
    text = SimpleNamespace(tokens=range(80))
    view = SimpleNamespace(texts=[text], unread=lambda arm, b: 80)
    found = chooser._behind_reading(plan, view, times)
    assert found.depth == whole.depth
    assert found.rate_tok_s == pytest.approx(whole.rate_tok_s)
    assert found.expected_s == pytest.approx(whole.expected_s)


class Unread:
    """Of a text 80 tokens are to be read, which takes so long for each of 40 that are to come."""

    def __init__(self, more_s: float) -> None:
        self.draft_s = lambda *given: (0.0, 0.08)
        self.left = lambda text: 40.0
        self.token_s = lambda *given: more_s / 2


@pytest.mark.parametrize(
    ("plain_s", "curve", "most", "alike"),
    [
        (1.0, 1.0, 40, True),
        (1.15, 1.0, 40, True),
        (0.85, 1.0, 40, True),
        (1.0, 1.09, 40, True),
        (1.15, 0.91, 40, True),
        (1.3, 1.0, 40, False),
        (0.75, 1.0, 40, False),
        (1.0, 1.11, 40, False),
        (1.15, 0.89, 40, False),
        (1.0, 1.0, 44, False),
    ],
)
def test_times_that_differ_by_more_than_noise_end_what_stands(
    plain_s: float, curve: float, most: int, alike: bool
) -> None:
    """Plain decoding may become slower with all else; what more rows take beside it may not."""
    known = [1.0 + 0.03 * row for row in range(40)]
    times = Times(1, 1.0, known, 40)
    slower = [plain_s * own * (curve if row > 4 else 1.0) for row, own in enumerate(known)]
    other = Times(1, plain_s, slower, most)
    assert times.like(other) is alike and times.like(times)
    assert not times.like(Times(2, 1.0, known, 40))
    # A plan may lie where they differ most.
    for share, near in ((1.1, True), (1.25, False)):
        turned = [own * (share if row == 2 else 1.0) for row, own in enumerate(known)]
        assert times.like(Times(1, 1.0, turned, 40)) is near


def test_luck_counts_at_once_and_once(monkeypatch) -> None:
    one = Watched(monkeypatch, wrong=lambda place: 0.5)
    one.world.run(PAID)
    book, timed = one.known.book(0, "greedy"), one.controller.timed
    felt, feel = [0], book.felt
    counted, changed = list[bool](), list[bool]()

    def feeling(text, kept, offered):
        felt[0] += 1
        feel(text, kept, offered)

    def ended(texts, times):
        done, before, luck = one.controller._round, felt[0], dict(book._luck)
        timed(texts, times)
        served = done is not None and done.served == [0]
        counted.append(felt[0] == before + served)
        if served and one.controller._over:
            changed.append(book._luck != luck)

    monkeypatch.setattr(book, "felt", feeling)
    monkeypatch.setattr(one.controller, "timed", ended)
    one.world.run(**LONG)
    assert all(counted) and all(changed) and len(changed) > 100


def test_an_offer_is_taken_though_a_choice_without_one_stands(monkeypatch) -> None:
    """The draft model is of no use, and the look-up is right now and then."""
    known = Seldom("seldom", right=6)
    one = Watched(monkeypatch, wrong=lambda place: 0.9, more=[known])
    one.world.run(PAID)
    before, said = one.controller.report()["seldom"]["rounds"], [0]
    chains = known.chains

    def saying(texts, depths):
        found = chains(texts, depths)
        said[0] += any(found)
        return found

    monkeypatch.setattr(known, "chains", saying)
    one.world.run(**LONG)
    taken = one.controller.report()["seldom"]["rounds"] - before
    assert said[0] > 50 and taken > 0.9 * said[0]


def test_a_plain_round_that_is_timed_while_a_choice_stands_is_one(monkeypatch) -> None:
    """Due from a round on, until one was noted."""
    one = Watched(monkeypatch, wrong=lambda place: 0.5)
    one.world.run(PAID)
    due, told = one.known.plain_due, list[int]()

    def at_times(texts, context):
        before = one.known._live.plain_seen(texts, context)[1]
        wanted = one.controller._rests[1, "greedy"].pays and one.known.now > 20 + before
        if due(texts, context) or wanted:
            told.append(one.known.now)
            return True
        return False

    before = one.controller.report()["none"]["reasons"][TIMED]
    monkeypatch.setattr(one.known, "plain_due", at_times)
    one.world.run(**LONG)
    timed = one.controller.report()["none"]["reasons"][TIMED] - before
    # It is asked behind rounds that are noted, and again in the round that follows.
    rounds = [now for now, later in pairwise([*told, 10**9]) if later != now + 1]
    # Behind the last ones that were noted no round came.
    assert timed <= len(rounds) <= timed + 1 and timed > 10
    assert all(later > now + 1 for now, later in pairwise(rounds))


def test_what_is_at_work_follows_choices_that_stand(monkeypatch) -> None:
    known = Seldom("seldom", right=6)
    one = Watched(monkeypatch, wrong=lambda place: 0.3, more=[known])
    one.world.run(PAID)
    same, stood = list[bool](), one.controller._again

    def again(*given):
        current = stood(*given)
        same.append(one.controller._chooser.at_work == current.plan.arm)
        return current

    monkeypatch.setattr(one.controller, "_again", again)
    one.world.run(**LONG)
    report = one.controller.report()
    assert min(report[name]["rounds"] for name in ("draft", "seldom")) > 50
    assert len(same) > 100 and sum(same) > len(same) - 20


def test_two_rules_in_turn_are_noted_at_once(monkeypatch) -> None:
    """Nothing stands where another text comes between: then nothing is to wait."""
    one = Watched(monkeypatch)
    one.world.run(PAID)
    one.world.run(PAID, temperature=0.5, seed=3)
    began = len(one.noted)
    params = [SamplingParams(max_tokens=200, temperature=t, seed=3) for t in (0.0, 0.5)]
    prompt = (1, 2, 3)
    one.world.requests.complete([Request(prompt, own) for own in params])
    assert len({rule for _, rule in one.controller._rests}) == 2
    assert max(behind - own for own, behind in one.noted[began : began + 40]) <= 1


def test_noting_that_fails_leaves_the_controller_whole(monkeypatch) -> None:
    one = Watched(monkeypatch)
    one.world.run(PAID)
    controller, over, whole = one.controller, one.known.over, list[bool]()

    def failing(done, times):
        raise RuntimeError("no room")

    def ending(text):
        if not controller._over:
            Controller.close(controller, text)
            return
        one.known.now += 7
        monkeypatch.setattr(one.known, "over", failing)
        before = one.known.now
        try:
            Controller.close(controller, text)
        except RuntimeError:
            kept = text.key in controller._states or text.key in one.world.model._handles
            whole.append(before == one.known.now and not kept)
        monkeypatch.setattr(one.known, "over", over)

    monkeypatch.setattr(controller, "close", ending)
    for tokens in range(40, 60):
        one.world.run(tokens)
    assert all(whole) and len(whole) > 10


def test_rounds_are_noted_under_their_own_numbers_however_late(monkeypatch) -> None:
    """Other texts' rounds come between a text's last one and its end."""
    one = Watched(monkeypatch)
    one.world.run(PAID)
    close, same = one.controller.close, list[bool]()

    def late(text):
        one.known.now += 7
        waiting, now = bool(one.controller._over), one.known.now
        close(text)
        if waiting:
            same.append(one.known.now == now)

    monkeypatch.setattr(one.controller, "close", late)
    for tokens in range(40, 60):
        one.world.run(tokens)
    assert all(same) and len(same) > 10


def test_plain_decoding_is_timed_however_short_texts_are(monkeypatch) -> None:
    """They end before rounds of theirs are noted; and longer ones are of another kind."""
    one = Watched(monkeypatch, wrong=lambda place: 0.0)
    one.world.run(PAID)
    seen, before = one.known._live.plain_seen, one.known.now
    timed = seen(1, 0)[0]
    while one.known.now < before + 3 * PLAIN_AGAIN[1]:
        one.world.run(24)
        # As a text that stands has it, not by a rest.
        assert one.controller._rests[1, "greedy"].pays
    assert 3 <= seen(1, 0)[0] - timed <= 5
    long = [1 + place % 5 for place in range(2100)]
    one.world.run(24, [long])
    assert seen(1, 3)[0] >= 1


def test_a_round_without_memory_leaves_none_unnoted(monkeypatch) -> None:
    """What is chosen next goes by all that came before."""
    one = Watched(monkeypatch)
    one.world.run(PAID)
    controller, propose, broken, left = one.controller, one.world.model.propose, [0], list[int]()
    choose = controller._chooser.choose

    def proposing(texts, depths, draws):
        if len(controller._over) == 3 and broken[0] < 20:
            broken[0] += 1
            raise MemoryError
        return propose(texts, depths, draws)

    def choosing(view):
        if controller._standing is None:
            left.append(len(controller._over))
        return choose(view)

    monkeypatch.setattr(one.world.model, "propose", proposing)
    monkeypatch.setattr(controller._chooser, "choose", choosing)
    one.world.run(**LONG)
    assert broken[0] == 20 and len(left) >= 20 and not any(left)
    assert sum(own["rounds"] for own in controller.report().values()) == one.known.now - 20


@pytest.mark.parametrize("tokens", [12, 40])
def test_what_holds_for_a_texts_first_round_or_for_a_timed_one_does_not_stand(
    monkeypatch, tokens: int
) -> None:
    """In a text's first round nobody who draws is asked, and plain decoding is timed for one."""
    one = Watched(monkeypatch, wrong=lambda place: 0.0)
    one.world.run(PAID)
    assert one.controller._rests[1, "greedy"].pays
    reasons = dict(one.controller.report()["none"]["reasons"])
    texts = 30
    for _ in range(texts):
        one.world.run(tokens)
    now = one.controller.report()["none"]["reasons"]
    gone = Counter(now)
    gone.subtract(reasons)
    assert gone.pop(TIMED, 0) <= 3
    # The first round of each, and no other.
    assert sum(gone.values()) == texts, gone


def test_drafts_reach_no_further_than_the_text_may(monkeypatch) -> None:
    """Texts that end while a choice stands, after any number of tokens."""
    one = Watched(monkeypatch, wrong=lambda place: 0.0)
    one.world.run(PAID)
    asked: list[tuple[int, int]] = []
    propose = one.world.model.propose

    def proposing(texts, depths, draws):
        asked.append((depths[0], texts[0].remaining - 1))
        return propose(texts, depths, draws)

    monkeypatch.setattr(one.world.model, "propose", proposing)
    made, planned = one.controller._drafted, list[bool]()

    def drafted(current, draws):
        planned.append(current.plan.depth <= current.view.caps[0])
        return made(current, draws)

    monkeypatch.setattr(one.controller, "_drafted", drafted)
    for tokens in range(20, 60):
        one.world.run(tokens)
        assert len(one.world.done[0].token_ids) == tokens
    assert asked and all(depth <= most for depth, most in asked)
    assert any(depth == most for depth, most in asked) and all(planned)


def test_a_text_that_ends_takes_what_stands_along(monkeypatch) -> None:
    one = Watched(monkeypatch)
    one.world.run(PAID)
    assert one.controller._standing is None and not one.controller._over
    report = one.controller.report()
    assert sum(own["rounds"] for own in report.values()) == one.known.now
    assert report["draft"]["reasons"][MOST] > 50


def alone(monkeypatch, drafter: Controller, rule: str, count: int) -> float:
    """How far from the target's law texts are, one at a time, of whose rounds many stand."""
    monkeypatch.setattr(Rest, "pays", property(lambda _: True, lambda *_: None), raising=False)
    # As there: every stage takes one second, so that drafts cost little.
    count_s = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(count_s)))
    monkeypatch.setattr("outrider.engine.laps.time", clock)
    stood, again = [0], Controller._again

    def counted(self, *given):
        stood[0] += 1
        return again(self, *given)

    monkeypatch.setattr(Controller, "_again", counted)
    engine = Engine(ProtocolTarget(TARGET), drafter, Emitter(None), max_texts=1)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    asked = [
        Request(PREFIX, SamplingParams(seed=seed, max_tokens=LENGTH), rule=rule)
        for seed in range(count)
    ]
    made = Counter(one.token_ids for one in requests.complete(asked))
    report = drafter.report()
    rounds = sum(one["rounds"] for one in report.values())
    drafted = sum(one["rounds"] for name, one in report.items() if "draft" in name)
    assert stood[0] > rounds / 8 and drafted > rounds / 4, (stood, report)
    return chi_square(made, TARGET)


@pytest.mark.filterwarnings("ignore:rule=:outrider.errors.OutriderWarning")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_is_the_targets_where_choices_stand(monkeypatch, rule: str) -> None:
    assert alone(monkeypatch, chosen(TARGET, 0.6), rule, 600) < 4.5


@pytest.mark.filterwarnings("ignore:rule=:outrider.errors.OutriderWarning")
def test_a_choice_that_stands_by_the_token_just_drawn_is_found(monkeypatch) -> None:
    wrong = Dropper([ModelDrafter(ProtocolTarget(blurred(TARGET, 3, 0.6)))])
    assert alone(monkeypatch, wrong, "token", 1500) > 8


def test_what_waits_to_be_compared_counts_at_once_and_another_class_is_weighed(monkeypatch) -> None:
    """Offers that were not taken are compared while plans stand, before the next is weighed."""
    one = Watched(monkeypatch, more=[Seldom("seldom", right=0)])
    arm = 1
    compare, taken, compared = one.known.compare, one.controller._chooser._taken, list[int]()
    classes = list[bool]()

    def comparing(text, state, part):
        before = one.known.heard[arm]
        compare(text, state, part)
        if one.controller._standing is not None and one.known.heard[arm] != before:
            compared.append(one.known.now)

    def taking(offer, *given):
        book = one.known.book(arm, "greedy")
        (text,) = one.controller._standing.texts if one.controller._standing else (None,)
        if text is not None:
            classes.append(offer.cell == book.cell(text.key, len(offer.tokens)))
        return taken(offer, *given)

    monkeypatch.setattr(one.known, "compare", comparing)
    monkeypatch.setattr(one.controller._chooser, "_taken", taking)
    one.world.run(**LONG)
    assert len(compared) > 10 and len(classes) > 10 and all(classes)
