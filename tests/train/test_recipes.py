"""Recipes: what they say is what is built, and what cannot be meant is an error that helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from outrider.errors import InvalidConfig
from outrider.train import load_recipe
from outrider.train.schedule import context_at, depth_at, rate_factor
from tests.train.train_recipes import RECIPE

FOLDER = Path(__file__).parents[2] / "outrider-models" / "outrider_models" / "recipes"


@pytest.mark.parametrize("name", ["target", "draft", "tiny"])
def test_bundled_recipes_load(name: str) -> None:
    recipe = load_recipe(FOLDER / f"{name}.toml")
    assert recipe.name == name
    assert (recipe.distil is not None) == (name == "draft")


def test_pair_shares_corpus_and_vocabulary() -> None:
    target, draft = (load_recipe(FOLDER / f"{name}.toml") for name in ("target", "draft"))
    assert (target.corpus, target.tokenizer) == (draft.corpus, draft.tokenizer)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(text, "utf-8")
    return path


TINY = (FOLDER / "tiny.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size", "hidden_sise", r"unknown key 'hidden_sise' in \[model\].*'hidden_size'"),
        ("[train]", "[trian]", r"unknown key 'trian' in \[recipe\].*'train'"),
        ("layers = 3", "", r"\[model\] lacks layers"),
        ("layers = 3", 'layers = "3"', "model.layers is '3', a str; give a int"),
        ("kv_heads = 1", "kv_heads = 3", "model.kv_heads is 3; give a divisor of heads"),
        ("context = 128", "context = 100", "train.context is 100; give a divisor"),
        ("tokens = 65_536", "tokens = 5", "train.tokens is 5; give at least one step"),
        ("seed = 7", "seed = ", "is not TOML"),
    ],
)
def test_recipe_errors(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TINY
    with pytest.raises(InvalidConfig, match=message):
        load_recipe(written(tmp_path, TINY.replace(old, new, 1)))


def test_missing_recipe(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no recipe at"):
        load_recipe(tmp_path / "absent.toml")


def test_rates_warm_up_stay_and_decay_to_zero() -> None:
    run = dataclasses.replace(
        RECIPE.train, tokens=100 * 256, warmup_steps=4, decay_fraction=0.25, long_fraction=0.1
    )
    factors = [rate_factor(step, run) for step in range(run.steps)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(factors[4:76]) == {1.0}
    assert factors[75:] == sorted(factors[75:], reverse=True)
    assert factors[-1] == pytest.approx(1 / 25)
    assert [context_at(step, run) for step in (0, 89, 90, 99)] == [64, 64, 128, 128]


def test_constant_phase_does_not_depend_on_the_total() -> None:
    short, long = (dataclasses.replace(RECIPE.train, tokens=n * 256) for n in (100, 400))
    for step in range(short.decay_from):
        assert rate_factor(step, short) == rate_factor(step, long)
        assert context_at(step, short) == context_at(step, long)


def test_growth_reads_more_layers_from_its_steps_on() -> None:
    run = dataclasses.replace(RECIPE.train, growth=((0, 2), (10, 4), (20, 7)))
    assert [depth_at(step, run, 7) for step in (0, 9, 10, 19, 20, 99)] == [2, 2, 4, 4, 7, 7]
    assert depth_at(50, dataclasses.replace(run, growth=()), 7) == 7
