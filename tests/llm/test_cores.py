"""Others on the machine: how that is told, and that a program whose threads spin is told so."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from outrider import LLM, cores
from outrider.errors import OutriderWarning


@pytest.mark.parametrize(
    ("looks", "busy"),
    [
        ((0, 1, 1), None),
        ((1, 1, 1), False),
        ((2, 2, 2), True),
        ((3, 1, 2), False),
        ((2, 4, 3), True),
    ],
)
def test_others_are_at_work_where_they_run_in_every_look(
    monkeypatch: pytest.MonkeyPatch, looks: tuple[int, ...], busy: bool | None
) -> None:
    seen = ((running, running - 1) for running in looks)
    monkeypatch.setattr(cores, "_num_running", lambda: next(seen))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert cores.others_at_work() is busy


def test_cores_to_spare_are_no_reason_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_num_running", lambda: (7, 6))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores.others_at_work() is False


def test_threads_of_ones_own_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    # A thread that is gone by now is none; that which looks runs.
    states = {"loadavg": "1.5 1.2 1.0 5/80 123", "4": "R", "5": "S", "6": "R", "7": ""}

    def told(path: Path, *given: str) -> str:
        if path.name == "loadavg":
            return states["loadavg"]
        if path.name != "stat":
            return read_text(path, *given)
        if not states[path.parent.name]:
            raise FileNotFoundError
        return f"{path.parent.name} (a) R (b) {states[path.parent.name]} 1 1"

    own = [Path("/proc/self/task") / name for name in ("4", "5", "6", "7")]
    monkeypatch.setattr(Path, "read_text", told)
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(own))
    assert cores._num_running() == (5, 3)
    states["4"] = "S"
    assert cores._num_running() == (5, 4)
    states["4"] = "R"
    states["loadavg"] = "0.1 0.1 0.1 2/80 123"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert cores.others_at_work() is False


def test_where_nothing_can_be_read_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert cores.others_at_work() is None


@pytest.mark.parametrize(
    ("busy", "threads", "own", "told"),
    [
        (True, 2, {}, True),
        (None, 2, {}, False),
        (False, 2, {}, False),
        (True, 1, {}, False),
        (True, 2, {cores.POLICY: "active"}, False),
        (True, 2, {cores.SPINS: "100"}, False),
    ],
)
def test_a_program_is_told_of_threads_that_spin_beside_others(
    monkeypatch: pytest.MonkeyPatch,
    busy: bool | None,
    threads: int,
    own: dict[str, str],
    told: bool,
) -> None:
    for name in (cores.POLICY, cores.SPINS):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "others_at_work", lambda: busy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        LLM.load("bundled", "none", compile=False)
    ours = [one for one in seen if one.category is OutriderWarning]
    assert [one.filename for one in ours] == [__file__] * told
    assert all("OMP_WAIT_POLICY=passive" in str(one.message) for one in ours)
