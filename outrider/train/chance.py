"""Chance of training: one generator per purpose and step, so a resumed run draws the same."""

import hashlib

import torch


def generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A generator whose stream depends on the three arguments alone."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
