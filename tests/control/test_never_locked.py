"""What was slow once, bad once or busy once is not held against a choice for ever."""

from __future__ import annotations

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.control import Controller
from outrider.control.live import AGE, Recent
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    alternatives,
    names_alternatives,
)
from outrider.drafters.base import RoundDraws
from outrider.drafters.stop import Stop
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, OutriderWarning
from outrider.types import Request, StageTimes
from tests.control.clocked import VOCAB, Chant, Slow, World
from tests.control.test_controller import Echo

EIGHT = [(1, 2, text) for text in range(8)]
LONG = tuple((7 * i) % 31 for i in range(700))


def served(world: World, *drafters: Drafter, target: Slow | None = None, **engine) -> World:
    """The same world with a controller of these."""
    world.controller = Controller(drafters, clock=world.clock)
    target = target or Slow(Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1 + 0.02 * rows)
    world.engine = Engine(target, world.controller, Emitter(None), **engine)
    world.requests = Requests(world.engine, depth=16, end_tokens=frozenset())
    return world


def drawer(world: World, name: str, level_s: float, wrong) -> ModelDrafter:
    return ModelDrafter(Slow(Chant(wrong, 5), world.clock, lambda rows: level_s), name=name)


def test_look_ups_alone_survive_a_slow_first_round_of_every_row_count(monkeypatch) -> None:
    world, seen = World(monkeypatch), set[int]()

    def seconds(rows: int) -> float:
        first = rows not in seen and rows < 60
        seen.add(rows)
        return 1.0 + 0.02 * rows + (10.0 if first else 0.0)

    served(world, NgramDrafter(), target=Slow(Echo(), world.clock, seconds))
    world.run(200), world.run(200)
    assert world.run(200) > 6.0


def test_few_values_and_old_ones_are_doubted() -> None:
    """One of fifty where one second was expected: three times that, nine times, fifty; and back."""
    recent, worth = Recent(), []
    for now in (1, 2, 3):
        recent.add(50.0, now)
        worth.append(recent.worth(1.0, now))
    assert worth == [3.0, 9.0, 50.0]
    assert [recent.worth(1.0, 3 + age * AGE) for age in (1, 2, 3, 9)] == [9.0, 3.0, 1.0, 1.0]


def test_a_draft_model_survives_a_slow_first_forward(monkeypatch) -> None:
    calls = [0]

    def level(rows: int) -> float:
        calls[0] += 1
        return 20.1 if calls[0] == 1 else 0.1

    world = World(monkeypatch, draft_s=level)
    world.run(100)
    assert world.run(150) > 2.0


def test_slow_first_plain_rounds_flatter_nobody_for_long(monkeypatch) -> None:
    calls = [0]

    def warmed_up(rows: int) -> float:
        calls[0] += 1
        return 4.0 if calls[0] < 4 else 1.0

    world = World(
        monkeypatch, target_s=warmed_up, draft_s=lambda rows: 0.9, wrong=lambda place: 0.5
    )
    # Nine seconds of them are the warm-up's own.
    assert world.run(200) > 200 / (200 + 9 + 12)


def test_others_are_sampled_while_one_works(monkeypatch) -> None:
    world = World(monkeypatch, wrong=lambda place: 0.15)
    better = drawer(world, "better", 0.02, lambda place: 1.0 if place < 250 else 0.0)
    served(world, better, world.model)
    assert world.run(900) > 3.2
    assert world.controller.report()["better"]["rounds"] > 20


def test_a_sample_leaves_other_texts_their_own_offers(monkeypatch) -> None:
    world = World(monkeypatch, more=[NgramDrafter()])
    world.engine.target.model = Echo()  # type: ignore[attr-defined]
    world.model.model.model = Echo()  # type: ignore[attr-defined]
    rounds: list[tuple[bool, int]] = []
    timed = world.controller.timed

    def watched(texts, times: StageTimes) -> None:
        done = world.controller._round
        assert done is not None
        offers = sum(offer is not None for offer in done.view.offers)
        if done.choice.stake is not None and offers == 8:
            rounds.append((done.choice.stake is not None, sum(n > 0 for n in done.offered)))
        timed(texts, times)

    world.controller.timed = watched  # type: ignore[method-assign]
    for _ in range(4):
        world.run(200, EIGHT)
    assert rounds and all(served == 8 for _, served in rounds)
    sampled = sum(
        one["reasons"].get("a sample, to know whether it would pay", 0)
        for one in world.controller.report().values()
    )
    assert sampled < 0.15 * sum(one["rounds"] for one in world.controller.report().values())


@pytest.mark.parametrize("chunk", [256, 512, 2048])
def test_a_text_is_read_whatever_the_chunk(chunk: int, monkeypatch) -> None:
    world = World(monkeypatch)
    target = Slow(Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1 + 0.002 * rows)
    served(world, world.model, target=target, chunk=chunk)
    world.run(60)
    (done,) = world.complete(200, [LONG])
    assert done.stats.accepted > 100


