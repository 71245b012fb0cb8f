"""Early-exit heads learn, survive kills bit for bit, and are served from their folder."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from outrider.drafters import Drafter, DrafterSpec, EarlyExitDrafter, NoDrafter
from outrider.errors import InvalidConfig, ModelError
from outrider.llm.heads import head_drafter
from outrider.models.base import Rows
from outrider.models.bundled import bundled_path
from outrider.models.exit_head import ExitHead, load_exit_head
from outrider.models.head_files import check_fingerprint
from outrider.models.hf import HuggingFaceTarget
from outrider.train import head as heads
from outrider.train import loop
from outrider.train import run_head as run_heads
from outrider.train.exit import ExitTraining, exit_layers, new_exit_head
from outrider.train.parts import differentiable
from outrider.train.recipe import LOSSES, EagleRecipe, ExitRecipe, HeadRecipe
from outrider.train.run_head import HeadRun, head_recipe, plan_head, prepare_head, run_head
from tests.drafters.serving import RAGGED, laws, served, texts
from tests.house.layout import ROOT
from tests.models.families import one_thread, random_model
from tests.train.test_heads import RECIPE, TARGET, documents, weights

single = pytest.fixture(scope="module", autouse=True)(one_thread)
EXIT = dataclasses.replace(
    RECIPE,
    eagle=EagleRecipe(),
    exit=ExitRecipe(rank=16, steps=3, written_share=0.5, written_rows=6, prompt_tokens=8),
)
SHIPPED = ROOT / "outrider-models" / "outrider_models" / "recipes" / "exit.toml"


def run_of(recipe: HeadRecipe = EXIT) -> HeadRun:
    objective = ExitTraining(recipe, TARGET, documents(1), documents(2), 0)
    head = new_exit_head(recipe, TARGET)
    return HeadRun(recipe, TARGET, objective, head, {"target": "tiny"}, "tiny")


def test_a_run_killed_three_times_resumes_to_the_same_bits_and_is_served(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "EVALUATE_STEPS", 8)
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    before = torch.get_rng_state()
    assert run_head(run_of(), tmp_path / "whole").finished
    assert torch.equal(before, torch.get_rng_state()), "the global generator plays no part"
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    for last in sorted(random.sample(range(2, 16), 3)):

        def stop(at: loop.Progress, last: int = last) -> None:
            if at.step == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_head(run_of(), tmp_path / "killed", progress=stop)
    assert run_head(run_of(), tmp_path / "killed").finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert one["up.weight"].abs().max() > 0, "it has learned something"
    # What is written is a head of float16 that is served, and its target's text.
    head = load_exit_head(tmp_path / "whole", TARGET)
    torch.testing.assert_close(head.up.weight, one["up.weight"], rtol=1e-3, atol=1e-3)
    assert head.shape.exit_threshold == 0.3
    law = laws(12)["greedy"]
    plain = texts(served(TARGET, NoDrafter()), law, RAGGED[:2])
    assert texts(served(TARGET, EarlyExitDrafter(1, head=head)), law, RAGGED[:2]) == plain
    lines = (tmp_path / "whole" / "training" / "log.jsonl").read_text().splitlines()
    measured = [line for line in map(json.loads, lines) if "accepted_length" in line]
    assert [line["step"] for line in measured] == [8, 16]
    assert all(1.0 <= line["accepted_length"] <= 1.0 + heads.DEPTH for line in measured)
    with pytest.raises(InvalidConfig, match="another recipe"):
        run_head(run_of(dataclasses.replace(EXIT, seed=6)), tmp_path / "killed")


@pytest.mark.parametrize("loss", LOSSES)
def test_it_learns_by_every_loss_and_the_target_does_not_change(loss: str) -> None:
    """Distances fall on the rows that are learned from, and so does the confidence's."""
    assert EXIT.exit is not None
    learns = dataclasses.replace(EXIT.exit, loss=loss, written_share=0.0)
    run = run_of(dataclasses.replace(EXIT, exit=learns))
    before = {name: value.clone() for name, value in TARGET.model.state_dict().items()}
    tokens_BT = torch.tensor([documents(1)[0][:32]])
    optimiser = torch.optim.Adam(run.head.parameters(), 3e-3)
    losses: list[float] = []
    for _ in range(12):
        lost = run.objective.loss(run.head, tokens_BT, tokens_BT, 0)  # type: ignore[arg-type]
        optimiser.zero_grad()
        lost.backward()
        optimiser.step()
        losses.append(lost.item())
    assert losses[-1] < losses[0] - 0.01
    assert all(
        torch.equal(value, before[name]) for name, value in TARGET.model.state_dict().items()
    )


