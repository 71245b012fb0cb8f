"""Outrider itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.certify.model.book import Book
from outrider.certify.model.captured import NAME, Capture, rows_of, watching
from outrider.certify.model.subject import Prompts, Subject
from outrider.config import SamplingParams
from outrider.drafters import ModelDrafter
from outrider.llm import LLM
from outrider.types import Completion

NEAR_TIE, COARSE_TIE = 1e-3, 0.25
"""Where rounding may choose between two logits: of float32, and of dtypes of a few bits."""


@dataclass(frozen=True, slots=True)
class Own:
    """An LLM under one rule; `depth` 0 is plain decoding."""

    llm: LLM
    rule: str | None = None
    depth: int | None = None

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Completion]:
        """Each prompt has a seed of its own: texts of one seed share their noise."""
        each = [replace(params, seed=seed + i) for i in range(len(prompts))]
        rule = None if params.temperature == 0 else self.rule
        return self.llm.generate([list(p) for p in prompts], each, rule=rule, depth=self.depth)


@dataclass(frozen=True, slots=True)
class Captured:
    """What the rule of chains is given while an LLM makes texts."""

    llm: LLM
    rule: str | None = None

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> Capture | None:
        """Positions with a draft; None of a rule that tests no chains with uniforms."""
        with watching(self.rule or "coupled") as watched:
            if watched is None:
                return None
            texts = Own(self.llm, NAME)(prompts, params, seed)
            return Capture(watched.rule, rows_of(watched, prompts, texts, seed))


def subject(llm: LLM, rule: str | None = None) -> Subject:
    """An LLM as it is loaded, its target's book beside it, and its draft model's where it has one.

    Args:
        llm: the model, whose drafter guesses.
        rule: the verification rule; None = what a given seed means, `coupled`.
    """
    drafter, target = llm.drafter, llm.target
    draft = Book(drafter.model) if isinstance(drafter, ModelDrafter) else None
    ends = tuple(x for x in llm.tokenizer.end_tokens() if x < target.vocab_size)
    named = getattr(torch, str(target.info()["dtype"]), None)
    # Weights that are quantised are multiplied in few bits.
    dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    return Subject(
        name=f"outrider, drafter {drafter.name}, rule {rule or 'coupled'}",
        generate=Own(llm, rule),
        target=Book(target, ends, torch.finfo(dtype).eps),
        plain=Own(llm, depth=0),
        draft=draft,
        near_tie=NEAR_TIE if dtype == torch.float32 else COARSE_TIE,
        capture=Captured(llm, rule),
    )
