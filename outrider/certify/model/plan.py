"""How long a certification looks, and how sure it is to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.certify.bets import needed
from outrider.config import SAMPLING, SamplingParams, check_between, check_whole

Progress = Callable[[str], None]
OTHER, SAMPLED_FROM = 1_000_003, 2_000_003
"""Added to a plan's seed: that of another text, and that of the first sampled one. Engines may
count on from a seed, prompt by prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to look, and how sure to be.

    Attributes:
        within: the total variation per token that counts as lossless.
        alpha: the chance that a lossless subject is called anything else.
        length: tokens per text.
        budget: tokens at most; None is what `within` needs.
        seed: of the first text; others count on from it.

    Raises:
        InvalidConfig: a number that cannot be meant.
    """

    within: float = 0.02
    alpha: float = 0.01
    length: int = 16
    budget: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        check_between("within", self.within, 0, 1, low_open=True)
        check_between("alpha", self.alpha, 0, 0.5, low_open=True)
        check_whole("length", self.length, 2)
        check_whole("seed", self.seed, 0, 2**62)
        if self.budget is not None:
            check_whole("budget", self.budget, 1)

    def tokens(self, num_looks: int) -> int:
        """Tokens to look at, at most."""
        return needed(num_looks, self.alpha, self.within) if self.budget is None else self.budget


def asked(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not as by default, for a report."""
    plain = SamplingParams()
    return {
        name: getattr(params, name)
        for name in SAMPLING
        if getattr(params, name) != getattr(plain, name)
    }
