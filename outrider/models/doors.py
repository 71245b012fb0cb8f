"""How a model's own forward comes by the cached keys and values: the doors.

The attention interface is the first choice: Outrider's op computes attention, and no mask over the
cache is made. A model without it keeps its own attention and is handed a cache and a mask
(`hf_slab`). Which of the two, a trial at load decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from outrider.cache import CacheManager
from outrider.models.attention_op import Body, Forward, running
from outrider.models.plan import Plan
from outrider.models.reach import Reach


class Door(ABC):
    """A way into a model's forward: the inputs beside tokens and positions."""

    name: str
    """Whose attention it is, for reports."""
    path: str
    """The way in, for reports, and why not the first choice."""

    @abstractmethod
    def inputs(self, cache: CacheManager, plan: Plan) -> dict[str, Any]:
        """Return the inputs of one forward over the plan's rows."""

    @contextmanager
    def entered(self, cache: CacheManager, plan: Plan, body: Body) -> Iterator[None]:
        """Surround one forward."""
        yield


class InterfaceDoor(Door):
    """Through transformers' attention interface: the op writes, attends and masks by the plan."""

    name = "outrider"
    path = "attention interface"

    def __init__(
        self, device: torch.device, reaches: Mapping[int, Reach | None], *, counts_rows: bool
    ) -> None:
        self.reaches = reaches
        self._counts_rows = counts_rows
        # Families hand a 4-D mask through unread, which saves making one in each forward.
        self._no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)

    def inputs(self, cache: CacheManager, plan: Plan) -> dict[str, Any]:
        """Return a mask that is not read, and no cache."""
        return self.given(plan.positions)

    def given(self, positions_R: Tensor) -> dict[str, Any]:
        """The same of rows at some positions."""
        placed = {"past_key_values": PlacedRows(positions_R)} if self._counts_rows else {}
        return {"attention_mask": self._no_mask, "use_cache": False, **placed}

    @contextmanager
    def entered(self, cache: CacheManager, plan: Plan, body: Body) -> Iterator[None]:
        """Make the op work for the plan's rows."""
        with running(Forward(cache, plan, body, self.reaches)):
            yield


class PlacedRows(Cache):
    """A cache that holds nothing: it tells layers that count rows themselves where each row is.

    Llama 4's temperature is a function of `arange(rows) + get_seq_length()`, whatever positions it
    is given; a length per row makes the sum the row's position.
    """

    def __init__(self, positions_R: Tensor) -> None:
        super().__init__(layers=[])
        count = positions_R.shape[-1]
        self._before_R = positions_R - torch.arange(count, device=positions_R.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what came: the op behind keeps it."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the tokens before each row, less the rows before it in this forward."""
        return self._before_R
