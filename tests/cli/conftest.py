"""A small real model for the command line: the bundled draft model as target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from outrider.cli import run
from outrider.models.bundled import bundled_path

PROMPT = "def main():\n    for i in range(10):\n        print(i)\n    for j in range(10):\n"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command line in this process."""

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(list(words))
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def model() -> str:
    return str(bundled_path("draft"))


@pytest.fixture
def generate(outrider: Callable[..., Ran], model: str) -> Callable[..., Ran]:
    """Runs `outrider generate` with the small model."""

    def call(*words: str) -> Ran:
        return outrider("generate", "--model", model, "--drafter", "ngram", "-n", "24", *words)

    return call
