"""What one call may say otherwise, and what is said once."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest

from outrider import LLM, SamplingParams
from outrider.drafters import CombinedDrafter, Drafter, ModelDrafter, NgramDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.unused import AFTER
from outrider.errors import InvalidConfig, OutriderWarning
from outrider.models.bundled import bundled_path
from outrider.models.protocol import ProtocolTarget
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.engine.toys import markov

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
PROMPT = "def mean(values):\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", "draft", k=3)


def test_one_call_may_do_without_a_drafter(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, PARAMS, drafter="none")
    assert plain.stats.drafted == 0
    assert plain.token_ids == llm.generate(PROMPT, PARAMS, depth=0)[0].token_ids
    assert llm.generate(PROMPT, PARAMS)[0].stats.drafted > 0
    deltas = llm.stream(PROMPT, PARAMS, drafter="none")
    assert tuple(t for delta in deltas for t in delta.token_ids) == plain.token_ids


def test_one_call_may_name_its_rule(llm: LLM) -> None:
    match = LLM.load("bundled", "draft", k=3, rule="match")
    (wanted,) = match.generate(PROMPT, PARAMS)
    (done,) = llm.generate(PROMPT, PARAMS, rule="match")
    assert done.token_ids == wanted.token_ids
    deltas = llm.stream(PROMPT, PARAMS, rule="match")
    assert tuple(t for delta in deltas for t in delta.token_ids) == wanted.token_ids
    assert llm.generate(PROMPT, PARAMS)[0].stats.as_dict() != wanted.stats.as_dict()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"rule": "blok"}, "did you mean 'block'"),
        ({"rule": "greedy"}, "would change the law"),
        ({"drafter": "int8"}, "not loaded, and one request cannot load it"),
        ({"drafter": "none", "depth": 2}, "contradict"),
    ],
)
def test_what_one_call_cannot_say(told: dict, message: str, llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match=message):
        llm.generate(PROMPT, PARAMS, **told)
    with pytest.raises(InvalidConfig, match=message):
        llm.stream(PROMPT, PARAMS, **told)


def test_each_prompt_may_have_its_own(llm: LLM) -> None:
    text = "def mean(values):\n    return sum(values)\n\ndef mean2(values):\n"
    drafters = [None, "none", "ngram", "suffix+draft"]
    done = llm.generate([text] * 4, PARAMS, drafter=drafters, depth=[2, None, 3, None], trace=True)
    assert len({one.token_ids for one in done}) == 1
    named = [{told.drafter for told in one.provenance} - {None} for one in done]
    assert named[0] == {"draft"} and named[1] == set() and named[2] <= {"ngram"}
    assert named[3] <= {"suffix", "draft"} and named[3]
    assert max(len(one.tokens) for one in done[0].trace or ()) == 2
    with pytest.raises(InvalidConfig, match="4 prompts came with 2 values of drafter"):
        llm.generate([text] * 4, PARAMS, drafter=["none", "ngram"])
    rules = [one.rule for one in llm.generate([text] * 2, PARAMS, rule=["match", None])]
    assert rules == ["match", "coupled"]


def test_a_prompt_that_fills_the_drafts_context_is_spoken_of_once() -> None:
    target, draft = ProtocolTarget(markov(5, 1, 0)), ProtocolTarget(markov(5, 1, 1))
    draft.max_length = 6
    requests = Requests(
        Engine(target, ModelDrafter(draft), Emitter(None)), depth=2, end_tokens=frozenset()
    )
    short = Request((1, 2, 3), SamplingParams(max_tokens=3, seed=1))
    long = Request((1, 2, 3) * 2, SamplingParams(max_tokens=3, seed=1))
    plain = Request((1, 2, 3) * 2, SamplingParams(max_tokens=3, seed=1), depth=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        requests.complete([short, plain])
    with pytest.warns(OutriderWarning, match="6 tokens fills the draft .* of 6") as told:
        (done,) = requests.complete([long])
    assert told[0].filename == __file__
    assert done.stats.drafted == 0
    requests.complete([long])


def test_a_chat_template_on_one_side_alone_is_spoken_of(tmp_path) -> None:
    folder = shutil.copytree(bundled_path("draft"), tmp_path / "draft")
    config = folder / "tokenizer_config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps({**stated, "chat_template": "{{ messages[0].content }}"}))
    for kind in ("draft", "bridge"):
        with pytest.warns(OutriderWarning, match="the target's tokenizer has no chat") as told:
            LLM.load("bundled", drafter=f"{kind}:{folder}")
        assert len(told) == 1 and told[0].filename == __file__
    LLM.load("bundled", drafter="draft")


def idle(drafter: Drafter | None = None, trees: TreeBudget | None = None) -> Requests:
    drafter = drafter or ModelDrafter(ProtocolTarget(markov(5, 1, 1)))
    engine = Engine(ProtocolTarget(markov(5, 1, 0)), drafter, Emitter(None), trees=trees)
    return Requests(engine, depth=2, end_tokens=frozenset())


def asked(max_tokens: int = 3, **how) -> Request:
    return Request((1, 2, 3), SamplingParams(max_tokens=max_tokens, seed=1), **how)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            asked(depth=0),
            r"'draft': draft was loaded .* none of 16 texts so far, as .*depth=0",
        ),
        (asked(drafter="none"), r"in none of 16 texts so far, as each had speculation off"),
        (asked(drafter="ngram"), r"or another drafter"),
        (asked(max_tokens=1), "more than the one token"),
    ],
)
def test_a_model_that_never_drafts_is_spoken_of_once(request_: Request, message: str) -> None:
    requests = idle()
    requests.complete([request_] * (AFTER - 1))
    with pytest.warns(OutriderWarning, match=message) as told:
        requests.complete([request_])
    assert len(told) == 1 and told[0].filename == __file__
    requests.complete([request_] * AFTER)


def test_a_part_that_others_stand_in_for_is_spoken_of_by_name() -> None:
    """A tree is drawn by the first that draws: the second has nothing to do."""
    draft, second = (
        ModelDrafter(ProtocolTarget(markov(5, 1, 1)), name=name) for name in ("draft", "int8")
    )
    requests = idle(CombinedDrafter([draft, second]), TreeBudget(2, 4))
    with pytest.warns(OutriderWarning, match=r"'draft\+int8': int8 was loaded .* in its place"):
        requests.complete([asked()] * AFTER)


def test_a_model_that_drafts_now_and_then_is_not_spoken_of() -> None:
    requests = idle()
    requests.complete([asked(depth=0)] * (AFTER - 1))
    requests.complete([asked()])
    requests.complete([asked(depth=0)] * AFTER)
    idle(NgramDrafter()).complete([asked(depth=0)] * AFTER)
