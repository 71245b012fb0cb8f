"""Forwards run before they are asked for, of tokens that the host had not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.cache import CacheManager
from outrider.host import Reading
from outrider.models.base import Rows
from outrider.models.plan import Plan

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the next forward gives, unless it is another: then it is as if this had not been.

    Attributes:
        plan: where its rows stand; nothing is staged of them.
        tokens: theirs, on their way to the host.
        logits_RV: of all its rows.
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    plan: Plan
    tokens: Reading
    logits_RV: Float[Tensor, "R V"]

    def scored(self, rows: Rows, cache: CacheManager) -> bool:
        """Whether these rows, all of them, are what it was run for: tokens are looked at, too."""
        if (self.seqs, self.counts) != (rows.seqs, rows.counts):
            return False
        if rows.ancestors_R is not None or rows.logits_rows is not None:
            return False
        now = [(cache.length(seq), cache.num_staged(seq)) for seq in self.seqs]
        if now != [(span.length, 0) for span in self.plan.spans]:
            return False
        (tokens_R,) = self.tokens.wait()
        return tokens_R.tolist() == rows.tokens_R.tolist()


@dataclass(frozen=True, slots=True)
class Begun:
    """The logits behind the first row of a chain, unless that is another.

    Attributes:
        places: where in its sequence the row may be.
        told: which of the places, and the token, on their way to the host.
    """

    seq: int
    places: range
    told: Reading
    logits_1V: Float[Tensor, "1 V"]

    def is_row(self, seq: int, place: int, token: int) -> bool:
        """Whether a row is what it was run for."""
        if seq != self.seq or place not in self.places:
            return False
        at_1, token_1 = self.told.wait()
        return (self.places.start + int(at_1), int(token_1)) == (place, token)
