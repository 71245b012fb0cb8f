"""One recipe from file to checkpoint folder."""

import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path
from outrider.models.checkpoint import load_llama, save_llama
from outrider.models.device import pick_device
from outrider.models.tokenizer import END_OF_TEXT_ID
from outrider.train.bigram import start_from_bigrams
from outrider.train.distil import Distillation
from outrider.train.job import STATE_FOLDER, Job
from outrider.train.journal import check_free
from outrider.train.lm import LanguageModelling
from outrider.train.loop import Objective, Outcome, ProgressCallback
from outrider.train.prepare import TOKENIZER_FILE, Prepared, build_model, prepare, sha256_of
from outrider.train.recipe import DistilRecipe, Recipe
from outrider.train.recipe_file import load_recipe
from outrider.train.state import STATE_FILE
from outrider.train.together import joined

TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json")


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

    `device` is what torch calls it; `auto` is the GPU where there is one, else the CPU. As any
    `Job` runs.

    Raises:
        InvalidConfig: a recipe, folder, time, device or state that cannot be used.
    """
    if max_minutes is not None and not max_minutes >= 0:
        raise InvalidConfig(f"max_minutes={max_minutes}: a number of at least 0 is due")
    path = recipe_path(path_or_name)
    recipe = load_recipe(path)
    # Before a device is picked: of several GPUs each process has its own.
    together = joined(device)
    place = pick_device(device)
    folder = _folder(Path(out))
    resumed = resume and (folder / STATE_FOLDER / STATE_FILE).is_file()
    target = None if recipe.distil is None else _target_folder(folder, recipe.distil)
    # The folder's own tokenizer is another run's unless that run is resumed.
    with together.leading():
        if together.leads:
            check_free(folder / STATE_FOLDER)
        prepared = prepare(
            recipe,
            folder,
            path.parent / recipe.corpus.manifest,
            speaks=target or (folder if resumed else None),
        )
    inputs = dict(prepared.inputs)
    if target is not None:
        inputs["target"] = sha256_of(target / "config.json", *sorted(target.glob("*.safetensors")))
    model = build_model(recipe, prepared.tokenizer.get_vocab_size())
    objective = _objective(recipe, prepared, model, folder, place)
    model.to(place)

    def save(folder: Path) -> None:
        if target is not None:
            for name in TOKENIZER_FILES:
                shutil.copyfile(target / name, folder / name)
        save_llama(model.cpu(), folder)

    job = Job(model, objective, recipe, inputs, place, save)
    return job.run(folder, resume=resume, max_minutes=max_minutes, progress=progress)


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"out={str(out)!r} is no folder and cannot be made one ({error.strerror}); "
            "give another folder"
        ) from error
    return out


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


def _target_folder(folder: Path, distil: DistilRecipe) -> Path:
    """Where the target of a draft model is, whose tokens it speaks."""
    target = folder.parent / distil.target
    if not all((target / name).is_file() for name in (*TOKENIZER_FILES, "config.json")):
        raise InvalidConfig(f"no target checkpoint at {target}; train the target there first")
    return target
