"""One recipe from file to checkpoint folder."""

import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path
from outrider.models.checkpoint import load_llama, save_llama
from outrider.models.tokenizer import END_OF_TEXT_ID
from outrider.train.bigram import start_from_bigrams
from outrider.train.distil import Distillation
from outrider.train.lm import LanguageModelling
from outrider.train.loop import Objective, Outcome, ProgressCallback, train
from outrider.train.prepare import Prepared, build_model, prepare
from outrider.train.recipe import Recipe
from outrider.train.recipe_file import load_recipe

STATE_FOLDER = "training"


def recipe_path(path_or_name: str | Path) -> Path:
    """The file of a recipe given by path, or by the name of one that outrider-models carries."""
    path = Path(path_or_name)
    if path.suffix == ".toml" or path.is_file():
        return path
    folder = bundled_path("target").parent / "recipes"
    names = sorted(p.stem for p in folder.glob("*.toml"))
    if str(path_or_name) not in names:
        raise InvalidConfig(
            f"no recipe {str(path_or_name)!r}; give the path of a TOML file, or one of the bundled "
            f"recipes {', '.join(names)}"
        )
    return folder / f"{path_or_name}.toml"


def run_recipe(
    path_or_name: str | Path,
    *,
    out: str | Path,
    resume: bool = True,
    max_minutes: float | None = None,
    device: str = "auto",
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Train what the recipe describes and write a checkpoint folder to `out`.

    `device` is what torch calls it; `auto` is the GPU where there is one, else the CPU.
    The state of the run lives in `out/training` and is resumed from there unless `resume` is False.
    When `max_minutes` are over first, the state is saved and nothing else is written.
    """
    path = recipe_path(path_or_name)
    recipe = load_recipe(path)
    place = pick_device(device)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.distil is not None:
        _copy_tokenizer(folder.parent / recipe.distil.target, folder)
    prepared = prepare(recipe, folder, path.parent / recipe.corpus.manifest)
    model = build_model(recipe, prepared.tokenizer.get_vocab_size())
    objective = _objective(recipe, prepared, model, folder, place)
    model.to(place)
    outcome = train(
        model,
        objective,
        recipe,
        folder / STATE_FOLDER,
        resume=resume,
        max_minutes=max_minutes,
        progress=progress,
    )
    if outcome.finished:
        save_llama(model.cpu(), folder)
    return outcome


def pick_device(name: str) -> torch.device:
    """The device of that name; InvalidConfig where this machine has none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InvalidConfig(f"device {name!r} is not to be had: {error}; give cpu") from error


def _objective(
    recipe: Recipe, prepared: Prepared, model: Any, folder: Path, device: torch.device
) -> Objective:
    """What the run minimises; the model gets the start that the recipe says."""
    if recipe.model.bigram_start:
        start_from_bigrams(model, prepared.train, END_OF_TEXT_ID, recipe.seed)
    if recipe.distil is None:
        return LanguageModelling(recipe, prepared.train, prepared.held_out, END_OF_TEXT_ID)
    target = load_llama(folder.parent / recipe.distil.target).to(device)
    return Distillation(recipe, target, prepared.train, prepared.held_out, END_OF_TEXT_ID)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """A draft model speaks its target's tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise InvalidConfig(f"no target checkpoint at {source}; train the target there first")
        shutil.copyfile(source / name, folder / name)
