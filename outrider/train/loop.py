"""The loop shared by all training: steps, checkpoints, progress, resuming.

A run is killed and resumed without a trace: everything a step draws follows from the seed and the
step's number.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.train.forward import settled
from outrider.train.optimise import Optimisers
from outrider.train.recipe import HeadRecipe, Recipe
from outrider.train.schedule import rate_factor
from outrider.train.state import check_resumable, fingerprint, load_state, save_state
from outrider.train.together import ALONE, Together

CHECKPOINT_S = 120.0
EVALUATE_STEPS = 100


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step; `held_out` is what `figure` names, where just measured."""

    step: int
    steps: int
    loss: float
    held_out: float | None
    rate_tok_s: float
    elapsed_s: float
    figure: str = "held-out perplexity"


ProgressCallback = Callable[[Progress], None]


class Objective(Protocol):
    """What a step minimises; `figure` is what `held_out` measures."""

    figure: str

    def backward(self, model: Any, step: int, together: Together = ALONE) -> float:
        """Add the gradients of a process's share of the step to the model; its part of the loss."""
        ...

    def held_out(self, model: Any) -> float:
        """How good the model is on held-out text."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What cannot be derived from the seed and the step's number."""
        ...

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from another object's `state`."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `finished` is False when its time was up first."""

    finished: bool
    step: int
    tokens: int
    elapsed_s: float
    history: tuple[tuple[int, float], ...]


def train(
    model: Any,
    objective: Objective,
    recipe: Recipe | HeadRecipe,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    resume: bool = True,
    max_minutes: float | None = None,
    progress: ProgressCallback | None = None,
    together: Together = ALONE,
) -> Outcome:
    """Run the recipe's steps on `model` in place, with a state file in `folder`.

    `inputs` are hashes of what the run reads besides its recipe: a resumed run must find the same.
    Of several processes the leading one evaluates, saves and reports.

    Raises:
        InvalidConfig: a state of another run; processes that do not go on from one step.
    """
    torch.set_num_threads(recipe.train.threads)
    device = next(model.parameters()).device
    recipe = settled(recipe, device)
    optimisers = Optimisers(model, recipe.train)
    run = recipe.train
    step, before_s, history = 0, 0.0, []
    state = load_state(folder) if resume else None
    if state is not None:
        check_resumable(recipe, inputs, state, folder)
        model.load_state_dict(state["model"])
        optimisers.restore(state["optimisers"])
        objective.restore(state["objective"])
        step, before_s, history = state["step"], state["elapsed_s"], state["history"]

    together.check_same_step(step, device)
    started = saved = time.monotonic()

    def elapsed() -> float:
        return before_s + time.monotonic() - started

    def save() -> None:
        if not together.leads:
            return
        save_state(
            folder,
            {
                "fingerprint": fingerprint(recipe, inputs),
                "growth": run.growth,
                "total": [run.steps, run.decay_from, run.long_from],
                "model": model.state_dict(),
                "optimisers": optimisers.state(),
                "objective": objective.state(),
                "step": step,
                "elapsed_s": elapsed(),
                "history": history,
            },
        )

    model.train()
    while step < run.steps:
        over = max_minutes is not None and time.monotonic() - started > 60 * max_minutes
        if together.agreed(over, device):
            break
        step_started = time.monotonic()
        loss = together.summed(model, objective.backward(model, step, together))
        optimisers.step(rate_factor(step, run))
        step += 1
        rate_tok_s = run.batch_tokens / (time.monotonic() - step_started)
        history.append((step, loss))
        held_out = None
        if together.leads and (step % EVALUATE_STEPS == 0 or step == run.steps):
            held_out = objective.held_out(model)
        if progress is not None and together.leads:
            at = Progress(step, run.steps, loss, held_out, rate_tok_s, elapsed(), objective.figure)
            progress(at)
        if time.monotonic() - saved > CHECKPOINT_S:
            save()
            saved = time.monotonic()
    save()
    model.eval()
    return Outcome(
        step == run.steps,
        step,
        step * run.batch_tokens,
        elapsed(),
        tuple((s, x) for s, x in history),
    )
