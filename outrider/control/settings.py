"""What a user may tell the controller."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import check_between, check_whole, nearest
from outrider.errors import InvalidConfig

MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Bounds of what the controller may choose.

    Attributes:
        min_acceptance_rate: a drafter of whose drafted tokens a smaller share was kept lately is
            asked for samples alone, even where it would pay; 0 leaves it to the measured times.
        max_depth: tokens drafted for a text in a round at most.
        fallback: who drafts where nobody pays: `none` (plain decoding), or one of the drafters,
            which then is not held to the guard nor to `min_acceptance_rate`.

    Raises:
        InvalidConfig: values that cannot be meant.
    """

    min_acceptance_rate: float = 0.0
    max_depth: int = MAX_DEPTH
    fallback: str = "none"

    def __post_init__(self) -> None:
        check_between("min_acceptance_rate", self.min_acceptance_rate, 0.0, 1.0)
        check_whole("max_depth", self.max_depth, 1)
        if not isinstance(self.fallback, str):
            raise InvalidConfig(f"fallback={self.fallback!r}: 'none' or a drafter's name is due")

    def check_fallback(self, names: tuple[str, ...]) -> None:
        """Refuses a fallback that is none of the drafters.

        Raises:
            InvalidConfig: naming those there are.
        """
        known = ("none", *names)
        if self.fallback not in known:
            raise InvalidConfig(
                f"fallback={self.fallback!r} is none of the drafters; they are "
                f"{', '.join(known)}" + nearest(self.fallback, known)
            )
