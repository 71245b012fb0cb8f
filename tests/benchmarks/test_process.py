"""A worker's process: what it answers, that it stands still while it rests, how it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.arena.contest import Refused
from benchmarks.arena.engines import ENGINES, Engine
from benchmarks.arena.home import Home
from benchmarks.arena.process import Process, ProcessContender
from outrider.errors import ModelError
from tests.benchmarks.arenas import job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TASK = {"threads": 1, "target": "somewhere"}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    toy = Engine(str(Path(__file__).parent / "toy_worker.py"), None, True, (), (), 1.0, 0)
    monkeypatch.setitem(ENGINES, "toy", toy)
    return Home(tmp_path)


@pytest.fixture
def process(home) -> Iterator[Process]:
    started = Process.start(home, "toy", TASK, home.root / "log")
    yield started
    started.end()


def state(process: Process) -> str:
    stat = Path(f"/proc/{process.popen.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def waited(process: Process, wanted: str) -> bool:
    for _ in range(200):
        if state(process) in wanted:
            return True
        time.sleep(0.01)
    return False


def test_a_worker_answers(process, home):
    assert process.about["version"] == "toy 1"
    assert process.startup_s > 0
    assert process.peak_bytes() > 1e6
    found = ProcessContender("toy/plain", "plain", process).run(job(tokens=3))
    assert found.texts == ((3, 3, 3),) and found.seconds == 0.5
    assert "an engine's own words" in (home.root / "log").read_text()


def test_a_resting_worker_is_stopped_and_goes_on(process):
    contender = ProcessContender("toy/plain", "plain", process)
    contender.rest()
    assert waited(process, "T")
    contender.wake()
    assert contender.run(job()).seconds == 0.5


def test_refusals_failures_and_deaths_are_told_apart(process, home):
    with pytest.raises(Refused, match="one text at a time"):
        ProcessContender("toy/a", "refuses", process).run(job())
    with pytest.raises(ModelError, match="ValueError: no such arm"):
        ProcessContender("toy/b", "fails", process).run(job())
    with pytest.raises(ModelError, match="ended with code 7"):
        ProcessContender("toy/c", "dies", process).run(job())
    with pytest.raises(Refused, match="no such model"):
        Process.start(home, "toy", {**TASK, "target": "nowhere"}, home.root / "log")


def test_who_does_not_answer_is_not_waited_for(process):
    process.rest()
    with pytest.raises(ModelError, match="no answer"):
        process.ask({"do": "run", "arm": "plain", "prompts": [], "tokens": 1}, 0.05)


def test_a_stopped_worker_can_be_ended(process):
    process.rest()
    assert waited(process, "T")
    process.end()
    assert process.popen.poll() is not None
    process.end()
