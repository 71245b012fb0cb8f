"""The MTP module that a run begins with: a layer of the target's class that adds nothing yet."""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import UnsupportedModel
from outrider.models.capability import has_experts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.mtp import MtpHead, module_of
from outrider.train.chance import generator
from outrider.train.parts import differentiable
from outrider.train.recipe import HeadRecipe, MtpRecipe


def layer_options(recipe: HeadRecipe) -> dict[str, Any]:
    """In what the module's layer differs from the target's."""
    assert isinstance(recipe.head, MtpRecipe)
    size = recipe.head.ffn_size
    return {"intermediate_size": size} if size else {}


def new_module(recipe: HeadRecipe, target: HuggingFaceTarget) -> MtpHead:
    """One module in float32; its norms begin as the target's final one.

    Raises:
        UnsupportedModel: a mixture of experts; a target whose layers cannot be built beside it.
    """
    if has_experts(target.model):
        raise UnsupportedModel(
            f"the {target.model.config.model_type} model is a mixture of experts, for which no MTP "
            "module is trained here; train an EAGLE-3 head for it"
        )
    module = module_of(target, 0, options=layer_options(recipe)).float()
    draw = generator(recipe.seed, "weights")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() != 2:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, parameter.size(1) ** -0.5, generator=draw)
    head = MtpHead([module], target)
    head.borrow(differentiable(target, torch.float32))
    return head
