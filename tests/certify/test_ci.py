"""`assert_lossless` in somebody else's tests: what passes, what fails, and what a failure says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.certify.model import words
from outrider.certify.model.subject import Subject
from outrider.certify.page import page
from outrider.certify.testing import NotLossless, assert_lossless
from outrider.errors import InvalidConfig
from tests.certify.faulty import FAULTS, PARAMS, subject
from tests.certify.test_model import PROMPTS
from tests.house.layout import ROOT
from tests.house.pages import blocks_of

pytest_plugins = ["pytester"]
# A run of pytest within this one forgets what it was first to import.
LOADED = (words, page, torch)
# By its module, whether Outrider was installed with its entry point or stands on the path alone.
PLUGIN = ("-p", "no:outrider", "-p", "outrider.certify.pytest_plugin", "-p", "no:cacheprovider")
FAULTY = """
from tests.certify.faulty import PARAMS, subject
from tests.certify.test_model import PROMPTS

def test_it(assert_lossless):
    assert_lossless(subject({fault!r}), PROMPTS, PARAMS, within=0.1, {more})
"""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", drafter="ngram")


@pytest.fixture
def ran(pytester: pytest.Pytester, llm: LLM) -> Callable[[str], pytest.RunResult]:
    """Runs a file of tests where the plugin is installed; the models' modules are there already."""

    def run(source: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess(*PLUGIN)

    return run


def test_the_ten_lines_of_the_page(ran: Callable[[str], pytest.RunResult]) -> None:
    (block,) = (
        b for b in blocks_of(ROOT / "docs" / "certify.md") if "def test_speculation" in b.text
    )
    ran(block.text).assert_outcomes(passed=1)
    faulty = block.text.replace("replace(params, ", "replace(params, temperature=0.6, ")
    result = ran(faulty)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NotLossless: verdict: *", "*to see it: *"])


def test_a_faulty_engine_fails_with_the_case(ran: Callable[[str], pytest.RunResult]) -> None:
    result = ran(FAULTY.format(fault="min_p ignored", more=""))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*NotLossless: verdict: control ignored (numpy engine*", '*to see it: {"prompts": *']
    )
    # The report, not the inside of the assertion.
    assert not re.search(r"testing\.py:\d+: NotLossless", result.stdout.str())


def test_what_shows_nothing_fails_or_is_skipped(ran: Callable[[str], pytest.RunResult]) -> None:
    ran(FAULTY.format(fault=None, more="budget=50")).assert_outcomes(failed=1)
    skipped = "budget=50, undecided='skip'"
    ran(FAULTY.format(fault=None, more=skipped)).assert_outcomes(skipped=1)


def test_the_report_comes_back_and_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report = assert_lossless(subject(), PROMPTS, PARAMS, within=0.2, html=file)
    assert report.verdict == "lossless"
    assert "lossless" in file.read_text(encoding="utf-8")
    with pytest.raises(NotLossless) as caught:
        assert_lossless(subject("seed ignored"), PROMPTS[:8], PARAMS, budget=50, html=file)
    assert caught.value.report.verdict == FAULTS["seed ignored"]
    assert "seed ignored" in file.read_text(encoding="utf-8")
    verdicts = ("lossless", "seed ignored")
    assert_lossless(subject("seed ignored"), PROMPTS, PARAMS, within=0.2, accept=verdicts)
    # What is accepted hides nothing else: here too few tokens were looked at.
    with pytest.raises(NotLossless, match="sampled law: undecided"):
        assert_lossless(subject("seed ignored"), PROMPTS[:8], PARAMS, budget=50, accept=verdicts)


def test_what_an_engine_does_not_promise() -> None:
    wrong = subject("seed ignored")
    assert assert_lossless(wrong, PROMPTS, PARAMS, within=0.2, seeded=False).verdict == "lossless"
    rough = subject(rounded=True)
    params = SamplingParams(max_tokens=8)
    with pytest.raises(NotLossless, match="logprobs: control ignored"):
        assert_lossless(rough, PROMPTS, params, within=0.2)
    accept = ("lossless", "numeric drift")
    assert_lossless(rough, PROMPTS, params, within=0.2, near_tie=0.3, accept=accept)


def test_an_llm_is_an_engine(llm: LLM) -> None:
    prompts = ["import os\n", "def f(", "class A:", "x = "]
    assert assert_lossless(llm, prompts, within=0.3, length=6).verdict == "lossless"


def test_what_cannot_be_meant() -> None:
    right = subject()
    with pytest.raises(InvalidConfig, match="target=None"):
        assert_lossless(right.generate, PROMPTS)
    with pytest.raises(InvalidConfig, match="Subject itself"):
        assert_lossless(right, PROMPTS, target="bundled")
    with pytest.raises(InvalidConfig, match="undecided='maybe'"):
        assert_lossless(right, PROMPTS, undecided="maybe")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="no tokenizer"):
        assert_lossless(right, ["text"])
    with pytest.raises(InvalidConfig, match="a function of"):
        assert_lossless(7, PROMPTS)  # type: ignore[arg-type]
    assert isinstance(right, Subject) and SamplingParams() != PARAMS
