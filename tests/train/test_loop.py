"""Runs are deterministic, survive a kill bit for bit, and learn."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidConfig, ModelError
from outrider.models.checkpoint import load_llama
from outrider.models.device import pick_device
from outrider.models.hf import default_dtype
from outrider.train import forward, loop
from outrider.train.bigram import start_from_bigrams
from outrider.train.distil import distances
from outrider.train.forward import products_dtype, settled
from outrider.train.prepare import build_model
from outrider.train.recipe import Recipe
from outrider.train.state import load_state
from tests.train.train_recipes import DISTIL, RECIPE, train_draft, train_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train_lm(folder, "whole")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = load_state(folder)
    assert state is not None
    return state["model"]


def assert_equal_weights(a: Path, b: Path) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_equal_recipes_give_equal_bits_and_another_seed_does_not(folder: Path) -> None:
    torch.manual_seed(99)  # The global generator plays no part.
    train_lm(folder, "again")
    assert_equal_weights(folder / "whole", folder / "again")
    train_lm(folder, "other", dataclasses.replace(RECIPE, seed=8))
    name = "lm_head.weight"
    assert not torch.equal(weights(folder / "whole")[name], weights(folder / "other")[name])


def test_products_in_bfloat16_learn_the_same_and_again_the_same(folder: Path) -> None:
    half = dataclasses.replace(RECIPE.train, precision="bfloat16")
    recipe = dataclasses.replace(RECIPE, train=half)
    for run in ("half", "half again"):
        train_lm(folder, run, recipe)
    assert_equal_weights(folder / "half", folder / "half again")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(folder / "half")[name], weights(folder / "whole")[name])
    losses = [load_state(folder / run)["history"] for run in ("half", "whole")]  # type: ignore[index]
    for (step, low), (_, high) in zip(*losses, strict=True):
        assert low == pytest.approx(high, abs=0.1), step
    assert weights(folder / "half")[name].dtype == torch.float32


def test_a_precision_or_device_that_is_none_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"train.precision is float8; give float32, bfloat16"):
        dataclasses.replace(RECIPE.train, precision="float8")
    with pytest.raises(InvalidConfig, match=r"device 'abacus' is not to be had: .*; give cpu"):
        pick_device("abacus")
    with pytest.raises(InvalidConfig, match=r"device 'meta' is not to be had: .*; give cpu"):
        pick_device("meta")
    auto = dataclasses.replace(RECIPE.train, precision="auto")
    assert products_dtype(auto, torch.device("cpu")) is default_dtype(torch.device("cpu"))
    # What a run is resumed with is what "auto" was where it began.
    begun = settled(dataclasses.replace(RECIPE, train=auto), torch.device("cpu"))
    assert f"torch.{begun.train.precision}" == str(default_dtype(torch.device("cpu")))
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_training_leaves_the_global_generator_alone(folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train_lm(folder, "rng")
    assert torch.equal(before, torch.get_rng_state())


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
import torch
from tests.train.train_recipes import train_lm
from outrider.train import loop
loop.CHECKPOINT_S = 0.0
def stop(p):
    if p.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
train_lm(Path(sys.argv[1]), "killed", progress=stop)
"""


def test_a_killed_run_resumes_to_the_same_bits(folder: Path) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(folder)],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    state = load_state(folder / "killed")
    assert state is not None
    assert state["step"] == 6
    outcome = train_lm(folder, "killed")
    assert outcome.finished
    assert [step for step, _ in outcome.history] == list(range(1, 13))
    assert_equal_weights(folder / "whole", folder / "killed")


def test_time_up_keeps_the_state_and_says_so(folder: Path) -> None:
    outcome = train_lm(folder, "short", max_minutes=0.0)
    assert (outcome.finished, outcome.step) == (False, 0)
    assert load_state(folder / "short") is not None


def test_another_recipe_does_not_resume(folder: Path) -> None:
    other = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, matrix_rate=0.5))
    with pytest.raises(InvalidConfig, match="started by another recipe"):
        train_lm(folder, "whole", other)
    longer = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, tokens=99 * 256))
    with pytest.raises(InvalidConfig, match="past the constant phase"):
        train_lm(folder, "whole", longer)


def test_other_files_than_the_runs_own_do_not_resume(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"inputs differ\); give another folder, or .* --fresh"):
        train_lm(folder, "whole", inputs={"manifest": "another", "tokenizer": "another"})


def grown(*growth: tuple[int, int]) -> Recipe:
    return dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, growth=growth))


