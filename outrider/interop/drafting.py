"""Who guesses in a call of `generate`, and how far: assistant model, drafter, or prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedModel

from outrider.config import check_whole
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    DrafterSpec,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    RecycleDrafter,
    SuffixDrafter,
)
from outrider.engine.decoder import as_drafter
from outrider.errors import InvalidConfig, VocabularyMismatch
from outrider.interop.fields import defaults
from outrider.interop.lend import lent
from outrider.llm.load import Loaded, Placement, folder_of, tokenizer_of
from outrider.models.base import Target
from outrider.models.hf import HuggingFaceTarget
from outrider.models.libllama import LibllamaTarget
from outrider.models.recurrent import RecurrentTarget

DEPTH = 4
"""Tokens drafted per round where nobody says."""

LOOKUP = 2
"""transformers' own longest n-gram of prompt lookup."""


BY_NAME: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "recycle": RecycleDrafter,
    "suffix": SuffixDrafter,
}
"""Drafters that need nothing but their name."""


@dataclass(frozen=True, slots=True)
class Guess:
    """How a call drafts: tokens per round, and the numbers of its kind of drafter.

    Attributes:
        depth: tokens drafted per round at most; 0 decodes plainly.
        lookup: whether the call asks for prompt lookup.
        longest: longest n-gram looked up; None where nobody says.
        confidence: probability below which an assistant stops drafting.
    """

    depth: int
    lookup: bool
    longest: int | None
    confidence: float

    @classmethod
    def read(cls, config: GenerationConfig, options: Mapping[str, Any], assistant: Any) -> Guess:
        """What the generation config, the callable's options and the assistant's own config say.

        Raises:
            InvalidConfig: answers that contradict each other, or cannot be meant.
        """
        usual = defaults()
        # transformers reads an assistant's numbers from its own generation config.
        own = getattr(assistant, "generation_config", None)

        def said(name: str) -> Any:
            by_call, by_own = (getattr(one, name, None) for one in (config, own))
            by_call = None if by_call == usual.get(name) else by_call
            by_own = None if by_own == usual.get(name) else by_own
            by_option = options.get(name)
            if by_call is not None and by_option is not None and by_call != by_option:
                raise InvalidConfig(
                    f"{name}={by_call!r} given to generate and {name}={by_option!r} given to "
                    "custom_generate contradict each other; give one"
                )
            given = by_option if by_call is None else by_call
            return by_own if given is None else given

        lookup, asked = said("prompt_lookup_num_tokens"), said("num_assistant_tokens")
        name = "num_assistant_tokens" if lookup is None else "prompt_lookup_num_tokens"
        depth = asked if lookup is None else lookup
        depth = DEPTH if depth is None else depth
        check_whole(name, depth, 0)
        longest = said("max_matching_ngram_size")
        if longest is not None:
            check_whole("max_matching_ngram_size", longest, 1)
        confidence = said("assistant_confidence_threshold") or 0.0
        return cls(depth, lookup is not None, longest, confidence)


