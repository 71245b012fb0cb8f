"""The check at the first load: kept by version, done again where it cannot be read, and obeyed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli import run
from outrider.decoding import RULES, known_answers, rule_named
from outrider.errors import OutriderWarning
from outrider.llm import first_load
from outrider.llm.first_load import BY_HAND, FIRST_LOAD, Finding, finding, keep, place

SEEDED = SamplingParams(max_tokens=12, seed=3)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An empty cache folder, and a note of each time the answers are asked for."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.delenv(first_load.SWITCH, raising=False)
    noted: list[int] = []
    whole = known_answers.fault
    monkeypatch.setattr(known_answers, "fault", lambda: (noted.append(1), whole())[1])
    return noted


def test_it_is_asked_once_for_each_version(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [finding(), finding()] == [Finding(None)] * 2
    assert len(asked) == 1
    assert place().stat().st_mode & 0o077 == 0
    assert place().parent.stat().st_mode & 0o077 == 0
    for name in ("torch", "transformers"):
        before = place()
        whole = first_load.version
        monkeypatch.setattr(
            first_load, "version", lambda n, own=name, w=whole: "9" if n == own else w(n)
        )
        assert place() != before
        finding()
    assert len(asked) == 3
    monkeypatch.setattr(first_load.torch.cpu, "get_capabilities", dict)
    finding()
    monkeypatch.setattr(first_load, "__version__", "9")
    finding()
    assert len(asked) == 5


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"fault": null}', '{"fault": 3, "by": "first load"}', "\x00" * 20]
)
def test_what_cannot_be_read_is_done_again(asked: list[int], text: str) -> None:
    finding()
    place().write_text(text)
    assert finding() == Finding(None)
    assert len(asked) == 2
    assert json.loads(place().read_text())["by"] == FIRST_LOAD


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_what_others_may_have_written_is_not_believed(asked: list[int]) -> None:
    keep(Finding("planted"))
    place().chmod(0o666)
    assert finding() == Finding(None)
    place().parent.chmod(0o777)
    finding()
    assert len(asked) == 2


def test_a_folder_that_takes_nothing(asked: list[int], tmp_path: Path) -> None:
    (tmp_path / "own").write_text("a file")
    assert finding() == Finding(None)
    assert len(asked) == 1


def test_it_can_be_switched_off(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    keep(Finding("something"))
    monkeypatch.setenv(first_load.SWITCH, "0")
    assert finding() is None
    assert first_load.refusal() is None
    assert not asked


def test_a_broken_rule_is_not_speculated_with(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "import os\n"
    plain = LLM.load("bundled", drafter="none").generate(prompt, SEEDED)[0]
    assert len(asked) == 1
    first_load.place().unlink()
    # Keeps whatever is likely enough.
    lossy = rule_named("typical-acceptance", lossless=False)
    monkeypatch.setitem(RULES, "block", lossy)
    with pytest.warns(OutriderWarning, match="block decided otherwise than proved"):
        llm = LLM.load("bundled", drafter="draft")
    assert llm.speculation_refused is not None
    assert "certify self" in llm.speculation_refused
    assert llm.info()["speculation_refused"] == llm.speculation_refused
    for how in ({}, {"depth": 4}, {"drafter": "ngram"}, {"rule": "token"}):
        done = llm.generate(prompt, SEEDED, **how)[0]
        assert llm.metrics.drafted == 0, how
        if "rule" not in how:
            assert done.token_ids == plain.token_ids
    # A fault may have been an accident of one process: the next load looks again. A passed
    # `certify self` sets it right.
    with pytest.warns(OutriderWarning, match="failed at first load"):
        LLM.load("bundled", drafter="none")
    assert len(asked) == 3
    keep(Finding(None, BY_HAND))
    assert LLM.load("bundled", drafter="draft").speculation_refused is None


def test_the_doctor_tells(
    asked: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import doctor

    monkeypatch.setattr(doctor, "self_test", lambda _: "passed")
    keep(Finding("rules: token decided otherwise than proved", BY_HAND))
    with pytest.warns(OutriderWarning, match="failed at outrider certify self"):
        run(["doctor", "--json"])
    pair = json.loads(capsys.readouterr().out)["pair"]
    assert "token decided otherwise" in pair["speculation_refused"]
