"""The records of one round of chains: what was drafted, the noise it may use, what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding.laws import Law

if TYPE_CHECKING:
    from jaxtyping import Int64


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """Where B sequences find their noise in one round.

    Attributes:
        seed_B: int64, the bits of 64-bit seeds.
        sample_B: int64, which of a prompt's samples.
        anchor_B: int64, tokens committed when the round began.
    """

    seed_B: Int64[Tensor, " B"]
    sample_B: Int64[Tensor, " B"]
    anchor_B: Int64[Tensor, " B"]

    def select(self, rows: Tensor) -> RoundNoise:
        """The noise of some of the sequences."""
        return RoundNoise(self.seed_B[rows], self.sample_B[rows], self.anchor_B[rows])


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """B drafted chains, padded to K tokens.

    Attributes:
        tokens_BK: int64; entries from `lengths_B` on are padding, any valid token.
        lengths_B: int64, 0 to K drafted tokens.
        law: the law each token was drawn from, row `b * K + i` for token i of chain b; None where
            the tokens are certain (point masses).
    """

    tokens_BK: Int64[Tensor, "B K"]
    lengths_B: Int64[Tensor, " B"]
    law: Law | None

    def to(self, device: torch.device) -> ChainDraft:
        """The same draft on a device."""
        law = None if self.law is None else self.law.to(device)
        return ChainDraft(self.tokens_BK.to(device), self.lengths_B.to(device), law)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided.

    Attributes:
        num_accepted_B: int64, drafted tokens kept.
        token_B: int64, the one token the target adds after them.
    """

    num_accepted_B: Int64[Tensor, " B"]
    token_B: Int64[Tensor, " B"]
