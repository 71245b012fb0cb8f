"""Where models run: a device by name, or a typed error; and memory that is given back."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.errors import InvalidConfig


def pick_device(name: Any) -> torch.device:
    """The device of that name; `auto` is the GPU where there is one, else the CPU.

    Raises:
        InvalidConfig: a name torch does not know, or a device this machine cannot compute on.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # A value read back: `meta` and absent drivers pass a mere allocation.
        probe = torch.zeros(1, device=name)
        probe.tolist()
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InvalidConfig(f"device {name!r} is not to be had: {reason}; give cpu") from error
    return probe.device


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model takes tokens; the layers of one that is spread out fetch what they need."""
    if model.device.type != "meta":
        return model.device
    # Weights that are kept elsewhere until they are used: accelerate's hook knows where that is.
    place = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return model.device if place is None else torch.device(place)


def give_back_memory() -> None:
    """Has torch's allocator and the C library return freed memory, where they can be asked to.

    Loading a model takes and frees about half as much again as its weights.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
