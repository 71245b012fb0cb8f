"""Rows written by a model itself: what a draft model is judged on, and learns from."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continue_rows(
    model: Any, prompts_BT: Tensor, count: int, greedy_B: Tensor, draw: torch.Generator
) -> Tensor:
    """Prompts of one length and `count` tokens more, `[B, T + count]`.

    Rows marked in `greedy_B` take the likeliest token, the others a token drawn at temperature 1.
    """
    device = next(model.parameters()).device
    tokens_BT = prompts_BT
    read_BT, cache = prompts_BT, None
    for _ in range(count):
        out = model(read_BT.to(device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        # What is drawn is drawn on the host, where the generator is.
        cache, logits_BV = out.get("past_key_values"), out.logits[:, -1].float().cpu()
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=draw).squeeze(1)
        new_B1 = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B).unsqueeze(1)
        tokens_BT = torch.cat([tokens_BT, new_B1], dim=1)
        # A model whose state is no cache of that name reads everything anew.
        read_BT = tokens_BT if cache is None else new_B1
    return tokens_BT
