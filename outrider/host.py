"""What the host may read of a device without waiting for it, and what it sends and is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from numpy.typing import NDArray
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


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on a device; what the host has goes there with one copy."""
    if device.type != "cuda" or any(tensor.is_cuda for tensor in tensors):
        return [send(tensor, device) for tensor in tensors]
    flat = send(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class Reading:
    """Tensors of integers, truths or float64 on their way to the host, with one copy.

    What a device is told to do behind it is not waited for.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        there = [_bits(tensor).flatten() for tensor in tensors if not tensor.is_cpu]
        self._sizes = [len(one) for one in there]
        self._flat = torch.cat(there) if there else None
        self._arrived: torch.cuda.Event | None = None
        if self._flat is not None and self._flat.is_cuda:
            pinned = torch.empty(len(self._flat), dtype=torch.int64, pin_memory=True)
            self._flat = pinned.copy_(self._flat, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(there[0].device))

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self._flat is None:
            return list(self._tensors)
        if self._arrived is not None:
            self._arrived.synchronize()
        found = iter(self._flat.cpu().split(self._sizes))
        return [one if one.is_cpu else _of_bits(next(found), one) for one in self._tensors]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64) if tensor.dtype == torch.float64 else tensor.to(torch.int64)


def _of_bits(part: Tensor, like: Tensor) -> Tensor:
    whole = part.view(torch.float64) if like.dtype == torch.float64 else part.to(like.dtype)
    return whole.view(like.shape)


class Mailbox:
    """Numbers that stay on a device, and the same on the host, which writes and sends them.

    Attributes:
        numbers: int64 `[size]`, where they are sent to.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._here = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def open(self) -> NDArray[np.int64]:
        """What may be written to: what was sent last has arrived."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._here.numpy()

    def send(self, first: int, last: int) -> None:
        """Sends a part, behind all that the device has to do before."""
        self.numbers[first:last].copy_(self._here[first:last], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.numbers.device))


def some(mask_n: Tensor) -> Tensor:
    """The places where the mask holds, or all places where leaving some out would cost a wait."""
    if reads_free(mask_n.device):
        return mask_n.nonzero().squeeze(1)
    return torch.arange(len(mask_n), device=mask_n.device)
