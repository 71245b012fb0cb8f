"""`outrider train eagle3` as a process of its own, killed at moments that nobody chose."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.train.state import load_state
from tests.house.layout import ROOT
from tests.train.train_recipes import write_target

STEPS = 64
RECIPE = f"""
name = "killed"
seed = 5
[train]
tokens = {STEPS * 64}
batch_tokens = 64
micro_tokens = 32
context = 32
long_context = 32
warmup_steps = 2
threads = 1
[eagle]
taps = [1, 2]
draft_vocab = 60
ffn_size = 32
written_share = 0.5
written_rows = 6
prompt_tokens = 8
"""
COMMAND = """
import sys
from outrider.cli import run
from outrider.train import loop
loop.CHECKPOINT_S = float(sys.argv[1])
sys.exit(run(sys.argv[2:]))
"""
OFTEN_S, SELDOM_S, PATIENCE_S = 0.05, 120.0, 900.0


def started(target: Path, out: Path, checkpoint_s: float) -> subprocess.Popen[bytes]:
    """The command in a process of its own, which saves its state so often."""
    recipe = target / "killed.toml"
    recipe.write_text(RECIPE, "utf-8")
    given = ["--target", target, "--text", target / "text.py", "--recipe", recipe, "--out", out]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(checkpoint_s), "train", "eagle3", *map(str, given)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


def steps_of(out: Path) -> list[int]:
    """The steps in a run's log in the order in which they were taken; a line may be cut."""
    log = out / "training" / "log.jsonl"
    found: list[int] = []
    for line in log.read_text("utf-8", "replace").splitlines() if log.is_file() else ():
        try:
            found.append(json.loads(line)["step"])
        except ValueError:
            continue
    return found


def killed(run: subprocess.Popen[bytes], out: Path, step: int, wait_s: float) -> int:
    """Kills a run some time behind a step; the step it has saved."""
    end = time.monotonic() + PATIENCE_S
    while max(steps_of(out), default=0) < step:
        assert run.poll() is None and time.monotonic() < end, f"no step {step}: {steps_of(out)}"
        time.sleep(0.002)
    time.sleep(wait_s)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "it was over before the kill"
    state = load_state(out / "training")
    return 0 if state is None else int(state["step"])


@pytest.mark.slow
def test_a_command_killed_three_times_ends_in_the_same_bits(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    target = tmp_path / "target"
    target.mkdir()
    write_target(target)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert started(target, whole, SELDOM_S).wait(PATIENCE_S) == 0
    assert steps_of(whole) == list(range(1, STEPS + 1))

    saved = 0
    for first, last in ((10, 24), (25, 39), (40, 54)):
        before = len(steps_of(broken))
        run = started(target, broken, OFTEN_S)
        now = killed(run, broken, draw.randint(first, last), draw.uniform(0.0, 0.05))
        assert steps_of(broken)[before] == saved + 1, "it goes on behind what was saved"
        assert saved < now < STEPS
        saved = now
    assert not (broken / "model.safetensors").exists()
    assert started(target, broken, OFTEN_S).wait(PATIENCE_S) == 0

    states = [load_state(folder / "training") for folder in (whole, broken)]
    one, other = (flat(state) for state in states)
    assert one.keys() == other.keys() and len(one) > 10
    assert all(torch.equal(one[name], other[name]) for name in one)
    written = [load_file(folder / "model.safetensors") for folder in (whole, broken)]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])


def flat(state: object, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a state: weights, moments, what the target wrote."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    if isinstance(state, dict):
        pairs = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        pairs = [(str(i), value) for i, value in enumerate(state)]
    else:
        return {}
    return {n: t for key, value in pairs for n, t in flat(value, f"{name}/{key}").items()}
