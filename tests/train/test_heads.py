"""Heads learn from their target, and survive a kill bit for bit."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models import hf
from outrider.models.bundled import bundled_path
from outrider.models.eagle import EagleHead
from outrider.models.hf import HuggingFaceTarget
from outrider.models.mtp_files import load_mtp
from outrider.models.product import product
from outrider.models.speculators import load_head
from outrider.models.text import TextTokenizer
from outrider.train import head as heads
from outrider.train import loop, plan
from outrider.train import run_head as run_heads
from outrider.train.eagle import TrainingTimeTest, draft_tokens, new_head, taps_of
from outrider.train.exit import ExitTraining, new_exit_head
from outrider.train.head import compiled_meanwhile
from outrider.train.mtp import new_module
from outrider.train.recipe import (
    LOSSES,
    EagleRecipe,
    ExitRecipe,
    HeadRecipe,
    MtpRecipe,
    TrainRecipe,
)
from outrider.train.run_head import HeadRun, head_recipe, plan_head, prepare_head, run_head
from outrider.train.schedule import readings_at
from outrider.train.state import fingerprint, load_state
from outrider.train.texts import read_texts
from outrider.train.together import ALONE, Together
from tests.house.layout import ROOT
from tests.models.families import VOCAB, one_thread, random_model

single = pytest.fixture(scope="module", autouse=True)(one_thread)
RECIPE = HeadRecipe(
    name="test",
    seed=5,
    train=TrainRecipe(
        tokens=16 * 64,
        batch_tokens=64,
        micro_tokens=32,
        context=32,
        long_context=32,
        warmup_steps=2,
        vector_rate=1e-2,
        threads=1,
    ),
    eagle=EagleRecipe(
        draft_vocab=60, ffn_size=32, steps=3, written_share=0.5, written_rows=6, prompt_tokens=8
    ),
)
TARGET = HuggingFaceTarget(random_model("llama"), share_prefixes=False)


def documents(seed: int) -> tuple[tuple[int, ...], ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(1, 80, (200,), generator=draw).tolist()) for _ in range(4))


def run_of(recipe: HeadRecipe = RECIPE) -> HeadRun:
    train, held_out = documents(1), documents(2)
    tokens = draft_tokens(train, VOCAB, recipe.eagle.draft_vocab)
    objective = TrainingTimeTest(recipe, TARGET, train, held_out, 0)
    head = new_head(recipe, TARGET, tokens)
    return HeadRun(recipe, TARGET, objective, head, {"target": "tiny"}, "tiny")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = load_state(folder / "training")
    assert state is not None
    return state["model"]


def test_a_run_killed_three_times_resumes_to_the_same_bits_and_is_served(
    tmp_path, monkeypatch
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
        state = load_state(tmp_path / "killed" / "training")
        assert state is not None and state["step"] == last - 1
        assert len(state["objective"]["written"]) == 6, "what the target wrote is kept"
    assert run_head(run_of(), tmp_path / "killed").finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys() and "embed_tokens.weight" not in one
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["fc.weight"], run_of().head.fc.weight)
    # Its folder is a head of float16, over the tokens that the text has most.
    head = load_head(tmp_path / "whole")
    torch.testing.assert_close(head.fc.weight, one["fc.weight"], rtol=1e-3, atol=1e-3)
    assert head.shape.taps == (1, 2) and head.shape.draft_vocab_size == 60
    lines = (tmp_path / "whole" / "training" / "log.jsonl").read_text().splitlines()
    noted = [json.loads(line) for line in lines]
    assert [line["step"] for line in noted] == list(range(1, 17))
    measured = [line["step"] for line in noted if "accepted_length" in line]
    assert measured == [8, 16]
    changed = dataclasses.replace(RECIPE, seed=6)
    with pytest.raises(InvalidConfig, match=r"another recipe or other files \(seed differ\)"):
        run_head(run_of(changed), tmp_path / "killed")


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        dataclasses.replace(
            RECIPE, eagle=EagleRecipe(), mtp=MtpRecipe(ffn_size=32, prompt_tokens=8)
        ),
        dataclasses.replace(
            RECIPE, eagle=EagleRecipe(), exit=ExitRecipe(layers=1, rank=4, prompt_tokens=8)
        ),
    ],
    ids=("eagle", "mtp", "exit"),
)
def test_products_in_bfloat16_learn_the_same_in_float32(recipe: HeadRecipe) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    losses: list[float] = []
    for precision in ("float32", "bfloat16"):
        train = dataclasses.replace(recipe.train, precision=precision)
        asked = dataclasses.replace(recipe, train=train)
        kind = ExitTraining if recipe.exit else TrainingTimeTest
        objective = kind(asked, TARGET, documents(1), documents(2), 0)
        if recipe.exit:
            head = new_exit_head(asked, TARGET)
        elif recipe.mtp:
            head = new_module(asked, TARGET)
        else:
            head = new_head(asked, TARGET, torch.arange(60))
        losses.append(objective.backward(head, 0))
        gradients.append({n: p.grad for n, p in head.named_parameters() if p.grad is not None})
    high, low = gradients
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]
    assert high.keys() == low.keys() and len(low) > 1
    for name, gradient in low.items():
        assert gradient.dtype == torch.float32
        size = high[name].norm()
        assert (gradient - high[name]).norm() <= 0.1 * size + 1e-6, name


def test_the_laws_learned_are_the_target_s_in_its_own_precision(monkeypatch) -> None:
    """A target whose cache has no pool yet makes one in its own dtype, and drafts from it."""
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    target = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    train = dataclasses.replace(RECIPE.train, precision="bfloat16")
    recipe = dataclasses.replace(
        RECIPE, train=train, eagle=dataclasses.replace(RECIPE.eagle, written_share=0.0)
    )
    objective = TrainingTimeTest(recipe, target, documents(1), documents(2), 0)
    rows = objective._rows(0)
    own = objective._read(rows, (1, 2))
    fresh = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    objective = TrainingTimeTest(recipe, fresh, documents(1), documents(2), 0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = objective._read(rows, (1, 2))
    assert all(torch.equal(one, other) for one, other in zip(own, mixed, strict=True))
    head = new_head(recipe, fresh, torch.arange(60))
    objective.backward(head, 0)
    assert 1.0 <= objective.held_out(head) <= 1.0 + heads.DEPTH


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_plan_is_timed_in_the_recipe_s_precision(precision: str, monkeypatch) -> None:
    train = dataclasses.replace(RECIPE.train, precision=precision)
    run = run_of(dataclasses.replace(RECIPE, train=train))
    usual, low = run.objective.loss, []

    def loss(*given):
        low.append(torch.is_autocast_enabled("cpu"))
        return usual(*given)

    monkeypatch.setattr(run.objective, "loss", loss)
    run.objective.rehearse(run.head, 0)
    run.objective.backward(run.head, 0)
    assert set(low) == {precision == "bfloat16"}


def test_a_float32_head_adds_up_in_float32_on_a_bfloat16_target() -> None:
    model = random_model("llama").bfloat16()
    target = HuggingFaceTarget(model, share_prefixes=False)
    objective = TrainingTimeTest(RECIPE, target, documents(1), documents(2), 0)
    head = new_head(RECIPE, target, torch.arange(60))
    normed: list[torch.dtype] = []
    layer = head.layers[0]
    for norm in (layer.input_layernorm, layer.hidden_norm):
        norm.register_forward_pre_hook(lambda _, given: normed.append(given[0].dtype))
    objective.backward(head, 0)
    assert head.embeddings.weight.dtype == torch.bfloat16 and set(normed) == {torch.float32}


def test_a_head_learns_what_its_target_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    longer = dataclasses.replace(RECIPE.train, tokens=50 * 64)
    run = run_of(dataclasses.replace(RECIPE, train=longer))
    losses = [loss for _, loss in run_head(run, tmp_path).history]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert 1.0 <= run.objective.held_out(run.head) <= 1.0 + heads.DEPTH


def mtp_run() -> HeadRun:
    """A run of an MTP module, with few steps."""
    own = MtpRecipe(ffn_size=32, written_share=0.5, written_rows=6, prompt_tokens=8)
    train = dataclasses.replace(RECIPE.train, tokens=12 * 64)
    recipe = dataclasses.replace(RECIPE, train=train, eagle=EagleRecipe(), mtp=own)
    assert recipe.head is own and own.kind == "mtp"
    objective = TrainingTimeTest(recipe, TARGET, documents(1), documents(2), 0)
    return HeadRun(recipe, TARGET, objective, new_module(recipe, TARGET), {}, "tiny")


def test_an_mtp_module_learns_resumes_and_is_served(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    before = torch.get_rng_state()
    outcome = run_head(mtp_run(), tmp_path / "whole")
    losses = [loss for _, loss in outcome.history]
    assert outcome.finished and sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert torch.equal(before, torch.get_rng_state()), "the global generator plays no part"

    def stop(at: loop.Progress) -> None:
        if at.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_head(mtp_run(), tmp_path / "killed", progress=stop)
    assert run_head(mtp_run(), tmp_path / "killed").finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(name.startswith("mtp.0.") for name in one), "the target's parts are not saved"
    head = load_mtp(tmp_path / "whole", TARGET)
    read = head.state_dict()
    assert read.keys() == one.keys() and head.taps == (3,)
    torch.testing.assert_close(
        read["mtp.0.eh_proj.weight"], one["mtp.0.eh_proj.weight"], atol=1e-3, rtol=1e-3
    )
    assert read["mtp.0.block.mlp.up_proj.weight"].shape == (32, 64)
    plan = plan_head(mtp_run())
    assert plan.steps == 12 and plan.parameters == sum(t.numel() for t in one.values())


def test_no_module_is_trained_for_a_mixture_of_experts() -> None:
    recipe = dataclasses.replace(RECIPE, eagle=EagleRecipe(), mtp=MtpRecipe(prompt_tokens=8))
    with pytest.raises(UnsupportedModel, match="a mixture of experts, for which no MTP module"):
        new_module(recipe, HuggingFaceTarget(random_model("mixtral")))


@pytest.mark.parametrize("loss", LOSSES)
def test_two_shares_of_a_step_add_up_to_it_by_every_loss(loss: str) -> None:
    """Though the text of one has more tokens that can be guessed than the other's."""
    own = dataclasses.replace(RECIPE.eagle, loss=loss, written_share=0.0, draft_vocab=8)
    for micro_tokens in (128, 32):
        train = dataclasses.replace(RECIPE.train, batch_tokens=128, micro_tokens=micro_tokens)
        run = run_of(dataclasses.replace(RECIPE, eagle=own, train=train))
        found = []
        for shares in ([ALONE], [Together(0, 2), Together(1, 2)]):
            run.head.zero_grad()
            lost = sum(run.objective.backward(run.head, 0, share) for share in shares)
            grads = [p.grad.flatten() for p in run.head.parameters() if p.grad is not None]
            found.append((lost, torch.cat(grads)))
        (one, own_grads), (two, added_grads) = found
        assert two == pytest.approx(one, abs=1e-5)
        assert (own_grads - added_grads).norm() < 1e-4 * own_grads.norm()