def test_plain_rounds_of_one_group_leave_what_another_has_to_read(monkeypatch) -> None:
    """A coupled text that nobody can draft for, beside a long greedy one."""
    world = World(monkeypatch, wrong=lambda place: 1.0 if place < 690 else 0.05)
    target = Slow(Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1 + 0.002 * rows)
    served(world, world.model, target=target, chunk=256)
    law = SamplingParams(max_tokens=120, temperature=1.0, seed=3)
    world.requests.complete([Request((1, 2, 3), law)])
    greedy = SamplingParams(max_tokens=100, temperature=0.0)
    done = world.requests.complete([Request(LONG, greedy), Request((1, 2, 3), law)])
    assert done[0].stats.accepted > 50 and done[0].stats.plain_rounds <= 5


def test_steady_arrivals_are_timed_and_guarded(monkeypatch) -> None:
    """Some text is in its first round in nearly every one."""
    world = World(monkeypatch)
    target = Slow(Chant(lambda place: 0.0, 1), world.clock, lambda rows: 1 + 0.002 * rows)
    served(world, world.model, target=target, max_texts=16)
    requests = [
        Request((1, 2, i % 30), SamplingParams(max_tokens=4 + 5 * i % 11, temperature=0.0))
        for i in range(120)
    ]
    world.requests.complete(requests)
    report = world.controller.report()
    assert report["draft"]["rounds"] > 3
    assert any(
        guard.weight or guard.num_pauses for guard in world.controller._known.guards.values()
    )


def test_bookkeeping_that_fails_ends_no_text(monkeypatch, caplog) -> None:
    world = World(monkeypatch)

    def fails(texts, times: StageTimes) -> None:
        raise ZeroDivisionError("bookkeeping")

    world.controller.timed = fails  # type: ignore[method-assign]
    done = world.complete(20, EIGHT)
    assert all(len(one.token_ids) == 20 for one in done)
    assert "failed to note a round" in caplog.text


class Told(NgramDrafter):
    """Counts the rounds it is told of."""

    rounds = 0

    def timed(self, texts, times: StageTimes) -> None:
        self.rounds += 1


@pytest.mark.parametrize("made", [Controller, CombinedDrafter])
def test_parts_are_told_of_rounds(made, monkeypatch) -> None:
    told = Told()
    world = World(monkeypatch, drafter=lambda world: made([told, world.model]))
    world.run(20)
    assert told.rounds >= 2


def test_a_round_that_failed_was_no_round(monkeypatch) -> None:
    """The next one reads the prompt, and is not taken for plain decoding."""
    world = World(monkeypatch, target_s=lambda rows: float(rows))
    score, calls = world.engine.target.score, [0]

    def broken(rows):
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("once")
        return score(rows)

    world.engine.target.score = broken  # type: ignore[method-assign]
    world.requests.complete(
        [Request((1, 2, 3) * 20, SamplingParams(max_tokens=12, temperature=0.0)) for _ in range(2)]
    )
    plain_s = world.controller._known._live.plain_s(1, 0)
    assert plain_s is not None and plain_s < 4.0


def test_a_drafter_keeps_the_confidence_it_was_given(monkeypatch) -> None:
    """Beside the controller's stop, which is gone when the round is over."""
    world = World(monkeypatch)
    world.model.confidence = 0.25
    stops: list[Stop | None] = []
    propose = world.model.propose

    def watched(texts, depths, draws: RoundDraws):
        stops.append(world.model.stop)
        return propose(texts, depths, draws)

    world.model.propose = watched  # type: ignore[method-assign]
    world.run(60)
    assert world.model.confidence == 0.25 and world.model.stop is None
    assert any(stop is not None and stop.least > 0 for stop in stops)


def test_nothing_ends_chains_whose_tokens_are_not_read_one_by_one(monkeypatch) -> None:
    """Of one text, as on a GPU; of several they are, and whatever a user's confidence ends."""
    monkeypatch.setattr(Slow, "takes_unread", True)
    for confidence, prompts, ended in (
        (0.0, [(1, 2, 3)], False),
        (0.25, [(1, 2, 3)], True),
        (0.0, [(1, 2, 3), (1, 2, 4)], True),
    ):
        world = World(monkeypatch)
        world.model.confidence = confidence
        stops = list[Stop | None]()
        propose = world.model.propose

        def watched(*given, model=world.model, propose=propose, stops=stops):
            stops.append(model.stop)
            return propose(*given)

        world.model.propose = watched  # type: ignore[method-assign]
        world.run(60, prompts)
        assert len(stops) > 5 and any(stop is not None for stop in stops) == ended


