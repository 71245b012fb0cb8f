"""Where the host may read tensors: leaving work out needs that, and elsewhere it would wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_AS_ON_GPU = ContextVar("as_on_gpu", default=False)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Here everything goes the way of a GPU: Triton's interpreter walks it on a CPU."""
    token = _AS_ON_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(token)


def on_gpu(device: torch.device) -> bool:
    """Whether work there goes the way of a GPU."""
    return device.type == "cuda" or _AS_ON_GPU.get()


def reads_free(device: torch.device) -> bool:
    """Whether the host reads tensors there at no cost, so that it can leave work out.

    Elsewhere all is worked on at every step, and what has stopped decides as before.
    """
    return device.type == "cpu" and not _AS_ON_GPU.get()


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device, without waiting for what the device has to do before."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # The allocator of pinned memory keeps it until the copy is through.
    return tensor.pin_memory().to(device, non_blocking=True)


def some(mask_n: Tensor) -> Tensor:
    """The places where the mask holds, or all places where leaving some out would cost a wait."""
    if reads_free(mask_n.device):
        return mask_n.nonzero().squeeze(1)
    return torch.arange(len(mask_n), device=mask_n.device)
