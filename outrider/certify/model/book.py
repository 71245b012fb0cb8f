"""The law of plain decoding, token by token: a model's rows under a request's own controls."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.config import SamplingParams
from outrider.engine.controls import Controls
from outrider.engine.places import Places
from outrider.models.base import Rows, Target
from outrider.sequence import Sequence
from outrider.types import Request

PLAIN = SamplingParams()
MANY = 1 << 30
"""More tokens than any text here has."""
CONTROLS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "logits_processors",
)
"""What of SamplingParams changes a law; each can be left out alone."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and at least one token that came after it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


Texts: TypeAlias = Sequenced[Text]


class Laws(Protocol):
    """What should come after each token of a text, whoever says so."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    @property
    def width(self) -> int:
        """Tokens there are."""
        ...

    @property
    def max_length(self) -> int | None:
        """Tokens in the longest text there may be; None = no limit is known."""
        ...

    def logits(self, texts: Texts) -> Tensor:
        """The rows `[N, V]` before each token of some texts."""
        ...

    def laws(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """The processed laws `[N, V]`, float64; controls learn of tokens `late` tokens late."""
        ...

    def scores(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """The same up to temperature: what greedy decoding takes the largest of, float64."""
        ...

    def judged(self, texts: Texts) -> Tensor:
        """Of which tokens the law is known, `[N]`."""
        ...


@dataclass(frozen=True, slots=True)
class Book:
    """A model that is read, never sampled: what should come after each token of a text.

    Attributes:
        model: the target, or a draft model.
        ends: tokens that end a text.
        eps: the last digit of 1 in the numbers that the model computes in.
    """

    model: Target
    ends: tuple[int, ...] = ()
    eps: float = torch.finfo(torch.float32).eps

    @property
    def width(self) -> int:
        """Tokens there are."""
        return self.model.vocab_size

    @property
    def max_length(self) -> int | None:
        """The model's context."""
        return self.model.max_length

    def logits(self, texts: Texts) -> Tensor:
        """The model's rows `[N, V]` before each token of some texts, in one forward."""
        # A draft model narrower than the target reads what it does not know as its last token.
        last = self.model.vocab_size - 1
        whole = [[min(x, last) for x in (*text.prompt, *text.output[:-1])] for text in texts]
        seqs = [self.model.open(len(tokens)) for tokens in whole]
        try:
            starts = np.cumsum([0, *map(len, whole)])
            wanted = [
                torch.arange(start + len(text.prompt) - 1, start + len(tokens))
                for start, text, tokens in zip(starts.tolist(), texts, whole, strict=False)
            ]
            flat = torch.tensor([token for tokens in whole for token in tokens])
            counts = tuple(map(len, whole))
            rows = Rows(tuple(seqs), counts, flat, None, torch.cat(wanted))
            return self.model.score(rows).cpu()
        finally:
            for seq in seqs:
                self.model.close(seq)

    def laws(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """The processed laws `[N, V]`, float64.

        Args:
            logits_NV: what `logits` returned.
            texts: the texts.
            params: the controls.
            late: how many tokens late the controls learn of a text.
        """
        controls, places = self._controls(texts, params, late)
        return controls.probs(controls.adjusted(logits_NV.double(), places), places.owners)

    def scores(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """The same up to temperature: what greedy decoding takes the largest of, float64."""
        controls, places = self._controls(texts, params, late)
        return controls.adjusted(logits_NV.double(), places)

    def last_digit(self, texts: Texts) -> float:
        """The last digit of the largest logit before the tokens of some texts, in nats."""
        if not texts:
            return 0.0
        return self.eps * float(self.logits(texts).abs().nan_to_num(posinf=0.0).max())

    def judged(self, texts: Texts) -> Tensor:
        """Of which tokens the law is known, `[N]`: of all."""
        return torch.ones(sum(len(text.output) for text in texts), dtype=torch.bool)

    def _controls(self, texts: Texts, params: SamplingParams, late: int) -> tuple[Controls, Places]:
        ends = frozenset[int]() if params.ignore_eos else frozenset(self.ends)
        sequences = [
            Sequence(i, Request(text.prompt, params), 0, "none", 0, MANY, ends, list(text.prompt))
            for i, text in enumerate(texts)
        ]
        owners = [i for i, text in enumerate(texts) for _ in text.output]
        paths = [text.output[: max(0, i - late)] for text in texts for i in range(len(text.output))]
        return Controls(sequences), Places(owners, paths)


def set_controls(params: SamplingParams) -> list[str]:
    """Those controls that a request does not leave as they are by default."""
    return [name for name in CONTROLS if getattr(params, name) != getattr(PLAIN, name)]


def without(params: SamplingParams, name: str) -> SamplingParams:
    """The request with one control left out."""
    return replace(params, **{name: getattr(PLAIN, name)})
