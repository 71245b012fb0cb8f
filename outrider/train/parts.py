"""A target's final norm and output layer as something that gradients of a head pass through."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.models.head import TargetParts, scaled
from outrider.models.hf import HuggingFaceTarget


def differentiable(target: HuggingFaceTarget, dtype: torch.dtype) -> TargetParts:
    """The target's parts as plain products in `dtype`; nothing of them learns.

    Raises:
        UnsupportedModel: a target whose logits are more than they make of its last states.
    """
    parts, model = TargetParts.of(target), target.model
    config = model.config.get_text_config()
    assert isinstance(parts.norm, nn.Module)
    norm = copy.deepcopy(parts.norm).to(dtype)
    output: Any = model.get_output_embeddings()
    weight, bias = output.weight.detach().to(dtype), getattr(output, "bias", None)
    bias = None if bias is None else bias.detach().to(dtype)

    def logits(h: Tensor) -> Tensor:
        return scaled(F.linear(h, weight, bias), config)

    return TargetParts(parts.embeddings, norm, logits)
