"""Grammars on the bundled model: texts fit them, whoever guesses; errors come before any work."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, Completion, SamplingParams
from outrider.errors import InvalidConfig, MissingExtra
from outrider.models import grammar as door
from outrider.models.bundled import bundled_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["file", "folder"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: call ("," " " call)~2 ";"\ncall: NAME "(" /[0-9]/ ")"\nNAME: /[a-z]{2,5}/'
CHOICE = ["def approved(by):\n", "def rejected(by):\n", "naïve ☃"]
PARAMS = [
    SamplingParams(max_tokens=48, json_schema=SCHEMA),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=24, regex=r"[a-z]{1,8}\(\w{1,8}, [0-9]\)"),
    SamplingParams(max_tokens=32, grammar=LARK),
    SamplingParams(max_tokens=24, choice=CHOICE),
]
PROMPTS = ["import json\nx = ", "def f(", "x = ", "print(1)\n", "# The answer:\n"]
LAWS = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.9, "seed": 5}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", "grammar+draft", strict=True)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[str, list[Completion]]:
    return {law: llm.generate(PROMPTS, asked(law), depth=0) for law in LAWS}


def asked(law: str, **more: Any) -> list[SamplingParams]:
    return [replace(params, **LAWS[law], **more) for params in PARAMS]


def told(done: list[Completion]) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.text, one.finish_reason) for one in done]


@pytest.mark.parametrize("law", LAWS)
def test_texts_fit_their_grammars(plain, law: str) -> None:
    schema, free, regex, lark, choice = plain[law]
    found = json.loads(schema.text)
    assert list(found) == ["name", "size", "kind"] and found["kind"] in ("file", "folder")
    assert isinstance(found["size"], int) and 0 <= found["size"] < 1000
    assert re.fullmatch(r"[a-z]{1,8}\(\w{1,8}, [0-9]\)", regex.text)
    assert re.fullmatch(r"[a-z]{2,5}\([0-9]\)(, [a-z]{2,5}\([0-9]\)){2};", lark.text)
    assert choice.text in CHOICE
    assert {one.finish_reason for one in plain[law] if one is not free} == {"stop"}


@pytest.mark.parametrize(
    ("drafter", "width", "law"),
    [
        ("draft", 1, "coupled"),
        ("draft", 3, "coupled"),
        ("ngram", 1, "greedy"),
        ("grammar", 1, "coupled"),
        ("grammar+draft", 3, "greedy"),
    ],
)
def test_whoever_guesses_the_texts_are_those_of_plain_decoding(
    plain, drafter: str, width: int, law: str
) -> None:
    llm = LLM.load("bundled", drafter, strict=True, width=width)
    assert told(llm.generate(PROMPTS, asked(law))) == told(plain[law])
    assert llm.metrics.accepted > 0


def test_alone_and_streamed_and_in_several_threads_they_are_the_same(llm: LLM, plain) -> None:
    streamed = "".join(d.text for d in llm.stream(PROMPTS[0], asked("greedy")[0]))
    assert streamed == plain["greedy"][0].text
    jobs = [*zip(PROMPTS, asked("coupled"), strict=True)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda job: llm.generate(*job)[0], jobs))
    assert told(done) == told(plain["coupled"])


def test_log_probabilities_of_the_law_are_those_of_plain_decoding(llm: LLM) -> None:
    params = asked("coupled", logprobs=2, logprobs_mode="processed")[0]
    ours, plain = (llm.generate(PROMPTS[0], params, depth=depth)[0] for depth in (4, 0))
    assert ours.logprobs == plain.logprobs
    forced = [one for one in ours.logprobs if len(one.top) == 1]
    assert forced and all(one.logprob == 0.0 for one in forced)


def test_every_sample_fits(llm: LLM) -> None:
    done = llm.generate(PROMPTS[0], replace(PARAMS[0], n=3, seed=3, temperature=1.0))
    assert len({one.text for one in done}) > 1
    assert all(json.loads(one.text) for one in done)
    unseeded = llm.generate(PROMPTS[2], replace(PARAMS[2], n=3))
    assert all(re.fullmatch(PARAMS[2].regex, one.text) for one in unseeded)


def test_forced_tokens_cost_no_round(plain) -> None:
    llm = LLM.load("bundled", "grammar", strict=True)
    done = llm.generate(PROMPTS[0], asked("greedy")[0])[0]
    stats, before = done.stats, plain["greedy"][0].stats
    assert done.token_ids == plain["greedy"][0].token_ids
    assert stats.accepted == stats.drafted >= 12
    assert stats.rounds + stats.plain_rounds <= before.plain_rounds - 12
    free = llm.generate(PROMPTS[1], asked("greedy")[1])[0]
    assert free.stats.drafted == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a{2"}, "regex='a{2'.*unclosed counted repetition"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, "grammar='start: foo'.*unknown name"),
        ({"grammar": 'root ::= "a" other'}, "grammar="),
        ({"json_schema": {"type": "strin"}}, "json_schema=.*strin"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
    ],
)
def test_a_grammar_that_is_none_is_refused_before_any_work(llm: LLM, given, message: str) -> None:
    before = llm.metrics.prompt_tokens
    with pytest.raises(InvalidConfig, match=message) as caught:
        llm.generate(["x", "y"], [SamplingParams(max_tokens=2), SamplingParams(**given)])
    assert "\n" not in str(caught.value)
    assert llm.metrics.prompt_tokens == before


def test_other_dialects_are_understood(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20)
    gbnf = replace(greedy, grammar='root ::= "a" [0-9] ("b" | "c")')
    assert re.fullmatch("a[0-9][bc]", llm.generate("x", gbnf)[0].text)
    anything = llm.generate("x = ", replace(greedy, json_schema=True, max_tokens=30))[0]
    assert anything.finish_reason == "length" or json.loads(anything.text) is not ...


def test_a_grammar_is_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = door._compiled
    monkeypatch.setattr(
        door, "_compiled", lambda *given: (compiled.append(given[1:]), compile_one(*given))[1]
    )
    params = SamplingParams(max_tokens=2, regex="once[a-z]", n=3)
    for _ in range(2):
        llm.generate(["x", "y"], params)
    assert compiled == [("regex", "once[a-z]")]


def test_few_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_COMPILED", 2)
    llm = LLM.load(bundled_path("draft"), "none")
    for i in (1, 2, 3, 2):
        llm.generate("x", SamplingParams(max_tokens=1, regex=f"a{{{i}}}"))
    assert list(llm._grammars._known) == [("regex", "a{3}"), ("regex", "a{2}")]


def test_without_llguidance_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.load(bundled_path("draft"), "grammar")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert llm.generate("x", SamplingParams(max_tokens=2))
    with pytest.raises(MissingExtra, match=r"pip install 'outrider\[grammar\]'"):
        llm.generate("x", SamplingParams(regex="a", max_tokens=2))


def test_a_model_without_an_end_of_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.text.TextTokenizer.end_tokens", lambda self: frozenset())
    llm = LLM.load(bundled_path("draft"), "none")
    with pytest.raises(InvalidConfig, match="states no end of text"):
        llm.generate("x", SamplingParams(regex="a", max_tokens=2))
