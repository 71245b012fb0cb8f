"""The JSON schema of golden vectors, for those who read them without Python."""

from __future__ import annotations

from typing import Any

from outrider.certify.vectors import KINDS, VERSION
from outrider.decoding import RULES

_WHOLE = {"type": "integer", "minimum": 0}
_SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_BELOW_ONE = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}


def _list_of(items: dict[str, Any], said: str | None = None, **more: Any) -> dict[str, Any]:
    described = {} if said is None else {"description": said}
    return {"type": "array", "items": items, **more, **described}


def _record(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NOISE = _record(
    {
        "seed": {**_WHOLE, "maximum": 2**64 - 1},
        "sample": _WHOLE,
        "anchor": {**_WHOLE, "description": "tokens committed when the round began"},
        "accept": _list_of(_BELOW_ONE, "the uniform that tests each node"),
        "extra": _list_of(_BELOW_ONE, "the uniform that draws the added token, by row"),
        "gumbel": _list_of(
            _list_of({"type": "number"}),
            "Gumbel noise by depth and token, of the rule coupled alone",
        ),
    }
)
_CASE = _record(
    {
        "id": {"type": "string"},
        "rule": {"enum": [name for name, rule in RULES.items() if rule.guarantee != "lossy"]},
        "tokens": _list_of(_WHOLE, "drafted, by node"),
        "parents": _list_of(_WHOLE, "the row each node hangs from: 0 is the root, node j is j + 1"),
        "kinds": _list_of({"enum": list(KINDS.values())}, "how each node was drawn"),
        "draft": _list_of(_list_of(_SHARE), "the law each node was drawn from"),
        "target": _list_of(_list_of(_SHARE), "the target's law at each row", minItems=1),
        "noise": {"$ref": "#/$defs/noise"},
        "vocabulary": {"type": "integer", "minimum": 1},
        "expect": {"$ref": "#/$defs/answer"},
    }
)
# What a checked command is given has no answer beside it.
_CASE["required"].remove("expect")
_ANSWER = _record(
    {
        "path": _list_of({"type": "integer", "minimum": 1}, "rows kept, from the root down"),
        "token": {**_WHOLE, "description": "the one the target adds"},
    }
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Golden vectors of verification rules",
    **_record({"version": {"const": VERSION}, "cases": _list_of({"$ref": "#/$defs/case"})}),
    "$defs": {"case": _CASE, "noise": _NOISE, "answer": _ANSWER},
}
"""Of what `certify vectors --emit` prints; `$defs` has that of a line, and of its answer."""
