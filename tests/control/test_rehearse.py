"""The controller and several drafters on traced texts: a replay goes as the real run goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.control.controller import Controller
from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.control.fit import costs_of
from outrider.control.guesses import together
from outrider.control.policies import policy_of
from outrider.control.record import Asked, alternatives_of, observed, observed_by, recorded
from outrider.control.replay import replay
from outrider.control.trace import TracedText, read_trace, write_trace
from outrider.drafters import CombinedDrafter, Drafter, ModelDrafter, NgramDrafter
from outrider.drafters.stop import CLASSES, Stop, class_of
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from tests.control.clocked import Chant, World, fixed, plain
from tests.engine.toys import blurred, markov

DEPTH, TOKENS = 6, 70
PROMPTS = ((1, 2, 3), (1, 2, 4))
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
NEAR = 0.05


class Echo(Chant):
    """Says the same few tokens for ever, so that they can be looked up."""

    def _row(self, text: Sequence[int]):
        return super()._row([text[0], *[5] * (len(text) % (9 + text[0] % 3))])


class Wavering(Chant):
    """Knows where it is wrong: there it is unsure."""

    def _row(self, text: Sequence[int]):
        row = super()._row(text)
        place = len(text)
        miss = self._dice[(place + 997 * text[min(2, place - 1)]) % len(self._dice)]
        if miss < self._wrong(place):
            said = int(row.argmax())
            row[[(said + i) % len(row) for i in range(4)]] = np.log([0.28, 0.24, 0.24, 0.24])
        return row


class Case:
    """A world, made anew as often as it is needed."""

    def __init__(self, monkeypatch, target=None, draft=None, **world) -> None:
        self._patch, self._target, self._draft, self._world = monkeypatch, target, draft, world

    def made(self, drafter=None) -> World:
        world = World(self._patch, drafter=drafter, more=[NgramDrafter()], **self._world)
        world.requests.depth = DEPTH
        if self._target is not None:
            world.engine.target.model = self._target()  # type: ignore[attr-defined]
        if self._draft is not None:
            world.model.model.model = self._draft()  # type: ignore[attr-defined]
        return world

    def rate(self, drafter=None, batch: int = 1) -> float:
        """Tokens a second of the prompts, `batch` at a time, as they really run."""
        world = self.made(drafter)
        before = world.clock.now
        for first in range(0, len(PROMPTS), batch):
            world.complete(TOKENS, PROMPTS[first : first + batch])
        return TOKENS * len(PROMPTS) / (world.clock.now - before)

    def traced(self, batch: int = 1) -> tuple[list[TracedText], Costs]:
        """The texts as both drafters guess at them, and what rounds cost."""
        requests = self.made().requests
        asked = Asked(PROMPTS, GREEDY, DEPTH, batch=batch)
        texts = observed_by(requests, asked, alternatives_of(requests))
        few = replace(asked, sampling=replace(GREEDY, max_tokens=20))
        ran = [
            text
            for name in ("draft", "ngram")
            for depth in (0, 1, 2, DEPTH)
            for text in recorded(requests, replace(few, drafter=name, depth=depth))
        ]
        return texts, costs_of(ran)


CASES = {
    "a good draft model": {},
    "a draft model that is never right": {"wrong": lambda place: 1.0},
    "look-ups say more": {
        "target": lambda: Echo(lambda place: 0.0, 1),
        "draft": lambda: Echo(lambda place: 0.3, 2),
    },
    "a draft model that knows where it is wrong": {
        "draft": lambda: Wavering(lambda place: 0.3, 2),
        "draft_s": lambda rows: 0.3,
    },
}


def unsure(text: TracedText) -> TracedText:
    """The text without what tells how sure the drafter was."""
    rounds = [replace(one, trace=replace(one.trace, worths=None)) for one in text.rounds]
    return replace(text, rounds=tuple(rounds))


@pytest.mark.parametrize("case", CASES)
def test_the_controller_is_replayed_as_it_runs(case: str, monkeypatch) -> None:
    world = Case(monkeypatch, **CASES[case])
    texts, costs = world.traced()
    found = replay(texts, policy_of("auto"), costs)
    assert found.tokens == TOKENS * len(PROMPTS) and found.unknown == 0
    due = world.rate()
    assert found.tokens_per_s == pytest.approx(due, rel=NEAR)
    # The negative controls: other costs, another drafter's guesses, or not to know how sure the
    # draft model was, give another speed.
    if case == "a draft model that knows where it is wrong":
        blind = replay([unsure(text) for text in texts], policy_of("auto"), costs)
        assert abs(blind.tokens_per_s / due - 1) > NEAR
    if case == "a good draft model":
        dear = {**costs.drafts, "draft": DraftCost(level_s=0.5)}
        wrong = replay(texts, policy_of("auto"), replace(costs, drafts=dear))
        assert abs(wrong.tokens_per_s / due - 1) > 2 * NEAR
        bad, _ = Case(monkeypatch, wrong=lambda place: 1.0).traced()
        assert replay(bad, policy_of("auto"), costs).tokens_per_s < (1 - 2 * NEAR) * due


def test_drafters_are_replayed_as_they_run(monkeypatch) -> None:
    world = Case(monkeypatch, **CASES["look-ups say more"])
    texts, costs = world.traced()
    rates = {
        "draft:4": world.rate(fixed(4)),
        f"ngram:{DEPTH}": world.rate(lambda _: NgramDrafter()),
        "none": world.rate(plain),
    }
    for spec, due in rates.items():
        assert replay(texts, policy_of(spec), costs).tokens_per_s == pytest.approx(due, rel=NEAR)
    assert max(rates.values()) > 1.2 * min(rates.values())
    found = replay(texts, policy_of("draft:4"), costs)
    assert found.rounds_by_drafter.keys() <= {"draft", "none"}
    # The negative control: the other one's guesses are another's.
    assert replay(texts, policy_of("ngram:4"), costs).rounds != found.rounds


def test_texts_that_share_rounds_are_replayed_as_they_run(monkeypatch) -> None:
    world = Case(monkeypatch, target_s=lambda rows: 0.9 + 0.05 * rows)
    texts, costs = world.traced(batch=2)
    found = replay(texts, policy_of("auto"), costs, batch=2)
    assert found.tokens_per_s == pytest.approx(world.rate(batch=2), rel=NEAR)


def test_the_oracle_is_marked_and_nobody_is_quicker(monkeypatch) -> None:
    texts, costs = Case(monkeypatch, **CASES["look-ups say more"]).traced()
    oracle = replay(texts, policy_of("oracle"), costs)
    others = [
        replay(texts, policy_of(spec), costs)
        for spec in ("none", "auto", "draft:auto", "draft:4", "ngram:6", "draft:expected")
    ]
    own = [replay(texts, policy_of(spec), costs) for spec in ("draft:oracle", "ngram:oracle")]
    assert all(one.oracle for one in (oracle, *own)) and not any(one.oracle for one in others)
    assert all(oracle.seconds <= one.seconds + 1e-9 for one in (*others, *own))
    assert {"draft", "ngram"} & oracle.rounds_by_drafter.keys()
    assert "ngram" not in others[2].rounds_by_drafter


WIDE = markov(9, 2, seed=1)
COSTS = Costs(
    tuple(ForwardCost(1, rows, 0, 10.0 + rows) for rows in (1, 9)),
    {"draft": DraftCost(0.5, 1.0, 0.1, 0.01), "ngram": DraftCost(0.1)},
    prompt_token_s=0.1,
)


def served(drafter: Drafter | None = None, trees: TreeBudget | None = None) -> Requests:
    chosen = drafter or Controller(
        [ModelDrafter(ProtocolTarget(blurred(WIDE, 2, 0.4))), NgramDrafter()]
    )
    engine = Engine(ProtocolTarget(WIDE), chosen, Emitter(None), trees=trees)
    return Requests(engine, depth=4, end_tokens=frozenset())


def seen(rule: str | None = None, **sampling) -> list[TracedText]:
    requests = served()
    asked = Asked([[1], [2, 3]], SamplingParams(max_tokens=24, **sampling), 4, rule=rule)
    return observed_by(requests, asked, alternatives_of(requests))


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_several_drafters_guess_at_one_text(rule: str) -> None:
    """Without a seed too: one is drawn for all of them."""
    texts = seen(rule, temperature=0.9)
    watched = together(texts)
    assert [list(one) for one in watched] == [["draft", "ngram"]] * 2
    assert [one["ngram"].text.settings.certain for one in watched] == [True] * 2
    assert not any(one["draft"].text.settings.certain for one in watched)
    found = replay(texts, policy_of("auto"), COSTS)
    assert found.tokens == 48 and found.drafted > 0
    for one, steps in zip(watched, found.steps, strict=True):
        for step in steps:
            due = one[step.drafter].draft(step.made, step.levels).kept if step.drafter else 0
            assert step.kept == due


def test_how_sure_a_draft_model_was_is_traced(tmp_path) -> None:
    texts = seen(temperature=0.0)
    assert all(one.trace.worths for one in texts[0].rounds[:-1])
    assert not any(one.trace.worths for one in texts[2].rounds)
    guesses = together(texts)[0]["draft"]
    worths = texts[0].rounds[0].trace.worths
    assert worths is not None
    whole = guesses.chain(0, 4)
    assert whole == texts[0].rounds[0].trace.tokens and len(whole) == 4
    assert guesses.worths(0, 3) == pytest.approx(worths[:3])
    assert guesses.chain(0, 4, Stop()) == whole
    # Two tokens are kept whole with a chance of a quarter, whatever they were given.
    half = (0.5,) * CLASSES
    assert guesses.chain(0, 4, Stop(0.3, half)) == whole[:2]
    assert guesses.chain(0, 4, Stop(0.6, half)) == whole[:1]
    # A class that is never kept ends a chain behind its first token.
    never = class_of(worths[0])
    sure = tuple(float(own != never) for own in range(CLASSES))
    assert guesses.chain(0, 4, Stop(0.5, sure)) == whole[:1]
    write_trace(tmp_path / "seen.jsonl", texts)
    assert read_trace(tmp_path / "seen.jsonl") == texts


def test_what_was_not_traced_is_refused() -> None:
    texts = seen(temperature=0.0)
    alone = [text for text in texts if text.settings.drafter == "draft"]
    with pytest.raises(InvalidConfig, match=r"no guess of 'ngram', but of draft; .*draft,ngram"):
        replay(alone, policy_of("ngram:4"), COSTS)
    for spec in ("depth:2", "expected", "threshold:0.5"):
        with pytest.raises(InvalidConfig, match=f"say draft:{spec}"):
            replay(texts, policy_of(spec), COSTS)
    with pytest.raises(InvalidConfig, match="some texts have guesses of draft, ngram, others"):
        replay(texts[:-1], policy_of("auto"), COSTS)
    with pytest.raises(InvalidConfig, match="drafter 'ngram' was not measured"):
        replay(texts, policy_of("ngram:oracle"), replace(COSTS, drafts={}))
    asked = Asked([[1]], SamplingParams(temperature=0.0, max_tokens=8), 4, drafter="draft")
    with pytest.raises(InvalidConfig, match="trace with --observe"):
        replay(recorded(served(), asked), policy_of("auto"), COSTS)
    with pytest.raises(InvalidConfig, match="trace without --width"):
        replay(observed(served(trees=TreeBudget(2, 6)), asked), policy_of("auto"), COSTS)
    # A drafter may be the one there is.
    one = replay(alone, policy_of("auto"), COSTS)
    assert one.rounds_by_drafter.keys() <= {"draft", "none"}


def test_alternatives_are_named_once() -> None:
    assert alternatives_of(served(NgramDrafter())) == []
    both = CombinedDrafter([NgramDrafter(), NgramDrafter()])
    assert alternatives_of(served(Controller([both, NgramDrafter()]))) == ["ngram+ngram", "ngram"]
    with pytest.raises(InvalidConfig, match="two drafters of one name"):
        alternatives_of(served(Controller([NgramDrafter(), NgramDrafter()])))


@pytest.mark.parametrize(
    ("spec", "drafter"),
    [
        ("draft:4", "draft"),
        ("draft:depth:4", "draft"),
        ("early-exit:2:4", "early-exit:2"),
        ("early-exit:2:threshold:0.4", "early-exit:2"),
        ("draft+ngram:oracle", "draft+ngram"),
        ("eagle3:auto", "eagle3"),
        ("auto", None),
    ],
)
def test_a_policy_may_begin_with_its_drafter(spec: str, drafter: str | None) -> None:
    found = policy_of(spec, ["eagle3"])
    assert found is not None and found.drafter == drafter and found.name == spec


@pytest.mark.parametrize(
    "spec", ["eagle3:4", "none:4", "auto:4", "draft:none", "draft:traced", "draft:"]
)
def test_what_begins_with_no_drafter_is_refused(spec: str) -> None:
    with pytest.raises(InvalidConfig, match="does not exist"):
        policy_of(spec)
