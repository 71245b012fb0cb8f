"""Engines in a Python of their own: the lines spoken with them, and what is refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from outrider import SamplingParams
from outrider.certify.adapters import engine
from outrider.certify.adapters.engine import ENGINES, HERE, Launch, Worker, options_of
from outrider.certify.model.book import Book
from outrider.certify.model.plan import Plan
from outrider.certify.model.report import Report
from outrider.certify.model.run import certify
from outrider.certify.model.subject import Subject
from outrider.errors import InvalidConfig, ModelError
from tests.certify import fake_engine
from tests.certify.fake_engine import END, VOCAB
from tests.engine.control_laws import Table

FAKE = str(Path(fake_engine.__file__))
PARAMS = SamplingParams(temperature=0.9, top_k=5)
PROMPTS = [[i % VOCAB] for i in range(40) if i % VOCAB != END]
PLAN = Plan(within=0.1)


def like() -> Subject:
    """The right table."""
    table = Table(torch.tensor(fake_engine.rows(), dtype=torch.float64))
    return Subject("table", lambda *_: [], Book(table, (END,)))


def certified(fault: str | None = None, params: SamplingParams = PARAMS) -> Report:
    with engine.subject(Launch(FAKE, {"fault": fault}), like()) as subject:
        return certify(subject, PROMPTS, params, PLAN)


def test_a_right_engine_is_lossless() -> None:
    report = certified()
    assert report.verdict == "lossless", report
    assert report.subject == "fake, None"


def test_a_control_that_it_ignores_is_found() -> None:
    report = certified("all")
    assert report.verdict == "control ignored", report
    assert report.checks[-1].evidence["fits"] == "top_k ignored"


def test_plain_decoding_has_no_option_of_speculation() -> None:
    launch = Launch(FAKE, {"fault": "all", "name": "it"})
    with engine.subject(launch, like()) as subject:
        assert subject.name == "it, all"
        assert subject.plain is not None
        few = SamplingParams(top_k=1, max_tokens=4)
        (plain,), (wild,) = (
            {tuple(text.token_ids) for text in run([[1]] * 1, few, 5)}  # type: ignore[union-attr]
            for run in (subject.plain, subject.generate)
        )
        assert plain == tuple(_likeliest(1, 4))
        assert wild != plain


def _likeliest(token: int, count: int) -> list[int]:
    table, out = fake_engine.rows(), [token]
    for _ in range(count):
        out.append(max(range(VOCAB), key=lambda x: table[out[-1]][x]))
    return out[1:]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (SamplingParams(min_p=0.1), "min_p=0.1: refused, as fake, dies"),
        (SamplingParams(stop_token_ids=(5,)), "stop_token_ids"),
        (SamplingParams(logit_bias={2: 1.0}), "logit_bias"),
        (SamplingParams(regex="a*"), "grammar"),
    ],
)
def test_what_it_does_not_have_is_refused_before_any_text(
    params: SamplingParams, word: str
) -> None:
    # It would die of the first text.
    with pytest.raises(InvalidConfig, match=word):
        certified("dies", params)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies", "ended with code 7: .*out of luck"),
        ("raises", "ValueError: not today"),
        ("does not load", "FileNotFoundError: no such table"),
    ],
)
def test_what_goes_wrong_there_is_told_here(fault: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        certified(fault)


def test_an_engine_that_hangs_ends_with_what_it_started() -> None:
    worker = Worker(Launch(FAKE, {"fault": "hangs"}, timeout_s=1.0))
    with pytest.raises(ModelError, match=r"no answer in 1 s.*--engine-timeout.*child ") as caught:
        worker([[1]], PARAMS, 1)
    child = int(str(caught.value).rsplit("child ", 1)[1])
    os.kill(child, 0)
    worker.close(patience_s=0.1)
    for _ in range(100):
        if ended(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} goes on")


def ended(process: int) -> bool:
    """Whether it is gone; one without parents is there until somebody asks how it ended."""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return not told.stdout.strip() or told.stdout.strip().startswith("Z")


def test_what_cannot_be_started() -> None:
    with pytest.raises(InvalidConfig, match="engine-timeout=0"):
        Launch(FAKE, timeout_s=0)
    with pytest.raises(InvalidConfig, match=r"'vlm'.*did you mean 'vllm'"):
        Worker(Launch("vlm"))
    with pytest.raises(InvalidConfig, match="does not start"):
        Worker(Launch(FAKE, python=Path("no/such/python")))
    with pytest.raises(InvalidConfig, match="NAME=VALUE"):
        options_of(["model"])
    told = options_of(["model=./llama", "k=4", 'way={"method": "ngram"}', "on=true", "tag=a=b"])
    assert told == {
        "model": "./llama", "k": 4, "way": {"method": "ngram"}, "on": True, "tag": "a=b"
    }  # fmt: skip


@pytest.mark.parametrize("name", [*ENGINES, "worker"])
def test_what_other_interpreters_run_knows_nothing_of_outrider(name: str) -> None:
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in top
    }
    assert {one.partition(".")[0] for one in names} <= {*sys.stdlib_module_names}
    assert "outrider" not in {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }


def test_an_engine_names_what_it_has() -> None:
    for name in ENGINES:
        text = (HERE / f"{name}.py").read_text(encoding="utf-8")
        known = {
            node.targets[0].id
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        assert {"CONTROLS", "SPECULATION"} <= known


def test_the_process_ends_with_its_subject() -> None:
    with closing(Worker(Launch(FAKE))) as worker:
        process = worker._popen
        assert process.poll() is None
    assert process.poll() == 0
