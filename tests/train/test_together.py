"""Two processes are one: what each adds, writes and reads of a run that they share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import InvalidConfig
from outrider.train.together import ALONE, joined
from tests.house.layout import ROOT
from tests.models.families import one_thread
from tests.train import shared

single = pytest.fixture(scope="module", autouse=True)(one_thread)

SCRIPT = """
import atexit, json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from outrider.train.together import joined
from tests.train import shared

torch.set_num_threads(1)
atexit.register(lambda: shared.tell({"left": not dist.is_initialized()}))
# A GPU that is there is not what was asked for.
torch.cuda.is_available = lambda: True
together = joined("cpu")
torch.cuda.is_available = lambda: False
shared.tell({"backend": dist.get_backend()})
for name in shared.FOUND:
    shared.tell({name: shared.FOUND[name](together, Path(sys.argv[1]))})
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("pair")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    started = [
        subprocess.Popen(
            command, env={**env, "RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in "01"
    ]  # fmt: skip
    ends = [process.communicate(timeout=240) for process in started]
    for process, (_, error) in zip(started, ends, strict=True):
        assert process.returncode == 0, error
    return [
        {key: value for line in out.splitlines() for key, value in json.loads(line).items()}
        for out, _ in ends
    ]


def test_gradients_are_added_where_some_process_has_one(pair) -> None:
    """Muon and AdamW leave alone what has none, as they do in one process."""
    for found in pair:
        assert found["gradients"] == [[3.0], [1.0], None]


def test_they_meet_where_they_compute_and_part_at_the_end(pair) -> None:
    for found in pair:
        assert found["backend"] == "gloo" and found["left"]


def test_those_that_cannot_meet_say_so(monkeypatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(InvalidConfig, match=r"do not meet \(invalid device ordinal\)"):
        joined("cuda")


def test_they_go_on_from_one_step(pair) -> None:
    for found in pair:
        assert "go on from steps 0 to 2, and a run has one state" in found["steps"]


def test_each_writes_its_share_and_all_have_the_whole(pair, tmp_path: Path) -> None:
    """What one process alone writes, row for row."""
    for name, whole in (("continued", 6), ("pools", 2)):
        due = getattr(shared, name)(ALONE, tmp_path)
        assert due["count"] == whole
        for found in pair:
            assert found[name] == {"count": whole // 2, "rows": due["rows"]}
