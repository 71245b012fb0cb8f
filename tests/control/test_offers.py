"""What look-ups offer: whose is taken, by whose name it goes, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider import SamplingParams
from outrider.control import Controller, ControlSettings, plans
from outrider.control.book import Book
from outrider.control.chooser import WEIGH_AGAIN, Chooser
from outrider.control.guard import Guard
from outrider.control.knowledge import SCORED, Knowledge
from outrider.control.plans import Times
from outrider.control.rounds import Offer, State
from outrider.drafters import NgramDrafter
from outrider.sequence import Sequence
from outrider.types import Request, StageTimes
from tests.control.clocked import Chant, World, view_of

PAIR = [(1, 2, 3), (1, 2, 4)]
EIGHT = [(1, 2, text) for text in range(8)]


class Knower(NgramDrafter):
    """A look-up that knows the next tokens of some texts, told by the third token of each."""

    def __init__(self, name: str, *, right: int = 6, texts: set[int] | None = None) -> None:
        super().__init__()
        self.name, self._right, self._texts = name, right, texts
        self._says = Chant(lambda place: 0.0, 1)

    def chains(self, texts, depths):
        """Six tokens, of which the first `right` are those of the target."""
        return [
            self._of(text.tokens, min(6, depth))
            if self._texts is None or text.tokens[2] in self._texts
            else []
            for text, depth in zip(texts, depths, strict=True)
        ]

    def _of(self, tokens: list[int], depth: int) -> list[int]:
        came = list(tokens)
        for place in range(depth):
            row = self._says._row(came)
            came.append(int(row.argmax()) if place < self._right else int(row.argmin()))
        return came[len(tokens) :]


def lookups(monkeypatch, *more: Knower) -> World:
    """A world in which look-ups alone are chosen among."""

    def made(world: World) -> Controller:
        world.controller = Controller(more, clock=world.clock)
        return world.controller

    return World(monkeypatch, drafter=made)


def test_texts_of_one_round_go_by_the_names_of_their_own_look_ups(monkeypatch) -> None:
    world = lookups(monkeypatch, Knower("three", texts={3}), Knower("four", texts={4}))
    world.run(200, PAIR)
    for done, name in zip(world.done, ("three", "four"), strict=True):
        named = [told.drafter for told in done.provenance]
        assert set(named) == {name, None}
        assert named.count(name) > 120


@pytest.mark.parametrize("order", [1, -1], ids=["good first", "good last"])
def test_of_two_offers_that_which_says_more_is_taken(monkeypatch, order: int) -> None:
    more = [Knower("good"), Knower("short", right=1)][::order]
    world = lookups(monkeypatch, *more)
    world.run(300)
    named = [told.drafter for told in world.done[0].provenance[100:]]
    assert named.count("good") > 150
    assert named.count("short") < 10


def test_an_offer_is_counted_once_whether_it_is_taken_or_not(monkeypatch) -> None:
    world = lookups(monkeypatch, Knower("good"))
    counted: list[int] = []
    saw = Book.saw

    def watched(self: Book, text: int, *args, **kwargs) -> None:
        counted.append(text)
        saw(self, text, *args, **kwargs)

    monkeypatch.setattr(Book, "saw", watched)
    world.run(200)
    rounds = world.controller.report()
    assert rounds["good"]["rounds"] > 20
    assert len(counted) <= sum(one["rounds"] for one in rounds.values())


def test_a_text_whose_own_ledger_says_no_is_given_no_look_up(monkeypatch) -> None:
    world = lookups(monkeypatch, Knower("good"))
    state = world.controller._state

    def paused(text):
        found = state(text)
        found.guards[None, False] = Guard(paused_until=1000)
        return found

    monkeypatch.setattr(world.controller, "_state", paused)
    world.run(60)
    assert set(world.controller.report()) == {"none"}


def test_ledgers_of_look_ups_are_apart_from_those_of_who_draws(monkeypatch) -> None:
    """Half of eight texts are looked up in the rounds in which the others are drafted for."""
    costs = {"target_s": lambda rows: 1 + 0.002 * rows, "draft_s": lambda rows: 0.01}
    world = World(monkeypatch, more=[Knower("known", texts={0, 1, 2, 3})], **costs)
    timed = world.controller.timed
    changed: list[set[tuple[int | None, bool]]] = []

    def rounds(state: State) -> dict[tuple[int | None, bool], float]:
        return {key: guard.weight for key, guard in state.guards.items()}

    def watched(texts, times: StageTimes) -> None:
        done = world.controller._round
        assert done is not None
        before = [rounds(state) for state in done.view.states]
        timed(texts, times)
        if 0 not in done.served:
            return
        for state, taken, known in zip(done.view.states, done.taken, before, strict=True):
            if taken:
                changed.append({key for key, _ in rounds(state).items() ^ known.items()})

    world.run(100, EIGHT[4:])
    world.controller.timed = watched  # type: ignore[method-assign]
    world.run(200, EIGHT)
    assert {(None, False)} in changed
    assert all(keys <= {(None, False)} for keys in changed)


def test_a_sample_is_of_the_text_that_loses_least_by_it(monkeypatch) -> None:
    """One of two texts is looked up, the other not; either may have more for the draft to read."""
    world = World(monkeypatch)
    drafters = [world.model, NgramDrafter()]
    request = Request((1, 2), SamplingParams(max_tokens=99, temperature=0.0))

    def sampled(offered: int, unread: tuple[int, int]) -> int | None:
        known = Knowledge(drafters, None)
        known.budgets[0] = 9.0
        monkeypatch.setattr(known, "plain_due", lambda num_texts, context: False)
        tokens = list(range(500))
        texts = [
            Sequence(b, request, 0, "greedy", 16, 99, frozenset(), list(tokens)) for b in range(2)
        ]
        offers: list[Offer | None] = [None, None]
        offers[offered] = Offer(1, [5] * 4, None, 500, [0.9, 0.8, 0.7, 0.6], 0)
        # A draft's level is thought to take a tenth of a round, and rows next to nothing.
        times = Times(2, 1.0, [1.0 + 0.001 * row for row in range(99)])
        view = view_of(texts, times, offers, read=[{0: 500 - left} for left in unread])
        choice = Chooser(drafters, known, ControlSettings()).choose(view)
        assert choice.stake is not None and choice.plan.arm == 0
        return choice.plan.only

    assert sampled(0, (1, 9)) == 1 and sampled(1, (9, 1)) == 0
    # To read much is worse than to lose an offer.
    assert sampled(0, (1, 45)) == 1 and sampled(0, (1, 400)) == 0


def test_of_an_offer_that_was_not_taken_the_first_tokens_are_scored() -> None:
    """As soon as these have come, however many more it has."""
    known, ngram = Knowledge([NgramDrafter()], None), 0
    request = Request((1, 2), SamplingParams(max_tokens=99, temperature=0.0))
    text = Sequence(0, request, 0, "greedy", 16, 99, frozenset(), [1, 2, *range(10, 10 + SCORED)])
    state = State(pending={ngram: Offer(ngram, list(range(10, 20)), None, 2, [0.5] * 10, 0)})
    text.tokens.pop()
    known.compare(text, state, 1.0)
    assert state.pending
    text.tokens.append(9 + SCORED)
    known.compare(text, state, 1.0)
    assert not state.pending
    book = known.book(ngram, "greedy")
    assert (book.drafted, book.kept) == (SCORED, SCORED)


def second() -> Sequence:
    """A text that goes by 2 in books."""
    request = Request((1, 2), SamplingParams())
    return Sequence(2, request, 0, "greedy", 16, 9, frozenset(), [1, 2])


def test_bad_luck_is_forgotten() -> None:
    book, text = Book(), second()
    for _ in range(20):
        book.felt(1, 4, 4)
        book.saw(book.cell(1), 4, 4)
        book.felt(2, 0, 4)
        book.saw(book.cell(2), 0, 4, part=0.01)
    good, bad = book.cell(1), book.cell(2)
    assert bad < good
    classes = [book.cells([text], 1)[0] for _ in range(60)]
    assert classes == sorted(classes) and classes[0] == bad
    assert classes[-1] == book.cell(3), "a new text has the luck of all"


class Veto(Knower):
    """A look-up below another one, which proposes nothing."""

    def propose(self, texts, depths, draws):
        """Nothing, whatever the other one knows."""
        return draws.points([[] for _ in texts])


def test_a_look_up_of_ones_own_is_asked_what_it_proposes(monkeypatch) -> None:
    world = lookups(monkeypatch, Veto("veto"))
    world.run(60)
    assert set(world.controller.report()) == {"none"}


def test_bad_luck_is_forgotten_by_the_round_however_seldom_it_is_looked_at() -> None:
    often, seldom, text = Book(), Book(), second()
    for book in (often, seldom):
        book.felt(2, 0, 4)
        book.saw(book.cell(2), 0, 4, part=0.01)
    for _ in range(4):
        often.cells([text], 1)
    seldom.cells([text], 4)
    assert seldom._luck[2] == pytest.approx(often._luck[2])


def test_who_stands_idle_is_weighed_anew_every_few_rounds_or_when_something_has_changed(
    monkeypatch,
) -> None:
    """A drafter of no use, of which samples are seen now and then."""
    world = World(monkeypatch, wrong=lambda place: 1.0)
    chooser, known, drawn = world.controller._chooser, world.controller._known, plans.drawn
    rounds: list[int] = []
    monkeypatch.setattr(plans, "drawn", lambda *given: rounds.append(known.now) or drawn(*given))
    monkeypatch.setattr("outrider.control.guard.ASKED", 10**9)
    monkeypatch.setattr(chooser, "forget", lambda: None)
    world.run(400, EIGHT[:2])
    began, before = known.now, len(rounds)
    heard = sum(one["rounds"] for name, one in world.controller.report().items() if name == "draft")
    world.run(400, EIGHT[:2])
    share = (len(rounds) - before) / (known.now - began)
    assert 1 / WEIGH_AGAIN <= share < 2 / WEIGH_AGAIN
    # What a sample said is weighed at once.
    view = chooser._plans[0]
    fresh = SimpleNamespace(
        times=view.times, caps=list(view.caps), texts=view.texts, lefts=(9.0, 9.0)
    )
    assert heard and view.holds(view.at + 1, view.heard, fresh)
    assert not view.holds(view.at + 1, view.heard + 1, fresh)
    assert not view.holds(view.at + WEIGH_AGAIN, view.heard, fresh)
    for other in ({"times": replace(view.times)}, {"caps": [99]}, {"texts": ()}, {"lefts": ()}):
        changed = SimpleNamespace(**{**vars(fresh), **other})
        assert not view.holds(view.at + 1, view.heard, changed)
