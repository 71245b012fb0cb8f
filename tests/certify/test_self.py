"""`certify self`: each part fails where something is not as it was proved."""

from __future__ import annotations

import json

import pytest

from outrider.certify import self_test, vectors
from outrider.certify.model.plan import Plan
from outrider.cli import run
from outrider.decoding import RULES, rule_named


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked shapes make everything slow here: fewer rounds will do."""
    for name, count in (
        ("CASES", 2),
        ("ROUNDS", 60),
        ("TREES", 15),
        ("TEXTS", 20),
        ("STRICT_TOKENS", 8),
    ):
        monkeypatch.setattr(self_test, name, count)
    monkeypatch.setattr(self_test, "LAW", Plan(within=0.2, length=6))


def test_this_installation_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "self", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert [part["name"] for part in told["parts"]] == [
        "known answers",
        "golden vectors",
        "beside references",
        "noise addresses",
        "strict",
        "law of the bundled pair",
    ]


def test_a_broken_rule_fails_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "token", RULES["match"])
    assert vectors.RULES is RULES
    assert not self_test.golden().ok
    part = self_test.beside_references()
    assert not part.ok
    assert "token" in part.said


def test_an_address_that_serves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "range", lambda *_: range(3), raising=False)
    part = self_test.addresses()
    assert not part.ok
    assert "used twice" in part.said


def test_a_ledger_that_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test.noise, "uniforms53", lambda *_: None)
    monkeypatch.setattr(self_test.runs, "write", lambda *_: None)
    assert not self_test.addresses().ok


def test_texts_that_are_not_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled pair under a rule that keeps what is likely enough."""
    lossy = rule_named("typical-acceptance", lossless=False)
    monkeypatch.setitem(RULES, "block", lossy)
    monkeypatch.setattr(self_test, "LAW", Plan(within=0.1))
    part = self_test.law()
    assert not part.ok
