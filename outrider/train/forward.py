"""A Llama read layer by layer, so that training may leave layers out and predict from early ones.

Same arithmetic as the model's own forward without a cache; LayerSkip (Elhoushi et al. 2024) needs
the steps apart.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.hf import default_dtype
from outrider.train.recipe import HeadRecipe, Recipe, TrainRecipe


def mixed(recipe: TrainRecipe, device: torch.device) -> AbstractContextManager[Any]:
    """Within, products are taken in the recipe's precision."""
    dtype = products_dtype(recipe, device)
    low = dtype is not torch.float32
    return torch.autocast(device.type, dtype if low else None, low)


def settled(recipe: Recipe | HeadRecipe, device: torch.device) -> Recipe | HeadRecipe:
    """The recipe with the precision that it has on a device, which a resumed run must have too."""
    dtype = str(products_dtype(recipe.train, device)).removeprefix("torch.")
    return replace(recipe, train=replace(recipe.train, precision=dtype))


def products_dtype(recipe: TrainRecipe, device: torch.device) -> torch.dtype:
    """The dtype of the recipe's products."""
    if recipe.precision == "auto":
        return default_dtype(device)
    return getattr(torch, recipe.precision)


def hidden_states(
    model: nn.Module,
    tokens_BT: Tensor,
    *,
    skipped: Sequence[bool] = (),
    exit_layer: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Hidden states `[B, T, D]` before the final norm, and those after `exit_layer` layers."""
    body: Any = model.model
    h_BTD = body.embed_tokens(tokens_BT)
    positions_1T = torch.arange(tokens_BT.size(1), device=tokens_BT.device).unsqueeze(0)
    rotary = body.rotary_emb(h_BTD, positions_1T)
    early_BTD: Tensor | None = None
    for i, layer in enumerate(body.layers):
        if exit_layer == i:
            early_BTD = h_BTD
        if not (skipped and skipped[i]):
            h_BTD = layer(
                h_BTD, attention_mask=None, position_ids=positions_1T, position_embeddings=rotary
            )
    return h_BTD, early_BTD


def logits(model: nn.Module, h_BTD: Tensor) -> Tensor:
    """Logits `[B, T, V]` in float32 through the shared final norm and head."""
    whole: Any = model
    return whole.lm_head(whole.model.norm(h_BTD)).float()


def log_laws(model: Any, tokens_BT: Tensor) -> Tensor:
    """Logarithms of the next-token laws `[B, T, V]` of any causal language model."""
    if model.config.model_type == "llama":
        return logits(model, hidden_states(model, tokens_BT)[0]).log_softmax(-1)
    return model(tokens_BT, use_cache=False).logits.float().log_softmax(-1)


def dropout_probabilities(layers: int, largest: float) -> list[float]:
    """Each layer's chance to be left out, from 0 to `largest` with depth (LayerSkip, eq. 2)."""
    return [largest * (2 ** (i / max(1, layers - 1)) - 1) for i in range(layers)]
