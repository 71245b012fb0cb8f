"""Forwards that were expected: their plans, and what they gave where they were run at once."""

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
class Run:
    """A forward of tokens that the host had not read, on their way to it meanwhile."""

    tokens: Reading
    logits_RV: Float[Tensor, "R V"]

    def scored(self, rows: Rows) -> bool:
        """Whether its rows, all of them, are these: their tokens are looked at."""
        (tokens_R,) = self.tokens.wait()
        return rows.logits_rows is None and tokens_R.tolist() == rows.tokens_R.tolist()


@dataclass(frozen=True, slots=True)
class Ahead:
    """A forward that comes next, unless another does: then it is as if it had not been."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    plan: Plan
    run: Run | None

    def fits(self, rows: Rows, cache: CacheManager) -> bool:
        """Whether it was expected of these rows, whatever their tokens are."""
        if (self.seqs, self.counts) != (rows.seqs, rows.counts) or rows.ancestors_R is not None:
            return False
        now = [(cache.length(seq), cache.num_staged(seq)) for seq in self.seqs]
        return now == [(span.length, 0) for span in self.plan.spans]
