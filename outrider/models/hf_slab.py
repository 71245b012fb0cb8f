"""The fallback for models without the attention interface: their own attention over our blocks.

A subclass of transformers' Cache writes the rows' keys and values to each sequence's slots and
returns the tokens of all sequences one after another; positions are explicit and a 4-D mask says
who sees whom. It costs a mask and scores between sequences that never see each other, and knows
full causal attention only. Dimension key: R flat rows, S tokens of all sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from outrider.cache import CacheManager
from outrider.models.doors import Door
from outrider.models.plan import Plan

if TYPE_CHECKING:
    from jaxtyping import Float


class SlabDoor(Door):
    """Through the model's own attention, which is given a cache and a mask."""

    name = "slab"

    def __init__(self, num_layers: int, dtype: torch.dtype, reason: str) -> None:
        self._num_layers, self._dtype = num_layers, dtype
        self.path = f"slab ({reason})"

    def inputs(self, cache: CacheManager, plan: Plan) -> dict[str, Any]:
        """Return the cache of this forward's rows, and the mask over its tokens."""
        return {
            "attention_mask": slab_mask(plan, self._dtype),
            "past_key_values": SlabCache(cache, plan, self._num_layers),
            "use_cache": True,
        }


class SlabCache(Cache):
    """The blocks of all sequences of one forward, as transformers wants to see a cache."""

    def __init__(self, cache: CacheManager, plan: Plan, num_layers: int) -> None:
        device = plan.positions.device
        slots_S = [span.slots.index(0, span.slots.count, device) for span in plan.spans]
        own_R = torch.cat(
            [slots[-span.num_rows :] for slots, span in zip(slots_S, plan.spans, strict=True)]
        )
        every_S = torch.cat(slots_S)
        layers = [SlabLayer(cache, layer, every_S, own_R) for layer in range(num_layers)]
        super().__init__(layers=list(layers))


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values in its pool, at the slots of one forward."""

    supports_early_init = False

    def __init__(self, cache: CacheManager, layer: int, every_S: Tensor, own_R: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self._cache, self._layer = cache, layer
        self._every_S, self._own_R = every_S, own_R

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: pools are made at first use."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows, `[1, G, R, D]`, and return all tokens, `[1, G, S, D]`."""
        pool = self._cache.pool(self._layer, key_states[0], value_states[0])
        own_R, every_S = self._own_R.to(key_states.device), self._every_S.to(key_states.device)
        # Rows beyond the sequences' own only pad the forward.
        pool.keys[:, own_R] = key_states[0, :, : len(own_R)]
        pool.values[:, own_R] = value_states[0, :, : len(own_R)]
        return pool.keys[None, :, every_S], pool.values[None, :, every_S]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the tokens a mask covers, and where they begin."""
        return self._every_S.shape[0], 0

    def get_seq_length(self) -> int:
        """Return the tokens before this forward's rows."""
        return self._every_S.shape[0] - self._own_R.shape[0]

    def get_max_length(self) -> int:
        """Return -1: no bound of its own."""
        return -1


def slab_mask(plan: Plan, dtype: torch.dtype) -> Float[Tensor, "1 1 R S"]:
    """Return 0 where a row sees a token and the lowest number where not."""
    device = plan.positions.device
    rows, count = len(plan.positions), sum(span.slots.count for span in plan.spans)
    mask_RS = torch.full((rows, count), torch.finfo(dtype).min, dtype=dtype, device=device)
    first = 0
    for span in plan.spans:
        visible = span.visible(None, device)
        part = mask_RS[span.first : span.last, first : first + span.slots.count]
        part[:, : visible.masked] = 0
        if visible.hidden is not None:
            part[:, visible.masked :].masked_fill_(~visible.hidden, 0)
        first += span.slots.count
    return mask_RS[None, None]
