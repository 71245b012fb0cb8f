"""`certify model`: planted faults are found and told apart, a right engine passes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.certify.model.book import Book, Text
from outrider.certify.model.plan import Plan
from outrider.certify.model.report import Check, Report
from outrider.certify.model.run import certify
from outrider.certify.model.signatures import Page, emitted
from outrider.certify.model.subject import Generate, Made, Prompts, Subject
from outrider.errors import EmptyPrompt, InvalidConfig, ModelError
from tests.certify.faulty import DEPTH, END, FAULTS, PARAMS, VOCAB, law_of, subject
from tests.engine.control_laws import Table

PROMPTS = [[i % VOCAB] for i in range(64) if i % VOCAB != END]
COARSE = Plan(within=0.1, alpha=0.01)
FINE = {"draft in bfloat16"}
"""Faults that are as small as rounding."""


def told(report: Report) -> str:
    return "; ".join(f"{one.name}: {one.said}" for one in (*report.checks, report.control))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gets_its_verdict(fault: str) -> None:
    plan = Plan(within=0.02, budget=40_000) if fault in FINE else COARSE
    report = certify(subject(fault), PROMPTS, PARAMS, plan)
    assert report.verdict == FAULTS[fault], told(report)
    assert report.exit_code == 1
    shown = [check.reproduction for check in report.checks if check.verdict == report.verdict]
    assert shown and all(case is not None for case in shown)


def each(generate: Generate) -> Generate:
    """The seeds of texts count on from the first."""

    def alone(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        return [generate([prompt], params, seed + i)[0] for i, prompt in enumerate(prompts)]

    return alone


@pytest.mark.parametrize("crowd", [False, True])
def test_a_case_is_one_prompt_where_that_shows_it(crowd: bool) -> None:
    wrong, right = (each(subject(fault).generate) for fault in ("min_p ignored", None))

    def generate(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        """In a crowd it may be wrong where it is right alone."""
        return (right if crowd and len(prompts) == 1 else wrong)(prompts, params, seed)

    report = certify(replace(subject(), generate=generate), PROMPTS, PARAMS, COARSE)
    case = next(check for check in report.checks if check.name == "sampled law").case
    if crowd:
        assert case["prompts"] == [list(prompt) for prompt in PROMPTS]
        prompt, seed = case["prompts"][case["index"]], case["seed"] + case["index"]
    else:
        prompt, seed = case["prompt"], case["seed"]
    params = replace(PARAMS, max_tokens=COARSE.length)
    due, came = (who([prompt], params, seed)[0] for who in (right, wrong))
    assert due.token_ids != came.token_ids


def test_numbers_that_are_not_finite_are_told_as_text() -> None:
    check = Check("greedy", "rule bias", "", {"gap": float("inf"), "rows": [float("nan"), 1.0]})
    report = Report("x", {}, 0.1, 0.1, (check,), check, 0.0)
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert replace(check, reproduction={"told": float("nan")}).case == {"told": "nan"}
    assert told["checks"][0]["evidence"] == {"gap": "inf", "rows": ["nan", 1.0]}


def test_a_right_engine_is_lossless() -> None:
    report = certify(subject(), PROMPTS, PARAMS, COARSE)
    assert (report.verdict, report.exit_code) == ("lossless", 0), told(report)
    assert report.control.verdict == "rule bias"
    json.dumps(report.as_dict())


@pytest.mark.slow
def test_two_hundred_right_runs_raise_no_more_alarms_than_declared() -> None:
    plans = [Plan(within=0.06, alpha=0.02, seed=1 + 10**7 * run) for run in range(200)]
    verdicts = [certify(subject(), PROMPTS, PARAMS, plan).verdict for plan in plans]
    assert sum(verdict not in ("lossless", "undecided") for verdict in verdicts) <= 4


def test_a_rounded_engine_is_drift_and_no_bias() -> None:
    """Its plain decoding differs from the book as much as its speculation does."""
    report = certify(subject(rounded=True), PROMPTS, PARAMS, COARSE)
    assert {check.verdict for check in report.checks if check.name == "sampled law"} <= {
        "numeric drift",
        "lossless",
    }, told(report)


def test_too_little_is_not_enough() -> None:
    report = certify(subject(), PROMPTS[:4], PARAMS, Plan(budget=100))
    assert report.verdict in ("undecided", "void")
    assert report.exit_code == 3


def test_the_law_of_the_book_is_the_engines_own() -> None:
    text = Text((1,), (5, 5, 7, END))
    one = subject()
    law_NV = one.target.laws(one.target.logits([text]), [text], PARAMS)
    engine = one.generate
    for i in range(len(text.output)):
        row = engine.target_VV[[1, *text.output][i]]  # type: ignore[attr-defined]
        due = torch.tensor(law_of(row, text.output[:i], PARAMS))
        assert torch.allclose(law_NV[i], due, atol=1e-6)


@pytest.mark.parametrize("width", [VOCAB - 4, VOCAB + 3])
def test_a_draft_of_another_width(width: int) -> None:
    """What it alone knows is left out, what it does not know it never draws."""
    own = torch.zeros(width, width, dtype=torch.float64)
    texts = [Text((1,), (VOCAB - 1, VOCAB - 1, END))]
    page = Page.of(texts, PARAMS, subject().target, Book(Table(own)))
    assert page.q_NV is not None
    assert page.q_NV.shape == page.p_NV.shape
    assert torch.allclose(page.q_NV.sum(1), torch.ones(3).double())
    assert bool((page.q_NV[:, width:] == 0).all())


def test_a_token_drawn_and_scored_by_one_law_has_the_targets() -> None:
    torch.manual_seed(0)
    p, q, r = (torch.rand(5, VOCAB).double().pow(3) for _ in range(3))
    p, q, r = (law / law.sum(1, keepdim=True) for law in (p, q, r))
    assert torch.allclose(emitted(p, q, q), p)
    assert (emitted(p, q, r) - p).abs().max() > 0.01
    assert torch.allclose(emitted(p, q, r).sum(1), torch.ones(5).double())


def test_what_is_no_text_is_refused() -> None:
    good = subject()

    def broken(out: Sequence[object]) -> Subject:
        return Subject("broken", lambda *_: out, good.target)

    for out, words in (
        ([], "gave 0 texts"),
        ([["a"]], "no text"),
        ([Made((1, 2), (0.0,))], "1 log-prob"),
    ):
        with pytest.raises(ModelError, match=words):
            certify(broken(out), [[1]], PARAMS, COARSE)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"within": 0}, "within=0"),
        ({"alpha": 0.9}, "alpha=0.9"),
        ({"length": 1}, "length=1"),
        ({"budget": 0}, "budget=0"),
    ],
)
def test_plans_that_cannot_be_meant(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Plan(**wrong)  # type: ignore[arg-type]


def test_nothing_to_certify() -> None:
    with pytest.raises(EmptyPrompt):
        certify(subject(), [], PARAMS)
    with pytest.raises(InvalidConfig, match="temperature=0"):
        certify(subject(), PROMPTS, SamplingParams(temperature=0))
    with pytest.raises(InvalidConfig, match="token ids"):
        certify(subject(), PROMPTS, SamplingParams(bad_words=("text",)))
    with pytest.raises(InvalidConfig, match="grammar"):
        certify(subject(), PROMPTS, SamplingParams(regex="a*"))
    assert DEPTH > 1


class Bent:
    """The right engine, its texts changed on the way out."""

    def __init__(self, bend: Callable[[Made], object]) -> None:
        self.bend = bend

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[object]:
        return [self.bend(text) for text in subject().generate(prompts, params, seed)]


def verdicts(bend: Callable[[Made], object]) -> dict[str, str]:
    """Of each check, with little sampling."""
    one = subject()
    bent = Subject("bent", Bent(bend), one.target, draft=one.draft)
    report = certify(bent, PROMPTS[:8], PARAMS, Plan(budget=50))
    return {check.name: check.verdict for check in report.checks}


def test_texts_cut_short_are_found() -> None:
    assert verdicts(lambda text: text)["ends"] == "lossless"
    assert verdicts(lambda text: Made(text.token_ids[:2]))["ends"] == "rule bias"
    # An end that is not told as a token is one cut off.
    left_out = verdicts(lambda text: Made(tuple(x for x in text.token_ids if x != END)))
    assert left_out["ends"] == "rule bias"


def test_log_probabilities_that_are_no_numbers_are_found() -> None:
    def bend(text: Made) -> Made:
        return Made(text.token_ids, text.logprobs and (math.nan,) * len(text.token_ids))

    assert verdicts(bend)["logprobs"] == "control ignored"


def test_log_probabilities_that_jitter_are_no_other_text() -> None:
    jitter = iter(range(10**6))

    def bend(text: Made) -> Made:
        return Made(text.token_ids, tuple(1e-9 * next(jitter) for _ in text.token_ids))

    assert verdicts(bend)["seeds"] == "lossless"


def test_log_probabilities_are_asked_for_raw() -> None:
    asked: list[str] = []
    one = subject()

    def generate(prompts: Prompts, params: SamplingParams, seed: int) -> object:
        asked.append(params.logprobs_mode)
        return one.generate(prompts, params, seed)

    processed = replace(PARAMS, logprobs_mode="processed")
    noting = Subject("noting", generate, one.target)  # type: ignore[arg-type]
    certify(noting, PROMPTS[:4], processed, Plan(budget=20))
    assert set(asked) == {"raw"}


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(ModelError, match=f"token {VOCAB}, "):
        verdicts(lambda _: [VOCAB])


def test_the_book_lets_ends_come_where_they_are_ignored() -> None:
    """min_tokens forbids the ends of a text, and under ignore_eos there are none."""
    texts, target = [Text((1,), (5, 7))], subject().target
    logits_NV = target.logits(texts)
    kept = SamplingParams(min_tokens=2, max_tokens=4)
    assert bool((target.laws(logits_NV, texts, kept)[:, END] == 0).all())
    free = replace(kept, ignore_eos=True)
    assert bool((target.laws(logits_NV, texts, free)[:, END] > 0).all())


def test_bias_is_no_drift_where_plain_decoding_is_off_by_less() -> None:
    report = certify(subject("noise used twice", rounded=True), PROMPTS, PARAMS, Plan(within=0.03))
    assert report.checks[-1].verdict == "rule bias", told(report)
