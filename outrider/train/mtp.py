"""The MTP module that a run begins with: a layer of the target's class that adds nothing yet."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import UnsupportedModel
from outrider.models.capability import has_experts
from outrider.models.head import TargetParts, scaled
from outrider.models.hf import HuggingFaceTarget
from outrider.models.mtp import MtpHead, module_of
from outrider.train.chance import generator
from outrider.train.recipe import HeadRecipe


def layer_options(recipe: HeadRecipe) -> dict[str, Any]:
    """In what the module's layer differs from the target's."""
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
    target.model.requires_grad_(False)
    head = MtpHead([module], target)
    head.borrow(_differentiable(target))
    return head


def _differentiable(target: HuggingFaceTarget) -> TargetParts:
    """The target's parts in float32 and as plain products, through which gradients pass."""
    parts, model = TargetParts.of(target), target.model
    config = model.config.get_text_config()
    assert isinstance(parts.norm, torch.nn.Module)
    output: Any = model.get_output_embeddings()
    weight, bias = output.weight.float(), getattr(output, "bias", None)
    bias = None if bias is None else bias.float()

    def logits(h: Tensor) -> Tensor:
        return scaled(F.linear(h, weight, bias), config)

    return TargetParts(parts.embeddings, copy.deepcopy(parts.norm).float(), logits)
