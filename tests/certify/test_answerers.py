"""Who answers golden vectors, how long a command may take, and the schema the cases keep."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.certify import answerers, vectors
from outrider.certify.vectors_schema import SCHEMA
from outrider.cli import run
from outrider.errors import InvalidConfig, MissingExtra

# Read once, when Triton is loaded.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
FEW = list(vectors.emit(1))
MAIN = "import sys; from outrider.cli import main; sys.argv[0] = 'outrider'; main()"


def test_the_references_answer_right() -> None:
    cases = list(vectors.emit())
    found = vectors.judged(cases, [answerers.reference(case) for case in cases])
    assert (found.right, found.wrong, found.skipped) == (len(cases), 0, 0), found.failures


def test_the_references_are_another_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer right where the rules do not."""
    monkeypatch.setitem(vectors.RULES, "token", vectors.RULES["match"])
    cases = [case for case in vectors.emit(1) if case["rule"] == "token"]
    assert not vectors.judged(cases, [vectors.answer(case) for case in cases]).ok
    assert vectors.judged(cases, [answerers.reference(case) for case in cases]).ok


def test_tritons_bodies_answer_right(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    answer = answerers.answerer("triton")
    from outrider.decoding import triton_race, triton_rows

    asked: list[str] = []
    bodies = {"prob_of": triton_rows, "less_law": triton_rows, "race": triton_race}
    for name, module in bodies.items():
        whole: Callable[..., Any] = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, w=whole: (asked.append(n), w(*a))[1])
    found = vectors.judged(FEW, [answer(case) for case in FEW])
    assert (found.right, found.wrong) == (len(FEW), 0), found.failures
    assert set(asked) == set(bodies)
    # Outside everything goes the way of the device again.
    assert answerers.host.reads_free(torch.device("cpu"))


def test_they_answer_through_the_command() -> None:
    command = [sys.executable, "-c", MAIN, "certify", "vectors", "--answer", "--with", "reference"]
    assert vectors.check(command, FEW).right == len(FEW)


def test_nobody_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="torch, reference, triton can answer"):
        answerers.answerer("numpy")
    monkeypatch.setattr(answerers, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match="pip install triton"):
        answerers.answerer("triton")


@pytest.mark.parametrize("line", ["{}", "[]", "x", '{"rule": "token"}'])
def test_lines_that_are_no_case(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", iter([line]))
    assert run(["certify", "vectors", "--answer"]) == 2
    assert "line 1 of standard input is no case" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes here")
def test_a_command_that_never_ends_is_ended(tmp_path: Path) -> None:
    """With what it started, which holds its output open."""
    note = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 300 & echo $! > {note}; wait"]
    started = time.monotonic()
    with pytest.raises(InvalidConfig, match=r"within 0\.5 s and was ended.*--timeout"):
        vectors.check(command, FEW, 0.5)
    assert time.monotonic() - started < 60
    child = int(note.read_text())
    # Whoever takes it over may not have fetched its end yet.
    stat = Path(f"/proc/{child}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("it is still there")


def faults(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What breaks a schema, of the keywords that ours uses."""
    if "$ref" in schema:
        return faults(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], at)
    known = {"object": dict, "array": list, "integer": int, "number": (int, float), "string": str}
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, known[kind]) or isinstance(value, bool)):
        return [f"{at}: no {kind}"]
    wrong = [
        f"{at}: {key}"
        for key, broken in (
            ("enum", lambda bound: value not in bound),
            ("const", lambda bound: value != bound),
            ("minimum", lambda bound: value < bound),
            ("maximum", lambda bound: value > bound),
            ("exclusiveMaximum", lambda bound: value >= bound),
            ("minItems", lambda bound: len(value) < bound),
            ("required", lambda bound: not set(bound) <= set(value)),
        )
        if key in schema and broken(schema[key])
    ]
    if kind == "object":
        assert schema["additionalProperties"] is False
        wrong += [f"{at}: {name}" for name in value if name not in schema["properties"]]
        for name, one in schema["properties"].items():
            wrong += faults(value[name], one, f"{at}.{name}") if name in value else []
    if kind == "array":
        for i, one in enumerate(value):
            wrong += faults(one, schema["items"], f"{at}[{i}]")
    return wrong


def test_every_case_keeps_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "vectors", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    file = {"version": vectors.VERSION, "cases": list(vectors.emit())}
    assert faults(file, SCHEMA) == []
    assert all(faults(answerers.reference(one), SCHEMA["$defs"]["answer"]) == [] for one in FEW)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rule", "typical-acceptance"),
        ("tokens", [-1]),
        ("kinds", ["guessed"]),
        ("target", []),
        ("draft", [[1.5]]),
        ("noise", {}),
        ("vocabulary", 0.5),
        ("more", 1),
    ],
)
def test_the_schema_refuses(name: str, value: object) -> None:
    case = copy.deepcopy(FEW[0])
    case[name] = value
    assert faults(case, SCHEMA["$defs"]["case"])
    del case["rule"]
    assert faults(case, SCHEMA["$defs"]["case"])
