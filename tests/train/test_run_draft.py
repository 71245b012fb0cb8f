"""A draft model for a target of one's own: from text to a folder that drafts, through a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cli.app import run as run_command
from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.checkpoint import load_llama
from outrider.train import head as heads
from outrider.train import loop
from outrider.train.distil import distances
from outrider.train.forward import log_laws
from outrider.train.recipe import LOSSES
from outrider.train.run_draft import DraftRun, plain_recipe, plan_draft, prepare_draft, run_draft
from outrider.train.state import load_state
from outrider.train.writing import continue_rows
from tests.models.families import one_thread, random_model
from tests.models.recurrent_families import OPTIONS, random_recurrent
from tests.train.train_recipes import write_target

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


RECIPE = """
name = "small"
seed = 3
[corpus]
manifest = "nowhere.json"
held_out = []
[model]
hidden_size = 16
layers = 1
heads = 1
kv_heads = 1
ffn_size = 24
head_size = 16
max_positions = 256
tied = true
[train]
tokens = 1024
batch_tokens = 128
micro_tokens = 64
context = 32
long_context = 32
warmup_steps = 2
threads = 1
[distil]
prompt_tokens = 8
continuation_tokens = 24
pool_rows = 8
refresh_steps = 4
refresh_rows = 4
"""


def run_of(target: Path, **given: Any) -> DraftRun:
    recipe = target / "small.toml"
    recipe.write_text(RECIPE, "utf-8")
    return prepare_draft(
        str(recipe), target=target, text=[target / "text.py"], device="cpu", **given
    )


def test_a_killed_run_ends_in_the_same_draft_and_it_drafts(
    target: Path, tmp_path: Path, monkeypatch
) -> None:
    assert run_draft(run_of(target), tmp_path / "whole").finished
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)

    def stop(at: loop.Progress) -> None:
        if at.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_draft(run_of(target), tmp_path / "killed", progress=stop)
    assert run_draft(run_of(target), tmp_path / "killed").finished
    one, other = (load_state(tmp_path / name / "training") for name in ("whole", "killed"))
    assert one is not None and other is not None
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    lines = (tmp_path / "killed" / "training" / "log.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines]
    assert noted[-1]["step"] == 8 and 1.0 <= noted[-1]["accepted_length"] <= 1.0 + heads.DEPTH
    # It speaks the target's tokens, and texts with it are the target's.
    params = SamplingParams(max_tokens=8, temperature=0.0)
    (due,) = LLM.load(target, "none").generate("def f", params)
    llm = LLM.load(target, f"draft:{tmp_path / 'whole'}")
    (done,) = llm.generate("def f", params)
    assert done.token_ids == due.token_ids and done.stats.drafted > 0


def test_the_plain_draft_is_a_quarter_as_wide_and_is_trained(
    target: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(heads, "NEW_TOKENS", 4)
    recipe = plain_recipe(load_llama(target), 81920)
    assert (recipe.model.hidden_size, recipe.model.layers, recipe.train.tokens) == (64, 2, 81920)
    assert recipe.distil is not None
    given = {"target": target, "text": [target / "text.py"], "device": "cpu"}
    run = prepare_draft(None, tokens=4096, **given)
    assert run.recipe == plain_recipe(load_llama(target), 4096)
    seen: list[loop.Progress] = []
    outcome = run_draft(run, tmp_path, progress=seen.append)
    assert outcome.finished and outcome.step == 2
    assert seen[-1].figure == "held-out accepted length" and seen[-1].held_out is not None
    assert load_llama(tmp_path).config.hidden_size == 64
    assert len(run.objective.state()["target"]) == 93, "what the plain recipe has it write"


def test_what_is_measured_is_the_draft_in_its_targets_loop(target: Path, monkeypatch) -> None:
    """The target as its own draft is always right; a draft model that is not, is not."""
    monkeypatch.setattr(heads, "NEW_TOKENS", 11)
    run = run_of(target)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert run.objective.held_out(load_llama(target)) == pytest.approx(1 + heads.DEPTH, abs=0.7)
    assert run.objective.held_out(run.model) < 2
    assert all(torch.equal(before[name], own) for name, own in run.model.state_dict().items())
    assert all(p.requires_grad for p in run.model.parameters())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_draft_learns_by_every_loss_that_heads_have(loss: str, target: Path) -> None:
    run = run_of(target, loss=loss)
    assert run.recipe.distil is not None and run.recipe.distil.loss == loss
    tokens_BT = torch.arange(64).view(2, 32) * 3
    teacher, optimiser = load_llama(target), torch.optim.Adam(run.model.parameters(), 3e-3)
    losses: list[float] = []
    for _ in range(8):
        lost, _ = distances(teacher, run.model, tokens_BT, run.recipe.distil)
        optimiser.zero_grad()
        lost.backward()
        optimiser.step()
        losses.append(lost.item())
    assert losses[-1] < losses[0] - 1e-4


def test_a_plan_costs_one_micro_batch_and_says_so(target: Path, tmp_path: Path, capsys) -> None:
    plan = plan_draft(run_of(target, loss="tv"))
    assert (plan.steps, plan.tokens) == (8, 1024)
    assert "8 steps, 1024 tokens, a draft model of" in plan.said()
    text, out = str(target / "text.py"), tmp_path / "out"
    asked = ["train", "draft", "--target", str(target), "--text", text, "--out", str(out)]
    options = ["--recipe", str(target / "small.toml"), "--loss", "block", "--plan"]
    assert run_command([*asked, *options]) == 0
    assert "8 steps, 1024 tokens, a draft model of" in capsys.readouterr().out
    assert not out.exists()


def test_what_cannot_be_trained_is_refused(target: Path) -> None:
    with pytest.raises(InvalidConfig, match="no text to train on"):
        prepare_draft(None, target=target, text=[])
    with pytest.raises(InvalidConfig, match=r"'tiny' has no \[distil\], so it imitates no target"):
        prepare_draft("tiny", target=target, text=[target / "text.py"])
    with pytest.raises(InvalidConfig, match=r"distil\.loss is mse; give one of ce, kl"):
        run_of(target, loss="mse")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "qwen3_next", "mamba2"])
def test_targets_of_any_family_write_what_they_would(family: str, tmp_path: Path) -> None:
    """Those without torch's own attention, and with state that is no cache of keys and values."""
    own = random_recurrent if family in OPTIONS else random_model
    own(family).save_pretrained(tmp_path)
    model: Any = load_llama(tmp_path)
    due = tokens_BT = torch.arange(1, 9)[None].repeat(2, 1)
    greedy, draw = torch.tensor([True, True]), torch.Generator().manual_seed(1)
    found = continue_rows(model, tokens_BT, 4, greedy, draw)
    with torch.no_grad():
        for _ in range(4):
            due = torch.cat((due, log_laws(model, due)[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, due)


def test_what_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    random_model("qwen2-vl").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="holds no causal language model"):
        load_llama(tmp_path)
