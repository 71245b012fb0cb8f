"""The attention op as a reader would write it, row by row and head by head; others equal it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models.attention_op import Options
from outrider.models.plan import Visible

if TYPE_CHECKING:
    from jaxtyping import Float


def attend_reference(
    query: Float[Tensor, "H r D"],
    keys: Float[Tensor, "G n D"],
    values: Float[Tensor, "G n E"],
    visible: Visible,
    options: Options,
) -> Float[Tensor, "r H E"]:
    """Return the attention of one span, `[r, H, D]`, computed in float64.

    `query` `[H, r, D]`; `keys`, `values` `[G, n, D]` are the tokens from `visible.first` on. Query
    head h reads key head `h // (H / G)`.
    """
    heads, rows, _ = query.shape
    per_group = heads // keys.shape[0]
    out = torch.empty(rows, heads, values.shape[-1], dtype=torch.float64, device=query.device)
    for row in range(rows):
        seen = torch.ones(keys.shape[1], dtype=torch.bool, device=query.device)
        if visible.hidden is not None:
            seen[visible.masked - visible.first :] = ~visible.hidden[row]
        for head in range(heads):
            own_keys = keys[head // per_group, seen].double()
            own_values = values[head // per_group, seen].double()
            scores = own_keys @ query[head, row].double() * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            total = scores.exp().sum()
            if options.sinks is not None:
                # A sink takes part in the sum and has no value: attention to nothing.
                total = total + options.sinks[head].double().exp()
            out[row, head] = scores.exp() @ own_values / total
    return out.to(query.dtype)
