"""A recipe of a second, its corpus being a few files written for the test."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch

from outrider.models.bundled import bundled_path
from outrider.models.checkpoint import build_llama, save_llama
from outrider.models.tokenizer import END_OF_TEXT_ID
from outrider.train.corpus import write_manifest
from outrider.train.distil import Distillation
from outrider.train.lm import LanguageModelling
from outrider.train.loop import Outcome, train
from outrider.train.prepare import Prepared, build_model, config_of, prepare
from outrider.train.recipe import (
    CorpusRecipe,
    DistilRecipe,
    ModelRecipe,
    Recipe,
    TokenizerRecipe,
    TrainRecipe,
)

RECIPE = Recipe(
    name="test",
    seed=3,
    corpus=CorpusRecipe(manifest="manifest.json", held_out=("held.py",), skip=("tables/",)),
    model=ModelRecipe(
        hidden_size=32, layers=3, heads=2, kv_heads=1, ffn_size=48, head_size=16, max_positions=128
    ),
    tokenizer=TokenizerRecipe(vocab_size=300),
    train=TrainRecipe(
        tokens=12 * 256,
        batch_tokens=256,
        micro_tokens=128,
        context=64,
        long_context=128,
        long_fraction=0.25,
        warmup_steps=2,
        growth=((0, 2), (4, 3)),
        threads=1,
    ),
)

DISTIL = DistilRecipe(
    prompt_tokens=8,
    continuation_tokens=24,
    pool_rows=16,
    refresh_steps=5,
    refresh_rows=8,
    draft_share=0.125,
)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_library(root: Path) -> Path:
    """A standard library of four files."""
    (root / "tables").mkdir(parents=True)
    (root / "tables" / "big.py").write_text("TABLE = {}\n", "utf-8")
    for i, name in enumerate(("one.py", "two.py", "held.py")):
        body = "".join(
            f"def f{n}(self, x):\n    return self.value{n % 7} + {n * i}\n\n\n" for n in range(60)
        )
        (root / name).write_text(body, "utf-8")
    return root


def write_target(folder: Path) -> Path:
    """A small random Llama that speaks the bundled target's tokens, and a text beside it."""
    shape = ModelRecipe(32, 2, 2, 1, 48, head_size=16, max_positions=256)
    model = build_llama(config_of(shape, 4096), 1)
    with torch.no_grad():
        draw = torch.Generator().manual_seed(2)
        model.lm_head.weight.normal_(0.0, 0.3, generator=draw)  # type: ignore[union-attr]
    save_llama(model, folder)
    for name in TOKENIZER:
        shutil.copyfile(bundled_path("target") / name, folder / name)
    (folder / "text.py").write_text(
        "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(200))
    )
    return folder


def prepared_in(folder: Path, recipe: Recipe = RECIPE) -> Prepared:
    """The recipe's corpus and tokenizer, made in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "library"
    if not root.exists():
        write_library(root)
        write_manifest(recipe.corpus, folder / "manifest.json", root)
    return prepare(recipe, folder, folder / "manifest.json", root)


def train_lm(folder: Path, run: str, recipe: Recipe = RECIPE, **options: object) -> Outcome:
    """A language model trained in `folder/run`, its checkpoint beside the state."""
    prepared = prepared_in(folder, recipe)
    model = build_model(recipe, prepared.tokenizer.get_vocab_size())
    objective = LanguageModelling(recipe, prepared.train, prepared.held_out, END_OF_TEXT_ID)
    options.setdefault("inputs", prepared.inputs)
    outcome = train(model, objective, recipe, folder / run, **options)  # type: ignore[arg-type]
    save_llama(model, folder / run)
    return outcome


def train_draft(folder: Path, run: str, target: object, **options: object) -> Outcome:
    """A draft model distilled from `target` in `folder/run`."""
    recipe = dataclasses.replace(RECIPE, seed=4, distil=DISTIL)
    prepared = prepared_in(folder, recipe)
    model = build_model(recipe, prepared.tokenizer.get_vocab_size())
    objective = Distillation(recipe, target, prepared.train, prepared.held_out, END_OF_TEXT_ID)
    options.setdefault("inputs", prepared.inputs)
    return train(model, objective, recipe, folder / run, **options)  # type: ignore[arg-type]


def change_manifest(path: Path, **entries: dict[str, str]) -> None:
    """Overwrite entries of a manifest's file table."""
    manifest = json.loads(path.read_text("utf-8"))
    manifest["files"].update(entries)
    path.write_text(json.dumps(manifest), "utf-8")
