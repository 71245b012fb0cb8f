"""Who drafts for a request: the engine's drafter, a part of it, or one that needs no model."""

from __future__ import annotations

from collections.abc import Callable

from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    DrafterSpec,
    GrammarDrafter,
    NgramDrafter,
    NoDrafter,
    RecycleDrafter,
    SeveralDrafters,
    SuffixDrafter,
    alternatives,
    names_alternatives,
)
from outrider.errors import InvalidConfig

WITHOUT_MODEL: dict[str, Callable[[], Drafter]] = {
    "grammar": GrammarDrafter,
    "ngram": NgramDrafter,
    "recycle": RecycleDrafter,
    "suffix": SuffixDrafter,
}
"""Drafters that need nothing but their name."""


class Choice:
    """The drafters of one engine, made when a request first asks for them and kept.

    Attributes:
        own: who drafts where a request does not say.
        plain: the one that proposes nothing.
    """

    def __init__(self, own: Drafter) -> None:
        self.own = own
        self.plain = own if isinstance(own, NoDrafter) else NoDrafter()
        # The preferred of two that bear one name stands first; of early-exit:L its kind is one.
        self._parts = {
            name: part
            for part in reversed(parts_of(own))
            for name in (part.name.partition(":")[0], part.name)
        }
        own_names = {"auto": own, own.name: own, "none": self.plain}
        self._made: dict[str, Drafter] = {**self._parts, **own_names}
        self._added: list[Drafter] = []

    def of(self, spec: str | None) -> Drafter:
        """The drafter of a spec: `none`, parts of its own, or one of `WITHOUT_MODEL`.

        None and `auto` are the engine's own.

        Raises:
            InvalidConfig: no spec, or one that a model would have to be loaded for.
        """
        if spec is None:
            return self.own
        if not isinstance(spec, str):
            raise InvalidConfig(
                f"drafter={spec!r}: a request names its drafter by a spec, such as 'none' or "
                "'ngram'; a Drafter is for LLM.load"
            )
        if spec not in self._made:
            if names_alternatives(spec):
                alternatives(spec, ())  # What names no drafter is refused as such.
                raise InvalidConfig(
                    f"drafter={spec!r}: one request chooses among none but the drafters that were "
                    f"loaded to be chosen among; name {self._ready()}, or give {spec!r} to LLM.load"
                )
            parts = [self._part(one) for one in DrafterSpec.parse_all(spec)]
            self._made[spec] = parts[0] if len(parts) == 1 else CombinedDrafter(parts)
        return self._made[spec]

    def _part(self, spec: DrafterSpec) -> Drafter:
        about = spec.path or spec.layers
        name = spec.kind if about is None else f"{spec.kind}:{about}"
        if spec.path is None and name in self._parts:
            return self._parts[name]
        if spec.kind not in WITHOUT_MODEL:
            raise InvalidConfig(
                f"drafter={name!r} is not loaded, and one request cannot load it; name "
                f"{self._ready()}, or give {name!r} to LLM.load"
            )
        made = self._parts[spec.kind] = WITHOUT_MODEL[spec.kind]()
        self._added.append(made)
        return made

    def _ready(self) -> str:
        """What a request may name."""
        names = dict.fromkeys(("none", *self._parts, *WITHOUT_MODEL))
        return f"{', '.join(names)}, several as a+b"

    def target_changed(self) -> None:
        """Tells every drafter that the target has new weights."""
        for drafter in (self.own, *self._added):
            drafter.target_changed()


def parts_of(drafter: Drafter) -> tuple[Drafter, ...]:
    """The drafters of a combination, or among alternatives; one that is none by itself."""
    if not isinstance(drafter, SeveralDrafters):
        return (drafter,)
    return tuple(part for one in drafter.drafters for part in parts_of(one))
