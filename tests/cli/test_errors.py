"""Bad input ends in one line that names thing, value and remedy, and exit code 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
        (("--file", "no/such/file"), ("no/such/file",)),
        (("x", "--dtype", "float7"), ("float7", "float32")),
    ],
)
def test_bad_options(outrider: Command, words: tuple[str, ...], named: tuple[str, ...]) -> None:
    assert_refused(outrider("generate", *([words] if isinstance(words, str) else words)), *named)


def test_unknown_names_are_answered_with_the_nearest(outrider: Command, model: str) -> None:
    generate = ("generate", "x", "--model", model)
    assert_refused(outrider("generte"), "generte", "generate")
    assert_refused(outrider(*generate, "--drafter", "ngrams"), "ngrams", "did you mean 'ngram'")
    assert_refused(outrider(*generate, "--rule", "blok"), "blok", "did you mean 'block'")


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


def test_a_prompt_longer_than_the_context(generate: Command) -> None:
    assert_refused(generate("x = 1\n" * 3000), "prompt", "2048", "shorten")


def test_the_process_ends_with_the_code() -> None:
    code = "from outrider.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", PROMPT, "--top-k", "-3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(Ran(done.returncode, done.stdout, done.stderr), "top_k=-3")
