"""How many tokens a text may have, and where a model's own rotary scaling changes on the way.

Transformers chooses the frequencies of `longrope` and `dynamic` by the longest row of a forward.
`longrope` has two sets: `switch` is the length beyond which the second is due (see `regimes`).
`dynamic` has another set for each length beyond the model's own, so that cached keys would have to
be made anew with each token: the context ends there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from outrider.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens a text may have (None: no bound), and the length after which frequencies change."""

    max_length: int | None
    switch: int | None = None


def context_of(config: PreTrainedConfig) -> Context:
    """Return the context of a text model's configuration.

    Raises:
        UnsupportedModel: kinds of layers that change at different lengths.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    switches = {
        int(length)
        for rotary in _rotaries(config)
        if rotary.get("rope_type", rotary.get("type")) == "longrope"
        and (length := _original_length(rotary, config)) is not None
    }
    if len(switches) > 1:
        raise UnsupportedModel(
            f"the {config.model_type} model cannot be a target: its layers change their rotary "
            f"frequencies at different lengths {sorted(switches)}; use another model"
        )
    switch = switches.pop() if switches else None
    return Context(longest, None if longest is not None and switch == longest else switch)


def _original_length(rotary: Mapping[str, Any], config: PreTrainedConfig) -> int | None:
    return rotary.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )


def _rotaries(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return
    yield given
    # Some families have one per kind of layer.
    yield from (each for each in given.values() if isinstance(each, Mapping))