def test_the_law_that_is_learned_is_that_of_the_whole_vocabulary() -> None:
    run, kept = run_of(), torch.tensor([3, 7, 20])
    rows = torch.tensor([documents(1)[0][:12]])
    _, log_p_BTM = run.objective._read(rows, (1,), kept)
    due_BTV = TARGET.model(rows, use_cache=False).logits.log_softmax(-1)
    torch.testing.assert_close(log_p_BTM, due_BTV[:, :, kept], atol=1e-4, rtol=1e-4)
    assert log_p_BTM.exp().sum(-1).max() < 0.9


def late(**changes) -> HeadRecipe:
    """RECIPE, whose places are read once more from a quarter and from half of its 16 steps on."""
    eagle = dataclasses.replace(RECIPE.eagle, step_from=(0.25, 0.5), written_share=0.0)
    return dataclasses.replace(RECIPE, eagle=dataclasses.replace(eagle, **changes))


def test_readings_are_added_in_the_course_of_a_run(tmp_path: Path, monkeypatch) -> None:
    assert [readings_at(s, RECIPE.train, RECIPE.eagle) for s in (0, 15)] == [3, 3]
    late_eagle = late().eagle
    assert [readings_at(s, RECIPE.train, late_eagle) for s in (0, 3, 4, 7, 8, 15)] == [
        *(1, 1, 2, 2, 3, 3)
    ]
    assert late(step_from=(0.5,)).eagle.changes(16) == (8, 8), "the last holds for all further ones"
    # A step of so many readings is the step of a recipe that has no others.
    for step, readings in ((0, 1), (4, 2), (8, 3)):
        one, other = run_of(late()), run_of(late(step_from=(), steps=readings))
        losses = [run.objective.backward(run.head, step) for run in (one, other)]
        assert losses[0] == losses[1]
        grads = [run.head.fc.weight.grad for run in (one, other)]
        assert torch.equal(grads[0], grads[1])
    # The times of all are in the plan, and a run that was killed between two of them resumes.
    assert run_of(late()).objective.stages == (0, 4, 8) and run_of().objective.stages == (0,)
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    assert run_head(run_of(late()), tmp_path / "whole").finished

    def stop(at: loop.Progress) -> None:
        if at.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_head(run_of(late()), tmp_path / "killed", progress=stop)
    longer = dataclasses.replace(late(), train=dataclasses.replace(RECIPE.train, tokens=40 * 64))
    with pytest.raises(InvalidConfig, match="past the constant phase of 16 or 40 steps"):
        run_head(run_of(longer), tmp_path / "killed")
    assert run_head(run_of(late()), tmp_path / "killed").finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for wrong in ((0.5, 0.25), (0.1, 0.2, 0.3), (1.0,), (True,), ("half",)):
        with pytest.raises(InvalidConfig, match=r"eagle.step_from is \[.*as steps = 3"):
            late(step_from=wrong)


