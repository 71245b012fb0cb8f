"""How far back the rows of a layer see: everything, a sliding window, or their own chunk.

Each is a lowest visible position per row, so that one rule serves chains and trees. What a family
masks is not believed but found out by asking its mask function about single rows and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class Window:
    """A row sees the last `size` positions, its own included."""

    size: int

    def lowest(self, position: Position) -> Position:
        """Return the lowest position seen from `position`; it may be negative."""
        return position - (self.size - 1)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row sees its own chunk of `size` positions; chunks begin at its multiples (Llama 4)."""

    size: int

    def lowest(self, position: Position) -> Position:
        """Return the first position of the chunk `position` is in."""
        return position // self.size * self.size


Reach = Window | Chunk
"""What bounds a layer's rows; None where every earlier token is seen."""


def recognise(
    function: Callable[..., Any], size: int | None, device: torch.device | None = None
) -> Reach | None:
    """Return what a mask function of (batch, head, row, key) does; `size` is the family's number.

    It is asked on the model's device, where what it holds lies.

    Raises:
        ValueError: it is neither causal, nor a window, nor chunks of that size.
    """
    candidates = (None,) if size is None else (Window(size), Chunk(size), None)
    for reach in candidates:
        if all(_agrees(function, reach, row, device) for row in _telling_rows(size)):
            return reach
    raise ValueError(f"no causal mask, window or chunk of {size}")


def _telling_rows(size: int | None) -> list[int]:
    if size is None:
        return [0, 1, 11, 5_000, 140_000]
    return [0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1]


def _agrees(
    function: Callable[..., Any], reach: Reach | None, row: int, device: torch.device | None
) -> bool:
    keys = torch.arange(row + 3)
    zero, own = (torch.tensor(number, device=device) for number in (0, row))
    seen = torch.as_tensor(function(zero, zero, own, keys.to(device)))
    wanted = keys <= row
    if reach is not None:
        wanted &= keys >= reach.lowest(row)
    return torch.equal(seen.expand(len(keys)).cpu(), wanted)
