"""Real engines, where the arena has set them up: plain decoding follows the target's law."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.arena.home import Home, default_home
from benchmarks.engines import ENGINES, converted, words_of
from outrider import LLM, SamplingParams
from outrider.certify.adapters import own
from outrider.certify.adapters.engine import Launch, options_of, subject
from outrider.certify.model.plan import Plan
from outrider.certify.model.run import certify
from outrider.models.bundled import eval_prompts


def options(words: list[str], flag: str) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_plain_decoding_is_right(engine: str) -> None:
    home = Home(default_home())
    if (why := home.missing(engine)) is not None:
        pytest.skip(f"{engine}: {why}")
    words = words_of(home, converted(home, engine), engine, "plain", "cut", "0.2")
    (name,), (python,) = options(words, "--engine"), options(words, "--python")
    llm = LLM.load("bundled", drafter="none", dtype="float32")
    prompts = [llm.tokenizer.encode(text)[:16] for text in eval_prompts("code")[:8]]
    launch = Launch(name, options_of(options(words, "-o")), Path(python))
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9)
    with subject(launch, own.subject(llm)) as one:
        report = certify(one, prompts, params, Plan(within=0.2, length=8))
    assert report.verdict == "lossless", json.dumps(report.as_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_commands_name_their_options(engine: str, tmp_path: Path) -> None:
    home = Home(tmp_path)
    words = words_of(home, tmp_path / "pair", engine, "draft", "whole", "0.1")
    given = options_of(options(words, "-o"))
    assert "{" not in json.dumps(given).replace('{"', "").replace(": {", "")
    assert str(tmp_path / "pair") in json.dumps(given)
