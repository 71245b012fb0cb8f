"""Captured rows: the law of what a rule writes is exact, and rules or rows that are wrong show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.certify.adapters import own
from outrider.certify.model import captured as module
from outrider.certify.model.book import Text
from outrider.certify.model.captured import Capture, Row, captured, law_of
from outrider.certify.model.report import Check
from outrider.certify.model.signatures import emitted
from outrider.decoding import RULES, Draft, TargetRows
from outrider.decoding.rules.base import ChainRejection, Sifted
from outrider.models.bundled import bundled_path

PARAMS = SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, max_tokens=10)
PROMPTS = ("import os\n", "def f(x):\n    return", "class A:\n", "for i in range(")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The bundled draft model, which guesses for itself in coarser numbers."""
    with torch.inference_mode():
        yield LLM.load(str(bundled_path("draft")), drafter="int8", dtype="float32", k=3)


class Wrong(ChainRejection):
    """`token`, but that a refused token is drawn from the target."""

    name = "wrong"

    def sift(self, draft: Draft, target: TargetRows, tests_BK: Tensor) -> Sifted:
        sifted = RULES["token"].sift(draft, target, tests_BK)  # type: ignore[attr-defined]
        whole = target.probs(torch.arange(len(tests_BK)) * target.shape[1])
        refused_B1 = sifted.num_accepted_B[:, None] == 0
        return replace(sifted, weights_BV=torch.where(refused_B1, whole, sifted.weights_BV))


def laws(seed: int, width: int = 30) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    p_V, q_V = (torch.rand(width, generator=rng).double().pow(4) for _ in range(2))
    p_V[:4], q_V[2:8] = 0, 0
    return p_V / p_V.sum(), q_V / q_V.sum()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_of_a_rule_is_the_targets(rule: str) -> None:
    for seed in range(5):
        p_V, q_V = laws(seed)
        law_V, accepted = law_of(RULES[rule], Row(Text((0,), (0,)), p_V, q_V))  # type: ignore[arg-type]
        assert float((law_V - p_V).abs().sum()) < 1e-6
        assert accepted == pytest.approx(float(torch.minimum(p_V, q_V).sum()), abs=1e-6)


def test_the_law_of_a_wrong_rule_is_the_one_that_is_worked_out() -> None:
    p_V, q_V = laws(1)
    law_V, _ = law_of(Wrong(), Row(Text((0,), (0,)), p_V, q_V))
    kept_V = torch.minimum(p_V, q_V)
    due_V = kept_V + (1 - kept_V.sum()) * p_V
    assert float((law_V - due_V).abs().sum()) < 1e-6
    assert float((law_V - p_V).abs().sum()) > 0.1
    assert float((emitted(p_V[None], q_V[None], q_V[None]) - p_V).abs().sum()) < 1e-9


def test_rare_tokens_are_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    p_V, q_V = laws(2)
    monkeypatch.setattr(module, "ASKED", 5)
    law_V, _ = law_of(RULES["token"], Row(Text((0,), (0,)), p_V, q_V))  # type: ignore[arg-type]
    assert float((law_V - p_V).abs().sum()) < 1e-6


def look(llm: LLM, rule: str, params: SamplingParams = PARAMS) -> tuple[Capture, own.Subject]:
    subject = own.subject(llm, rule)
    assert subject.capture is not None
    capture = subject.capture([llm.tokenizer.encode(text) for text in PROMPTS], params, 5)
    assert capture is not None
    return capture, subject


def judged(llm: LLM, capture: Capture, subject: own.Subject) -> Check:
    return captured(subject.target, capture, PARAMS, subject.near_tie)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_of_outrider_give_the_targets_law(llm: LLM, rule: str) -> None:
    capture, subject = look(llm, rule)
    check = judged(llm, capture, subject)
    assert check.verdict == "lossless", check
    told = check.evidence
    assert told["largest TV"] < 1e-5
    assert told["acceptance"] == pytest.approx(told["ceiling"], abs=1e-5)
    assert 0.5 < told["acceptance"] < 1
    assert module.NAME not in RULES


def test_a_wrong_rule_is_found_on_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "wrong", Wrong())
    check = judged(llm, *look(llm, "wrong"))
    assert (check.verdict, check.reproduction is None) == ("rule bias", False)


@pytest.mark.parametrize(
    ("made", "fault"),
    [({"frequency_penalty": 0.0}, "frequency_penalty ignored"), ({"top_k": 0}, "top_k ignored")],
)
def test_rows_without_a_control_are_found(llm: LLM, made: dict[str, float], fault: str) -> None:
    check = judged(llm, *look(llm, "token", replace(PARAMS, **made)))
    assert check.verdict == "control ignored", check
    assert check.said.startswith(fault)


def test_sixteen_bits_excuse_no_rule(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rule makes of the rows it was given is the same arithmetic whatever the model's."""
    monkeypatch.setitem(RULES, "wrong", Wrong())
    capture, subject = look(llm, "wrong")
    coarse = replace(subject.target, eps=torch.finfo(torch.bfloat16).eps)
    check = captured(coarse, capture, PARAMS, own.COARSE_TIE)
    assert module.EXACT < check.evidence["TV of the rule"] < own.COARSE_TIE
    assert check.verdict == "rule bias", check


def moved(capture: Capture, by: float, seed: int = 0) -> Capture:
    """Rows whose likely tokens are moved by some nats, up or down."""
    rng = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for row in capture.rows:
        p_V = row.p_V * (by * torch.randn(len(row.p_V), generator=rng).clamp(-1, 1)).exp()
        rows.append(replace(row, p_V=p_V / p_V.sum()))
    return replace(capture, rows=tuple(rows))


@pytest.mark.parametrize(
    ("by", "verdict"), [(1e-4, "lossless"), (0.1, "numeric drift"), (1.0, "rule bias")]
)
def test_rows_that_are_not_the_targets(llm: LLM, by: float, verdict: str) -> None:
    """In float32 rows are the target's own; where they are not, it is told how far they are off."""
    capture, subject = look(llm, "token")
    check = captured(subject.target, moved(capture, by), PARAMS, own.COARSE_TIE)
    assert check.verdict == verdict, check
    # Numbers of sixteen bits move as much by themselves.
    coarse = replace(subject.target, eps=torch.finfo(torch.bfloat16).eps)
    drift = captured(coarse, moved(capture, 0.02), PARAMS, own.COARSE_TIE)
    assert drift.evidence["bound"] > drift.evidence["TV of its rows"] > module.EXACT
    assert drift.verdict == "lossless", drift


def test_a_right_model_of_sixteen_bits_is_lossless() -> None:
    with torch.inference_mode():
        rough = LLM.load(str(bundled_path("draft")), drafter="int8", dtype="bfloat16", k=3)
        capture, subject = look(rough, "token")
        check = captured(subject.target, capture, PARAMS, subject.near_tie)
    assert check.verdict == "lossless", check
    assert check.evidence["bound"] < 0.05


def test_a_rule_without_uniforms_has_nothing_to_show(llm: LLM) -> None:
    subject = own.subject(llm, "coupled")
    assert subject.capture is not None
    assert subject.capture([[5, 6]], PARAMS, 1) is None
