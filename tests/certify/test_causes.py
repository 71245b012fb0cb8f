"""Whose fault it is: rounding at a cut-off, an engine's own defaults, books too short to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.certify.model.book import Book, Text
from outrider.certify.model.report import Report
from outrider.certify.model.run import certify
from outrider.certify.model.sampled import LONGER
from outrider.certify.model.signatures import Page, signatures
from outrider.certify.model.subject import Generate, Made, Prompts
from outrider.errors import PromptTooLong
from outrider.models.base import Rows
from tests.certify.faulty import END, PARAMS, VOCAB, Engine, models, subject
from tests.certify.test_model import COARSE, PROMPTS, told
from tests.engine.control_laws import Table

LITTLE = replace(COARSE, budget=50)
NEAR = 0.25
"""What rounding to bfloat16 moves the logits of `faulty` by, at most."""


class Stubborn:
    """The right engine with other values than it is asked for, sampling alone."""

    def __init__(self, **own: Any) -> None:
        self.own = own

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        asked = params if params.temperature == 0 else replace(params, **self.own)
        return subject().generate(prompts, asked, seed)  # type: ignore[return-value]


def law_of_texts(report: Report) -> tuple[str, str]:
    """The verdict on sampled texts, and what fits."""
    check = report.checks[-1]
    return check.verdict, str(check.evidence.get("fits", ""))


def test_rounding_at_a_cut_off_is_no_control_ignored() -> None:
    rough = replace(subject(rounded=True), near_tie=NEAR)
    report = certify(rough, PROMPTS, SamplingParams(top_k=8), COARSE)
    verdict, _ = law_of_texts(report)
    assert verdict in ("lossless", "numeric drift"), told(report)
    assert report.checks[-1].evidence["at a cut-off"] > 0


def test_a_cut_off_that_is_ignored_is_found_in_coarse_numbers_too() -> None:
    wild = Stubborn(top_k=0)
    coarse = replace(subject(rounded=True), generate=wild, plain=wild, near_tie=NEAR)
    report = certify(coarse, PROMPTS, SamplingParams(top_k=8), COARSE)
    assert law_of_texts(report) == ("control ignored", "top_k ignored"), told(report)


@pytest.mark.parametrize(
    ("params", "edge"),
    [
        (SamplingParams(top_k=2), {1}),
        (SamplingParams(top_p=0.7), {1}),
        (SamplingParams(min_p=0.8), {1}),
        # What is forbidden by name is not nearly allowed.
        (SamplingParams(bad_words=((7, 1),)), set[int]()),
        (SamplingParams(), set[int]()),
    ],
)
def test_the_edge_of_a_cut_off(params: SamplingParams, edge: set[int]) -> None:
    """Logits of 3, 2.9, 2.7 and 0: the third is just outside, the last far away."""
    row_V = torch.tensor([2.9, 2.7, 3.0, 0.0], dtype=torch.float64)
    book = Book(Table(row_V.expand(8, 4)))
    found = set[int]()
    for token in range(4):
        page = Page.of([Text((7,), (token,))], params, book)
        found |= {token} if bool(page.edges(NEAR)[0]) else set()
        assert not bool(page.edges(1e-6).any())
    assert found == edge


@pytest.mark.parametrize(
    ("own", "words"),
    [({"temperature": 0.6}, "temperature near 0.6"), ({"top_k": 6}, ""), ({"min_p": 0.1}, "")],
)
def test_an_engines_own_defaults_are_controls_ignored(own: dict[str, Any], words: str) -> None:
    """Nothing is set in the request, so that there is no control to leave out."""
    stubborn = Stubborn(**own)
    report = certify(
        replace(subject(), generate=stubborn, plain=stubborn), PROMPTS, SamplingParams(), COARSE
    )
    verdict, fits = law_of_texts(report)
    assert verdict == "control ignored", told(report)
    assert words in fits


def test_what_looks_like_a_default_is_bias_where_plain_decoding_is_right() -> None:
    report = certify(
        replace(subject(), generate=Stubborn(temperature=0.6)), PROMPTS, SamplingParams(), COARSE
    )
    assert law_of_texts(report)[0] == "rule bias", told(report)


def test_plain_decoding_is_read_no_longer_than_it_takes() -> None:
    """Forty thousand tokens may be read here; the fault shows after some hundreds."""
    read = 0

    def plain(prompts: Prompts, params: SamplingParams, seed: int) -> list[Any]:
        nonlocal read
        texts = subject().generate(prompts, params, seed)
        read += sum(len(text.token_ids) for text in texts)
        return list(texts)

    wrong = replace(subject("likeliest token drafted"), plain=plain)
    report = certify(wrong, PROMPTS, SamplingParams(), replace(COARSE, within=0.02))
    assert law_of_texts(report)[0] == "rule bias"
    most = report.checks[-1].evidence["tokens"] * (LONGER + 2)
    assert 0 < read < most < 20_000


def test_where_two_texts_of_a_seed_part_is_told() -> None:
    report = certify(subject("seed ignored"), PROMPTS, SamplingParams(), COARSE)
    (seeds,) = (check for check in report.checks if check.name == "seeds")
    assert seeds.reproduction is not None
    told_of = seeds.reproduction
    assert (told_of["index"] in range(len(PROMPTS)), told_of["position"] >= 0) == (True, True)
    assert f"token {told_of['position']}" in seeds.said


class Unsteady:
    """The right engine; asked for the same again, it writes a few texts otherwise."""

    def __init__(self) -> None:
        self._asked: set[int] = set()

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        texts = list(subject().generate(prompts, params, seed))
        if params.temperature and seed in self._asked:
            texts[:2] = subject().generate(prompts[:2], params, seed + 777)
        self._asked.add(seed)
        return texts


@pytest.mark.parametrize(
    ("plain", "verdict"), [(None, "undecided"), (subject().generate, "undecided"), (..., "drift")]
)
def test_a_few_texts_that_come_otherwise_again_are_no_seed_ignored(
    plain: Any, verdict: str
) -> None:
    like = Unsteady() if plain is ... else plain
    report = certify(
        replace(subject(), generate=Unsteady(), plain=like), PROMPTS, SamplingParams(), COARSE
    )
    (seeds,) = (check for check in report.checks if check.name == "seeds")
    assert (seeds.verdict.endswith(verdict), seeds.evidence["parted"]) == (True, 2), told(report)
    # Who promises nothing is not held to it.
    free = replace(subject(), generate=Unsteady(), seeded=False)
    assert certify(free, PROMPTS, SamplingParams(), COARSE).verdict == "lossless"


class Short(Table):
    """A context of ten tokens, which it keeps to."""

    max_length = 10

    def score(self, rows: Rows) -> torch.Tensor:
        assert max(rows.counts) <= self.max_length
        return super().score(rows)


def test_a_target_whose_context_is_shorter_than_the_texts() -> None:
    short = Book(Short(torch.zeros(VOCAB, VOCAB, dtype=torch.float64)), (END,))
    with pytest.raises(PromptTooLong, match=r"17 tokens.*reads 10"):
        certify(replace(subject(), target=short), PROMPTS, SamplingParams(), COARSE)


def test_beyond_a_drafts_context_nothing_is_drafted() -> None:
    """Its rows are read as far as they go; behind them no fault of drafting is tried."""
    one, params = subject(), SamplingParams(temperature=0.7, top_k=6)
    draft = Book(Short(torch.tensor(models()[1])))
    texts = [Text((1,), (5,) * 14), Text((2,) * 12, (5, 5)), Text((3,), (7, 7))]
    page, whole = (Page.of(texts, params, one.target, book) for book in (draft, one.draft))
    assert page.q_NV is not None and whole.q_NV is not None and page.read_N is not None
    read_N = page.read_N
    assert read_N.tolist() == [True] * 10 + [False] * 4 + [False] * 2 + [True] * 2
    assert torch.equal(page.q_NV[read_N], whole.q_NV[read_N])
    assert torch.equal(page.q_NV[~read_N], page.p_NV[~read_N])
    for fault, due in zip(signatures(page), signatures(whole), strict=True):
        assert torch.allclose(fault.probs_N[read_N], due.probs_N[read_N])
        if "draft" in fault.name or "refused" in fault.name:
            assert torch.equal(fault.probs_N[~read_N], page.at(page.p_NV)[~read_N])
    nothing = Page.of(texts[1:2], params, one.target, draft)
    assert nothing.q_NV is not None and torch.equal(nothing.q_NV, nothing.p_NV)
    right = certify(replace(one, draft=draft), PROMPTS, PARAMS, COARSE)
    assert right.verdict == "lossless", told(right)


def greedy_of(generate: Generate) -> tuple[str, str]:
    """The verdict on greedy texts, and what was said."""
    report = certify(replace(subject(), generate=generate), PROMPTS[:8], SamplingParams(), LITTLE)
    (check,) = (check for check in report.checks if check.name == "greedy")
    return check.verdict, check.said


def test_a_temperature_of_0_that_is_ignored_is_named_at_temperature_1() -> None:
    """Nothing in the request says more of it: texts are asked for greedily all the same."""

    def warm(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        return subject().generate(prompts, replace(params, temperature=1.0), seed)

    verdict, said = greedy_of(warm)
    assert (verdict, said.startswith("temperature ignored")) == ("control ignored", True), said


def test_other_temperatures_that_are_ignored_show_at_temperature_1() -> None:
    """Greedy texts are right, and so are those of the request."""

    def stuck(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        heat = min(1.0, 99 * params.temperature)
        return subject().generate(prompts, replace(params, temperature=heat), seed)

    for generate, verdict in ((stuck, "control ignored"), (subject().generate, "lossless")):
        one = replace(subject(), generate=generate)
        report = certify(one, PROMPTS, SamplingParams(top_k=8), LITTLE)
        (check,) = (check for check in report.checks if check.name == "temperature")
        assert check.verdict == verdict, told(report)
    cool = certify(subject(), PROMPTS[:8], SamplingParams(temperature=0.7), LITTLE)
    assert "temperature" not in {check.name for check in cool.checks}


def test_a_greedy_text_that_is_off_in_the_same_way_again_is_no_temperature_ignored() -> None:
    def off(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        texts = subject().generate(prompts, params, seed)
        if params.temperature:
            return texts
        return [Made(tuple((x + 1) % VOCAB for x in text.token_ids)) for text in texts]

    verdict, said = greedy_of(off)
    assert (verdict, "ignored" in said) == ("rule bias", False), said


@pytest.mark.parametrize("kept", [0, 2])
def test_greedy_texts_that_are_cut_short_are_found(kept: int) -> None:
    """Every token that came is right, or there is none."""

    def short(prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Any]:
        texts = subject().generate(prompts, params, seed)
        if params.temperature:
            return texts
        return [text.token_ids[:kept] for text in texts]

    report = certify(replace(subject(), generate=short), PROMPTS[:8], SamplingParams(), LITTLE)
    (ends,) = (check for check in report.checks if check.name == "ends")
    assert ends.verdict == "rule bias", told(report)
    assert ends.case["params"]["temperature"] == 0
    assert ends.case["seed"] == 0


def test_large_scores_of_few_bits_have_wide_ties() -> None:
    """Two scores near 100 are half a nat apart in bfloat16, or not at all."""
    law_VV = models()[0] + 80.0
    rough_VV = torch.tensor(law_VV).bfloat16().double()
    eps = torch.finfo(torch.bfloat16).eps
    one = subject()
    for digits, fine in ((eps, True), (torch.finfo(torch.float32).eps, False)):
        rough = replace(
            one,
            generate=Engine(rough_VV.numpy(), models()[1]),
            plain=Engine(rough_VV.numpy(), models()[1], depth=0),
            target=Book(Table(torch.tensor(law_VV)), (END,), digits),
            near_tie=NEAR,
        )
        report = certify(rough, PROMPTS, SamplingParams(), LITTLE)
        verdicts = {check.name: check.verdict for check in report.checks}
        assert verdicts["greedy"] == "lossless"
        assert (verdicts["logprobs"] == "lossless") is fine, told(report)


def test_what_is_told_is_what_refuted_though_later_texts_are_right() -> None:
    """A fault that comes and goes within a call: its account falls again before all are read."""

    def generate(prompts: Prompts, params: SamplingParams, seed: int) -> list[Any]:
        first = subject("row before").generate(prompts[:5], params, seed)
        return [*first, *subject().generate(prompts, params, seed)[5:]]

    report = certify(replace(subject(), generate=generate), PROMPTS, PARAMS, COARSE)
    assert law_of_texts(report) == ("rule bias", "token from the row before"), told(report)
