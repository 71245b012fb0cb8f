"""Arguments of `generate` that transformers drops on the way to a callable, found and named."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from outrider.errors import InvalidConfig

NAMED = ("assistant_model", "streamer", "synced_gpus")
"""Parameters of `generate` that no callable is handed."""

KEYWORDS = ("assistant_tokenizer", "past_key_values", "tokenizer")
"""Keywords that are taken out before a callable is called, or hidden among what is handed over."""

FRAMES = 12
"""How far up the calling `generate` is looked for."""


def check_lost() -> None:
    """Looks into the calling `generate` for what it was given and does not hand on.

    A help only: where the frames look otherwise nothing is found, and nothing else changes.

    Raises:
        InvalidConfig: names the argument and the place where it arrives.
    """
    for name, value in _given().items():
        if value is None or value is False:
            continue
        if name in ("past_key_values", "synced_gpus"):
            raise InvalidConfig(f"{name}={_short(value)} cannot be honoured; leave it out")
        raise InvalidConfig(
            f"{name}={_short(value)} given to generate(...) never reaches a custom_generate "
            f"callable; give it to outrider.custom_generate({name}=...)"
        )


def _given() -> dict[str, Any]:
    frame = _generate()
    if frame is None:
        return {}
    given = {name: frame.f_locals.get(name) for name in NAMED}
    # Its own keyword arguments are popped from; those of torch's decorator around it are whole.
    raw = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
    if isinstance(raw, dict):
        given |= {name: raw.get(name) for name in KEYWORDS}
    return given


def _generate() -> FrameType | None:
    """The frame of the nearest `generate` that takes a callable; others may lie in between."""
    frame = sys._getframe(1)
    for _ in range(FRAMES):
        if frame is None or frame.f_code.co_name == "generate":
            break
        frame = frame.f_back
    return frame if frame is not None and "custom_generate" in frame.f_locals else None


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int)) else type(value).__name__
