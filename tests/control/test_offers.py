"""What look-ups offer: whose is taken, by whose name it goes, and what is counted of it."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.control import Controller
from outrider.control.book import Book
from outrider.control.knowledge import SCORED, Knowledge
from outrider.control.rounds import Offer, State
from outrider.drafters import NgramDrafter
from outrider.sequence import Sequence
from outrider.types import Request, StageTimes
from tests.control.clocked import Chant, World

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
    monkeypatch.setattr(State, "allows", lambda self, now, arm, trees=False: arm is not None)
    world.run(60)
    assert set(world.controller.report()) == {"none"}


def test_ledgers_of_look_ups_are_apart_from_those_of_who_draws(monkeypatch) -> None:
    """Half of eight texts are looked up in the rounds in which the others are drafted for."""
    costs = {"target_s": lambda rows: 1 + 0.002 * rows, "draft_s": lambda rows: 0.01}
    world = World(monkeypatch, more=[Knower("known", texts={0, 1, 2, 3})], **costs)
    timed = world.controller.timed
    changed: list[set[tuple[int | None, bool]]] = []

    def rounds(state: State) -> dict[tuple[int | None, bool], int]:
        return {key: guard.rounds for key, guard in state.guards.items()}

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


def test_a_sample_is_of_a_text_that_is_offered_nothing(monkeypatch) -> None:
    """Four of eight texts are looked up; a sample of who draws takes none of that."""
    costs = {"target_s": lambda rows: 1 + 0.01 * rows, "draft_s": lambda rows: 0.05}
    world = World(
        monkeypatch, more=[Knower("known", texts={0, 1, 2, 3})], wrong=lambda place: 1.0, **costs
    )
    timed, sampled = world.controller.timed, set[int]()

    def watched(texts, times: StageTimes) -> None:
        done = world.controller._round
        if done is not None and done.plan.only is not None and len(texts) == 8:
            sampled.add(texts[done.plan.only].tokens[2])
        timed(texts, times)

    world.controller.timed = watched  # type: ignore[method-assign]
    for _ in range(4):
        world.run(200, EIGHT)
    assert sampled and sampled <= {4, 5, 6, 7}


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


def test_bad_luck_is_forgotten() -> None:
    book = Book()
    for _ in range(20):
        book.saw(1, book.cell(1), 4, 4)
        book.saw(2, book.cell(2), 0, 4, part=0.01)
    good, bad = book.cell(1), book.cell(2)
    assert bad < good
    classes = [book.drifted(2) for _ in range(60)]
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
