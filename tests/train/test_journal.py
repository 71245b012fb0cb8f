"""What a run notes and draws, the text it reads from Parquet, and processes that share it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidConfig, MissingExtra
from outrider.models.bundled import bundled_path
from outrider.models.text import TextTokenizer
from outrider.train import job as jobs
from outrider.train import journal as journals
from outrider.train import run_head as run_heads
from outrider.train.journal import PICTURE, check_free, draw, journal_of, noted
from outrider.train.loop import Outcome, Progress
from outrider.train.run import run_recipe
from outrider.train.texts import read_texts
from outrider.train.together import ALONE, Together
from tests.house.layout import ROOT
from tests.train.test_exit_heads import run_of as exit_head


def steps(last: int) -> list[Progress]:
    figure = "held-out perplexity"
    return [
        Progress(i, last, 1.0 / i, 2.0 if i == last else None, 100.0, 0.1 * i, figure)
        for i in range(1, last + 1)
    ]


def test_a_journal_has_a_line_for_each_step(tmp_path: Path) -> None:
    told: list[int] = []
    for resume in (True, True, False):
        with journal_of(tmp_path, resume, ALONE) as journal:
            noted = journal.noting(lambda at: told.append(at.step))
            for at in steps(3):
                noted(at)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and told == [1, 2, 3] * 3
    assert lines[-1]["perplexity"] == 2.0 and "perplexity" not in lines[0]
    with journal_of(tmp_path / "other", True, Together(1, 2)) as journal:
        journal.note(steps(1)[0])
    assert not (tmp_path / "other").exists(), "the leading process writes"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="is no folder and cannot be made one"):
        journal_of(tmp_path / "file" / "training", True, ALONE)


def test_a_folder_is_one_run_s_at_a_time(tmp_path: Path) -> None:
    state = tmp_path / "training"
    with journal_of(state, True, ALONE) as journal:
        journal.note(steps(1)[0])
        for resume in (True, False):
            with (
                pytest.raises(InvalidConfig, match=r"another run is at work in .*; wait until it"),
                journal_of(state, resume, ALONE),
            ):
                pytest.fail("two runs in one folder")
        with pytest.raises(InvalidConfig, match="another run is at work"):
            check_free(state)
        journal.note(steps(2)[1])
    with journal_of(state, True, ALONE):
        assert list(noted(state)) == [1, 2], "who was refused has changed nothing"
    check_free(state)
    check_free(tmp_path / "none")


def test_a_run_at_work_keeps_its_tokenizer(tmp_path: Path) -> None:
    with (
        journal_of(tmp_path / "training", True, ALONE),
        pytest.raises(InvalidConfig, match="another run is at work"),
    ):
        run_recipe("tiny", out=tmp_path, resume=False)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_line_cut_by_a_kill_and_a_picture_that_fails_end_no_run(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """What the run makes is written before the picture, and its own error is the one told."""
    with journal_of(tmp_path, True, ALONE) as journal:
        journal.note(steps(1)[0])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def fails(state: Path) -> None:
        assert list(noted(state)) == [1, 3], "the line behind the cut one is its own"
        raise RuntimeError("no picture today")

    monkeypatch.setattr(journals, "draw", fails)
    with journal_of(tmp_path, True, ALONE) as journal:
        journal.note(steps(3)[2])
    assert "no picture of the run" in caplog.text and "no picture today" in caplog.text
    with pytest.raises(KeyboardInterrupt), journal_of(tmp_path, True, ALONE):
        raise KeyboardInterrupt
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('[]\n{"step": 4}\n7\n')
    assert list(noted(tmp_path)) == [1, 3]
    saved: list[bool] = []
    monkeypatch.setattr(journals, "draw", lambda _: saved.append(is_written(tmp_path / "head")))
    outcome = Outcome(True, 16, 1024, 1.0, ())
    monkeypatch.setattr(jobs, "train", lambda *_, **__: outcome)
    assert run_heads.run_head(exit_head(), tmp_path / "head") == outcome and saved == [True]


def is_written(folder: Path) -> bool:
    return (folder / "model.safetensors").is_file()


def test_a_picture_of_loss_and_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with journal_of(tmp_path, True, ALONE) as journal:
        for at in (*steps(4), *steps(6)):
            journal.note(at)
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "log.jsonl").write_text("")
    draw(tmp_path)


def test_parquet_holds_texts_and_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    tokenizer = TextTokenizer(bundled_path("target"))
    table = pyarrow.table({"id": [1, 2, 3], "text": ["def f():", "import os", "x = 1\n"]})
    parquet.write_table(table, tmp_path / "texts.parquet")
    texts = read_texts([tmp_path / "texts.parquet"], tokenizer)
    found = {tokenizer.decode(ids) for ids in (*texts.train, *texts.held_out)}
    assert found == {"def f():", "import os", "x = 1\n"}
    parquet.write_table(pyarrow.table({"id": [1]}), tmp_path / "texts.parquet")
    with pytest.raises(InvalidConfig, match=r"row 1 of texts\.parquet holds neither a text nor"):
        read_texts([tmp_path / "texts.parquet"], tokenizer)
    (tmp_path / "texts.parquet").write_bytes(b"no")
    with pytest.raises(InvalidConfig, match="is no Parquet file"):
        read_texts([tmp_path], tokenizer)


def test_parquet_without_its_reader_names_the_install_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "texts.parquet").write_bytes(b"no")
    with pytest.raises(MissingExtra, match=r"pip install 'outrider\[train\]'"):
        read_texts([tmp_path], TextTokenizer(bundled_path("target")))


def test_micro_batches_are_shared_by_number() -> None:
    micro = [torch.tensor([i]) for i in range(5)]
    shares = [[i for i, _ in Together(rank, 2).share(micro)] for rank in range(2)]
    assert shares == [[0, 2, 4], [1, 3]] and len(ALONE.share(micro)) == 5
    with pytest.raises(InvalidConfig, match=r"6 processes with 5 micro-batches a step; lower"):
        Together(0, 6).share(micro)
    with ALONE.leading():
        assert ALONE.agreed(True, torch.device("cpu")) and ALONE.summed(None, 2.0) == 2.0


RUN = """
import sys
from pathlib import Path
from outrider.train.run_head import run_head
from tests.train.test_exit_heads import run_of as exit_head
from tests.train.test_heads import run_of as eagle_head
from outrider.train import head
import torch
torch.set_num_threads(1)
head.NEW_TOKENS = 6
run_head(eagle_head(), Path(sys.argv[1]) / "eagle")
run_head(exit_head(), Path(sys.argv[1]) / "exit")
"""


def losses(folder: Path) -> list[float]:
    lines = (folder / "training" / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


LAUNCHERS = {
    "torch": "-m torch.distributed.run --nproc-per-node 2 --master-port 29731",
    "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 29732",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_processes_have_the_loss_curve_of_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "run.py").write_text(RUN)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for out, start in (("one", []), ("two", LAUNCHERS[name].split())):
        command = [sys.executable, *start, str(tmp_path / "run.py"), str(tmp_path / out)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for kind in ("eagle", "exit"):
        one, two = losses(tmp_path / "one" / kind), losses(tmp_path / "two" / kind)
        assert len(one) == len(two) == 16
        assert two == pytest.approx(one, abs=1e-3)
        assert (tmp_path / "two" / kind / "model.safetensors").is_file()
