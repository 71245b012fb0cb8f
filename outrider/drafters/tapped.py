"""What all drafters with a head of their target's have in common: one head, one target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.drafters.base import Drafter
from outrider.errors import InvalidConfig
from outrider.models.base import Target

if TYPE_CHECKING:
    from outrider.models.head import TargetHead

HeadT = TypeVar("HeadT", bound="TargetHead")


class TappedDrafter(Drafter, Generic[HeadT]):
    """Drafts with a head that reads its target's hidden states.

    A text is drafted for from the round on in which the target has read all of it but its last
    token.
    """

    def __init__(self, head: HeadT, name: str) -> None:
        self.name = name
        self.taps = head.taps
        self.vocab_size = head.vocab_size
        self._given = head
        self._target: Target | None = None
        self._asked = False

    def attach(self, target: Target) -> Target:
        """The target itself; a copy of the head gets what it borrows, its dtype and its device.

        Raises:
            UnsupportedModel: a target without hidden states to be had.
            VocabularyMismatch, TargetShapeMismatch: the head of another target.
            InvalidConfig: a drafter in use elsewhere.
        """
        # Who brings their own two methods needs no transformers.
        from outrider.models.head import fitted

        if self._target is None:
            self._given, self._target = fitted(self._given, target), target
        elif self._target is not target:
            raise InvalidConfig(
                f"drafter {self.name} reads the hidden states of another target; make a drafter "
                "for each"
            )
        return target

    def never_asked(self) -> tuple[str, ...]:
        """Its name until it was asked to draft."""
        return () if self._asked else (self.name,)
