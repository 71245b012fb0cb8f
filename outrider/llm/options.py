"""vLLM's `speculative_config`, read into Outrider's own options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from outrider.config import check_between, check_flag, check_whole, nearest
from outrider.control.settings import ControlSettings
from outrider.drafters import DrafterSpec, SuffixDrafter, SuffixStore, alternatives
from outrider.engine.settings import MAX_EXPANDED
from outrider.errors import InvalidConfig

METHODS = {
    "draft_model": "draft",
    "eagle": "eagle",
    "eagle3": "eagle",
    "medusa": "medusa",
    "mtp": "mtp",
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "none": "none",
    "suffix": "suffix",
}
RULES = {"standard": "token", "block": "block"}
NO_METHODS = {
    "custom_class": "give LLM.load your Drafter as drafter=",
    "dflash": "there is no such drafter",
    "dspark": "there is no such drafter",
    "extract_hidden_states": "it drafts nothing",
    "mlp_speculator": "there is no such drafter",
}
"""vLLM's methods that no drafter stands for, and why."""

NO_RULES = {
    "fly": "it changes the law of the text",
    "synthetic": "it accepts by a given rate, which changes the law of the text",
}
"""vLLM's ways of verifying that are not lossless."""

SPEED = "it belongs to vLLM's own kernels"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_backend": ((), "attention is Outrider's own"),
    "code_revision": ((), "a model's own code is not run"),
    "disable_eagle_block_drop": ((False,), "cached blocks are shared as they are"),
    "disable_padded_drafter_batch": ((False, True), SPEED),
    "draft_load_config": ((), "a draft model is read from a local folder as it is"),
    "draft_sample_method": (("probabilistic",), "drafts are drawn from the draft's own law"),
    "draft_tensor_parallel_size": ((1,), "a draft model runs in one process"),
    "dspark_draft_topk": ((), "there is no such drafter"),
    "enable_adaptive_verification": ((False,), "every drafted token is verified"),
    "enforce_eager": ((False, True), SPEED),
    "index_share_for_mtp_iteration": ((), SPEED),
    "kv_cache_dtype": (("auto",), "keys and values are kept in the model's dtype"),
    "max_model_len": ((), "a draft model's context is its own; it stops drafting there by itself"),
    "moe_backend": (("auto",), SPEED),
    "num_speculative_tokens_per_batch_size": (
        (),
        "the draft length does not follow the batch; give num_speculative_tokens, or depth= per "
        "call",
    ),
    "parallel_drafting": ((False,), "drafted tokens are drawn one after another"),
    "quantization": ((), "a draft model is read as its folder says"),
    "revision": ((), "models are local folders, which have no revisions"),
    "synthetic_acceptance_length": ((), NO_RULES["synthetic"]),
    "synthetic_acceptance_rates": ((), NO_RULES["synthetic"]),
    "tensor_parallel_size": ((1,), "a draft model runs in one process"),
    "use_local_argmax_reduction": ((False, True), SPEED),
}
"""vLLM's keys that nothing here stands for: values that ask for nothing, and the reason."""

KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_min_token_prob",
    "use_heterogeneous_vocab",
)
SUFFIX = "suffix_decoding_"
CACHED_REQUESTS = 10_000
"""What vLLM remembers where nobody says."""