def test_a_plan_counts_what_steps_of_fewer_readings_take(monkeypatch) -> None:
    run = run_of(late())
    read: list[int] = []
    usual = run.objective.rehearse

    def rehearse(head, step: int) -> int:
        read.append(step)
        clock[0] += {0: 1.0, 4: 2.0, 8: 3.0}[step]
        return usual(head, step)

    clock = [0.0]
    monkeypatch.setattr(run.objective, "rehearse", rehearse)
    monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])
    # Two micro-batches a step: 4 steps of one second each, 4 of two, 8 of three.
    assert plan_head(run).seconds == 2 * (4 * 1 + 4 * 2 + 8 * 3) and read == [8, 0, 4, 8]


@pytest.mark.compiled
def test_rows_are_written_by_compiled_forwards_and_read_by_the_model_s_own(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    target = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    given = RECIPE, target, documents(1), documents(2), 0
    used: list[tuple[bool, bool]] = []
    usual = target.score

    def score(*rows, **more):
        used.append((target.info()["compiled"], len(objective._written) > 0))
        return usual(*rows, **more)

    monkeypatch.setattr(target, "score", score)
    texts = []
    for asked in (False, True, "auto"):
        objective = TrainingTimeTest(*given, asked)
        objective.backward(new_head(RECIPE, target, torch.arange(60)), 0)
        # Compiled in the end while nothing is written yet, and never behind that.
        while_written = [compiled for compiled, written in used if not written]
        assert while_written[-1] is (asked is not False) and (True, True) not in used
        assert (False, True) in used
        assert not target.info()["compiled"] and target.product is None
        used.clear()
        texts.append(objective.state()["written"])
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_a_compilation_that_fails_leaves_the_model_s_own_forward(
    tmp_path: Path, monkeypatch
) -> None:
    """Products on disk, which are for every model, are not left to a target that has no more."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert product(build=True) is not None
    target = HuggingFaceTarget(random_model("llama"), share_prefixes=False)

    def refused(*given, **more):
        raise UnsupportedModel("no")

    monkeypatch.setattr(hf, "compiled_forward", refused)
    with compiled_meanwhile(target, "auto"):
        assert target.product is None
    assert target.product is None and not target.info()["compiled"]
    with pytest.raises(UnsupportedModel, match="no"), compiled_meanwhile(target, True):
        pass
    assert target.product is None
    with pytest.raises(InvalidConfig, match=r"eagle.written_share is 0; leave it out"):
        prepare_head(head_recipe("eagle3")[0], target="bundled", compile=True)


def test_runs_that_did_not_know_of_added_readings_go_on() -> None:
    table = fingerprint(RECIPE, {})
    assert "step_from" not in table["eagle"] and "step_from" in fingerprint(late(), {})["eagle"]


ROW_BYTES = 32 * (2 * TARGET.model.config.hidden_size * 4 + 60 * 2)
"""Of 32 places: what is behind two layers in float32, the law of 60 tokens in float16."""


def keeping(kept_gb: float, recipe: HeadRecipe = RECIPE, **changes) -> HeadRecipe:
    """Four rows at once, two of them the target's own."""
    head = dataclasses.replace(recipe.head, kept_gb=kept_gb, **changes)
    train = dataclasses.replace(RECIPE.train, tokens=16 * 128, batch_tokens=128, micro_tokens=128)
    return dataclasses.replace(recipe, train=train, **{head.section: head})


def counted(objective: heads.HeadObjective, monkeypatch) -> list[int]:
    """How many rows each of the target's readings had, from now on."""
    read, usual = [], objective._read_anew

    def read_anew(tokens_BT, *given):
        read.append(len(tokens_BT))
        return usual(tokens_BT, *given)

    monkeypatch.setattr(objective, "_read_anew", read_anew)
    return read


def test_what_the_target_makes_of_its_own_rows_is_kept(tmp_path: Path, monkeypatch) -> None:
    """Rows are read once where there is room, and the head is the same where there is none."""
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(heads, "NEW_TOKENS", 6)
    reads, room = {}, {"all": 1.0, "two": 2.9e-9 * ROW_BYTES, "none": 1e-12}
    held = {"all": 6, "two": 2, "none": 0}
    for name, kept_gb in room.items():
        run = run_of(keeping(kept_gb))
        reads[name] = counted(run.objective, monkeypatch)
        assert run_head(run, tmp_path / name).finished
        sizes = [
            sum(part.nbytes for part in made) for made in run.objective._kept._readings.values()
        ]
        assert len(sizes) == held[name] and set(sizes) <= {ROW_BYTES}
        assert run.objective.kept_bytes == held[name] * ROW_BYTES
    # A step's two rows of the text are read together, those of the target's own one by one.
    assert all(own.count(2) == 16 and set(own) == {1, 2} for own in reads.values())
    assert [own.count(1) for own in reads.values()][::2] == [6, 32]
    assert 6 < reads["two"].count(1) < 32
    run = run_of(keeping(0.0))
    together = counted(run.objective, monkeypatch)
    run.objective.backward(run.head, 0)
    assert together == [4], "rows of which nothing is kept are read as they always were"

    def stop(at: loop.Progress) -> None:
        if at.step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_head(run_of(keeping(1.0)), tmp_path / "killed", progress=stop)
    # How much is kept may change in between, whether anything is may not.
    with pytest.raises(InvalidConfig, match="eagle differ"):
        run_head(run_of(keeping(0.0)), tmp_path / "killed")
    assert run_head(run_of(keeping(0.5)), tmp_path / "killed").finished
    found = [weights(tmp_path / name) for name in (*room, "killed")]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    for nothing in (RECIPE, late(kept_gb=1.0)):
        assert "kept_gb" not in fingerprint(nothing, {})["eagle"], "without rows of its own"
    with pytest.raises(InvalidConfig, match=r"eagle.kept_gb is -1; give at least 0"):
        keeping(-1)


def test_rows_of_another_run_are_not_taken_for_kept_ones(monkeypatch) -> None:
    run = run_of(keeping(1.0))
    run.objective.backward(run.head, 0)
    read = counted(run.objective, monkeypatch)
    run.objective.backward(run.head, 0)
    assert read == [2]
    run.objective.restore(run.objective.state())
    run.objective.backward(run.head, 0)
    assert read[1:] in ([1, 1, 2], [1, 2])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["eagle", "mtp", "exit"])