def test_a_drafter_that_knows_when_it_is_wrong_drafts_deep_and_stops_there(monkeypatch) -> None:
    """Long runs of right tokens, then a wrong one that it gives little: each run is one draft."""
    world = World(monkeypatch, wrong=lambda place: float(place % 12 == 0), draft_s=lambda rows: 0.2)
    chant = world.model.model.model
    row = chant._row
    flat = np.log(np.full(VOCAB, 1 / VOCAB))

    def unsure(text):
        found = row(text)
        return flat + 1e-3 * (found == 0.0) if len(text) % 12 == 0 else found

    chant._row = unsure
    world.run(400)
    before = world.engine.metrics.drafted, world.engine.metrics.accepted
    rounds = world.controller.report()["draft"]["rounds"]
    world.run(240)
    drafted = world.engine.metrics.drafted - before[0]
    accepted = world.engine.metrics.accepted - before[1]
    rounds = world.controller.report()["draft"]["rounds"] - rounds
    assert accepted / rounds > 8, "as deep as it is right"
    assert drafted - accepted < 1.3 * rounds, "and hardly a token further"


def test_a_text_nobody_can_draft_for_says_nothing_of_others(monkeypatch) -> None:
    """The draft model's context ends at 64 tokens: what goes beyond lowers no class of luck."""
    world = World(monkeypatch, wrong=lambda place: 0.0)
    world.model.model.max_length = 64  # type: ignore[misc]
    world.run(50)
    book = world.controller._known.book(0, "greedy")
    before = book.survival(-1, 1)[0]
    world.model._warned = True
    world.complete(100, [tuple(range(1, 31)) * 3])
    assert book.survival(-1, 1)[0] >= before - 0.05


def test_one_text_of_noise_stops_alone(monkeypatch) -> None:
    """Of eight texts one is never guessed: its own ledger, or its luck, leaves it out."""
    world = World(monkeypatch, target_s=lambda rows: 0.9 + 0.02 * rows)
    wrong = Chant(lambda place: 0.3, 2)
    usual = wrong._row

    def row(text):
        return usual([*text[:-1], text[-1] + 1] if text[2] == 7 else text)

    wrong._row = row  # type: ignore[method-assign]
    world.model.model.model = wrong  # type: ignore[attr-defined]
    done = world.complete(150, EIGHT)
    good, bad = done[0].stats, done[7].stats
    assert good.accepted > 60
    assert bad.rounds < 0.7 * good.rounds


def test_a_seed_that_times_decide_with_is_warned_of_once(monkeypatch) -> None:
    world = World(monkeypatch)
    law = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    with pytest.warns(OutriderWarning, match=r"rule='block' with seed=3.*drafter='draft'") as told:
        world.requests.complete([Request((1, 2, 3), law, rule="block")])
    assert told[0].filename == __file__
    # Once; and never where the seed holds, is not given, or one drafter is named.
    for rule, drafter, seed in (
        ("block", None, 3),
        (None, None, 3),
        ("block", None, None),
        ("block", "ngram", 4),
    ):
        other = World(monkeypatch) if rule is None or seed != 3 else world
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=seed)
        other.requests.complete([Request((1, 2, 3), params, rule=rule, drafter=drafter)])


def test_nobody_is_always_an_alternative() -> None:
    auto = ("draft", "ngram")
    for spec in ("ngram,none", "none,ngram", "ngram , none"):
        assert names_alternatives(spec) and alternatives(spec, auto) == ("ngram",)
    assert alternatives("auto,ngram", auto) == alternatives("auto,none,ngram", auto) == auto
    assert alternatives("draft, suffix", auto) == ("draft", "suffix")
    assert not names_alternatives("draft+ngram")
    for spec in ("ngram,suffix+ngram", "none,none", "auto,auto"):
        with pytest.raises(InvalidConfig, match="names one drafter twice"):
            alternatives(spec, auto)


def test_a_look_ups_draft_is_taken_as_far_as_it_pays(monkeypatch) -> None:
    """All of it as it is, or the first tokens of it: never a row more than was planned."""
    world = World(monkeypatch, more=[NgramDrafter()], target_s=lambda rows: 1 + 0.05 * rows)
    world.engine.target.model = Echo()  # type: ignore[attr-defined]
    world.model.model.model = Echo()  # type: ignore[attr-defined]
    drafted, seen = world.controller._drafted, list[bool]()

    def watched(current, draws):
        draft = drafted(current, draws)
        plan, offers = current.plan, current.view.offers
        if plan.arm is None and plan.depth:
            assert draft.tree.counts_B.tolist() == list(plan.lengths)
            for row, offer, num in zip(draft.tree.tokens_BN, offers, plan.lengths, strict=True):
                assert num == 0 or row[:num].tolist() == offer.tokens[:num]
            offered = [0 if offer is None else len(offer.tokens) for offer in offers]
            seen.append(offered == list(plan.lengths))
        return draft

    world.controller._drafted = watched  # type: ignore[method-assign]
    for _ in range(4):
        world.run(200, EIGHT)
    assert any(seen) and not all(seen)
