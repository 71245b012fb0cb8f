"""Where the host may read tensors: leaving work out needs that, and elsewhere it would wait."""

from __future__ import annotations

import torch
from torch import Tensor


def reads_free(device: torch.device) -> bool:
    """Whether the host reads tensors there at no cost, so that it can leave work out.

    Elsewhere all is worked on at every step, and what has stopped decides as before.
    """
    return device.type == "cpu"


def some(mask_n: Tensor) -> Tensor:
    """The places where the mask holds, or all places where leaving some out would cost a wait."""
    if reads_free(mask_n.device):
        return mask_n.nonzero().squeeze(1)
    return torch.arange(len(mask_n), device=mask_n.device)
