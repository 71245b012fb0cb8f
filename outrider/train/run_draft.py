"""A draft model for a user's own target, from the user's own text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path
from outrider.models.checkpoint import build_llama, load_llama, save_llama
from outrider.models.device import pick_device
from outrider.models.hf import model_folder
from outrider.models.text import TextTokenizer
from outrider.train.bigram import start_from_bigrams
from outrider.train.chance import generator
from outrider.train.distil import Distillation
from outrider.train.job import Job
from outrider.train.loop import Outcome, ProgressCallback
from outrider.train.plan import Plan, planned
from outrider.train.prepare import config_of, sha256_of
from outrider.train.recipe import CorpusRecipe, DistilRecipe, ModelRecipe, Recipe, TrainRecipe
from outrider.train.recipe_file import load_recipe
from outrider.train.run import recipe_path
from outrider.train.sources import texts_of
from outrider.train.together import joined

SPEAKS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files of a tokenizer: the draft model speaks its target's tokens."""

SMALLEST = 64
NO_CORPUS = CorpusRecipe(manifest="", held_out=())
"""That of a run whose text is given with it."""


@dataclass(frozen=True, slots=True)
class DraftRun:
    """A run made ready: its recipe, what is learned from, and the draft model at its start."""

    recipe: Recipe
    target: Path
    objective: Distillation
    model: Any
    inputs: dict[str, str]


def plain_recipe(target: Any, tokens: int | None = None) -> Recipe:
    """What is trained where no recipe is named: two layers of a quarter of the target's width."""
    config = target.config.get_text_config()
    width = max(SMALLEST, int(config.hidden_size) // 4 // SMALLEST * SMALLEST)
    heads = width // SMALLEST
    shape = ModelRecipe(
        hidden_size=width,
        layers=2,
        heads=heads,
        kv_heads=heads if heads % 2 else heads // 2,
        ffn_size=width * 8 // 3 // 32 * 32,
        head_size=SMALLEST,
        max_positions=int(getattr(config, "max_position_embeddings", 2048)),
        tied=True,
    )
    run = TrainRecipe(
        tokens or 4_096_000, context=256, long_context=256, layer_dropout=0.0, exit_weight=0.0
    )
    return Recipe("draft", 20251, NO_CORPUS, shape, run, distil=DistilRecipe())


def prepare_draft(
    path_or_name: str | None,
    *,
    target: str | Path,
    text: Sequence[str | Path],
    tokens: int | None = None,
    loss: str | None = None,
    device: str = "auto",
) -> DraftRun:
    """Read the target and the text; nothing is trained or written yet.

    `tokens` and `loss` go before what the recipe says.

    Raises:
        InvalidConfig: no text, or too little; a recipe without [distil]; a loss, target or device
            that cannot be used.
        ModelError: no target that can be read.
        UnsupportedModel: a target that cannot be served, so that no draft is measured with it.
    """
    joined(device)
    folder = bundled_path("target") if str(target) == "bundled" else model_folder(Path(target))
    place = pick_device(device)
    teacher: Any = load_llama(folder)
    if path_or_name is None:
        recipe, manifest = plain_recipe(teacher, tokens), None
    else:
        path = recipe_path(path_or_name)
        recipe = load_recipe(path)
        manifest = path.parent / recipe.corpus.manifest
    if tokens is not None:
        recipe = replace(recipe, train=replace(recipe.train, tokens=tokens))
    if recipe.distil is None:
        raise InvalidConfig(
            f"the recipe {path_or_name!r} has no [distil], so it imitates no target; add one, or "
            "run outrider train lm"
        )
    if loss is not None:
        recipe = replace(recipe, distil=replace(recipe.distil, loss=loss))
    torch.set_num_threads(recipe.train.threads)
    tokenizer = TextTokenizer(folder)
    texts = texts_of(text, recipe.corpus, manifest, tokenizer)
    ends = sorted(tokenizer.end_tokens())
    end = ends[0] if ends else 0
    vocab_size = int(teacher.get_output_embeddings().weight.shape[0])
    model: Any = build_llama(
        {**config_of(recipe.model, vocab_size), "bos_token_id": end, "eos_token_id": end},
        int(generator(recipe.seed, "weights").initial_seed() % 2**31),
    )
    if recipe.model.bigram_start:
        start_from_bigrams(model, texts.train, end, recipe.seed)
    given = texts.train, texts.held_out, end
    objective = Distillation(recipe, teacher.to(place), *given)
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    inputs = {"target": sha256_of(folder / "config.json", *weights), "text": texts.sha256}
    return DraftRun(recipe, folder, objective, model.to(place), inputs)


def plan_draft(run: DraftRun) -> Plan:
    """Times one micro-batch of text; the run's own gradients and optimisers are not touched."""
    device = run.model.device
    return planned("a draft model", run.model, run.objective, run.recipe.train, device)


def run_draft(
    run: DraftRun,
    out: Path,
    *,
    resume: bool = True,
    max_minutes: float | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Train the draft model and write its checkpoint, with the target's tokenizer, to `out`.

    As any `Job` runs.

    Raises:
        InvalidConfig: a folder or state that cannot be used.
    """
    save = partial(_save, run)
    job = Job(run.model, run.objective, run.recipe, run.inputs, run.model.device, save)
    return job.run(out, resume=resume, max_minutes=max_minutes, progress=progress)


def _save(run: DraftRun, out: Path) -> None:
    """Write the draft model, with its target's tokenizer."""
    for name in SPEAKS:
        if (run.target / name).is_file():
            shutil.copyfile(run.target / name, out / name)
    save_llama(run.model.cpu(), out)