def test_gradients_pass_what_the_target_itself_makes_of_states() -> None:
    """Norm, output layer and what a family makes of its logits, soft caps and factors included."""
    for family in ("llama", "opt", "qwen3", "gemma2", "cohere"):
        target = HuggingFaceTarget(random_model(family))
        parts, seq = differentiable(target, torch.float32), target.open(6)
        depth = target.model.config.num_hidden_layers
        with target.tapping((depth,)) as taps:
            logits_RV = target.score(Rows((seq,), (6,), torch.arange(1, 7)))
        states_RD = taps.of(seq).clone().requires_grad_()
        own_RV = parts.output(parts.norm(states_RD))
        torch.testing.assert_close(own_RV, logits_RV.clone(), atol=1e-4, rtol=1e-4)
        own_RV.sum().backward()
        assert states_RD.grad is not None and states_RD.grad.abs().max() > 0


def test_a_head_knows_the_weights_it_was_trained_for(tmp_path: Path) -> None:
    """Another target of its class and shape is refused by name; so are heads of the other kinds."""
    text = [ROOT / "outrider" / "train"]
    for kind, spec in (("early-exit", "early-exit"), ("mtp", "mtp"), ("eagle3", "eagle")):
        recipe, _ = head_recipe(kind, tokens=4096)
        run, out = prepare_head(recipe, target="bundled", text=text), tmp_path / kind
        run_heads._save(run, out)
        if isinstance(run.head, ExitHead):
            assert load_exit_head(out).shape.depth == 6
        assert check_fingerprint(out, bundled_path("target")) is None
        other = tmp_path / "other"
        if not other.is_dir():
            shutil.copytree(bundled_path("target"), other)
            with sorted(other.glob("*.safetensors"))[-1].open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x3c")
        parsed = DrafterSpec.parse(f"{spec}:{out}")
        assert isinstance(head_drafter(parsed, bundled_path("target"), run.target), Drafter)
        with pytest.raises(ModelError, match=r"made for 'bundled', and the target '.*other' has"):
            head_drafter(parsed, other, run.target)


def test_a_plan_and_the_recipes() -> None:
    plan = plan_head(run_of())
    assert "16 steps, 1024 tokens, a head of" in plan.said()
    assert exit_layers(ExitRecipe(), TARGET) == 1 and exit_layers(ExitRecipe(layers=2), TARGET) == 2
    recipe, manifest = head_recipe("early-exit", str(SHIPPED), loss="block")
    assert recipe.exit is not None and recipe.exit.loss == "block" and manifest is not None
    # Two bytes a number, at the bundled target's width.
    assert 2 * (2 * recipe.exit.rank * 384 + 2 * 384 + 2) < 1_000_000
    assert head_recipe("early-exit", tokens=4096)[0].exit == ExitRecipe()
    with pytest.raises(InvalidConfig, match="run `outrider train early-exit` with it"):
        head_recipe("eagle3", str(SHIPPED))
    with pytest.raises(InvalidConfig, match="run `outrider train eagle3` with it"):
        head_recipe("early-exit", str(SHIPPED.parent / "eagle.toml"))
    with pytest.raises(InvalidConfig, match=r"exit\.rank is 0; give at least 1"):
        ExitRecipe(rank=0)
    with pytest.raises(InvalidConfig, match=r"exit\.exit_threshold is 2"):
        ExitRecipe(exit_threshold=2)
