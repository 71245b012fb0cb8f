"""A run made ready: trained, noted step by step, and written when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.train.journal import journal_of
from outrider.train.loop import Objective, Outcome, ProgressCallback, train
from outrider.train.recipe import HeadRecipe, Recipe
from outrider.train.together import joined

STATE_FOLDER = "training"
"""Of a run's folder: its state, its log and their picture."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, to what end, and how it is written.

    Attributes:
        model: trained in place.
        objective: what is minimised.
        recipe: its steps.
        inputs: hashes of what is read besides; a resumed run must find the same.
        device: where it computes.
        save: writes what was trained to a folder.
    """

    model: Any
    objective: Objective
    recipe: Recipe | HeadRecipe
    inputs: Mapping[str, str]
    device: torch.device
    save: Callable[[Path], None]

    def run(
        self,
        out: Path,
        *,
        resume: bool = True,
        max_minutes: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> Outcome:
        """Train, and write to `out` when the last step is done.

        The state of the run lives in `out/training`, beside a line of JSON for each step and their
        picture; it is resumed from there unless `resume` is False. When `max_minutes` are over
        first, the state is saved and nothing else is written. Processes that were launched together
        share the work, and the leading one writes.

        Raises:
            InvalidConfig: a folder or state that cannot be used.
        """
        together, state = joined(self.device), out / STATE_FOLDER
        with journal_of(state, resume, together) as journal:
            outcome = train(
                self.model,
                self.objective,
                self.recipe,
                state,
                inputs=self.inputs,
                resume=resume,
                max_minutes=max_minutes,
                progress=journal.noting(progress),
                together=together,
            )
            if outcome.finished and together.leads:
                self.save(out)
        return outcome
