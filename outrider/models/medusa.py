"""Medusa heads: each guesses one token ahead from the target's last hidden state alone.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (ICML
2024, arXiv 2401.10774). Head k gives the law of the token k + 2 behind the one whose state it
reads, which is behind the target's final norm: the target itself gives the next. Parameters bear
the names of the authors' files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.errors import InvalidConfig
from outrider.models.head import TargetHead

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """How many heads, of how many residual blocks each, for a target of which widths.

    `depth` is the number of the target's layers, whose last is read.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_blocks: int
    depth: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_blocks"):
            number: int = getattr(self, name)
            least = 1 if name == "num_heads" else 0
            if number < least:
                raise InvalidConfig(f"medusa {name}={number}; give at least {least}")


class _Block(nn.Module):
    """`h + SiLU(W h + b)`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.silu(self.linear(h))


class MedusaHeads(TargetHead):
    """All heads of a target."""

    kind = "medusa"

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        self.taps, self.vocab_size = (shape.depth,), shape.vocab_size
        self.target_size = shape.hidden_size
        # What the constructors draw is written over, and the global generator is not theirs.
        with torch.random.fork_rng(devices=[]):
            self.heads = nn.ModuleList(
                nn.Sequential(
                    *(_Block(shape.hidden_size) for _ in range(shape.num_blocks)),
                    nn.Linear(shape.hidden_size, shape.vocab_size, bias=False),
                )
                for _ in range(shape.num_heads)
            )

    def features(self, hidden_RD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The target's last hidden states as the heads read them."""
        return self.parts.norm(hidden_RD)

    def logits(self, head: int, h_RD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """What one head says after features."""
        return self.heads[head](h_RD)
