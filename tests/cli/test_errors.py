"""Bad input ends in one line that names thing, value and remedy, and exit code 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import PROMPT, Ran
from tests.house.layout import ROOT

Command = Callable[..., Ran]


def assert_refused(ran: Ran, *words: str) -> None:
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((""), ("prompt is empty",)),
        (("x", "-k", "0"), ("depth=0", "--drafter none")),
        (("x", "-k", "17"), ("k=17 exceeds max_depth=16", "'auto'", "max_depth=17 too")),
        (("x", "-k", "9", "--max-depth", "8", "--drafter", "draft"), ("k=9 exceeds max_depth=8",)),
        (("x", "--tempo", "1"), ("--tempo", "--temperature")),
        (("x", "--temperature", "-1"), ("temperature=-1.0",)),
        (("x", "--temperature", "nan"), ("temperature=nan",)),
        (("x", "--top-p", "0"), ("top_p=0.0",)),
        (("x", "--max-tokens", "0"), ("max_tokens=0",)),
        (("x", "--max-tokens", "many"), ("--max-tokens", "integer")),
        (("x", "--stop", ""), ("stop",)),
        (("x", "--seed", "-1"), ("seed=-1",)),
        (("x", "--model", "no/such/folder"), ("no/such/folder", "save_pretrained")),
        (("x", "--file", "prompt.txt"), ("exclude",)),
        (("--file", "no/such/file"), ("no/such/file", "give a file of UTF-8 text")),
        (("x", "--dtype", "float7"), ("float7", "float32")),
        (("a\udcffb",), ("argument", "UTF-8")),
        (("x", "--device", "abacus"), ("'abacus'", "give cpu")),
        (("x", "--model", str(ROOT)), (str(ROOT), "config.json", "save_pretrained")),
    ],
)
def test_bad_options(outrider: Command, words: tuple[str, ...], named: tuple[str, ...]) -> None:
    assert_refused(outrider("generate", *([words] if isinstance(words, str) else words)), *named)


def test_doctor_names_a_device_that_is_none(outrider: Command) -> None:
    ran = outrider("doctor", "--device", "abacus")
    assert ran.code == 2
    assert "device 'abacus' is not to be had" in ran.out
    assert ran.err == ""


def test_unknown_names_are_answered_with_the_nearest(outrider: Command, model: str) -> None:
    generate = ("generate", "x", "--model", model)
    assert_refused(outrider("generte"), "generte", "generate")
    assert_refused(outrider(*generate, "--drafter", "ngrams"), "ngrams", "did you mean 'ngram'")
    both = outrider(*generate, "--drafter", "ngram,sufix")
    assert_refused(both, "drafter='sufix' in", "drafters are auto, none", "did you mean 'suffix'")
    assert_refused(outrider(*generate, "--rule", "blok"), "blok", "did you mean 'block'")


def test_what_cannot_be_written_is_told_why(generate: Command, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ran = generate("x", "--trace", str(missing / "rounds.jsonl"))
    assert_refused(ran, f"its folder {str(missing)!r} does not exist; make it first")
    ran = generate("x", "--trace", str(tmp_path))
    assert_refused(ran, "Is a directory; write elsewhere")
    assert not missing.exists()


def test_a_folder_that_is_no_model(outrider: Command, tmp_path: Path, model: str) -> None:
    assert_refused(outrider("generate", "x", "--model", str(tmp_path)), str(tmp_path))
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    assert_refused(outrider("generate", "x", "--model", str(tmp_path / "broken")), "broken")


def test_an_unsupported_architecture(outrider: Command, tmp_path: Path, model: str) -> None:
    folder = tmp_path / "strange"
    shutil.copytree(model, folder)
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_refused(outrider("generate", "x", "--model", str(folder)), "strange")


def test_a_draft_with_another_vocabulary(outrider: Command, tmp_path: Path, model: str) -> None:
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    ran = outrider("generate", "x", "--model", model, "--drafter", f"draft:{folder}")
    assert_refused(ran, "other", "draft")


def test_a_closed_standard_input(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    for words in ((), ("-",)):
        assert_refused(outrider("generate", *words), "no prompt", "--file")


def test_training_that_cannot_be(outrider: Command, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("", "utf-8")
    train = ("train", "lm", "tiny", "--out")
    assert_refused(outrider(*train, str(occupied)), str(occupied), "another folder")
    folder = str(tmp_path / "run")
    assert_refused(outrider(*train, folder, "--max-minutes", "-1"), "max_minutes=-1.0")
    assert_refused(outrider(*train, folder, "--device", "abacus"), "'abacus'", "give cpu")


def process(*words: str, **streams: Any) -> subprocess.Popen[str]:
    """A command line in a process of its own."""
    code = "from outrider.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


PRINTS_BY_RICH = ("generate", "--drafter", "ngram", "-n", "8", PROMPT, "--model")
PRINTS_BY_TYPER = ("--version",)


def test_a_reader_that_went_away_is_no_error(model: str) -> None:
    for words in ((*PRINTS_BY_RICH, model), PRINTS_BY_TYPER):
        with process(*words, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            running.stdout.close()
            assert running.stderr is not None
            err = running.stderr.read()
        assert running.returncode == 0, err
        assert "Error" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(model: str) -> None:
    for words in ((*PRINTS_BY_RICH, model), PRINTS_BY_TYPER):
        with open("/dev/full", "w") as full, process(*words, stdout=full) as running:
            assert running.stderr is not None
            err = running.stderr.read()
        # Figures may stand before it: the text is written out as it comes, or at the end.
        assert running.returncode == 2, err
        last = err.splitlines()[-1]
        assert last.startswith("error: the output cannot be written: No space left")
        assert "make room" in last
        assert "Traceback" not in err
        assert "Exception ignored" not in err


def test_a_prompt_longer_than_the_context(generate: Command) -> None:
    assert_refused(generate("x = 1\n" * 3000), "prompt", "2048", "shorten")


def test_the_process_ends_with_the_code() -> None:
    with process("generate", PROMPT, "--top-k", "-3", stdout=subprocess.PIPE) as running:
        out, err = running.communicate()
    assert_refused(Ran(running.returncode, out, err), "top_k=-3")
