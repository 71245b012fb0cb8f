"""Text and numbers as they may stand in a page."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Mapping

KEPT = "\n\t"


def text(value: object) -> str:
    """Escaped, with characters that cannot be seen, or reorder what can, spelt out."""
    return html.escape("".join(map(_spelt, str(value))))


def _spelt(char: str) -> str:
    if char in KEPT or unicodedata.category(char)[0] != "C":
        return char
    return char.encode("unicode_escape").decode("ascii")


def tag(name: str, inner: str = "", **attributes: object) -> str:
    """An element around markup; `class_` is the attribute `class`, and `_` in others is `-`."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{named}>{inner}</{name}>"


def number(value: float) -> str:
    """A number for a reader: whole ones with thousands apart, others with four digits."""
    if not math.isfinite(value):
        return "no number"
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    return f"{value:.4g}"


def shown(value: object) -> str:
    """A value of the evidence, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value)


def pairs(entries: Mapping[str, object]) -> str:
    """Names with their values, as a list."""
    rows = (
        tag("div", tag("dt", text(name)) + tag("dd", text(shown(value))))
        for name, value in entries.items()
    )
    return tag("dl", "".join(rows))
