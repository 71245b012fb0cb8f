"""GGUF files on the command line: texts, what doctor says of them, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.models.libllama_models import bundled_file, needs_libllama

pytestmark = needs_libllama
Command = Callable[..., Ran]


def test_a_pair_of_files_generates(outrider: Command) -> None:
    target, draft = bundled_file("target"), bundled_file("draft")
    words = ("generate", "--model", target, "--drafter", f"draft:{draft}", "-n", "16")
    ran = outrider(*map(str, words), "--compare", "--json", "def mean(values):\n")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert len(report["token_ids"]) == 16 and report["tokens_equal"]


def test_doctor_says_whose_law_is_exact(outrider: Command) -> None:
    ran = outrider("doctor", "--model", str(bundled_file("target")), "--drafter", "ngram", "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert report["versions"]["llama-cpp-python"] != "not installed"
    pair = report["pair"]
    assert pair["compatible"] and pair["exact_law"] == "that of the file's own weights (F16)"
    assert pair["strict_self_test"].startswith("not to be had: strict=True")


@pytest.mark.parametrize("content", [b"GGUF and nothing more", b"", b"PK"])
def test_a_file_that_is_none_ends_in_one_line(
    outrider: Command, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    ran = outrider("generate", "--model", str(file), "x")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert "bad.gguf' cannot be loaded as a GGUF file" in ran.err


def test_a_file_is_certified(outrider: Command, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef f(x):\n")
    words = ("certify", "model", "--model", str(bundled_file("draft")), "--drafter", "ngram")
    few = ("--file", str(prompts), "--within", "0.3", "--budget", "200", "-n", "6", "--json")
    ran = outrider(*words, *few)
    report = json.loads(ran.out)
    assert report["verdict"] == "lossless", report["checks"]


def test_nobody_looks_into_a_file(outrider: Command) -> None:
    ran = outrider("profile", "--model", str(bundled_file("draft")), "--drafter", "none")
    assert ran.code == 2
    assert "one call of libllama" in ran.err
