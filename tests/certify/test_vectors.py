"""Golden vectors: two implementations agree on them, and every mutant is caught."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.certify import vectors
from outrider.decoding import RULES
from outrider.errors import InvalidConfig

VERIFIER = str(Path(__file__).with_name("verifier.py"))
MUTANTS = (
    "resampled from the target",
    "noise used twice",
    "wrong bonus row",
    "siblings left in",
    "target not updated",
)


@cache
def cases() -> list[dict[str, Any]]:
    return list(vectors.emit())


def test_outriders_own_rules_answer_right() -> None:
    found = vectors.judged(cases(), [vectors.answer(case) for case in cases()])
    assert (found.wrong, found.skipped) == (0, 0), found.failures
    assert found.right == len(cases())


def test_cases_meet_every_rule_and_every_edge() -> None:
    exact = {name for name, rule in RULES.items() if rule.guarantee != "lossy"}
    assert {case["rule"] for case in cases()} == exact
    assert any(not case["tokens"] for case in cases())
    assert any(0.0 in row for case in cases() for row in case["draft"])
    assert {kind for case in cases() for kind in case["kinds"]} == set(vectors.KINDS.values())
    # Without the answers, what a command sees goes through JSON unchanged.
    assert json.loads(json.dumps(cases())) == cases()


def test_cases_are_the_same_in_every_run() -> None:
    assert list(vectors.emit(1)) == list(vectors.emit(1))


def test_a_verifier_that_knows_nothing_of_outrider_agrees() -> None:
    found = vectors.check([sys.executable, VERIFIER], cases())
    assert found.ok, found.failures
    assert found.right > 80
    assert found.skipped > 0


@pytest.mark.parametrize("fault", MUTANTS)
def test_mutants_are_caught(fault: str) -> None:
    found = vectors.check([sys.executable, VERIFIER, fault], cases())
    assert not found.ok
    assert found.failures


def test_all_skipped_is_not_ok() -> None:
    assert not vectors.judged(cases(), [None] * len(cases())).ok


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["./no-such-program"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit('broken')"], "ended with 1: broken"),
        ([sys.executable, "-c", "print('hello')"], "answered 1 of"),
    ],
)
def test_commands_that_do_not_answer(command: list[str], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        vectors.check(command, cases())


def test_an_answer_that_is_no_json() -> None:
    program = "import sys\nfor _ in sys.stdin: print('x')"
    with pytest.raises(InvalidConfig, match="no JSON"):
        vectors.check([sys.executable, "-c", program], cases())
