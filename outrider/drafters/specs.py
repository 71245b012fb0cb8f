"""Spec strings: `none`, `draft`, `draft:PATH`, `ngram`, `auto`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import nearest
from outrider.errors import InvalidConfig

SPECS = {
    "auto": "the target's registered draft model, otherwise ngram",
    "none": "plain decoding",
    "draft": "the target's registered draft model",
    "draft:PATH": "the draft model in a folder",
    "ngram": "prompt lookup in the text itself",
}


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec: which kind of drafter, and the folder it is loaded from, if any."""

    kind: str
    path: str | None = None

    @classmethod
    def parse(cls, spec: str) -> DrafterSpec:
        """Reads a spec string.

        Raises:
            InvalidConfig: an unknown drafter, a missing folder or one too many.
        """
        kind, colon, path = spec.partition(":")
        if kind not in {name.partition(":")[0] for name in SPECS}:
            raise InvalidConfig(
                f"drafter={spec!r} does not exist; drafters are {', '.join(SPECS)}"
                + nearest(kind, SPECS)
            )
        if colon and (kind != "draft" or not path):
            raise InvalidConfig(f"drafter={spec!r}: only draft:PATH takes a folder, and needs it")
        return cls(kind, path or None)
