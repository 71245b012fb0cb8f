"""LLM: text in, text out. The engine with a tokenizer around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from outrider.config import SamplingParams, check_rule, nearest
from outrider.drafters import Drafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import EmptyPrompt, InvalidConfig
from outrider.llm.load import Placement, as_dtype, folder_of, load_drafter
from outrider.llm.options import Speculation
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer
from outrider.types import Completion, Delta, Request, SpeculativeMetrics

Prompt = str | Sequence[int]
OPTIONS = ("cache_bytes", "k", "max_texts", "pack", "prefill_chunk", "rule")


class LLM:
    """A language model that decodes speculatively; `LLM.load` is the way to get one.

    One LLM may be used from several threads: their texts share rounds.
    """

    def __init__(
        self,
        target: HuggingFaceTarget,
        tokenizer: TextTokenizer,
        drafter: Drafter,
        *,
        k: int = 4,
        rule: str | None = None,
        max_texts: int = 64,
        prefill_chunk: int = 512,
    ) -> None:
        for name, value in (("k", k), ("max_texts", max_texts), ("prefill_chunk", prefill_chunk)):
            if not isinstance(value, int) or value < 1:
                raise InvalidConfig(f"{name}={value!r}: a whole number of at least 1 is due")
        if rule is not None:
            check_rule(rule)
        self.tokenizer = tokenizer
        self.rule = rule
        self._target = target
        engine = Engine(
            target, drafter, Emitter(tokenizer), max_texts=max_texts, chunk=prefill_chunk
        )
        self._requests = Requests(engine, depth=k, end_tokens=tokenizer.end_tokens())

    @classmethod
    def load(
        cls,
        model: str | Path = "bundled",
        drafter: str | Drafter = "auto",
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        strict: bool | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> LLM:
        """Loads a model and who guesses for it.

        Args:
            model: a local folder, or "bundled".
            drafter: a Drafter, or a spec: none, draft, draft:PATH, ngram, auto.
            device: where the models run; None = the CPU.
            dtype: "float32", "bfloat16", ...; None = bfloat16 where the processor has it.
            strict: one arithmetic class for everything, so that logits are equal bit for bit.
            speculative_config: vLLM's dictionary; takes precedence over `drafter` and `k`.
            **options: k, rule, max_texts, prefill_chunk, cache_bytes, and pack (weights laid out
                for several rows; None = for a target that verifies drafts).

        Raises:
            InvalidConfig: an unknown option, with the nearest known one.
            ModelError, UnsupportedModel, VocabularyMismatch, MissingExtra: what cannot be loaded.
        """
        for name in options:
            if name not in OPTIONS:
                raise InvalidConfig(
                    f"option {name!r} does not exist; options are {', '.join(OPTIONS)}"
                    + nearest(name, OPTIONS)
                )
        asked = Speculation(
            drafter if isinstance(drafter, str) else "none",
            options.pop("k", 4),
            options.pop("rule", None),
        ).updated(speculative_config or {})
        place = Placement(
            device,
            as_dtype(dtype),
            bool(strict),
            options.pop("pack", None),
            options.pop("cache_bytes", None),
        )
        folder = folder_of(model)
        tokenizer = TextTokenizer(folder)
        if isinstance(drafter, str):
            drafter = load_drafter(asked, model, tokenizer, place)
        target = place.load(folder, many_rows=not isinstance(drafter, NoDrafter))
        return cls(target, tokenizer, drafter, k=asked.k, rule=asked.rule, **options)

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Counts and stage times over everything made so far."""
        return self._requests.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        depth: int | None = None,
    ) -> list[Completion]:
        """Continues prompts, given as text or token ids.

        Args:
            prompts: one prompt or several.
            sampling_params: for all prompts, or one per prompt; None = SamplingParams().
            depth: tokens drafted per round, instead of the LLM's k; 0 = plain decoding.

        Returns:
            One completion per prompt and sample, prompt-major.

        Raises:
            EmptyPrompt, PromptTooLong, TokenOutOfRange, InvalidConfig: before any work.
            NonFinite, OutOfMemory: one request failed; the others' completions are in the
                exception's attribute `completions`.
        """
        several = _several(prompts)
        params = sampling_params or SamplingParams()
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(several):
            raise InvalidConfig(
                f"{len(several)} prompts came with {len(each)} sampling params; give one for all, "
                "or one per prompt"
            )
        requests = [
            request
            for prompt, one in zip(several, each, strict=True)
            for request in self._of(prompt, one, depth)
        ]
        for request in requests:
            self._requests.check(request)
        return self._requests.complete(requests)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        depth: int | None = None,
    ) -> Iterator[Delta]:
        """Continues one prompt, round by round.

        Raises:
            InvalidConfig: more than one sample; and whatever `generate` raises.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1:
            raise InvalidConfig(f"n={params.n}: a stream carries one text; use generate(...)")
        (request,) = self._of(prompt, params, depth)
        self._requests.check(request)
        return self._requests.stream(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Answers a conversation through the model's chat template.

        Raises:
            InvalidConfig: a tokenizer without a chat template; and whatever `generate` raises.
        """
        return self.generate([self.tokenizer.chat(messages)], sampling_params)

    def _of(self, prompt: Prompt, params: SamplingParams, depth: int | None) -> list[Request]:
        if not prompt:
            raise EmptyPrompt("the prompt is empty; give at least one character to continue from")
        tokens = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        return [Request(tokens, params, sample, self.rule, depth) for sample in range(params.n)]

    def info(self) -> dict[str, Any]:
        """What runs, and how, for reports."""
        engine = self._requests.engine
        return {
            **self._target.info(),
            "model": str(self.tokenizer.folder),
            "drafter": {"name": engine.drafter.name, "trusted": engine.drafter.trusted},
            "k": self._requests.depth,
            "rule": self.rule,
        }


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several; a list of whole numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
