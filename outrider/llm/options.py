"""vLLM's `speculative_config`, read into Outrider's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.config import nearest
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
        for key in config:
            if key not in KEYS:
                raise InvalidConfig(
                    f"speculative_config key {key!r} is not supported; keys are {', '.join(KEYS)}"
                    + nearest(key, KEYS)
                )
        drafter = self.drafter
        if "method" in config:
            method = config["method"]
            if method not in METHODS:
                raise InvalidConfig(
                    f"speculative_config method {method!r} is not supported; methods are "
                    f"{', '.join(METHODS)}" + nearest(str(method), METHODS)
                )
            drafter = METHODS[method]
        if "model" in config and config["model"] != "[ngram]":
            drafter = f"draft:{config['model']}"
        rule = self.rule
        if "rejection_sample_method" in config:
            method = config["rejection_sample_method"]
            if method not in RULES:
                raise InvalidConfig(
                    f"rejection_sample_method {method!r} is not supported; methods are "
                    f"{', '.join(RULES)}" + nearest(str(method), RULES)
                )
            rule = RULES[method]
        longest = int(config.get("prompt_lookup_max", max(self.longest, 1)))
        return Speculation(
            drafter=drafter,
            k=config.get("num_speculative_tokens", self.k),
            rule=rule,
            shortest=int(config.get("prompt_lookup_min", min(self.shortest, longest))),
            longest=longest,
        )
