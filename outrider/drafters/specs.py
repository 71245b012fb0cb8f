"""Spec strings: `none`, `draft`, `draft:PATH`, `ngram`, ...; `a+b` together, `a,b` to choose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.config import nearest
from outrider.errors import InvalidConfig

SPECS = {
    "auto": "whoever pays most, in each round: the target's own MTP modules or registered draft "
    "model, ngram, none",
    "none": "plain decoding",
    "draft": "the target's registered draft model",
    "draft:PATH": "the draft model in a folder",
    "ngram": "prompt lookup in the text itself",
    "suffix": "the longest earlier occurrence of the text's end, by counts",
    "recycle": "the target's own earlier guesses",
    "grammar": "what the request's grammar forces",
    "int8": "the target's own weights in eight bits",
    "early-exit": "the target's own first layers, as many as are found to pay best",
    "early-exit:L": "the target's own first L layers",
    "early-exit:PATH": "the target's own first layers and the early-exit head in a folder",
    "eagle:PATH": "the EAGLE head, of any generation, in a folder; bundled: the bundled one",
    "medusa:PATH": "the Medusa heads in a folder",
    "mtp": "the multi-token prediction modules of the target's own checkpoint",
    "mtp:PATH": "those in a folder",
    "bridge:PATH": "the draft model in a folder, of another tokenizer than the target's",
}
KINDS = tuple(dict.fromkeys(name.partition(":")[0] for name in SPECS))
# A plus sign in a folder's name is none between drafters.
_PLUS = re.compile(rf"\+(?=(?:{'|'.join(KINDS)})(?:[:+]|$))")
_COMMA = re.compile(rf" *, *(?=(?:{'|'.join(KINDS)})(?:[:+,]|$))")


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec: which kind of drafter, and the folder or number of layers it names, if any."""

    kind: str
    path: str | None = None
    layers: int | None = None

    def __str__(self) -> str:
        """The spec string."""
        given = self.layers if self.path is None else self.path
        return self.kind if given is None else f"{self.kind}:{given}"

    @classmethod
    def parse(cls, spec: str) -> DrafterSpec:
        """Reads the spec string of one drafter.

        Raises:
            InvalidConfig: an unknown drafter; a missing folder, or one too many; no layers.
        """
        kind, colon, path = spec.partition(":")
        if kind not in KINDS:
            raise _unknown(spec)
        if kind == "early-exit" and ((colon and not path) or path.lstrip("+-").isnumeric()):
            return cls(kind, layers=_layers(spec, path))
        needs = kind in ("bridge", "eagle", "medusa")
        takes = needs or kind in ("draft", "early-exit", "mtp")
        if (colon and not (takes and path)) or (needs and not path):
            folders = [name for name in SPECS if name.endswith(":PATH")]
            raise InvalidConfig(
                f"drafter={spec!r}: {', '.join(folders[:-1])} and {folders[-1]} take a folder, "
                "early-exit:L takes a number of layers, no other drafter takes anything"
            )
        return cls(kind, path or None)

    @classmethod
    def parse_all(cls, spec: str, auto: str = "auto") -> tuple[DrafterSpec, ...]:
        """Reads a spec string of one drafter, or of several as `a+b`; `auto` is what that means.

        Raises:
            InvalidConfig: what `parse` refuses; the same drafter twice; `none` beside another.
        """
        parsed = (cls.parse(part) for part in _PLUS.split(spec))
        found = tuple(cls(auto) if one.kind == "auto" else one for one in parsed)
        if len(set(found)) < len(found):
            raise InvalidConfig(f"drafter={spec!r} names one drafter twice; name it once")
        if len(found) > 1 and any(one.kind == "none" for one in found):
            raise InvalidConfig(f"drafter={spec!r}: 'none' guesses nothing; leave it out")
        return found


def names_alternatives(spec: str) -> bool:
    """Whether a spec says to choose: `auto`, or `a,b`, `none` among them or not."""
    return spec == "auto" or len(_COMMA.split(spec)) > 1


def alternatives(spec: str, auto: tuple[str, ...]) -> tuple[str, ...]:
    """The specs of `a,b`, each of one drafter or of several as `a+b`; `auto` is what that means.

    Of what `auto` means those that are named beside it are left out. Nobody is always a choice, so
    `none` is no alternative of its own.

    Raises:
        InvalidConfig: one drafter twice, in one alternative or in two.
    """
    given = [one.strip() for one in _COMMA.split(spec)]
    named = [part for one in given if one != "auto" for part in DrafterSpec.parse_all(one)]
    if len(set(named)) < len(named) or given.count("auto") > 1:
        raise InvalidConfig(
            f"drafter={spec!r} names one drafter twice; name it once: of alternatives each text "
            "has the best in each round anyhow"
        )
    found: list[str] = []
    for one in given:
        if one == "auto":
            found += (own for own in auto if DrafterSpec.parse(own) not in named)
        elif one != "none":
            found.append(one)
    return tuple(found)


def _unknown(spec: str) -> InvalidConfig:
    """What is said of a spec that is no drafter's: the first part that no drafter goes by."""
    parts = [part.strip() for part in re.split("[,+]", spec)]
    wrong = next((part for part in parts if part.partition(":")[0] not in KINDS), spec)
    where = f" in drafter={spec!r}" if wrong != spec else ""
    return InvalidConfig(
        f"drafter={wrong!r}{where} does not exist; drafters are {', '.join(SPECS)}, several "
        "together as a+b, or a,b for the best of them in each round"
        + nearest(wrong.partition(":")[0], SPECS)
    )


def _layers(spec: str, given: str) -> int:
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise InvalidConfig(
            f"drafter={spec!r}: a number of layers is due, such as early-exit:2; early-exit alone "
            "looks for the best"
        )
    return int(given)
