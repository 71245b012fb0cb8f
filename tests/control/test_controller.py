"""The controller on a clock of its own: it pays or it is off, and follows when things change."""

from __future__ import annotations

import pytest

from outrider import SamplingParams
from outrider.control import Controller, ControlSettings
from outrider.control.guard import Guard, Pace
from outrider.drafters import CombinedDrafter, GrammarDrafter, NgramDrafter, SuffixDrafter
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request, StageTimes
from tests.control.clocked import Chant, World, fixed, plain

COLD, WARM = 60, 240
"""Tokens of texts: what is learned first costs, later it must not."""
LONG = tuple([1] * 1000)


def rows_cost(share: float):
    """A target of which each row costs this share of a forward."""
    return lambda rows: 1.0 - share + share * rows


CASES = {
    "a good draft model": {},
    "a middling one": {"wrong": lambda place: 0.4},
    "none of its tokens is ever kept": {"wrong": lambda place: 1.0},
    "it is as slow as the target": {"draft_s": lambda rows: 1.0},
    "it is half as slow": {"draft_s": lambda rows: 0.45, "wrong": lambda place: 0.15},
    "every row costs as much as the first": {"target_s": rows_cost(1.0)},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_never_slower_than_plain_and_comes_near_the_best_depth(case, monkeypatch) -> None:
    slow = World(monkeypatch, drafter=plain, **CASES[case]).run(WARM)
    best = max(
        [slow, *(World(monkeypatch, drafter=fixed(k), **CASES[case]).run(WARM) for k in (1, 4, 8))]
    )
    world = World(monkeypatch, **CASES[case])
    assert world.run(COLD) > 0.85 * slow
    assert world.run(WARM) > max(0.97 * slow, 0.85 * best)


def test_a_batch_that_grows_gets_less_and_less(monkeypatch) -> None:
    """Where rows cost, 32 texts leave no room for what pays for one."""
    world = World(monkeypatch, target_s=lambda rows: 0.9 + 0.1 * rows, wrong=lambda place: 0.3)
    depths = []
    for num in (1, 8, 32):
        prompts = [(1, 2, text) for text in range(num)]
        world.run(60, prompts)
        before = world.engine.metrics.drafted, world.engine.metrics.committed
        world.run(60, prompts)
        now = world.engine.metrics.drafted, world.engine.metrics.committed
        depths.append((now[0] - before[0]) / (now[1] - before[1]))
    assert depths[0] > 2 * depths[1] > 2 * depths[2]
    assert depths[2] < 0.1


def test_a_long_prompt_and_a_short_output_are_decoded_plainly(monkeypatch) -> None:
    """The draft model would have to read the prompt first; and no first token waits for it."""
    costs = {"target_s": rows_cost(0.05), "draft_s": lambda rows: 0.05 + 0.02 * rows}
    world = World(monkeypatch, **costs)
    (done,) = world.complete(WARM, [LONG[:400]])
    assert done.sources[0] == "bonus" and done.stats.accepted > 50
    (done,) = world.complete(16, [LONG])
    assert done.stats.drafted == 0
    (done,) = world.complete(300, [LONG])
    assert done.stats.accepted > 100


def watched(world: World) -> list[tuple[int, float]]:
    """Where the text of a world stands after each round, and when."""
    seen: list[tuple[int, float]] = []
    timed = world.controller.timed

    def noted(texts, times: StageTimes) -> None:
        seen.append((len(texts[0].tokens), world.clock.now))
        timed(texts, times)

    world.controller.timed = noted  # type: ignore[method-assign]
    return seen


def test_it_follows_a_change_and_the_way_back(monkeypatch) -> None:
    """Good drafts, then noise, then the same again: beside a text that has had no noise."""

    def rate(seen: list[tuple[int, float]], first: int, last: int) -> float:
        inside = [one for one in seen if first <= one[0] < last]
        return (inside[-1][0] - inside[0][0]) / (inside[-1][1] - inside[0][1])

    world = World(monkeypatch, wrong=lambda place: 1.0 if 250 <= place < 550 else 0.1)
    changed = watched(world)
    world.run(1000)
    world = World(monkeypatch)
    steady = watched(world)
    world.run(1000)
    assert rate(changed, 300, 550) > 0.9
    assert rate(changed, 100, 250) > 2.5
    # Some forty rounds after the change.
    assert rate(changed, 660, 1000) > 0.9 * rate(steady, 660, 1000)


def test_a_slow_round_turns_nothing(monkeypatch) -> None:
    """A neighbour on the machine, now and then, is no reason to stop."""
    world = World(monkeypatch)
    world.run(WARM)
    drafted = world.engine.metrics.plain_rounds
    target = world.engine.target
    assert isinstance(target, ProtocolTarget)
    usual, calls = target.seconds, [0]  # type: ignore[attr-defined]

    def now_and_then(rows: int) -> float:
        calls[0] += 1
        return 20.0 if calls[0] % 10 == 0 else usual(rows)

    target.seconds = now_and_then  # type: ignore[attr-defined]
    world.run(WARM)
    assert world.engine.metrics.plain_rounds - drafted <= 3


def test_look_ups_are_taken_where_they_say_more(monkeypatch) -> None:
    """A text that repeats itself: the draft model is good, a look-up better and for nothing."""
    world = World(monkeypatch, more=[NgramDrafter()])
    world.engine.target.model = Echo()  # type: ignore[attr-defined]
    world.model.model.model = Echo()  # type: ignore[attr-defined]
    world.run(WARM)
    (done,) = world.done
    assert {told.drafter for told in done.provenance} <= {"draft", "ngram", None}
    names = [told.drafter for told in done.provenance[-100:]]
    assert names.count("ngram") > 60
    report = world.controller.report()
    assert report["ngram"]["tokens_per_round"] > 10
    assert sum(report["ngram"]["reasons"].values()) == report["ngram"]["rounds"]


@pytest.mark.parametrize(
    "more",
    [
        [CombinedDrafter([NgramDrafter(), SuffixDrafter()])],
        [NgramDrafter(), CombinedDrafter([SuffixDrafter(), NgramDrafter(3)])],
    ],
    ids=["several as one", "beside one"],
)
def test_each_token_goes_by_who_of_several_said_it(monkeypatch, more) -> None:
    world = World(monkeypatch, more=more)
    world.engine.target.model = Echo()  # type: ignore[attr-defined]
    world.model.model.model = Echo()  # type: ignore[attr-defined]
    world.run(WARM, [(1, 2, 3), (4, 5, 6)])
    names = [told.drafter for done in world.done for told in done.provenance]
    assert {"draft", "ngram", "suffix"} & set(names) > {"draft"}
    assert set(names) <= {"draft", "ngram", "suffix", None}
    assert world.controller.names[:2] == ("draft", "ngram")
    # Each names the text's own tokens: a look-up that said nothing is not named.
    only = World(monkeypatch, more=[CombinedDrafter([NgramDrafter(), GrammarDrafter()])])
    only.engine.target.model = Echo()  # type: ignore[attr-defined]
    only.run(WARM)
    told = {told.drafter for done in only.done for told in done.provenance}
    assert "ngram" in told and "grammar" not in told


class Echo(Chant):
    """Says the same nine tokens for ever."""

    def __init__(self) -> None:
        super().__init__(lambda place: 0.0, 1)

    def _row(self, text):
        return super()._row([text[0], *[5] * (len(text) % 9)])


def test_offers_not_taken_are_scored_all_the_same(monkeypatch) -> None:
    """Full information: of a look-up is known what it is worth though others draft."""
    world = World(monkeypatch, more=[SuffixDrafter(min_prob=0.0)], wrong=lambda place: 0.02)
    world.run(WARM)
    book = world.controller._known.book(1, "greedy")
    assert book.drafted > 3
    assert world.controller.report()["draft"]["rounds"] > 5


@pytest.mark.parametrize("texts", [1, 4])
def test_a_drafter_below_the_rate_is_left_at_once(monkeypatch, texts: int) -> None:
    """However well the rounds before it went, and however long their plan would stand."""
    world = World(
        monkeypatch,
        draft_s=lambda rows: 0.002,
        target_s=lambda rows: 1 + 0.0005 * rows,
        wrong=lambda place: 0.0 if place < 150 else float(place % 8 == 7),
        min_acceptance_rate=0.6,
    )
    known = world.controller._known
    drafted, below = world.controller._drafted, list[bool]()

    def watched(current, draws):
        rate, choice = known.rate(0, current.view.rule), current.choice
        if choice.plan.arm == 0 and choice.stake is None:
            below.append(rate is not None and rate < 0.6)
        return drafted(current, draws)

    world.controller._drafted = watched  # type: ignore[method-assign]
    for i in range(3):
        world.run(400, [(1, 2, 3 + i)] * texts)
    assert len(below) > 20 and not any(below)


def test_the_bounds_hold(monkeypatch) -> None:
    world = World(monkeypatch, max_depth=2)
    world.run(WARM)
    assert len(world.engine.metrics.drafted_per_pos) == 2
    strict = World(monkeypatch, wrong=lambda place: 0.3, min_acceptance_rate=0.9)
    loose = World(monkeypatch, wrong=lambda place: 0.3)
    strict.run(WARM), loose.run(WARM)
    assert strict.engine.metrics.drafted < 0.3 * loose.engine.metrics.drafted
    with pytest.raises(InvalidConfig, match=r"depth=3 exceeds max_depth=2.* ask for at most 2"):
        world.requests.check(Request((1, 2), SamplingParams(), depth=3))
    world.requests.check(Request((1, 2), SamplingParams(), depth=3, drafter="ngram"))
    kept = World(monkeypatch, wrong=lambda place: 1.0, fallback="draft")
    kept.run(COLD)
    assert kept.controller.report()["draft"]["rounds"] > 5
    with pytest.raises(InvalidConfig, match="fallback='ngram' is none of the drafters"):
        Controller([SuffixDrafter()], ControlSettings(fallback="ngram"))
    with pytest.raises(InvalidConfig, match="no drafters"):
        Controller([])
    for wrong in ({"max_depth": 0}, {"min_acceptance_rate": 1.5}, {"fallback": 3}):
        with pytest.raises(InvalidConfig):
            ControlSettings(**wrong)


def test_the_guard_believes_the_clock() -> None:
    guard = Guard()
    for now in range(20):
        guard.saw(now, -0.1)
    assert guard.num_pauses >= 1 and not guard.allows(20)


@pytest.mark.parametrize(("usual_s", "often", "slow_s"), [(0.66, 10, 10.0), (0.85, 3, 1.6)])
def test_noise_is_not_held_against_a_choice(usual_s: float, often: int, slow_s: float) -> None:
    """Plain rounds are as noisy, and of theirs the median counts."""
    guard, pace = Guard(), Pace()
    for now in range(60):
        took_s = slow_s if now % often == often - 1 else usual_s
        guard.saw(now, 1.0 - pace.usual_s(took_s, usual_s))
    assert guard.num_pauses == 0
    for now in range(60, 90):
        guard.saw(now, 1.0 - pace.usual_s(1.1, usual_s))
    assert guard.num_pauses >= 1
