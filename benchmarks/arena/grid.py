"""What is measured: stages, each of which loads its models once, and their cells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

ALPHAS = (0.6, 0.7, 0.8, 0.9)
COSTS = (0.05, 0.1, 0.2)
INFLATED = ("small", "half", "billion")
RANDOM = ("qwen3-0.6b", "llama-3.2-1b")


@dataclass(frozen=True, slots=True)
class Stage:
    """A checkpoint, the cost ratio its draft model was sized for, and an imposed acceptance."""

    checkpoint: str
    cost: float = 0.1
    alpha: float | None = None

    def __str__(self) -> str:
        imposed = "" if self.alpha is None else f" alpha={self.alpha:g}"
        return f"{self.checkpoint} c={self.cost:g}{imposed}"


@dataclass(frozen=True, slots=True)
class Cell:
    """What all arms of a stage are asked for in turn."""

    stage: Stage
    temperature: float
    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        asked = f"T={self.temperature:g} batch={self.batch} prompt={self.prompt_tokens}"
        return f"{self.stage} {asked}"


def cells(
    checkpoints: Sequence[str],
    temperatures: Sequence[float],
    batches: Sequence[int],
    prompts: Sequence[int],
    alphas: Sequence[float],
    costs: Sequence[float],
) -> list[Cell]:
    """Every combination that means something, stage by stage.

    A text of random weights has no acceptance of its own, so there it is imposed; and it is imposed
    on greedy texts, where accepting means being equal. An arm that fails takes part in nothing more
    of the stage in that run: what some fail at, sampling, comes last.
    """
    found: list[Cell] = []
    for checkpoint in checkpoints:
        imposed = checkpoint in RANDOM
        for cost, alpha in itertools.product(
            costs if imposed else (0.1,), alphas if imposed else (None,)
        ):
            stage = Stage(checkpoint, cost, alpha)
            for temperature, prompt, batch in itertools.product(
                [0.0] if imposed else temperatures, prompts, batches
            ):
                found.append(Cell(stage, temperature, batch, prompt))
    return found


GRIDS = {
    "tiny": (("small",), (0.0,), (1,), (128,), ALPHAS, COSTS),
    "reduced": (("small",), (0.0, 0.8), (1, 4), (128,), ALPHAS, COSTS),
    "core": (("half",), (0.0, 0.8), (1, 4), (128,), ALPHAS, COSTS),
    "full": ((*INFLATED[1:], *RANDOM), (0.0, 0.8), (1, 4), (128, 2048), ALPHAS, COSTS),
}
"""Arguments of `cells`."""
