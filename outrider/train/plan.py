"""What a run will take, told before it begins."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from outrider.train.recipe import TrainRecipe


class Rehearsed(Protocol):
    """What a run minimises, as far as its time is asked for."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which a step takes another time, 0 first, ascending."""
        ...

    def rehearse(self, model: Any, step: int) -> int:
        """One micro-batch of text, gradients included, as in a step; how many tokens it had."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take, by the time and memory of some of its micro-batches here."""

    what: str
    steps: int
    tokens: int
    parameters: int
    seconds: float
    memory_bytes: int

    def said(self) -> str:
        """In a line."""
        return (
            f"{self.steps} steps, {self.tokens} tokens, {self.what} of {self.parameters:,} "
            f"parameters: about {self.seconds / 60:.0f} minutes and {self.memory_bytes / 1e9:.1f} "
            "GB here"
        )


def planned(
    what: str, model: Any, objective: Rehearsed, recipe: TrainRecipe, device: torch.device
) -> Plan:
    """Times one micro-batch of `what` in each stage; its gradients are dropped."""
    # What the first of all takes more is no step's.
    objective.rehearse(model, objective.stages[-1])
    seconds = 0.0
    for first, last in pairwise((*objective.stages, recipe.steps)):
        started = time.perf_counter()
        tokens = objective.rehearse(model, first)
        model.zero_grad(set_to_none=True)
        took = time.perf_counter() - started
        seconds += took * (last - first) * recipe.batch_tokens / tokens
    parameters = sum(p.numel() for p in model.parameters())
    held = 4 * 3 * parameters
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Plan(what, recipe.steps, recipe.tokens, parameters, seconds, used + held)
