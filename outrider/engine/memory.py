"""Out of memory: how it shows, whoever says so."""

from __future__ import annotations

import torch


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; the CPU allocator of torch says so in words alone."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