DEPTH = 4
"""Tokens drafted per round where nobody says; a suffix draft has as many as its match may have."""


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """How the drafter `suffix` looks things up; the names are those of SuffixDrafter."""

    longest: int = 24
    spec_factor: float = 1.0
    min_prob: float = 0.1
    cached_requests: int = 0

    def drafter(self) -> SuffixDrafter:
        """The drafter, with a store of its own where requests are to be remembered."""
        store = None
        if self.cached_requests:
            store = SuffixStore(max_requests=self.cached_requests, longest=self.longest)
        return SuffixDrafter(
            longest=self.longest,
            spec_factor=self.spec_factor,
            min_prob=self.min_prob,
            store=store,
        )

    def updated(self, given: Mapping[str, Any], drafter: str) -> SuffixOptions:
        """These options with vLLM's in their place; method `suffix` remembers 10,000 requests.

        Raises:
            InvalidConfig: a value that cannot be meant, an option without the method.
        """
        names = [name for name in given if name.startswith(SUFFIX)]
        if "suffix" not in drafter.split("+"):
            if names:
                raise InvalidConfig(
                    f"speculative_config {names[0]} is for method 'suffix', not for drafter "
                    f"{drafter!r}; leave one out"
                )
            return self
        values = {name.removeprefix(SUFFIX): given[name] for name in names}
        longest = values.get("max_tree_depth", self.longest)
        cached = values.get("max_cached_requests", CACHED_REQUESTS)
        check_whole(f"{SUFFIX}max_tree_depth", longest, 1, 2**31)
        check_whole(f"{SUFFIX}max_cached_requests", cached, 0, 2**31)
        factor = values.get("max_spec_factor", self.spec_factor)
        share = values.get("min_token_prob", self.min_prob)
        check_between(f"{SUFFIX}max_spec_factor", factor, 0.0, math.inf)
        check_between(f"{SUFFIX}min_token_prob", share, 0.0, 1.0)
        return SuffixOptions(longest, factor, share, cached)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate: drafter spec, draft length, rule, and prompt lookup's n-gram lengths.

    `control` bounds what a controller may choose; None where there is to be none.
    """

    drafter: str
    k: int | None = None
    rule: str | None = None
    shortest: int = 2
    longest: int = 4
    suffix: SuffixOptions = SuffixOptions()
    exit_threshold: float | None = None
    control: ControlSettings | None = None

    def __post_init__(self) -> None:
        self._check_bound()
        if self.exit_threshold is None:
            return
        check_between("exit_threshold", self.exit_threshold, 0.0, 1.0)
        parts = [
            part
            for one in alternatives(self.drafter, ())
            for part in DrafterSpec.parse_all(one, "ngram")
        ]
        if not any(part.kind == "early-exit" for part in parts):
            raise InvalidConfig(
                f"exit_threshold={self.exit_threshold} is for the drafters early-exit:L and "
                f"early-exit:PATH, not for {self.drafter!r}; leave one out"
            )

    def _check_bound(self) -> None:
        """Refuses more tokens per round than a controller may let be guessed."""
        most = None if self.control is None else self.control.max_depth
        if most is not None and isinstance(self.k, int) and self.k > most:
            raise InvalidConfig(
                f"k={self.k} exceeds max_depth={most}, which bounds what drafter={self.drafter!r} "
                f"may choose; give max_depth={self.k} too, or k={most} at most"
            )

    def depth(self, width: int = 1) -> int:
        """Tokens drafted per round at most, and levels of trees of a width."""
        if self.k is not None:
            return self.k
        if self.control is not None:
            longest = self.control.max_depth
        elif self.drafter == "suffix":
            longest = self.suffix.longest
        else:
            return DEPTH
        return longest if width < 2 else min(longest, MAX_EXPANDED // width + 1)

    def updated(self, config: Mapping[str, Any]) -> Speculation:
        """These options with those of a vLLM `speculative_config` in their place.

        Raises:
            InvalidConfig: an unknown key or value, with the nearest known one.
        """
        if not isinstance(config, Mapping):
            raise InvalidConfig(f"speculative_config={config!r}: a dictionary is due")
        given = {key: value for key, value in config.items() if value is not None}
        for key in config:
            _check_key(key, given)
        drafter = _drafter(given) or self.drafter
        rule = self.rule
        if "rejection_sample_method" in given:
            rule = RULES[_known("rejection_sample_method", given, RULES, NO_RULES)]
        shortest, longest = self._lookup(given, drafter)
        k = given.get("num_speculative_tokens", self.k)
        if k is not None:
            check_whole("num_speculative_tokens", k, 1)
        suffix = self.suffix.updated(given, drafter)
        return replace(
            self,
            drafter=drafter,
            k=k,
            rule=rule,
            shortest=shortest,
            longest=longest,
            suffix=suffix,
        )

    def _lookup(self, given: Mapping[str, Any], drafter: str) -> tuple[int, int]:
        """Lengths of the n-grams looked up; one that is not given follows the other."""
        names = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if name in given]
        for name in names:
            check_whole(name, given[name], 1)
            if drafter not in ("ngram", "auto"):
                raise InvalidConfig(
                    f"speculative_config {name} is for method 'ngram', not for drafter "
                    f"{drafter!r}; leave one out"
                )
        least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        if least is None:
            least = self.shortest if most is None else min(self.shortest, most)
        if most is None:
            most = max(self.longest, least)
        if least > most:
            raise InvalidConfig(
                f"prompt_lookup_min={least} exceeds prompt_lookup_max={most}; "
                "lower the one or raise the other"
            )
        return least, most


def _check_key(key: Any, given: Mapping[str, Any]) -> None:
    """Refuses a key of vLLM's that asks for what is not there, and one vLLM does not have."""
    if key in KEYS:
        return
    if key not in REFUSED:
        raise InvalidConfig(
            f"speculative_config key {key!r} does not exist; keys are {', '.join(KEYS)}"
            + nearest(str(key), (*KEYS, *REFUSED))
        )
    harmless, reason = REFUSED[key]
    if key in given and given[key] not in harmless:
        only = f"; only {' or '.join(map(repr, harmless))} is taken" if harmless else ""
        raise InvalidConfig(
            f"speculative_config {key}={given[key]!r} cannot be honoured: {reason}{only}"
        )


def _known(
    name: str, given: Mapping[str, Any], values: Mapping[str, str], others: Mapping[str, str]
) -> str:
    """The value of `name`, one of `values`; of `others` the reason is known."""
    value = given[name]
    if not isinstance(value, str) or value not in values:
        known = others.get(value) if isinstance(value, str) else None
        raise InvalidConfig(
            f"speculative_config {name} {value!r} is not supported"
            + (f" ({known})" if known else "")
            + f"; {name.rpartition('_')[2]}s are {', '.join(values)}"
            + nearest(str(value), values)
        )
    return value


def _drafter(given: Mapping[str, Any]) -> str | None:
    """The drafter spec that `method` and `model` mean together; None where neither is given."""
    method = METHODS[_known("method", given, METHODS, NO_METHODS)] if "method" in given else None
    model = given.get("model")
    if model is None:
        return method
    if not isinstance(model, (str, PathLike)):
        raise InvalidConfig(f"speculative_config model {model!r}: the path of a folder is due")
    if method in ("eagle", "medusa", "mtp"):
        return f"{method}:{fspath(model)}"
    # vLLM's older form names prompt lookup as a model.
    meant = "ngram" if model == "[ngram]" else "draft"
    if method not in (None, meant):
        raise InvalidConfig(
            f"speculative_config method {given['method']!r} and model {str(model)!r} contradict "
            "each other; leave one out"
        )
    if meant == "ngram":
        return meant
    other = given.get("use_heterogeneous_vocab", False)
    check_flag("use_heterogeneous_vocab", other)
    return f"{'bridge' if other else 'draft'}:{fspath(model)}"
