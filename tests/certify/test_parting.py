"""Where greedy texts part: what plain decoding draws there tells near ties from faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.certify.endpoint.paired import Sides
from outrider.certify.endpoint.parting import MOST, PLACES, Partings, Settled, parting
from outrider.certify.endpoint.server import Server, completions_url
from outrider.certify.endpoint.wire import Answer, Ask
from outrider.certify.model.plan import Plan
from outrider.certify.model.report import Check
from tests.certify.faulty import Engine, models
from tests.certify.served import LETTERS, Numpy, ids_of
from tests.certify.server import Settings, serving
from tests.certify.test_endpoint import OFF, PROMPTS

NEAR = 0.1
COLD = SamplingParams(temperature=0, max_tokens=16)
WORDS = {1: " due", 2: " ours", 3: " other"}


class Plain(Server):
    """After any prompt one of three tokens: `gap` nats lie between the first and the second."""

    def __init__(self, gap: float, told: bool = True) -> None:
        super().__init__("http://plain")
        self.scores, self.told = np.array([0.0, -gap, -3.0]), told
        self.asked: list[Ask] = []

    def ask(self, asked: Ask) -> Answer:
        self.asked.append(asked)
        heat = asked.params.temperature
        law = np.exp((self.scores - self.scores.max()) / (heat or 1e-9))
        token = 1 + int(np.random.default_rng(asked.seed).choice(3, p=law / law.sum()))
        return answer((token,), self.told)

    def all(self, asked: Any) -> list[Answer]:
        return [self.ask(one) for one in asked]


def answer(ids: tuple[int, ...], told: bool = True, finish: str = "length") -> Answer:
    text = "".join(WORDS.get(x, f" {x}") for x in ids)
    return Answer(text, finish, ids if told else None, prompt_ids=(7, 8) if told else None)


def looked(
    plain: Server, params: SamplingParams | None = None, seed: int = 1, told: bool = True
) -> Settled:
    params = SamplingParams(max_tokens=4) if params is None else params
    one = Partings(plain, ["p"], params, NEAR, 0.01, seed)
    (found,) = one.settled([0], [answer((5, 6, 2), told)], [answer((5, 6, 1), told)])
    return found


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(("gap", "outcome"), [(0.02, "tie"), (NEAR, "tie"), (1.5, "fault")])
def test_ties_and_faults(gap: float, outcome: str, told: bool) -> None:
    plain = Plain(gap, told)
    found = looked(plain, told=told)
    assert found.outcome == outcome
    assert found.case is not None
    assert found.case["came"] == ([2] if told else " ours")
    due = (7, 8, 5, 6) if told else "p 5 6"
    assert {asked.prompt for asked in plain.asked} == {due}
    assert len(plain.asked) <= MOST + 1


def test_outcomes_are_as_sure_as_they_should_be() -> None:
    for gap, outcome in ((NEAR, "fault"), (0.6, "tie")):
        found = [looked(Plain(gap), seed=10**4 * run) for run in range(150)]
        assert sum(one.outcome == outcome for one in found) <= 2


def test_plain_decoding_that_goes_the_other_way_itself() -> None:
    found = looked(Plain(-0.02))
    assert (found.outcome, found.drawn) == ("tie", 0)
    # A text may be cut into other tokens as a prompt: nothing is shown.
    assert looked(Plain(-0.02, told=False), told=False).outcome == "open"


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_do_not_count_what_is_in_a_prompt(name: str) -> None:
    plain = Plain(0.0)
    found = looked(plain, replace(SamplingParams(max_tokens=4), **{name: 1.0}))
    assert (found.outcome, name in found.why, plain.asked) == ("open", True, [])


def test_few_places_are_looked_into() -> None:
    texts = [answer((5, 2))] * 30, [answer((5, 1))] * 30
    one = Partings(Plain(0.0), ["p"] * 30, SamplingParams(max_tokens=4), NEAR, 0.01, 1)
    found = list(one.settled(range(30), *texts))
    assert len(found) == PLACES
    assert len({settled.index for settled in found}) == PLACES


def test_where_texts_part() -> None:
    ended = parting("p", answer((5,), finish="stop"), answer((5, 1)))
    assert ended is not None and ended.before == (7, 8, 5)
    assert ended.side(answer((), finish="stop")) is True
    assert ended.side(answer((1,))) is False
    assert ended.side(answer((3,))) is None
    text = parting("p", Answer("if retry", "length"), Answer("if return", "length"))
    assert text is not None and text.before == "pif"
    assert text.side(Answer(" return x", "length")) is False
    assert text.side(Answer(" ret", "length")) is None
    assert parting((1, 2), Answer("a", "length"), Answer("b", "length")) is None


def engine(fault: str | None) -> Numpy:
    """With speculation on one prompt's first token is the second of two that nearly tie."""
    target_VV, draft_VV = models()
    first, second = np.argsort(-target_VV, axis=1)[:, :2].T
    rows = np.arange(len(target_VV))
    target_VV[rows, second] = target_VV[rows, first] - 0.05
    found = Numpy()
    found.off = Engine(target_VV, draft_VV, depth=0)
    texts = found.off([ids_of(one) for one in PROMPTS], COLD, 0)
    met = {token for text in texts for token in text.token_ids}
    row = next(x for one in PROMPTS for x in ids_of(one) if x not in met)
    swapped_VV = target_VV.copy()
    swapped_VV[row, [first[row], second[row]]] = target_VV[row, [second[row], first[row]]]
    found.on = Engine(swapped_VV, draft_VV, fault)
    return found


def greedy(fault: str | None, params: SamplingParams | None = None) -> Check:
    served = Settings(engine(fault), ids_of, LETTERS.__getitem__)
    with serving(served) as url:
        where = completions_url(url)
        on, off = Server(where), Server(where, extra=OFF)
        params = SamplingParams(max_tokens=16) if params is None else params
        return Sides(on, off, PROMPTS, params, Plan(), lambda _: None, NEAR)._greedy()


def test_near_ties_of_a_server_are_no_fault() -> None:
    check = greedy(None)
    assert check.verdict == "lossless", check
    assert check.evidence["parted"] == check.evidence["ties"] == 1


def test_a_fault_among_them_is_found() -> None:
    check = greedy("row before")
    assert check.verdict == "rule bias", check
    assert "logic, not rounding" in check.said
    assert check.reproduction is not None and check.reproduction["prompt"]


def test_what_stays_open_says_what_would_settle_it() -> None:
    params = SamplingParams(max_tokens=16, presence_penalty=0.01)
    check = greedy(None, params)
    assert check.verdict == "undecided", check
    assert "presence_penalty" in check.said and "--model" in check.said
    assert check.evidence["parted"] == 1