def test_what_is_kept_teaches_the_same(kind: str, loss: str, precision: str) -> None:
    """But for the rounding of the laws."""
    others = {
        "eagle": RECIPE.eagle,
        "mtp": MtpRecipe(ffn_size=32, prompt_tokens=8),
        "exit": ExitRecipe(layers=1, rank=4, prompt_tokens=8),
    }
    sections = {"eagle": EagleRecipe(), kind: others[kind]}
    recipe = dataclasses.replace(RECIPE, **sections)
    made = {"mtp": new_module, "exit": new_exit_head}
    losses, grads = [], []
    for kept_gb in (0.0, 1.0):
        asked = keeping(kept_gb, recipe, loss=loss, written_share=0.5, written_rows=2)
        train = dataclasses.replace(asked.train, precision=precision)
        asked = dataclasses.replace(asked, train=train)
        kinds = ExitTraining if kind == "exit" else TrainingTimeTest
        objective = kinds(asked, TARGET, documents(1), documents(2), 0)
        if kind in made:
            head = made[kind](asked, TARGET)
        else:
            head = new_head(asked, TARGET, torch.arange(60))
        losses.append([objective.backward(head, step) for step in range(3)])
        grads.append({n: p.grad for n, p in head.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and grads[0]
    for name, gradient in grads[0].items():
        off = (grads[1][name] - gradient).norm()
        # Where laws meet the total variation has a kink.
        assert off <= 0.05 * gradient.norm() + 1e-6, name


def test_a_plan_counts_what_will_be_kept(monkeypatch) -> None:
    for recipe, rows in ((keeping(1.0), 6), (keeping(0.0), 0), (late(kept_gb=1.0), 0)):
        run, made = run_of(recipe), []

        def planned(*given, made=made):
            made.append(plan.planned(*given))
            return made[0]

        monkeypatch.setattr(run_heads, "planned", planned)
        assert run.objective.kept_bytes == 0, "nothing was read yet"
        memory = plan_head(run).memory_bytes
        assert memory - made[0].memory_bytes == run.objective.kept_bytes == rows * ROW_BYTES


def test_the_most_frequent_tokens_are_drafted() -> None:
    assert draft_tokens([[3, 3, 1], [1, 5], []], 6, 2).tolist() == [1, 3]
    assert draft_tokens([[3]], 6, 3).tolist() == [0, 1, 3]
    assert draft_tokens([[3]], 6, 99).tolist() == list(range(6))
    assert taps_of(EagleRecipe(), TARGET) == (1, 2)
    assert taps_of(EagleRecipe(taps=(2, 3)), TARGET) == (2, 3)


def test_a_plan_costs_one_micro_batch_and_changes_nothing() -> None:
    run = run_of()
    plan = plan_head(run)
    assert (plan.steps, plan.tokens) == (16, 16 * 64) and plan.memory_bytes > 1e6
    assert "16 steps, 1024 tokens, a head of" in plan.said()
    assert all(parameter.grad is None for parameter in run.head.parameters())
    assert isinstance(run.head, EagleHead)


def test_texts_are_files_folders_and_conversations(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(bundled_path("target"))
    for i in range(3):
        (tmp_path / f"{i}.py").write_text(f"x = {i}\n")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "more.jsonl").write_text('{"text": "def f():"}\n\n{"text": "import os"}\n')
    texts = read_texts([tmp_path], tokenizer)
    wanted = ["x = 0\n", "x = 1\n", "x = 2\n", "def f():", "import os"]
    decoded = [tokenizer.decode(ids) for ids in (*texts.train, *texts.held_out)]
    assert sorted(decoded) == sorted(wanted) and len(texts.held_out) == 1
    (tmp_path / "one.txt").write_text("word " * 100)
    single = read_texts([tmp_path / "one.txt"], tokenizer)
    assert len(single.held_out[0]) == (len(single.train[0]) + len(single.held_out[0])) // 20
    # What ends a line elsewhere is text in JSON; what is no text is left out of folders.
    (tmp_path / "more.jsonl").write_text('{"text": "a\u2028b"}\n', "utf-8-sig")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("no")
    (tmp_path / "image").write_bytes(b"\xff\xfe\xff")
    again = read_texts([tmp_path], tokenizer)
    decoded = [tokenizer.decode(ids) for ids in (*again.train, *again.held_out)]
    assert "a\u2028b" in decoded and "no" not in decoded
    for content, says in (
        ("{", "line 1 of bad.jsonl is no JSON"),
        ('{"messages": []}', "neither a text nor a conversation"),
        ("[1]", "neither a text nor a conversation"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(InvalidConfig, match=says):
            read_texts([tmp_path / "bad.jsonl"], tokenizer)
    (tmp_path / "raw").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidConfig, match="no text in UTF-8"):
        read_texts([tmp_path / "raw"], tokenizer)
    with pytest.raises(InvalidConfig, match="is no file or folder"):
        read_texts([tmp_path / "nowhere"], tokenizer)
    (tmp_path / "short").write_text("x = 1")
    with pytest.raises(InvalidConfig, match="too little text"):
        read_texts([tmp_path / "short"], tokenizer)
    (tmp_path / "empty").write_text("")
    with pytest.raises(InvalidConfig, match="too little text"):
        read_texts([tmp_path / "empty"], tokenizer)


def test_recipes_of_heads_are_checked() -> None:
    shipped = ROOT / "outrider-models" / "outrider_models" / "recipes" / "eagle.toml"
    recipe, manifest = head_recipe("eagle3", str(shipped))
    assert recipe.corpus is not None and manifest is not None and manifest.is_file()
    recipe, manifest = head_recipe("eagle3", tokens=4096, loss="tv")
    assert (recipe.train.tokens, recipe.eagle.loss, manifest) == (4096, "tv", None)
    with pytest.raises(InvalidConfig, match=r"eagle\.loss is mse; give one of ce, kl"):
        head_recipe("eagle3", loss="mse")
    with pytest.raises(InvalidConfig, match=r"mtp\.loss is mse; give one of ce, kl"):
        head_recipe("mtp", loss="mse")
    recipe, _ = head_recipe("mtp", str(shipped.with_name("mtp.toml")), tokens=4096, loss="tv")
    assert recipe.mtp is not None and (recipe.train.tokens, recipe.mtp.loss) == (4096, "tv")
    with pytest.raises(InvalidConfig, match="of kind eagle3, and mtp is asked for"):
        head_recipe("mtp", str(shipped))
    for other in ({"mtp": MtpRecipe()}, {"exit": ExitRecipe()}):
        with pytest.raises(InvalidConfig, match=r"of several heads; give \[eagle\], \[mtp\] or"):
            dataclasses.replace(RECIPE, **other)
    with pytest.raises(InvalidConfig, match=r"eagle\.written_rows is 0; give at least 1"):
        EagleRecipe(written_rows=0)
    train = dataclasses.replace(RECIPE.train, growth=((0, 1),))
    with pytest.raises(InvalidConfig, match=r"train\.growth is .* know no other"):
        dataclasses.replace(RECIPE, train=train)
    with pytest.raises(InvalidConfig, match=r"train\.context is 32; give more than 65"):
        dataclasses.replace(RECIPE, eagle=EagleRecipe(prompt_tokens=64))
