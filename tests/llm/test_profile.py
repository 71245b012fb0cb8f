"""Profiles: what a plan found best, written, read, and loaded with."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM
from outrider.errors import InvalidConfig
from outrider.llm.profile import read_profile, write_profile
from outrider.models.bundled import bundled_path

SAID = {"drafter": "ngram", "k": 3, "width": None, "shape": [0, 0, 1]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    write_profile(path, SAID, {"model": 'a "name"', "machine": "two cores"})
    return path


def test_a_profile_comes_back(file: Path) -> None:
    assert read_profile(file) == {"drafter": "ngram", "k": 3, "shape": [0, 0, 1]}
    assert file.read_text().startswith('drafter = "ngram"\nk = 3\n')


def test_models_are_loaded_with_it_and_what_is_given_beside_it(file: Path) -> None:
    draft = bundled_path("draft")
    info = LLM.load(draft, profile=file).info()
    assert (info["drafter"]["name"], info["k"]) == ("ngram", 3)
    assert info["trees"]["shape"] == (0, 0, 1)
    info = LLM.load(draft, "suffix", profile=str(file), k=2).info()
    assert (info["drafter"]["name"], info["k"]) == ("suffix", 2)


def test_any_path_and_the_rule_come_back(tmp_path: Path) -> None:
    said = {"drafter": "draft:/home/é\U0001f600/\x7f\\", "k": 2, "rule": "block"}
    path = tmp_path / "plan.toml"
    write_profile(path, said, {"model": "\U0001f600"})
    assert read_profile(path) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("depth = 3", "says 'depth', which no profile does"),
        ("drafters = 'x'", "did you mean 'drafter'"),
        ("k = ", "cannot be read"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=said):
        read_profile(path)
    with pytest.raises(InvalidConfig, match="outrider plan --save"):
        read_profile(tmp_path / "none.toml")