class Guesser:
    """Makes the drafter of each call from what the callable was given.

    Args:
        assistant_model: a transformers model that guesses.
        drafter: a Drafter, a Target, a DraftModel, or a spec: none, ngram, auto,
            suffix, recycle, draft:PATH; or several without a model as a+b.
        tokenizer, assistant_tokenizer: show that both models' tokens mean the same.

    Raises:
        InvalidConfig: two of them, an unknown spec, something that cannot guess.
    """

    def __init__(
        self, assistant_model: Any, drafter: Any, tokenizer: Any, assistant_tokenizer: Any
    ) -> None:
        if assistant_model is not None and drafter is not None:
            raise InvalidConfig("assistant_model and drafter exclude each other; give one")
        if assistant_model is not None and not isinstance(assistant_model, PreTrainedModel):
            raise InvalidConfig(
                f"assistant_model={type(assistant_model).__name__}: a transformers model is due; "
                "give anything else that guesses as drafter="
            )
        if isinstance(drafter, str):
            several = DrafterSpec.parse_all(drafter, auto="ngram")
            for one in several:
                if one.kind not in (*BY_NAME, "auto", "draft", "ngram"):
                    raise InvalidConfig(
                        f"drafter={one.kind!r} is not offered inside generate; make the Drafter "
                        "and give it, or use LLM.load"
                    )
            if any(one.kind == "draft" and one.path is None for one in several):
                raise InvalidConfig("drafter='draft' names no model here; use draft:PATH")
            drafter = several[0] if len(several) == 1 else _together(drafter, several)
        self.assistant = assistant_model
        self._given = drafter
        self._tokenizer, self._assistant_tokenizer = tokenizer, assistant_tokenizer

    @property
    def has_model(self) -> bool:
        """Whether something was given that is of no use unless it drafts."""
        given = self._given
        named = isinstance(given, tuple) or (
            isinstance(given, DrafterSpec) and given.kind != "draft"
        )
        return self.assistant is not None or (given is not None and not named)

    def drafter(self, guess: Guess, model: PreTrainedModel, target: Target) -> Drafter:
        """The drafter of one call.

        Raises:
            InvalidConfig: numbers for another kind of drafter than this one.
            VocabularyMismatch: an assistant whose tokens are not the target's.
        """
        made = self._made(guess, model, target)
        if guess.longest is not None and not isinstance(made, NgramDrafter):
            raise InvalidConfig(
                f"max_matching_ngram_size={guess.longest} is for prompt lookup, not for drafter "
                f"{made.name!r}; leave one out"
            )
        if guess.confidence and not (
            isinstance(made, ModelDrafter) and made.confidence == guess.confidence
        ):
            raise InvalidConfig(
                f"assistant_confidence_threshold={guess.confidence} is for an assistant model, not "
                f"for drafter {made.name!r}; leave one out"
            )
        return made

    def _made(self, guess: Guess, model: PreTrainedModel, target: Target) -> Drafter:
        if guess.lookup:
            if self.has_model:
                raise InvalidConfig(
                    f"prompt_lookup_num_tokens={guess.depth} and an assistant_model or drafter "
                    "exclude each other; give one"
                )
            return NgramDrafter(1, guess.longest or LOOKUP)
        if self.assistant is not None:
            self._check_assistant(self.assistant, target)
            return ModelDrafter(lent(self.assistant).target, confidence=guess.confidence)
        if isinstance(self._given, DrafterSpec) and self._given.kind == "draft":
            self._given = self._loaded(self._given, model, target)
        if isinstance(self._given, (HuggingFaceTarget, RecurrentTarget, LibllamaTarget)):
            return ModelDrafter(self._given, confidence=guess.confidence)
        if isinstance(self._given, DrafterSpec) and self._given.kind in BY_NAME:
            return BY_NAME[self._given.kind]()
        if isinstance(self._given, tuple):
            named = cast("tuple[DrafterSpec, ...]", self._given)
            return CombinedDrafter([BY_NAME.get(one.kind, NgramDrafter)() for one in named])
        if self._given is None or isinstance(self._given, DrafterSpec):
            return NgramDrafter() if guess.longest is None else NgramDrafter(1, guess.longest)
        return as_drafter(self._given, target)

    def _check_assistant(self, assistant: PreTrainedModel, target: Target) -> None:
        if self._tokenizer is None or self._assistant_tokenizer is None:
            _check_width(assistant.config.get_text_config().vocab_size, target)
            return
        ours, theirs = self._tokenizer.get_vocab(), self._assistant_tokenizer.get_vocab()
        if ours != theirs:
            raise VocabularyMismatch(
                f"the assistant's tokenizer has {len(theirs)} tokens, the model's {len(ours)}, and "
                "they differ; choose an assistant of the model's tokenizer"
            )

    def _loaded(self, spec: DrafterSpec, model: PreTrainedModel, target: Target) -> Loaded:
        """The draft model of a folder or file, loaded once, where and as the calling model is."""
        assert spec.path is not None
        folder = folder_of(spec.path)
        if self._tokenizer is not None:
            theirs = tokenizer_of(folder).vocabulary()
            if theirs != self._tokenizer.get_vocab():
                raise VocabularyMismatch(
                    f"the draft model in {spec.path!r} has another vocabulary than tokenizer="
                    f"{type(self._tokenizer).__name__}; choose a draft of the model's tokenizer"
                )
        loaded = Placement(str(model.device), model.dtype).load(folder, guesses=True)
        if self._tokenizer is None:
            _check_width(loaded.vocab_size, target)
        return loaded


def _together(given: str, parts: tuple[DrafterSpec, ...]) -> tuple[DrafterSpec, ...]:
    """Specs of several drafters, none of which needs a model."""
    if any(one.kind == "draft" for one in parts):
        raise InvalidConfig(
            f"drafter={given!r}: inside generate a draft model guesses alone; use draft:PATH by "
            "itself, or LLM.load"
        )
    return parts


def _check_width(width: int, target: Target) -> None:
    if width != target.vocab_size:
        raise VocabularyMismatch(
            f"the assistant predicts {width} tokens, the model {target.vocab_size}; where that is "
            "padding alone, show it: give both tokenizer= and assistant_tokenizer= to "
            "custom_generate"
        )
