"""Laws that known faults would give: each is tried as an alternative to the law that is due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from outrider.certify.model.book import MANY, Book, Laws, Text, Texts, set_controls, without
from outrider.config import SamplingParams

Category = Literal["rule bias", "numeric drift", "control ignored"]
CUTS = "top_k", "top_p", "min_p", "typical_p"
MASSES = "top_p", "typical_p"
COUNTS = "repetition_penalty", "presence_penalty", "frequency_penalty"
HEATS = 0.6, 0.8, 1.25
"""Times the temperature that is asked for: an engine's own instead of it."""
OWN = (("top_k", 50), ("min_p", 0.05))
"""Defaults that engines and checkpoints bring along where a request leaves a control off."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A known fault.

    Attributes:
        name: what is wrong.
        category: what kind of fault it is.
        probs_N: the chance it gives to the tokens that came.
        guessed: whether it has values that nobody named: other faults may look alike.
    """

    name: str
    category: Category
    probs_N: Tensor
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """Some texts with what the signatures read of them; a row for each of their tokens.

    Attributes:
        texts: prompts and outputs.
        params: their controls.
        target: the target's book.
        logits_NV: the target's rows.
        p_NV: the law that is due.
        draft: the draft model's book; None without one.
        draft_logits_NV, q_NV: its rows, and its law under the same controls.
        read_N: which rows its context holds; in the others, where nothing is drafted, `q_NV` is the
            law that is due.
    """

    texts: Texts
    params: SamplingParams
    target: Laws
    logits_NV: Tensor
    p_NV: Tensor
    draft: Book | None = None
    draft_logits_NV: Tensor | None = None
    q_NV: Tensor | None = None
    read_N: Tensor | None = None

    @classmethod
    def of(
        cls, texts: Texts, params: SamplingParams, target: Laws, draft: Book | None = None
    ) -> Page:
        """Reads the texts with both models."""
        logits_NV = target.logits(texts)
        p_NV = target.laws(logits_NV, texts, params)
        if draft is None:
            return cls(texts, params, target, logits_NV, p_NV)
        # Of tokens that only one of the two knows the draft draws none.
        width = p_NV.shape[1]
        read_N, own_NV = _within_reach(draft, texts, width)
        q_NV = torch.where(read_N[:, None], draft.laws(own_NV, texts, params), p_NV)
        return cls(texts, params, target, logits_NV, p_NV, draft, own_NV, q_NV, read_N)

    def tokens(self) -> Tensor:
        """What came, text after text."""
        return torch.tensor([token for text in self.texts for token in text.output])

    def firsts(self) -> Tensor:
        """Where a text begins."""
        return torch.tensor([i == 0 for text in self.texts for i in range(len(text.output))])

    def law(self, params: SamplingParams, late: int = 0) -> Tensor:
        """The target's law under other controls, or when they learn of tokens late."""
        return self.target.laws(self.logits_NV, self.texts, params, late)

    def edges(self, near: float) -> Tensor:
        """Which tokens the law forbids, and would not if rounding moved logits by `near`."""
        out_N = self.at(self.p_NV) == 0
        if not bool(out_N.any()):
            return out_N
        moved_N1 = torch.full((len(out_N), 1), near, dtype=torch.float64)
        moved_NV = self.logits_NV.double().scatter_add(1, self.tokens()[:, None], moved_N1)
        # What is left out of a mass moves by as much as the logits of its tokens.
        rest = math.exp(-near)
        masses = {name: 1 - (1 - getattr(self.params, name)) * rest for name in MASSES}
        law_NV = self.target.laws(moved_NV, self.texts, replace(self.params, **masses))
        return out_N & (self.at(law_NV) > 0)

    def at(self, law_NV: Tensor) -> Tensor:
        """What a law gives to the tokens that came."""
        return law_NV.gather(1, self.tokens()[:, None]).squeeze(1)


def _within_reach(draft: Book, texts: Texts, width: int) -> tuple[Tensor, Tensor]:
    """Which rows a draft model's context holds `[N]`, and its logits `[N, V]`, 0 in the others."""
    most = draft.max_length or MANY
    counts = [min(len(one.output), max(0, most + 1 - len(one.prompt))) for one in texts]
    pairs = list(zip(texts, counts, strict=True))
    read_N = torch.tensor([i < count for one, count in pairs for i in range(len(one.output))])
    within = [Text(one.prompt, one.output[:count]) for one, count in pairs if count]
    if not within:
        return read_N, torch.zeros(len(read_N), width)
    some_MV = draft.logits(within)[:, :width]
    some_MV = nn.functional.pad(some_MV, (0, width - some_MV.shape[1]), value=-torch.inf)
    own_NV = some_MV.new_zeros(len(read_N), width)
    own_NV[read_N] = some_MV
    return read_N, own_NV


