"""`model.generate(..., custom_generate=outrider.custom_generate(...))`: factory and callable.

A factory, because transformers hands a callable neither an assistant model nor a streamer nor a
tokenizer. The engine makes the texts; this file says which, and puts them back into a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.config import check_flag, check_rule, check_whole, nearest
from outrider.decoding import rule_named
from outrider.drafters import Drafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, warn
from outrider.interop.asked import Ends, sampling_of
from outrider.interop.drafting import Guess, Guesser
from outrider.interop.fields import check_fields, check_handed, pad_of
from outrider.interop.lend import at_work, lent
from outrider.interop.lost import check_lost
from outrider.interop.rows import Batch
from outrider.interop.write import written
from outrider.models.hf import HuggingFaceTarget
from outrider.types import Request, SpeculativeMetrics

if TYPE_CHECKING:
    from jaxtyping import Int64

NUMBERS = (
    "assistant_confidence_threshold",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "prompt_lookup_num_tokens",
)
OPTIONS = (*NUMBERS, "assistant_tokenizer", "max_texts", "pack", "rule", "stop_strings", "strict")

NAMED = ("assistant_model", "drafter", "streamer", "tokenizer")
ALIASES: dict[str, str] = dict.fromkeys(
    ("depth", "k", "num_speculative_tokens"), "num_assistant_tokens"
)


def custom_generate(
    *_called: Any,
    assistant_model: PreTrainedModel | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    drafter: Any = None,
    **options: Any,
) -> CustomGenerate:
    """A callable for the `custom_generate` argument of transformers' `generate`.

    Args:
        assistant_model: a smaller transformers model of the same vocabulary, which guesses.
        streamer: transformers' TextStreamer, TextIteratorStreamer or one's own.
        tokenizer: the model's; needed for stop_strings, and beside assistant_tokenizer.
        drafter: who guesses instead: a Drafter, a DraftModel, or a spec (none, ngram, auto,
            suffix, recycle, draft:PATH; or several without a model as a+b). None and no
            assistant_model is prompt lookup.
        **options: num_assistant_tokens, assistant_confidence_threshold, prompt_lookup_num_tokens,
            max_matching_ngram_size, assistant_tokenizer and stop_strings as in transformers; rule,
            max_texts and strict as in LLM.load; pack (lay the model's layers out for the
            processor, for good; off by default).

    Raises:
        InvalidConfig: an unknown option, with the nearest known one; a value that cannot be meant;
            arguments without a name: it was given to `generate` itself, and not called.
    """
    if _called:
        raise InvalidConfig(
            f"custom_generate was handed {type(_called[0]).__name__}: it makes the callable, so "
            "call it: generate(..., custom_generate=outrider.custom_generate())"
        )
    for name in options:
        if name not in OPTIONS:
            raise InvalidConfig(
                f"option {name!r} of custom_generate does not exist; options are "
                f"{', '.join(OPTIONS)}" + nearest(name, (*NAMED, *OPTIONS), ALIASES)
            )
    return CustomGenerate(
        Guesser(assistant_model, drafter, tokenizer, options.pop("assistant_tokenizer", None)),
        streamer,
        tokenizer,
        options,
    )


class CustomGenerate:
    """What `custom_generate` returns: give it to any model's `generate`, as often as wanted.

    `metrics` counts over all calls. A model serves one call at a time; others wait.
    """

    def __init__(
        self, guesser: Guesser, streamer: Any, tokenizer: Any, options: dict[str, Any]
    ) -> None:
        self._guesser = guesser
        self._streamer = streamer
        self._numbers = {name: options.get(name) for name in NUMBERS}
        self._rule: str | None = options.get("rule")
        check_rule(self._rule)
        if self._rule is not None:
            rule_named(self._rule)
        self._max_texts: int = options.get("max_texts", 64)
        check_whole("max_texts", self._max_texts, 1)
        self._layout = {name: options.get(name, False) for name in ("pack", "strict")}
        for name, value in self._layout.items():
            check_flag(name, value)
        self._stops = _stops(options.get("stop_strings"), tokenizer)
        self._warned = False
        self.metrics = SpeculativeMetrics()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int64[Tensor, "B L"],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What transformers calls in place of its own decoding.

        Raises:
            InvalidConfig: what cannot be honoured, by name; nothing is left out silently.
            UnsupportedModel, VocabularyMismatch: models that cannot be used, or not together.
            PromptTooLong, TokenOutOfRange, EmptyPrompt, NonFinite, OutOfMemory: as in LLM.
        """
        check_lost()
        check_fields(generation_config)
        one = lent(model, **self._layout)
        check_handed(model_kwargs)
        batch = Batch.read(input_ids, model_kwargs, stopping_criteria, self._stops)
        sampling = sampling_of(generation_config, logits_processor, batch.ends, batch.width)
        guess = Guess.read(generation_config, self._numbers, self._guesser.assistant)
        drafter = self._guesser.drafter(guess, model, one.target)
        self._warn_unused(guess)
        rule = None if sampling.temperature == 0 else self._rule or "block"
        asked = [Request(prompt, sampling, i, rule) for i, prompt in enumerate(batch.prompts)]
        borrowed = [(model, one)]
        if self._guesser.assistant is not None:
            borrowed.append((self._guesser.assistant, lent(self._guesser.assistant)))
        with at_work(*borrowed):
            # A drafter that works on the target's own layers tries them out.
            requests = self._requests(one.target, drafter, guess, batch.ends, generation_config)
            out = written(requests, asked, batch, pad_of(generation_config), self._streamer)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, out))
        return out

    def _requests(
        self,
        target: HuggingFaceTarget,
        drafter: Drafter,
        guess: Guess,
        ends: Ends,
        config: GenerationConfig,
    ) -> Requests:
        """An engine of this call's own, whose counts are the callable's."""
        chunk = getattr(config, "prefill_chunk_size", None) or 512
        engine = Engine(target, drafter, Emitter(None), max_texts=self._max_texts, chunk=chunk)
        engine.metrics = self.metrics
        return Requests(engine, depth=guess.depth, end_tokens=ends.tokens)

    def _warn_unused(self, guess: Guess) -> None:
        if guess.depth == 0 and self._guesser.has_model and not self._warned:
            self._warned = True
            warn(
                "custom_generate was given a model that guesses, but num_assistant_tokens=0: it "
                "is never asked; leave num_assistant_tokens out, or give at least 1"
            )


def _stops(stop_strings: Any, tokenizer: Any) -> list[StopStringCriteria]:
    """transformers' own criterion of stop strings, which generate cannot make for a callable."""
    if stop_strings is None:
        return []
    if tokenizer is None:
        raise InvalidConfig(f"stop_strings={stop_strings!r} needs tokenizer=, the model's own")
    return [StopStringCriteria(tokenizer, stop_strings)]
