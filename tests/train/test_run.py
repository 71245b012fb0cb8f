"""A recipe's run in its folder: what it reuses, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.errors import InvalidConfig
from outrider.models.tokenizer import load_tokenizer
from outrider.train import corpus, run_recipe, write_manifest
from outrider.train.__main__ import main
from outrider.train.recipe_file import load_recipe
from tests.train.train_recipes import write_library

RECIPE = """
name = "{name}"
seed = 3
[corpus]
manifest = "manifest.json"
held_out = ["held.py"]
[tokenizer]
vocab_size = {vocab_size}
[model]
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
ffn_size = 48
head_size = 16
max_positions = 128
[train]
tokens = 1024
batch_tokens = 256
micro_tokens = 128
context = 64
long_context = 128
threads = 1
"""
DISTIL = """
[distil]
target = "target"
prompt_tokens = 8
continuation_tokens = 24
pool_rows = 16
refresh_rows = 8
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside its corpus, which is the standard library as far as the run can see."""
    root = write_library(tmp_path / "library")
    monkeypatch.setattr(corpus, "stdlib_root", lambda: root)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(name="target", vocab_size=300), "utf-8")
    write_manifest(load_recipe(path).corpus, tmp_path / "manifest.json")
    return path


def vocabulary(folder: Path) -> int:
    return load_tokenizer(folder).get_vocab_size()


def test_a_fresh_run_trains_its_own_tokenizer(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_recipe(recipe, out=out)
    assert vocabulary(out) == 300
    recipe.write_text(RECIPE.format(name="target", vocab_size=320), "utf-8")
    with pytest.raises(InvalidConfig, match="tokenizer"):
        run_recipe(recipe, out=out)
    assert vocabulary(out) == 300, "a refused run changes nothing"
    assert run_recipe(recipe, out=out, resume=False).finished
    assert vocabulary(out) == 320


def test_a_folder_without_a_state_lends_no_tokenizer(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_recipe(recipe, out=out)
    shutil.rmtree(out / "training")
    recipe.write_text(RECIPE.format(name="target", vocab_size=320), "utf-8")
    assert run_recipe(recipe, out=out).finished
    assert vocabulary(out) == 320


@pytest.mark.parametrize("name", ["manifest.json", "run/tokenizer.json"])
def test_a_run_resumes_with_the_files_it_began_with(
    recipe: Path, tmp_path: Path, name: str
) -> None:
    out, changed = tmp_path / "run", tmp_path / name
    assert not run_recipe(recipe, out=out, max_minutes=0).finished
    whole = changed.read_text("utf-8")
    changed.write_text(json.dumps(json.loads(whole), indent=3), "utf-8")
    with pytest.raises(InvalidConfig, match="inputs differ"):
        run_recipe(recipe, out=out)
    changed.write_text(whole, "utf-8")
    assert run_recipe(recipe, out=out).finished


def test_a_draft_resumes_with_the_target_it_began_with(recipe: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text(RECIPE.format(name="draft", vocab_size=300) + DISTIL, "utf-8")
    with pytest.raises(InvalidConfig, match="train the target there first"):
        run_recipe(draft, out=tmp_path / "draft")
    run_recipe(recipe, out=tmp_path / "target")
    assert not run_recipe(draft, out=tmp_path / "draft", max_minutes=0).finished
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    recipe.write_text(recipe.read_text("utf-8").replace("seed = 3", "seed = 4"), "utf-8")
    run_recipe(recipe, out=tmp_path / "target", resume=False)
    with pytest.raises(InvalidConfig, match="inputs differ"):
        run_recipe(draft, out=tmp_path / "draft")
    (tmp_path / "target" / "model.safetensors").write_bytes(before)
    assert run_recipe(draft, out=tmp_path / "draft").finished
    for name in ("tokenizer.json", "tokenizer_config.json"):
        ours, its = ((tmp_path / who / name).read_bytes() for who in ("draft", "target"))
        assert ours == its


@pytest.mark.parametrize("minutes", [-1.0, float("nan")])
def test_a_time_that_is_none(recipe: Path, tmp_path: Path, minutes: float) -> None:
    with pytest.raises(InvalidConfig, match=f"max_minutes={minutes}: a number of at least 0"):
        run_recipe(recipe, out=tmp_path / "run", max_minutes=minutes)


def test_a_folder_that_cannot_be(recipe: Path) -> None:
    for out in (recipe, recipe / "inside"):
        with pytest.raises(InvalidConfig, match=r"recipe\.toml.* is no folder"):
            run_recipe(recipe, out=out)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_manifest_that_is_none(recipe: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, "utf-8")
    with pytest.raises(InvalidConfig, match=r"manifest\.json is no corpus manifest"):
        run_recipe(recipe, out=tmp_path / "run")


def test_the_module_ends_in_one_line_too(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", str(recipe), "--out", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: out=")
