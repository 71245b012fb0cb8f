"""vLLM's `speculative_config`, read into Outrider's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from outrider.config import check_whole, nearest
from outrider.errors import InvalidConfig

METHODS = {"draft_model": "draft", "ngram": "ngram", "ngram_gpu": "ngram", "none": "none"}
RULES = {"standard": "token", "block": "block"}
NO_METHODS = {
    "custom_class": "give LLM.load your Drafter as drafter=",
    "dflash": "there is no such drafter",
    "dspark": "there is no such drafter",
    "eagle": "there is no such drafter",
    "eagle3": "there is no such drafter",
    "extract_hidden_states": "it drafts nothing",
    "medusa": "there is no such drafter",
    "mlp_speculator": "there is no such drafter",
    "mtp": "there is no such drafter",
    "suffix": "there is no such drafter; 'ngram' looks into the text itself",
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
    "disable_eagle_block_drop": ((False,), "there is no such drafter"),
    "disable_padded_drafter_batch": ((False, True), SPEED),
    "draft_load_config": ((), "a draft model is read from a local folder as it is"),
    "draft_sample_method": (("probabilistic",), "drafts are drawn from the draft's own law"),
    "draft_tensor_parallel_size": ((1,), "a draft model runs in one process"),
    "dspark_draft_topk": ((), "there is no such drafter"),
    "enable_adaptive_verification": ((False,), "every drafted token is verified"),
    "enforce_eager": ((False, True), SPEED),
    "index_share_for_mtp_iteration": ((), "there is no such drafter"),
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
    "suffix_decoding_max_cached_requests": ((10000,), NO_METHODS["suffix"]),
    "suffix_decoding_max_spec_factor": ((1.0,), NO_METHODS["suffix"]),
    "suffix_decoding_max_tree_depth": ((24,), NO_METHODS["suffix"]),
    "suffix_decoding_min_token_prob": ((0.1,), NO_METHODS["suffix"]),
    "synthetic_acceptance_length": ((), NO_RULES["synthetic"]),
    "synthetic_acceptance_rates": ((), NO_RULES["synthetic"]),
    "tensor_parallel_size": ((1,), "a draft model runs in one process"),
    "use_heterogeneous_vocab": ((False,), "draft and target share one vocabulary"),
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
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate: drafter spec, draft length, rule, and prompt lookup's n-gram lengths."""

    drafter: str
    k: int
    rule: str | None = None
    shortest: int = 2
    longest: int = 4

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
        check_whole("num_speculative_tokens", k, 1)
        return Speculation(drafter, k, rule, shortest, longest)

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
    # vLLM's older form names prompt lookup as a model.
    meant = "ngram" if model == "[ngram]" else "draft"
    if method not in (None, meant):
        raise InvalidConfig(
            f"speculative_config method {given['method']!r} and model {str(model)!r} contradict "
            "each other; leave one out"
        )
    return "ngram" if meant == "ngram" else f"draft:{fspath(model)}"
