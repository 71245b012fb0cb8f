"""What one call may say otherwise, and what is said once."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest

from outrider import LLM, SamplingParams
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, OutriderWarning
from outrider.models.bundled import bundled_path
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request
from tests.engine.toys import markov

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
PROMPT = "def mean(values):\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", k=3)


def test_one_call_may_do_without_a_drafter(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, PARAMS, drafter="none")
    assert plain.stats.drafted == 0
    assert plain.token_ids == llm.generate(PROMPT, PARAMS, depth=0)[0].token_ids
    assert llm.generate(PROMPT, PARAMS)[0].stats.drafted > 0
    deltas = llm.stream(PROMPT, PARAMS, drafter="none")
    assert tuple(t for delta in deltas for t in delta.token_ids) == plain.token_ids


def test_one_call_may_name_its_rule(llm: LLM) -> None:
    match = LLM.load("bundled", k=3, rule="match")
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
    with pytest.warns(OutriderWarning, match="6 tokens fills the draft model's context of 6"):
        (done,) = requests.complete([long])
    assert done.stats.drafted == 0
    requests.complete([long])


def test_a_chat_template_on_one_side_alone_is_spoken_of(tmp_path) -> None:
    folder = shutil.copytree(bundled_path("draft"), tmp_path / "draft")
    config = folder / "tokenizer_config.json"
    stated = json.loads(config.read_text())
    config.write_text(json.dumps({**stated, "chat_template": "{{ messages[0].content }}"}))
    with pytest.warns(OutriderWarning, match="the target's tokenizer has no chat template"):
        LLM.load("bundled", drafter=f"draft:{folder}")