def test_layers_may_grow_otherwise_from_the_next_step_on_and_not_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedError(Exception):
        pass

    def stop(p: loop.Progress) -> None:
        if p.step == 5:
            raise StoppedError

    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    with pytest.raises(StoppedError):
        train_lm(folder, "grown", progress=stop)
    state = load_state(folder / "grown")
    assert state is not None
    assert state["step"] == 4
    with pytest.raises(InvalidConfig, match=r"trained 2 layers at step 3, train.growth says 3"):
        train_lm(folder, "grown", grown((0, 2), (3, 3)))
    with pytest.raises(InvalidConfig, match=r"trained 2 layers at step 0, train.growth says 3"):
        train_lm(folder, "grown", grown())
    assert train_lm(folder, "grown", grown((0, 2), (6, 3))).finished


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\x03\x04 half an archive"])
def test_a_damaged_state_is_named(folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(InvalidConfig, match=r"state\.pt cannot be read .*--fresh"):
        load_state(tmp_path)
    whole = (folder / "whole" / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidConfig, match=r"state\.pt cannot be read .*--fresh"):
        load_state(tmp_path)


def test_another_versions_state_is_named(tmp_path: Path) -> None:
    torch.save({"fingerprint": {}, "step": 3}, tmp_path / "state.pt")
    with pytest.raises(InvalidConfig, match="not of this version"):
        load_state(tmp_path)


def test_the_loss_falls(folder: Path) -> None:
    state = load_state(folder / "whole")
    assert state is not None
    losses = [loss for _, loss in state["history"]]
    assert losses[-1] < losses[0] - 0.5


def test_layers_that_have_not_grown_add_nothing() -> None:
    model = build_model(RECIPE, 300)
    tokens_BT = torch.arange(20).view(2, 10)
    whole_BTD, _ = forward.hidden_states(model, tokens_BT)
    two_BTD, _ = forward.hidden_states(model, tokens_BT, skipped=[False, False, True])
    assert torch.equal(whole_BTD, two_BTD)


def test_reading_by_layers_equals_the_model(folder: Path) -> None:
    model = load_llama(folder / "whole")
    tokens_BT = torch.arange(60).view(2, 30)
    with torch.no_grad():
        h_BTD, early_BTD = forward.hidden_states(model, tokens_BT, exit_layer=1)
        logits_BTV = forward.logits(model, h_BTD)
        expected_BTV = model(tokens_BT).logits
    assert early_BTD is not None
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-5, atol=1e-5)


def test_stored_weights_are_the_trained_ones_rounded_once(folder: Path) -> None:
    stored, trained = load_llama(folder / "whole").state_dict(), weights(folder / "whole")
    assert all(torch.equal(stored[name], trained[name].half().float()) for name in trained)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model; give a checkpoint folder"):
        load_llama(tmp_path)


def test_distillation_brings_the_draft_nearer_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_llama(folder / "whole")
    whole = train_draft(folder, "draft", target)
    variations = [loss for _, loss in whole.history]
    assert variations[-1] < variations[0]

    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)

    class StoppedError(Exception):
        pass

    def stop(p: loop.Progress) -> None:
        if p.step == 8:
            raise StoppedError

    with pytest.raises(StoppedError):
        train_draft(folder, "stopped", target, progress=stop)
    train_draft(folder, "stopped", target)
    assert_equal_weights(folder / "draft", folder / "stopped")


def test_a_model_is_at_no_distance_from_itself(folder: Path) -> None:
    model = load_llama(folder / "whole")
    divergence, variation = distances(model, model, torch.arange(64).view(2, 32), DISTIL)
    assert float(divergence.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(variation.detach()) == pytest.approx(0.0, abs=1e-6)


def test_the_start_is_a_bigram_model() -> None:
    documents = [[1, 2, 3, 4] * 50, [1, 2, 5, 4] * 50]
    recipe = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, bigram_start=True))
    model = build_model(recipe, 6)
    start_from_bigrams(model, documents, 0, seed=1)
    with torch.no_grad():
        law_V = model(torch.tensor([[2]])).logits.softmax(-1)[0, 0]
    assert law_V[[3, 5]].tolist() == pytest.approx([0.5, 0.5], abs=0.05)


def test_a_tied_model_cannot_start_from_bigrams() -> None:
    with pytest.raises(InvalidConfig, match="bigram_start"):
        dataclasses.replace(RECIPE.model, bigram_start=True, tied=True)
