"""The contract between the engine and whoever guesses.

A drafter sees texts and hands back chains; it draws nothing by itself. It asks the round's draws
for tokens of a law, so that the law reported is the law sampled. What it keeps between rounds
follows the texts' own tokens: after an exception it simply has more to read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequenced
from typing import Protocol

from torch import Tensor

from outrider.decoding import Draft
from outrider.models.protocol import Rng
from outrider.sequence import Sequence


class RoundDraws(Protocol):
    """What the engine offers a drafter for one round of B sequences."""

    def sample(self, logits_nV: Tensor, members: Sequenced[int], index: int) -> list[int]:
        """Draws drafted token `index` of the round's `members`-th sequences from rows of logits.

        The rows become laws under each request's own sampling controls and are kept for the
        verification rule.
        """
        ...

    def drawn(self) -> Draft:
        """Everything sampled this round, with its laws."""
        ...

    def points(self, tokens: Sequenced[Sequenced[int]]) -> Draft:
        """A draft of certain tokens, one list per sequence, possibly empty."""
        ...

    def rng(self, member: int) -> Rng:
        """Chance for a foreign drafter that draws for itself."""
        ...

    def trusted(
        self, tokens: Sequenced[Sequenced[int]], logprobs: Sequenced[Sequenced[Tensor] | None]
    ) -> Draft:
        """A foreign drafter's tokens with the laws `[V]` it reports; None = point masses."""
        ...


class Drafter(ABC):
    """Guesses the next tokens of texts."""

    name: str
    """What metrics and reports call it."""
    trusted: bool = False
    """Whether it draws for itself, so that its laws are taken on trust."""
    vocab_size: int | None = None
    """Width of its laws; None where it only repeats tokens it has seen."""

    @abstractmethod
    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """At most `depths[b]` tokens after each text."""

    def commit(self, text: Sequence, accepted: int) -> None:
        """The text kept its first `accepted` drafted tokens and gained one of the target's."""

    def discard(self, text: Sequence) -> None:
        """The round came to nothing: forget what it staged."""

    def close(self, text: Sequence) -> None:
        """The text is over: give back what was kept for it."""
