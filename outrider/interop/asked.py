"""What one call of `generate` asks for: processors and criteria read into sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from outrider.config import SamplingParams
from outrider.errors import InvalidConfig

ORDER: tuple[type, ...] = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
)
"""The processors that are sampling parameters here, in the order in which both apply them."""

STATEFUL: tuple[type, ...] = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Processors that remember earlier calls, where a guess that was refused would stay remembered."""

LENGTHS, WARPERS = ORDER[:2], ORDER[2:]


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the texts of a call end.

    Attributes:
        max_tokens: new tokens at most; None = up to the context.
        tokens: the tokens that end a text.
        criteria: the user's own criteria and transformers' others, asked after each token.
        pads: whether a text that has ended is padded; without an end token transformers lets every
            text go on until the last one ends.
    """

    max_tokens: int | None
    tokens: frozenset[int]
    criteria: StoppingCriteriaList
    pads: bool

    @classmethod
    def read(cls, criteria: Iterable[Any], prompt_length: int) -> Ends:
        """The ends that criteria stand for; `prompt_length` counts padding too."""
        criteria = list(criteria)
        longest = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        ends = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
        known = (MaxLengthCriteria, EosTokenCriteria)
        return cls(
            # At least one token: criteria are asked after a token, never before.
            max_tokens=max(1, min(longest) - prompt_length) if longest else None,
            tokens=frozenset(int(token) for tensor in ends for token in tensor),
            criteria=StoppingCriteriaList(c for c in criteria if type(c) not in known),
            pads=any(hasattr(c, "eos_token_id") for c in criteria),
        )


def sampling_of(
    config: GenerationConfig, processors: Iterable[Any], ends: Ends, prompt_length: int
) -> SamplingParams:
    """The law that a configuration and its prepared processors stand for.

    The seed comes from torch's default generator, so that `torch.manual_seed` makes a text again;
    greedy search draws nothing.

    Other processors stay what they are: each is asked for every row, with the text so far without
    its padding.

    Raises:
        InvalidConfig: an order of processors that is another law, or one that keeps a state.
    """
    kept = [one for one in processors if type(one) is not LogitNormalization]
    foreign = tuple(one for one in kept if type(one) not in ORDER)
    for one in foreign:
        if isinstance(one, STATEFUL):
            raise InvalidConfig(
                f"the logits processor {type(one).__name__} remembers earlier calls, and would "
                "remember guesses that were refused; use plain generate"
            )
    sampling = dict[str, Any](
        max_tokens=ends.max_tokens,
        min_tokens=_least(kept, ends, prompt_length),
        logits_processors=foreign,
    )
    if not config.do_sample:
        # What only divides or cuts away from below leaves the largest logit the largest.
        return SamplingParams(temperature=0.0, **sampling)
    places = [ORDER.index(type(one)) for one in kept if type(one) in WARPERS]
    first = next((i for i, one in enumerate(kept) if type(one) in WARPERS), len(kept))
    late = any(type(one) not in ORDER for one in kept[first:])
    if late or places != sorted(set(places)):
        raise InvalidConfig(
            f"logits processors in the order {[type(one).__name__ for one in kept]} are another "
            "law than one's own processors, then temperature, top_k, top_p, min_p, typical_p, each "
            "once; give them in this order"
        )
    for one in kept:
        sampling |= _warper(one)
    return SamplingParams(seed=drawn_seed(), **sampling)


def drawn_seed() -> int:
    """64 bits of torch's default generator."""
    high, low = torch.randint(0, 2**32, (2,)).tolist()
    return high << 32 | low


def _least(processors: list[Any], ends: Ends, prompt_length: int) -> int:
    """New tokens before which no end token may come; no more than may be made."""
    least = 0
    for one in processors:
        if type(one) not in LENGTHS:
            continue
        if frozenset(int(token) for token in one.eos_token_id) != ends.tokens:
            raise InvalidConfig(
                f"{type(one).__name__} holds back the tokens {one.eos_token_id.tolist()}, but the "
                f"text ends at {sorted(ends.tokens)}; give both the same"
            )
        if type(one) is MinLengthLogitsProcessor:
            least = max(least, one.min_length - prompt_length)
        else:
            least = max(least, one.prompt_length_to_skip + one.min_new_tokens - prompt_length)
    return least if ends.max_tokens is None else min(least, ends.max_tokens)


def _warper(one: Any) -> dict[str, Any]:
    if type(one) is TemperatureLogitsWarper:
        return {"temperature": float(one.temperature)}
    if type(one) not in WARPERS:
        return {}
    if one.filter_value != -torch.inf or one.min_tokens_to_keep != 1:
        raise InvalidConfig(
            f"{type(one).__name__} with filter_value={one.filter_value!r} and "
            f"min_tokens_to_keep={one.min_tokens_to_keep!r} is another law; use -inf and 1"
        )
    if type(one) is TopKLogitsWarper:
        return {"top_k": one.top_k}
    if type(one) is TopPLogitsWarper:
        return {"top_p": float(one.top_p)}
    if type(one) is TypicalLogitsWarper:
        return {"typical_p": float(one.mass)}
    return {"min_p": float(one.min_p)}