def signatures(page: Page) -> Iterator[Signature]:
    """Every fault that this request could have; always the same ones for the same parameters."""
    yield from _of_controls(page)
    p_NV = page.p_NV
    # Row i's token came from the row before: what is added after a draft was taken one too early.
    before_NV = torch.where(page.firsts()[:, None], p_NV, p_NV.roll(1, 0))
    yield Signature("token from the row before", "rule bias", page.at(before_NV))
    if page.target.ends:
        rest_NV = p_NV.index_fill(1, torch.tensor(page.target.ends), 0)
        rest_NV = rest_NV / rest_NV.sum(1, keepdim=True).clamp(min=1e-300)
        yield Signature("end of text swallowed", "rule bias", page.at(rest_NV))
    if page.q_NV is not None:
        yield from _of_draft(page, page.q_NV)


def _of_controls(page: Page) -> Iterator[Signature]:
    params = page.params
    for name in set_controls(params):
        ignored_NV = page.law(without(params, name))
        yield Signature(f"{name} ignored", "control ignored", page.at(ignored_NV))
    for heat in HEATS:
        name = f"a temperature near {params.temperature * heat:g}, not {params.temperature:g}"
        other_NV = page.law(replace(params, temperature=params.temperature * heat))
        yield Signature(name, "control ignored", page.at(other_NV), guessed=True)
    for control, value in OWN:
        if control not in set_controls(params):
            name = f"a {control} near {value:g}, which nobody asked for"
            other_NV = page.law(replace(params, **{control: value}))
            yield Signature(name, "control ignored", page.at(other_NV), guessed=True)
    if any(name in COUNTS for name in set_controls(params)):
        for late in 1, 2:
            name = f"penalties counted {late} late"
            yield Signature(name, "control ignored", page.at(page.law(params, late)))


def _of_draft(page: Page, q_NV: Tensor) -> Iterator[Signature]:
    assert page.draft is not None and page.draft_logits_NV is not None
    p_NV = page.p_NV

    def came(law_NV: Tensor) -> Tensor:
        """Where nothing can be drafted the law is the one that is due."""
        assert page.read_N is not None
        return page.at(torch.where(page.read_N[:, None], law_NV, p_NV))

    top_NV = torch.zeros_like(q_NV).scatter(1, q_NV.argmax(1, keepdim=True), 1.0)
    yield Signature(
        "likeliest token drafted, scored with the draft's law",
        "rule bias",
        came(emitted(p_NV, top_NV, q_NV)),
    )
    yield Signature("draft kept without a test", "rule bias", came(q_NV))
    kept_NV = torch.minimum(p_NV, q_NV)
    again_NV = kept_NV + (1 - kept_NV.sum(1, keepdim=True)) * p_NV
    yield Signature("refused token drawn from the target", "rule bias", came(again_NV))
    raw = page.params
    for name in set(CUTS) & set(set_controls(raw)):
        raw = without(raw, name)
    if raw != page.params:
        raw_NV = page.draft.laws(page.draft_logits_NV, page.texts, raw)
        yield Signature(
            "truncated draft, scored with its whole law",
            "rule bias",
            came(emitted(p_NV, q_NV, raw_NV)),
        )
        yield Signature(
            "whole draft, scored with its truncated law",
            "rule bias",
            came(emitted(p_NV, raw_NV, q_NV)),
        )
    rough = page.draft_logits_NV.bfloat16().double()
    rough_NV = page.draft.laws(rough, page.texts, page.params)
    yield Signature(
        "draft drawn in bfloat16, scored in float32",
        "numeric drift",
        came(emitted(p_NV, rough_NV, q_NV)),
    )


def emitted(p_NV: Tensor, drawn_NV: Tensor, scored_NV: Tensor) -> Tensor:
    """What `token` writes for a token drawn from one law and tested with another; p if equal."""
    keep_NV = torch.where(scored_NV > 0, p_NV / scored_NV.clamp(min=1e-300), 1.0).clamp(max=1)
    keep_NV = torch.where(p_NV > 0, drawn_NV * keep_NV, 0.0)
    rest_NV = (p_NV - scored_NV).clamp(min=0)
    mass_N1 = rest_NV.sum(1, keepdim=True)
    rest_NV = torch.where(mass_N1 > 0, rest_NV / mass_N1.clamp(min=1e-300), p_NV)
    return keep_NV + (1 - keep_NV.sum(1, keepdim=True)).clamp(min=0) * rest_NV
