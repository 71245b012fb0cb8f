"""SpeculativeDecoder: token ids in, token ids out, with any two models."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import replace
from typing import Any

from outrider.config import SAMPLING, as_tokens, known_options
from outrider.drafters.base import Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import ProtocolDrafter
from outrider.engine.emit import Emitter
from outrider.engine.engine import Engine
from outrider.engine.requests import Requests
from outrider.engine.settings import SpeculativeDecoderConfig
from outrider.errors import InvalidConfig, VocabularyMismatch, standing_at
from outrider.models.base import Target
from outrider.models.protocol import DraftModel, ProtocolTarget, Rng, TargetModel
from outrider.types import Request, SpeculativeMetrics

NOTE = "; the configuration's sampling=SamplingParams(...) has the others"


def as_target(model: Target | TargetModel) -> Target:
    """A target as the engine wants it.

    Raises:
        InvalidConfig: an object that is neither a Target nor a TargetModel.
    """
    if isinstance(model, Target):
        return model
    if isinstance(model, TargetModel):
        return ProtocolTarget(model)
    raise InvalidConfig(
        f"target={type(model).__name__} has no verify(prefix, draft_tokens) and is no Target; "
        "wrap a Hugging Face model in outrider.models.HuggingFaceTarget"
    )


def as_drafter(model: Drafter | Target | DraftModel | None, target: Target) -> Drafter:
    """A drafter as the engine wants it; None drafts nothing, a Target becomes a draft model.

    Raises:
        InvalidConfig: an object that cannot draft.
        VocabularyMismatch: a DraftModel over another vocabulary than the target's.
    """
    if model is None:
        return NoDrafter()
    if isinstance(model, Drafter):
        return model
    if isinstance(model, Target):
        return ModelDrafter(model)
    if not isinstance(model, DraftModel):
        raise InvalidConfig(
            f"draft={type(model).__name__} has no propose(prefix, k, rng) and is no Drafter"
        )
    drafter = ProtocolDrafter(model)
    if model.vocab_size != target.vocab_size:
        raise VocabularyMismatch(
            f"the draft model predicts {model.vocab_size} tokens, the target {target.vocab_size}; "
            "both need one vocabulary"
        )
    return drafter


class SpeculativeDecoder:
    """The engine over token ids: decodes with a target, guesses with a draft model.

    Args:
        draft: a DraftModel, a Drafter, a Target used as draft model, or None.
        target: a TargetModel or a Target.
        config: draft length, rule, sampling and end of text.

    Raises:
        InvalidConfig, VocabularyMismatch: models that do not fit the protocols or each other.
    """

    def __init__(
        self,
        draft: Drafter | Target | DraftModel | None,
        target: Target | TargetModel,
        config: SpeculativeDecoderConfig | None = None,
    ) -> None:
        self.config = config or SpeculativeDecoderConfig()
        self.target = as_target(target)
        ends = {self.config.eos_token} if self.config.stop_on_eos else set[int | None]()
        engine = Engine(
            self.target,
            as_drafter(draft, self.target),
            Emitter(None),
            trees=self.config.trees,
        )
        engine.metrics.cost_ratio = self.config.cost_ratio
        self._requests = Requests(
            engine,
            depth=self.config.k,
            end_tokens=frozenset(e for e in ends if e is not None),
            lossless=self.config.lossless,
        )
        for end in self._requests.end_tokens:
            if end >= self.target.vocab_size:
                raise InvalidConfig(
                    f"eos_token={end} is outside the vocabulary 0..{self.target.vocab_size - 1}"
                )

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Counts since the last reset, over all calls."""
        return self._requests.engine.metrics

    def reset_metrics(self) -> None:
        """Starts the counts anew; the cost ratio stays."""
        self._requests.engine.metrics = SpeculativeMetrics(cost_ratio=self.config.cost_ratio)

    @known_options(*SAMPLING, note=NOTE)
    def generate(
        self,
        prefix: Sequenced[int],
        max_tokens: int | None = None,
        *,
        seed: int | None = None,
        rng: Rng | None = None,
    ) -> list[int]:
        """The continuation of `prefix`, without it.

        Args:
            prefix: token ids, at least one.
            max_tokens: tokens at most; None = as the configuration or the context says.
            seed: 64-bit seed; None = the configuration's, or fresh entropy.
            rng: draws the seed instead, two numbers of 32 bits.

        Raises:
            EmptyPrompt, TokenOutOfRange, PromptTooLong, InvalidConfig: before any work.
            NonFinite, ModelError: the target gave no law, or failed.
        """
        if rng is not None:
            if seed is not None:
                raise InvalidConfig("seed and rng exclude each other; give one")
            seed = int(rng.uniform() * 2**32) << 32 | int(rng.uniform() * 2**32)
        return self.generate_batch([prefix], max_tokens, seed=seed)[0]

    @known_options(*SAMPLING, note=NOTE)
    def generate_batch(
        self,
        prefixes: Sequenced[Sequenced[int]],
        max_tokens: int | None = None,
        *,
        seed: int | None = None,
    ) -> list[list[int]]:
        """The continuation of each prefix; row by row what `generate` gives under the same seed."""
        sampling = self.config.sampling
        if max_tokens not in (None, 0):
            sampling = replace(sampling, max_tokens=max_tokens)
        if seed is not None:
            sampling = replace(sampling, seed=seed)
        rows = _rows(prefixes)
        requests: list[Request] = []
        for i, prefix in enumerate(rows):
            with standing_at(f"prefixes[{i}]" if len(rows) > 1 else None):
                prompt = as_tokens("prefix", prefix)
                requests.append(Request(prompt, sampling, rule=self.config.rule))
                self._requests.check(requests[-1])
        if max_tokens == 0:
            return [[] for _ in requests]
        done = self._requests.complete(requests)
        return [list(completion.token_ids) for completion in done]


def _rows(prefixes: Any) -> list[Any]:
    try:
        return list(prefixes)
    except TypeError as error:
        raise InvalidConfig(f"prefixes={prefixes!r}: several sequences are due") from error
