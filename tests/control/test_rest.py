"""Batches of which few texts gain, and rounds in which nobody is asked."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.control import ControlSettings
from outrider.control.chooser import MOST, PLAIN, Chooser
from outrider.control.guard import LONGEST_REST, QUIET, QUIET_TEXTS, Rest
from outrider.control.knowledge import RESTING, Knowledge
from outrider.control.plans import Class, Drawing, Plan, Times, certain, drawn
from outrider.control.rounds import Offer, State, View
from outrider.drafters import NgramDrafter
from outrider.sequence import Sequence
from outrider.types import Request
from tests.control.clocked import World

EIGHT = [(1, 2, text) for text in range(8)]


def left_out(rest: Rest, rounds: int, texts: int = 1, share: float = 1.0) -> list[int]:
    """Rounds without a draft that are left out, in lengths of each time."""
    lengths = [0]
    for now in range(1, rounds + 1):
        if rest.holds(now):
            lengths[-1] += 1
        else:
            rest.saw(now, texts, share, drafted=False, sample=False)
            lengths += [0] if lengths[-1] else []
    return lengths


@pytest.mark.parametrize("texts", [1, 4, 100])
def test_rests_grow_and_more_texts_come_to_them_sooner(texts: int) -> None:
    first = -(-QUIET // min(texts, QUIET_TEXTS))
    assert left_out(Rest(), first, texts) == [0]
    assert left_out(Rest(), first + 1, texts) == [1]
    assert left_out(Rest(), first + 200, texts)[:7] == [1, 2, 4, 8, 16, LONGEST_REST, LONGEST_REST]
    # No more than it takes for asking to cost a hundredth of the time.
    assert left_out(Rest(), first + 200, texts, 0.051)[:5] == [1, 2, 4, 5, 5]
    assert left_out(Rest(), first + 200, texts, 0.009) == [0]


def test_a_draft_ends_rests_and_none_follows_a_sample() -> None:
    rest = Rest()
    left_out(rest, QUIET + 100)
    now = next(n for n in range(QUIET + 100, QUIET + 200) if not rest.holds(n))
    rest.saw(now, 1, 1.0, drafted=False, sample=True)
    assert not rest.holds(now + 1)
    rest.saw(now + 1, 1, 1.0, drafted=True, sample=False)
    assert not rest.holds(now + 2)
    rest.saw(now + 2, 1, 1.0, drafted=False, sample=False)
    assert not rest.holds(now + 3), "it is quiet anew only after as many rounds as before"


class Silent(NgramDrafter):
    """A look-up that finds nothing."""

    name = "silent"

    def chains(self, texts, depths):
        """Nothing."""
        return [[] for _ in texts]


def looked_at(world: World) -> list[int]:
    """The numbers of rounds in which the controller asks anybody, which takes a tenth of one."""
    seen: list[int] = []
    choose = world.controller._chooser.choose

    def watched(view):
        seen.append(world.controller._known.now)
        world.clock.now += 0.1
        return choose(view)

    world.controller._chooser.choose = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("prompts", [EIGHT[:1], EIGHT], ids=["one", "eight"])
def test_where_nobody_pays_for_long_nobody_is_asked(monkeypatch, prompts) -> None:
    hopeless = {"wrong": lambda place: 1.0, "target_s": lambda rows: 0.5 + 0.5 * rows}
    world = World(monkeypatch, **hopeless)
    seen = looked_at(world)
    world.run(300, prompts)
    before, began = len(seen), world.controller._known.now
    world.run(300, prompts)
    rounds = world.controller._known.now - began
    assert len(seen) - before < 0.45 * rounds
    # Of a new text the first rounds are looked at, whatever came of others.
    assert set(range(began + 1, began + 8)) <= set(seen)
    told = world.controller.report()["none"]
    assert told["reasons"][RESTING] > 0.5 * rounds
    assert told["rounds"] == sum(told["reasons"].values())
    everything = world.controller.report().values()
    assert sum(one["rounds"] for one in everything) == world.controller._known.now


def test_rests_of_many_texts_are_not_those_of_one(monkeypatch) -> None:
    """Eight texts have come to rests; a single one is looked at for as long as it ever is."""
    world = World(monkeypatch, wrong=lambda place: 1.0, target_s=lambda rows: 0.5 + 0.5 * rows)
    seen = looked_at(world)
    world.run(300, EIGHT)
    began = world.controller._known.now
    world.run(QUIET + 8)
    assert set(range(began + 1, began + QUIET)) <= set(seen)


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
        if controller._resting:
            left.append(texts[0].key in controller._reading)
        timed(texts, times)
        controller._reading[texts[0].key] = 0

    controller.timed = watched  # type: ignore[method-assign]
    world.run(300)
    assert len(left) > 50 and not any(left)


def test_who_pays_is_asked_in_every_round(monkeypatch) -> None:
    world = World(monkeypatch)
    seen = looked_at(world)
    world.run(400)
    assert len(seen) == world.controller._known.now


def test_gains_of_few_texts_count_half_and_of_all_whole() -> None:
    gained = Plan(None, 4, 12.0, 1.0, served=8)
    assert gained.counted_tok_s(8) == pytest.approx(12.0)
    assert Plan(None, 4, 12.0, 1.0, served=4).counted_tok_s(8) == pytest.approx(8 + 4 * 0.75)
    assert Plan(0, 4, 3.0, 1.0, served=1).counted_tok_s(1) == pytest.approx(3.0)
    free = Times(4, 1.0, [1.0] * 40)
    for chances, served in (
        ([[0.8], [], [0.8], []], 2),
        ([[0.9, 0.8], [], [0.3], []], (1.7 + 0.3) ** 2 / (1.7**2 + 0.3**2)),
    ):
        found = certain(free, chances)
        assert found is not None and found.served == pytest.approx(served)


def test_a_drafter_is_good_for_the_texts_that_gain_by_it() -> None:
    """One of eight gains: whoever guesses, that counts half."""
    times = Times(8, 1.0, [1.0 + 0.02 * max(0, row - 8) for row in range(99)])
    one, others = Class([0.9, 0.85, 0.8, 0.75], 4, 1), Class([0.01] * 4, 4, 7)
    found = drawn(times, Drawing(0, 0.05, [one, others], ()))
    assert found is not None and 1 <= found.served < 1.2
    assert found.counted_tok_s(8) < found.rate_tok_s
    found = drawn(times, Drawing(0, 0.05, [Class(one.survival, 4, 8)], ()))
    assert found is not None and found.served == pytest.approx(8)
    assert found.counted_tok_s(8) == pytest.approx(found.rate_tok_s)


def chosen(monkeypatch, offers: list[list[float]]) -> str:
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
    states = [State(rounds=20) for _ in texts]
    view = View(
        texts=texts,
        states=states,
        caps=[16] * num,
        rule="greedy",
        context=0,
        trees=None,
        max_certain=0,
        prompt_rows=0,
        times=times,
        offers=found,
    )
    return Chooser([ngram], known, ControlSettings()).choose(view).why


def test_what_few_of_many_texts_gain_has_to_be_more(monkeypatch) -> None:
    """Eight texts gain five percent by one of them: on its own, or of all, that is taken."""
    assert chosen(monkeypatch, [[0.6]]) == MOST
    assert chosen(monkeypatch, [[0.6]] * 8) == MOST
    assert chosen(monkeypatch, [[0.6], *[[]] * 7]) == PLAIN
    assert chosen(monkeypatch, [[0.9, 0.9, 0.9], *[[]] * 7]) == MOST
    # All of eight that gain next to nothing are left, too; one is not.
    assert chosen(monkeypatch, [[0.05]] * 8) == PLAIN
    assert chosen(monkeypatch, [[0.05]]) == MOST
