"""vLLM's `speculative_config`, read into Outrider's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from outrider.config import check_whole, nearest
from outrider.errors import InvalidConfig

METHODS = {"draft_model": "draft", "ngram": "ngram", "none": "none"}
RULES = {"standard": "token", "block": "block"}
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
        for key in config:
            if key not in KEYS:
                raise InvalidConfig(
                    f"speculative_config key {key!r} is not supported; keys are {', '.join(KEYS)}"
                    + nearest(str(key), KEYS)
                )
        given = {key: value for key, value in config.items() if value is not None}
        drafter = _drafter(given) or self.drafter
        rule = self.rule
        if "rejection_sample_method" in given:
            rule = RULES[_known("rejection_sample_method", given, RULES)]
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


def _known(name: str, given: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """The value of `name`, one of `values`."""
    value = given[name]
    if not isinstance(value, str) or value not in values:
        raise InvalidConfig(
            f"speculative_config {name} {value!r} is not supported; {name.rpartition('_')[2]}s are "
            f"{', '.join(values)}" + nearest(str(value), values)
        )
    return value


def _drafter(given: Mapping[str, Any]) -> str | None:
    """The drafter spec that `method` and `model` mean together; None where neither is given."""
    method = METHODS[_known("method", given, METHODS)] if "method" in given else None
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
