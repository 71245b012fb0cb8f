"""Training checkpoints: one file, replaced atomically, holding all a run needs to go on."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.train.recipe import Recipe

STATE_FILE = "state.pt"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; a kill at any moment leaves the old file or the new one, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / (STATE_FILE + ".part")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / STATE_FILE)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The last state of a run, or None where there is none."""
    path = folder / STATE_FILE
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe must not change in a resumed run: all but the length of its phases."""
    table = asdict(recipe)
    for key in ("tokens", "decay_fraction", "long_fraction", "growth", "threads"):
        del table["train"][key]
    return table


def check_resumable(recipe: Recipe, state: dict[str, Any], folder: Path) -> None:
    """InvalidConfig when the state is another recipe's, or past what the change affects."""
    if state["fingerprint"] != fingerprint(recipe):
        raise InvalidConfig(
            f"the run in {folder} was started by another recipe; "
            "give another folder, or resume=False"
        )
    total = state["total"]
    now = [recipe.train.steps, recipe.train.decay_from, recipe.train.long_from]
    if total != now and state["step"] > min(total[1], now[1], total[2], now[2]):
        raise InvalidConfig(
            f"the run in {folder} is at step {state['step']}, past the constant phase of "
            f"{total[0]} or {now[0]} steps; its tokens can no longer change"
        )
