"""`assert_lossless`: a certification as one line of somebody's tests.

Installing Outrider makes it a fixture of pytest, too; importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.certify.model.report import Report
    from outrider.certify.model.subject import Generate, Subject
    from outrider.config import SamplingParams
    from outrider.llm import LLM
    from outrider.models.text import Tokenizer

WITHIN = 0.05
"""A test of some thousands of tokens; `certify model` looks at more."""
UNDECIDED = "fail", "skip"


class NotLossless(AssertionError):
    """A certification that did not end as it should; its text is the report.

    Attributes:
        report: the certification.
    """

    def __init__(self, text: str, report: Report) -> None:
        super().__init__(text)
        self.report = report


def assert_lossless(
    engine: Subject | LLM | Generate,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    params: SamplingParams | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    within: float = WITHIN,
    alpha: float = 0.01,
    length: int = 16,
    budget: int | None = None,
    seed: int = 1,
    near_tie: float | None = None,
    seeded: bool = True,
    accept: Collection[str] = ("lossless",),
    undecided: Literal["fail", "skip"] = "fail",
    html: str | Path | None = None,
) -> Report:
    """Fails unless what an engine writes has the law of plain decoding.

    For given seeds of the texts it comes out the same each time, if the engine keeps seeds. An
    engine that does not fails about once in 1 / alpha runs without being wrong.

    Args:
        engine: a function of prompts (token ids), parameters and a seed that returns the token ids
            of one text per prompt; a Subject; or an LLM.
        prompts: text or token ids; a dozen short ones will do.
        params: the controls; None = SamplingParams().
        target: the folder of the target's model, or "bundled", that says what should come, in
            float32. A Subject and an LLM have their own.
        draft: the folder of the draft model, where there is one; finds more, sooner.
        within: the total variation per token that counts as lossless.
        alpha: the chance of a false alarm.
        length: tokens per text.
        budget: tokens at most; None is what `within` needs.
        seed: of the first text.
        near_tie: logits closer than this, in nats, may change places by rounding; None = 0.001, or
            what a Subject says. An engine of 16 bits needs about 0.1.
        seeded: whether a seed is promised to give the same text again.
        accept: verdicts that pass: `("lossless", "numeric drift")` lets rounding through.
        undecided: what happens where the tokens did not suffice, or the planted bias was not
            found: a test that shows nothing fails, unless it is to be skipped.
        html: where the report is written as a page, whatever the verdict.

    Raises:
        NotLossless: another verdict; the text says which, and how to see it.
        InvalidConfig: a function without a target, prompts as text without a tokenizer, a number
            that cannot be meant.
    """
    __tracebackhide__ = True
    from outrider.certify.model.plan import Plan
    from outrider.certify.model.run import certify
    from outrider.certify.model.words import as_text
    from outrider.config import SamplingParams

    if undecided not in UNDECIDED:
        raise InvalidConfig(f"undecided={undecided!r}: 'fail' or 'skip' is due")
    subject, tokenizer = _subject(engine, target, draft)
    if near_tie is not None:
        subject = replace(subject, near_tie=near_tie)
    subject = replace(subject, seeded=subject.seeded and seeded)
    plan = Plan(within=within, alpha=alpha, length=length, budget=budget, seed=seed)
    report = certify(subject, _ids(prompts, tokenizer), params or SamplingParams(), plan)
    if html is not None:
        _write(Path(html), report, tokenizer)
    # Not the headline alone: a verdict that is accepted must not hide another that is not.
    fine = {"lossless", "refused", "not looked at", *accept}
    if report.control.verdict != "void" and all(c.verdict in fine for c in report.checks):
        return report
    text = as_text(report)
    if report.verdict in ("undecided", "void") and undecided == "skip":
        import pytest

        pytest.skip(text)
    raise NotLossless(text, report)


def _subject(engine: Any, target: Any, draft: Any) -> tuple[Subject, Tokenizer | None]:
    from outrider.certify.adapters import own
    from outrider.certify.model.subject import Subject
    from outrider.llm import LLM

    if isinstance(engine, (Subject, LLM)) and (target is not None or draft is not None):
        raise InvalidConfig(f"target and draft are those of the {type(engine).__name__} itself")
    if isinstance(engine, LLM):
        return own.subject(engine), engine.tokenizer
    if isinstance(engine, Subject):
        return engine, None
    if not callable(engine):
        raise InvalidConfig(
            f"engine={engine!r}: a function of prompts, parameters and a seed is due"
        )
    if target is None:
        raise InvalidConfig(
            "target=None: name the folder of the target's model, which says what should come"
        )
    return _against(cast("Generate", engine), target, draft)


def _against(
    engine: Generate, target: str | Path, draft: str | Path | None
) -> tuple[Subject, Tokenizer]:
    import torch

    from outrider.certify.model.book import Book
    from outrider.certify.model.subject import Subject
    from outrider.llm.load import Placement, folder_of, tokenizer_of

    place, folder = Placement(dtype=torch.float32), folder_of(target, "target")
    tokenizer = tokenizer_of(folder)
    model = place.load(folder)
    book = Book(model, tuple(x for x in tokenizer.end_tokens() if x < model.vocab_size))
    guess = None if draft is None else Book(place.load(folder_of(draft, "draft")))
    name = getattr(engine, "__name__", type(engine).__name__)
    return Subject(name, engine, book, draft=guess), tokenizer


def _ids(prompts: Sequence[Any], tokenizer: Tokenizer | None) -> list[list[int]]:
    ids: list[list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            ids.append(list(prompt))
        elif tokenizer is None:
            raise InvalidConfig(f"prompt {prompt!r}: give token ids, as a Subject has no tokenizer")
        else:
            ids.append(tokenizer.encode(prompt))
    return ids


def _write(file: Path, report: Report, tokenizer: Tokenizer | None) -> None:
    from outrider.certify.page.page import Origin, page

    decode = None if tokenizer is None else tokenizer.decode
    origin = Origin("outrider.certify.testing.assert_lossless", decode=decode)
    file.write_text(page(report, origin), encoding="utf-8")
