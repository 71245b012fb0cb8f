"""Rows of a record whose rates are known, and a report with every cell in it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arena.__main__ import main
from benchmarks.arena.engines import Arm
from benchmarks.arena.grid import GRIDS, INFLATED, RANDOM, cells
from benchmarks.arena.tables import Found

CELL = "small c=0.1 T=0 batch=1 prompt=128"
SAMPLED = "small c=0.1 T=0.8 batch=1 prompt=128"


def outcome(rate: float, text: str = "a", accepted: int | None = None) -> dict[str, Any]:
    return {
        "tokens": 32,
        "seconds": 32 / rate,
        "first_s": 0.5,
        "rounds": None,
        "drafted": None,
        "accepted": accepted,
        "texts": [text],
    }


def heat(rates: dict[str, float], drift: float = 0.2) -> dict[str, Any]:
    """Sixteen rounds on a machine that slows down: every rate by the same factor."""
    return {
        str(n): {
            "number": n,
            "others": 0.01,
            "clocks_mhz": 2500.0,
            "found": {
                name: outcome(rate / (1 + drift * n), accepted=16 if "draft" in name else None)
                for name, rate in rates.items()
            },
        }
        for n in range(16)
    }


FIRST = {
    "outrider/none": 20.0,
    "outrider/draft": 40.0,
    "transformers/plain": 10.0,
    "transformers/assistant": 15.0,
}
SECOND = {
    "outrider/none": 10.0,
    "openvino/plain": 15.0,
    "openvino/draft": 25.0,
    "openvino/int8": 90.0,
}


@pytest.fixture
def record() -> dict[str, Any]:
    arms = {
        name: {"version": name, "startup_s": 2.0, "peak_bytes": 10**9} for name in FIRST | SECOND
    }
    arms["outrider/draft"]["cost_ratio"] = 0.11
    machine = {
        "processor": "a processor", "num_cpus": 2, "capability": "AVX512", "system": "Linux",
        "python": "3.11", "load_average": [0.1, 0.1, 0.1],
    }  # fmt: skip
    return {
        "commands": ["python -m benchmarks.arena run"],
        "machine": machine,
        "machines": [machine],
        "settings": {
            "pairs": 16,
            "tokens": 32,
            "k": 4,
            "threads": 2,
            "top_k": 40,
            "arms": [*FIRST, *SECOND],
        },
        "stages": {"small c=0.1": arms},
        "skipped": {"everywhere": {"vllm/plain": "not installed"}},
        "cells": {CELL: {"0": heat(FIRST), "1": heat(SECOND)}, SAMPLED: {"0": heat(SECOND)}},
    }


def row(record: dict[str, Any], name: str, cell: str = CELL) -> Any:
    return next(row for row in Found(record).rows(cell) if row.arm == Arm.of(name))


def test_drift_leaves_the_ratio_over_plain_alone(record):
    over = row(record, "outrider/draft").over_plain
    assert (over.mean, over.low, over.high) == pytest.approx((2.0, 2.0, 2.0))
    assert row(record, "outrider/none").over_plain is None


def test_arms_of_different_heats_meet_through_the_anchor(record):
    # openvino/draft is 2.5 times its heat's anchor, which is half as fast there as in the other.
    found = row(record, "openvino/draft")
    assert found.best_peer == Arm.of("outrider/draft")
    assert found.over_peer.mean == pytest.approx(2.5 / 2.0)
    ours = row(record, "outrider/draft")
    assert ours.best_peer == Arm.of("openvino/draft")
    assert ours.over_peer.mean == pytest.approx(2.0 / 2.5)


def test_intervals_hold_what_varies(record):
    rates = record["cells"][CELL]["0"]
    for n, factor in enumerate([0.9, 1.1] * 8):
        rates[str(n)]["found"]["outrider/draft"]["seconds"] *= factor
    over = row(record, "outrider/draft").over_plain
    assert over.low < over.mean < over.high
    assert over.mean == pytest.approx(2.0 / (0.9 * 1.1) ** 0.5)
    # Half a standard deviation of ten percent over sixteen rounds, twice.
    assert over.high / over.low == pytest.approx(1.1, abs=0.03)


def test_eight_bits_and_wrong_laws_are_no_peers(record):
    assert row(record, "openvino/int8").best_peer is None
    sampled = row(record, "outrider/none", SAMPLED)
    assert sampled.best_peer == Arm.of("openvino/plain")
    assert row(record, "openvino/draft", SAMPLED).wrong
    assert row(record, "openvino/draft").wrong is None


def test_tokens_a_forward_and_equal_texts(record):
    assert row(record, "outrider/draft").kept == pytest.approx(2.0)
    assert row(record, "outrider/none").kept is None
    assert row(record, "outrider/draft").equal == (16, 16)
    other = copy.deepcopy(record)
    other["cells"][CELL]["0"]["3"]["found"]["outrider/draft"]["texts"] = ["b"]
    assert row(other, "outrider/draft").equal == (15, 16)
    assert row(other, "openvino/draft", SAMPLED).equal is None


def test_the_report_has_every_cell_arm_and_reason(record):
    text = Found(record).markdown("arena.json")
    for cell, heats in record["cells"].items():
        part = text.split(f"### {cell}\n")[1].split("###")[0]
        for name in {name for rounds in heats.values() for name in rounds["0"]["found"]}:
            engine, _, arm = name.partition("/")
            assert f"| {engine} | {arm}" in part
        assert "`vllm/plain` skipped: not installed." in part
    assert "law known wrong" in text.split(f"### {SAMPLED}")[1]
    assert "law known wrong" not in text.split(f"### {SAMPLED}")[0]
    assert "8 bit" in text


def test_who_has_rounds_is_not_called_skipped(record):
    record["skipped"]["small c=0.1"] = {"openvino/draft": "failed later", "vllm/draft": "failed"}
    assert set(Found(record).skipped(CELL)) == {"vllm/plain", "vllm/draft"}


def test_a_start_up_on_a_busy_machine_is_not_told(record):
    assert row(record, "outrider/none").startup_s == 2.0
    record["stages"]["small c=0.1"]["outrider/none"]["startup_others"] = 0.4
    assert row(record, "outrider/none").startup_s is None


def test_the_command_prints_it(record, tmp_path: Path, capsys):
    (tmp_path / "arena.json").write_text(json.dumps(record))
    assert main(["report", str(tmp_path / "arena.json")]) == 0
    assert f"### {CELL}" in capsys.readouterr().out


def test_an_unknown_engine_is_a_mistake(tmp_path: Path, capsys):
    assert main(["setup", "nothing", "--home", str(tmp_path)]) == 2
    assert "llama.cpp" in capsys.readouterr().err
    files = ["--home", str(tmp_path), "--json", str(tmp_path / "arena.json")]
    assert main(["run", "--prepare", "--engines", "outrider,nothing", *files]) == 2
    assert "'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--pairs", "0"], ["--tokens", "1"], ["--k", "0"]])
def test_numbers_that_measure_nothing_are_mistakes(wrong: list[str], tmp_path: Path, capsys):
    files = ["--home", str(tmp_path), "--json", str(tmp_path / "arena.json")]
    assert main(["run", "--prepare", *wrong, *files]) == 2
    assert f"{wrong[0][2:]}={wrong[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "# a page", "[]", "{}"])
def test_what_is_no_record_is_a_mistake(text: str | None, tmp_path: Path, capsys):
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 2
    assert "other.json: no record" in capsys.readouterr().err


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_has_cells_of_every_checkpoint(grid: str):
    for checkpoint in (*INFLATED, *RANDOM):
        found = cells((checkpoint,), *GRIDS[grid][1:])
        assert found and {cell.stage.checkpoint for cell in found} == {checkpoint}
        # Greedy ones first: engines that fail in sampling are out afterwards.
        assert [cell.temperature for cell in found] == sorted(cell.temperature for cell in found)


def test_an_unknown_checkpoint_is_a_mistake(tmp_path: Path, capsys):
    files = ["--home", str(tmp_path), "--json", str(tmp_path / "arena.json")]
    assert main(["run", "--prepare", "--checkpoints", "nobody", *files]) == 2
    assert "'nobody'" in capsys.readouterr().err


def test_the_picture_is_drawn(record, tmp_path: Path):
    pytest.importorskip("matplotlib")
    from benchmarks.arena.picture import draw

    record["stages"]["qwen3-0.6b c=0.1 alpha=0.7"] = record["stages"]["small c=0.1"]
    record["cells"]["qwen3-0.6b c=0.1 alpha=0.7 T=0 batch=1 prompt=128"] = {"0": heat(FIRST)}
    draw(Found(record), tmp_path / "arena.png")
    assert (tmp_path / "arena.png").stat().st_size > 1000
