"""The certificate as a record: what makes it hold, what it prints, and the page of the proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest

from outrider.certify import certificate, proof
from outrider.certify.certificate import Caught, Certificate, Certified
from outrider.cli import run
from outrider.cli.certify import shown, verdict

GOOD = Certified(
    "token",
    "sampled",
    "chain 2",
    3,
    30,
    20,
    Fraction(0),
    Fraction(0),
    Fraction(10, 9),
    11 / 9,
    True,
)
FOUND, MISSED = Caught("token: wrong", "1/9", True), Caught("token: wrong", "0", False)


def test_what_speaks_against_a_rule():
    assert GOOD.exact
    assert not GOOD.optimal
    against = [
        replace(GOOD, cases=0),
        replace(GOOD, max_tv=Fraction(1, 10**9)),
        replace(GOOD, max_other=Fraction(1, 10**9)),
        replace(GOOD, as_in_theory=False),
        replace(GOOD, expected_accepted=Fraction(12, 9)),
    ]
    assert [rule.exact for rule in against] == [False] * 5
    assert replace(GOOD, expected_accepted=Fraction(11, 9)).optimal
    assert Certificate([GOOD], [FOUND]).ok
    assert not Certificate([GOOD, against[1]], [FOUND]).ok
    assert not Certificate([GOOD], [FOUND, MISSED]).ok


def test_verdicts_and_numbers_as_shown():
    assert verdict(GOOD) == "exact"
    assert verdict(replace(GOOD, expected_accepted=Fraction(11, 9))) == "exact, optimal"
    assert verdict(replace(GOOD, max_tv=Fraction(1, 9))) == "BIASED"
    assert verdict(replace(GOOD, max_other=Fraction(1, 9))) == "OTHER TEXT"
    assert verdict(replace(GOOD, as_in_theory=False)) == "NOT AS IN THEORY"
    assert shown(Fraction(10, 9)) == "10/9"
    assert shown(Fraction(10**9, 3**30)) == "~4.85694e-06"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `outrider certify rules` in this process."""

    def call(*words: str) -> Ran:
        code = run(["certify", "rules", *words])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules and two broken ones, in this process."""
    things, wrong = certificate.certifiables()[:2], certificate.wrong_schemes()[:2]
    monkeypatch.setattr(certificate, "_things", lambda: things)
    monkeypatch.setattr(certificate, "_wrong", lambda: wrong)


@pytest.mark.usefixtures("few")
def test_the_command_prints_the_promised_json(command: Callable[..., Ran]):
    ran = command("--pairs", "1", "--processes", "1", "--json")
    assert ran.code == 0
    printed = json.loads(ran.out)
    assert set(printed) == {"rules", "wrong", "ok"}
    assert printed["ok"] is True
    keys = ["rule", "drafter", "tree", "cases", "max_tv", "expected_accepted", "optimum", "exact"]
    assert [list(rule) for rule in printed["rules"]] == [keys] * 2
    assert {rule["max_tv"] for rule in printed["rules"]} == {"0"}
    assert [list(wrong) for wrong in printed["wrong"]] == [["name", "tv", "found"]] * 2
    assert all(Fraction(wrong["tv"]) > 0 for wrong in printed["wrong"])
    assert "[4/4]" in ran.err


@pytest.mark.usefixtures("few")
def test_the_command_prints_tables_and_fails_where_one_is_missed(
    command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    ran = command("--pairs", "1", "--processes", "1")
    assert ran.code == 0
    assert "2 of 2 exact, 2 of 2 broken variants found" in ran.out
    monkeypatch.setattr(certificate, "catch", lambda wrong: MISSED)
    ran = command("--pairs", "1", "--processes", "1")
    assert ran.code == 1
    assert "0 of 2 broken variants found" in ran.out
    assert "FAILED" in ran.out


@pytest.mark.parametrize("words", [("--pairs", "0"), ("--processes", "0")])
def test_counts_that_cannot_be_meant(command: Callable[..., Ran], words: tuple[str, str]):
    ran = command(*words)
    assert ran.code == 2
    assert "at least 1" in ran.err


def test_several_processes_find_what_one_does(monkeypatch: pytest.MonkeyPatch):
    """Work travels as numbers into processes that make the schemes anew."""
    broken = certificate.wrong_schemes()[:3]
    monkeypatch.setattr(certificate, "_things", lambda: [])
    monkeypatch.setattr(certificate, "_wrong", lambda: broken)
    found = certificate.certify_rules(num_pairs=1, processes=2)
    assert found.wrong == [certificate.catch(wrong) for wrong in broken]


def test_the_page_tells_a_failure():
    good = proof.Proof(Certificate([GOOD], [FOUND]))
    assert good.ok
    page = proof.as_markdown(good, "scripts/prove")
    assert "everything holds" in page
    assert "| token | sampled | chain 2 | 3 | 30 | 20 | 0 | 10/9 | 1.2222 | yes |" in page
    bad = proof.Proof(Certificate([GOOD], [MISSED]))
    assert not bad.ok
    assert "SOMETHING FAILED" in proof.as_markdown(bad, "scripts/prove")
