"""`outrider profile`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from outrider.bench.machine import Machine
from outrider.bench.profile import MEANINGS, STAGES, Profile, Stages
from outrider.control.costs import Costs, DraftCost, ForwardCost
from tests.cli.conftest import Ran

Command = Callable[..., Ran]
SHORT = ("-n", "8", "--repeats", "1", "--no-compile", "--dtype", "float32")


@pytest.fixture
def profiled(outrider: Command, model: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `outrider profile` with a small model on a machine that reads 8 GB a second."""
    monkeypatch.setattr("outrider.bench.profile.read_bandwidth", lambda: 8e9)

    def call(*words: str) -> Ran:
        return outrider("profile", "--model", model, "--drafter", "ngram", *SHORT, *words)

    return call


def test_the_table(profiled: Command) -> None:
    ran = profiled("def f(x):\n    return")
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert lines[0].split() == ["stage", "ms/step", "share", "calls", "MB/step", "GB/s", "of",
                                "bandwidth"]  # fmt: skip
    shown = [line[:18].strip() for line in lines[1:]]
    rows = shown[: shown.index("step")]
    assert set(rows) <= set(STAGES.values()) and rows[-1] == "other"
    assert {"target: linears", "target: attention", "draft: guesses", "verify"} <= set(rows)
    assert "draft: linears" not in rows
    assert "without hooks: " in ran.out and "8.0 GB/s read at best" in ran.out


def test_the_json(profiled: Command) -> None:
    threads = torch.get_num_threads()
    ran = profiled("--json", "--prompts", "2", "--batch", "2", "--threads", "1")
    assert torch.get_num_threads() == threads, "as before"
    found = json.loads(ran.out)
    named = {field.name for field in fields(Profile)}
    assert set(found) == named | {"machine", "info", "meanings"}
    assert found["machine"]["num_threads"] == 1
    assert set(found["machine"]) == {field.name for field in fields(Machine)}
    assert found["meanings"] == MEANINGS
    for stage in found["stages"]:
        assert set(stage) == {field.name for field in fields(Stages)}
        assert (stage["part"], stage["stage"]) in STAGES
    assert sum(stage["ms"] for stage in found["stages"]) == pytest.approx(found["ms_per_step"])
    assert found["tokens"] == 16 and found["bandwidth_gb_s"] == 8


def test_every_stage_is_explained() -> None:
    assert {stage for _, stage in STAGES} == set(MEANINGS)


def test_costs_come_in_order_with_their_file(
    outrider: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ((4, 8), (1, 5), (1, 1), (4, 4))
    costs = Costs(
        tuple(ForwardCost(texts, rows, 64, 1e-3 * rows) for texts, rows in rows),
        {"suffix": DraftCost(1e-4), "ngram": DraftCost(1e-4)},
    )
    monkeypatch.setattr("outrider.llm.llm.measure_costs", lambda *_, **__: costs)
    words = ("--model", model, "--drafter", "suffix,ngram", "--prompts", "1", *SHORT)
    ran = outrider("profile", "--costs", *words)
    assert ran.code == 0, ran.err
    *lines, last = ran.out.splitlines()
    assert [line.partition(" at ")[0] for line in lines[:4]] == [
        "1 row of 1 text", "5 rows of 1 text", "4 rows of 4 texts", "8 rows of 4 texts"
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in lines[4:]] == ["ngram", "suffix"]
    file = Path(last.removeprefix("kept in ").partition(",")[0])
    assert Costs.from_dict(json.loads(file.read_text())["costs"]) == costs
    assert outrider("profile", "--costs", "--model", model, "--drafter", "ngram").code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "0"), "batch=0: at least 1"),
        (("--threads", "0"), "threads=0: at least 1"),
        (("--repeats", "0"), "repeats=0: at least 1"),
        (("--prompts", "0"), "prompts=0: at least 1"),
        (("--prompts", "1000"), "held-out prompts"),
        (("", "--no-compile"), "the prompt is empty"),
        (("x", "-n", "1"), "ask for more tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    profiled: Command, words: tuple[str, ...], said: str
) -> None:
    ran = profiled(*words)
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("error: ") and said in ran.err
