"""`outrider replay`: traces from the command line, replayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.control import replay as replay_module
from tests.cli.conftest import PROMPT, Ran

Command = Callable[..., Ran]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def traced(generate: Command, kept: Path) -> Path:
    """A text observed to a depth of 4, and rounds of depths 0, 1, 2 and 4 as they ran."""
    file = kept / "observed.jsonl"
    if not file.exists():
        ran = generate(PROMPT, "--trace", str(file), "--observe", "--depth", "4", "--json")
        assert ran.code == 0, ran.err
        assert (
            json.loads(ran.out)["token_ids"]
            == json.loads(generate(PROMPT, "--json").out)["token_ids"]
        )
    return file


def test_another_depth_is_replayed_as_it_runs(
    outrider: Command, generate: Command, traced: Path
) -> None:
    words = [word for depth in (1, 2, 4) for word in ("--policy", f"depth:{depth}")]
    ran = outrider("replay", str(traced), *words, "--policy", "oracle", "--json")
    found = json.loads(ran.out)
    assert found["texts"] == 1 and found["costs"]["format"] == 1
    for one, depth in zip(found["policies"], (1, 2, 4), strict=False):
        stats = json.loads(generate(PROMPT, "--depth", str(depth), "--json").out)["stats"]
        assert one["rounds"] == stats["rounds"] + stats["plain_rounds"]
        assert (one["drafted"], one["accepted"]) == (stats["drafted"], stats["accepted"])
        assert one["tokens"] == stats["committed"] == 24 and one["unknown_rounds"] == 0
    assert [one["oracle"] for one in found["policies"]] == [False, False, False, True]
    assert found["policies"][-1]["regret_s"] == 0


def test_the_table(outrider: Command, traced: Path) -> None:
    ran = outrider("replay", str(traced))
    lines = ran.out.splitlines()
    assert lines[0].split()[:2] == ["policy", "tokens/s"]
    best = next(i for i, line in enumerate(lines) if line.startswith("oracle (sees the future)"))
    # Nobody is faster; a fixed depth may be as fast, and stand before it.
    assert all(line.split()[-1] == "0" for line in lines[1 : best + 1])
    assert {line.split()[0] for line in lines[1:-1]} == {
        "none", "depth:1", "depth:2", "depth:4", "expected", "auto", "oracle"
    }  # fmt: skip
    assert lines[-1] == "1 text, 24 tokens, 1 at a time" and ran.err == ""


def test_a_text_as_it_ran(outrider: Command, generate: Command, tmp_path: Path) -> None:
    file = tmp_path / "ran.jsonl"
    stats = json.loads(generate(PROMPT, "--trace", str(file), "--json").out)["stats"]
    ran = outrider("replay", str(file), "--policy", "traced", "--policy", "depth:2", "--json")
    one, other = json.loads(ran.out)["policies"]
    assert one["tokens"] == other["tokens"] == 24
    assert one["rounds"] == stats["rounds"] + stats["plain_rounds"]
    laps = sum(stats[name] for name in ("draft_s", "score_s", "verify_s", "commit_s"))
    assert one["seconds"] == pytest.approx(laps) and laps <= stats["wall_s"]


def test_a_trace_of_auto_says_that_drafters_are_taken_as_one(
    outrider: Command, generate: Command, tmp_path: Path
) -> None:
    file = tmp_path / "auto.jsonl"
    assert generate(PROMPT, "--drafter", "auto", "-n", "8", "--trace", str(file)).code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    said = outrider("replay", str(file), "--policy", "none").out
    assert "auto chose among drafters" in said


def test_drafters_are_chosen_among(outrider: Command, generate: Command, tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    words = ("--drafter", "suffix,ngram", "--depth", "2", "-n", "12")
    ran = generate(PROMPT, "--trace", str(file), "--observe", *words, "--json")
    assert ran.code == 0, ran.err
    picked = ("none", "suffix:2", "ngram:2", "auto", "oracle")
    asked = [word for one in picked for word in ("--policy", one)]
    found = json.loads(outrider("replay", str(file), *asked, "--json").out)
    assert found["texts"] == 1
    rounds = {one["policy"]: one["rounds_by_drafter"] for one in found["policies"]}
    assert rounds["none"] == {"none": 12}
    assert rounds["suffix:2"].keys() <= {"suffix", "none"}
    assert rounds["auto"].keys() <= {"suffix", "ngram", "none"}
    stats = json.loads(generate(PROMPT, *words, "--drafter", "ngram", "--json").out)["stats"]
    assert sum(rounds["ngram:2"].values()) == stats["rounds"] + stats["plain_rounds"]
    assert [one["policy"] for one in found["policies"] if one["oracle"]] == ["oracle"]
    table = outrider("replay", str(file)).out
    assert "ngram:1" in table and "auto" in table and "1 text, 12 tokens" in table
    refused = outrider("replay", str(file), "--policy", "recycle:2")
    assert refused.code == 2 and "no guess of 'recycle'" in refused.err


def test_regret_is_drawn(outrider: Command, traced: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "regret.png"
    ran = outrider("replay", str(traced), "--png", str(picture))
    assert ran.code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_told_before_any_work(
    outrider: Command, traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(replay_module, "replay", None)
    ran = outrider("replay", str(traced), "--png", str(tmp_path / "regret.png"))
    assert ran.code == 2 and ran.out == "" and "outrider[bench]" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.jsonl",), "cannot be read"),
        (("{}", "--policy", "greedy"), "does not exist"),
        (("{}", "--policy", "traced"), "of an observed text"),
        (
            ("{}", "--policy", "depth:5"),
            "4 at most; ask for at most 4, or trace anew with --depth 5",
        ),
        (("{}", "--policy", "ngram:20"), "asks for 20 levels"),
        (
            ("{}", "--policy", "tree:4,9"),
            "asks for 9 nodes, and drafts of the trace have 4 at most",
        ),
        (("{}", "--batch", "0"), "batch=0"),
        (("{}", "--batch", "2", "--png", "x.png"), "leave --batch out"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    outrider: Command, traced: Path, words: tuple[str, ...], said: str
) -> None:
    ran = outrider("replay", *(word.replace("{}", str(traced)) for word in words))
    assert ran.code == 2 and ran.out == "" and said in ran.err


def test_observing_ends_with_what_to_do_next(generate: Command, tmp_path: Path) -> None:
    """That nothing was kept is what was asked for, and no failure to be measured."""
    file = tmp_path / "observed.jsonl"
    err = generate(PROMPT, "--trace", str(file), "--observe", "--depth", "2", "-n", "8").err
    assert err.startswith(f"8 tokens observed: behind each stands a guess in {file}")
    assert f"outrider replay {file}" in err.splitlines()[0] and "acceptance" not in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x81\x00", "is no trace: it is no text"),
        (b"[1,\n", "it is no JSON"),
        (b"[1]\n", "its JSON says something else"),
        (b'{"a": 1}\n', "it has no 'text'"),
        (b'{"text": 0, "trace": 1}\n', "is of version 1; 2 is read"),
        (b"", "no round in"),
    ],
)
def test_what_is_no_trace_is_told_how_to_make_one(
    outrider: Command, tmp_path: Path, content: bytes, said: str
) -> None:
    (file := tmp_path / "file").write_bytes(content)
    ran = outrider("replay", str(file))
    assert ran.code == 2 and ran.out == "" and said in ran.err and str(file) in ran.err
    assert "`outrider generate --trace FILE`" in ran.err and "Error" not in ran.err


def test_observing_needs_a_trace(generate: Command) -> None:
    ran = generate(PROMPT, "--observe")
    assert ran.code == 2 and "--trace FILE" in ran.err
