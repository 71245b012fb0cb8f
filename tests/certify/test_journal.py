"""A proof that was cut short goes on: what is kept comes back, what is not the same does not."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from outrider.certify import certificate
from outrider.certify.certificate import Caught, Certified, certify_rules
from outrider.certify.journal import Journal, digest
from outrider.certify.paths import PathCount
from outrider.certify.proof import _sources

KINDS = Certified, Caught, PathCount
ROW = Certified(
    "block", "sampled", "2", 3, 9, 4, Fraction(0), Fraction(1, 3), Fraction(10, 9), 1.5, None
)
COUNT = PathCount("token", 5, 20, 1, 0, ["one", "two"])


def journal(file: Path, of: str = "x") -> Journal[Any]:
    return Journal(file, of, KINDS)


def test_what_was_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "proof.jsonl"
    first = journal(file)
    first.keep("row", ROW)
    first.keep("count", COUNT)
    again = journal(file)
    assert (len(again), again["row"], again["count"]) == (2, ROW, COUNT)
    assert "other" not in again
    again.end()
    assert not file.exists()


def test_a_line_that_was_cut_off_and_other_code_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "proof.jsonl"
    journal(file).keep("row", ROW)
    with file.open("a") as out:
        out.write('{"name": "count", "ki')
    torn = journal(file)
    assert len(torn) == 1
    torn.keep("count", COUNT)
    assert len(journal(file)) == 2
    assert len(journal(file, "y")) == 0
    assert len(journal(file)) == 0


def test_the_digest_is_of_code_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("one = 1")
    first = digest([file], 3)
    assert digest([file], 3) == first != digest([file], 4)
    file.write_text("one = 2")
    assert digest([file], 3) != first
    names = {file.name for file in _sources()}
    assert {"noise.py", "tree.py", "block.py", "chainwise.py", "reference.py", "proof.py"} <= names


def test_parts_that_are_done_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = certificate._things()[:2]
    monkeypatch.setattr(certificate, "_things", lambda: few)
    monkeypatch.setattr(certificate, "_wrong", lambda: [])
    whole = certify_rules(num_pairs=1, processes=1)
    kept = journal(tmp_path / "proof.jsonl")
    marked = Certified("mark", *list(map(whole.rules[0].__getattribute__, Certified.__slots__))[1:])
    kept.keep("0", marked)
    said: list[str] = []
    found = certify_rules(num_pairs=1, processes=1, progress=said.append, journal=kept)
    assert found.rules == [marked, whole.rules[1]]
    assert len(said) == 1 and said[0].startswith("[2/2]")
    assert len(journal(tmp_path / "proof.jsonl")) == 2
