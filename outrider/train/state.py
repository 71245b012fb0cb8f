"""Training checkpoints: one file, replaced atomically, holding all a run needs to go on."""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.train.recipe import HeadRecipe, Recipe, UnrolledRecipe
from outrider.train.schedule import depth_at

STATE_FILE = "state.pt"
KEYS = {
    *("fingerprint", "growth", "total", "step", "elapsed_s", "history"),
    *("model", "optimisers", "objective"),
}
ANEW = "give another folder, or start anew with --fresh (resume=False)"


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
    """The last state of a run, or None where there is none.

    Raises:
        InvalidConfig: a file that is no state of this version.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # Damaged bytes end in whatever the reader of their place raises.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"the state in {path} cannot be read ({reason}); {ANEW}") from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise InvalidConfig(f"the state in {path} is not of this version; {ANEW}")
    return state


def fingerprint(recipe: Recipe | HeadRecipe, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What must not change in a resumed run: all it reads, and its recipe but phases' lengths."""
    table = asdict(recipe)
    for key in ("tokens", "decay_fraction", "long_fraction", "growth", "threads"):
        del table["train"][key]
    if isinstance(recipe, HeadRecipe):
        # How much is kept changes nothing but the time, whether anything may be does.
        table[recipe.head.section]["kept_gb"] = recipe.head.keeps
        for head in (table["eagle"], table["mtp"], table["exit"]):
            # Without them runs are what they were that did not know the keys.
            for key in ("step_from", "kept_gb"):
                if head and not head.get(key):
                    head.pop(key, None)
    return _given({**table, "inputs": dict(inputs)})


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    """What is None is as good as absent: recipes may come to know more parts than a run's did."""
    return {key: value for key, value in table.items() if value is not None}


def check_resumable(
    recipe: Recipe | HeadRecipe, inputs: Mapping[str, str], state: dict[str, Any], folder: Path
) -> None:
    """InvalidConfig when the state is another recipe's, or past what the change affects."""
    known, now = _given(state["fingerprint"]), fingerprint(recipe, inputs)
    if known != now:
        either = dict.fromkeys((*now, *known))
        changed = ", ".join(key for key in either if now.get(key) != known.get(key))
        raise InvalidConfig(
            f"the run in {folder} was started by another recipe or other files ({changed} differ); "
            f"{ANEW}"
        )
    if isinstance(recipe, Recipe):
        _check_growth(recipe, state, folder)
    total = state["total"]
    now = [recipe.train.steps, recipe.train.decay_from, recipe.train.long_from]
    constant = [*total[1:], *now[1:]]
    head = recipe.head if isinstance(recipe, HeadRecipe) else None
    if isinstance(head, UnrolledRecipe) and head.step_from:
        pairs = zip(head.changes(total[0]), head.changes(now[0]), strict=True)
        constant += [min(pair) for pair in pairs if pair[0] != pair[1]]
    if total != now and state["step"] > min(constant):
        raise InvalidConfig(
            f"the run in {folder} is at step {state['step']}, past the constant phase of "
            f"{total[0]} or {now[0]} steps, or where step_from changes what they read; its tokens "
            "can no longer change"
        )


def _check_growth(recipe: Recipe, state: dict[str, Any], folder: Path) -> None:
    """The steps that were taken have trained the layers that the recipe's growth says."""
    run, layers = recipe.train, recipe.model.layers
    was = replace(run, growth=state["growth"])
    for step in range(state["step"]):
        then, now = depth_at(step, was, layers), depth_at(step, run, layers)
        if then != now:
            raise InvalidConfig(
                f"the run in {folder} trained {then} layers at step {step}, train.growth says "
                f"{now}; only growth from step {state['step']} on can change: "
                f"restore the entries before, or {ANEW}"
            )
