"""`outrider plan`: its table, JSON, charts and profile, with times that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.control import plan as plan_module
from outrider.llm.profile import read_profile
from tests.cli.conftest import PROMPT, Ran
from tests.control.test_plan import clocked

Command = Callable[..., Ran]
SHORT = ("-n", "12", "--depth", "3", "--verify", "1", "--no-compile", "--dtype", "float32")


@pytest.fixture
def planned(
    outrider: Command, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Runs `outrider plan` with a small model on a machine where rows are cheap."""
    monkeypatch.setattr(plan_module, "timed", clocked(0.01, 0.1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": PROMPT}) + "\n" + json.dumps({"prompt": "x = 1\n"}))

    def call(*words: str) -> Ran:
        given = ("--target", model, "--drafters", "ngram", "--prompts", str(prompts), *SHORT)
        return outrider("plan", *given, *words)

    return call


def test_the_json_the_profile_and_the_charts(planned: Command, tmp_path: Path) -> None:
    save, charts = tmp_path / "plan.toml", tmp_path / "charts"
    draws = find_spec("matplotlib") is not None
    words = ("--charts", str(charts)) if draws else ()
    ran = planned("--json", "--batch", "1,2", "--save", str(save), *words)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    kinds = [one["candidate"] for one in found["predictions"]]
    for one in found["predictions"]:
        over = one["tokens_per_s"]["mean"] / one["plain_tokens_per_s"]
        assert one["speedup"]["mean"] == pytest.approx(over)
    assert {(kind["drafter"], kind["batch"], kind["depth"]) for kind in kinds} == {
        (name, batch, depth)
        for batch in (1, 2)
        for name, depth in (("none", 0), ("ngram", 1), ("ngram", 2), ("ngram", 3))
    }
    assert {one["prediction"]["candidate"]["drafter"] for one in found["verified"]} == {"ngram"}
    assert set(found["advice"]) == set(found["best"]) == {"1", "2"}
    assert found["machine"]["num_threads"] >= 1
    assert [one["engine"] for one in found["equivalents"]] == ["vLLM", "SGLang", "llama.cpp"]
    said = read_profile(save)
    assert said["drafter"] == ("ngram" if found["best"]["1"]["depth"] else "none")
    if draws:
        names = {path.name for path in charts.iterdir()}
        assert names == {"speedup.png", "acceptance.png", "stages.png", "predicted.png"}


def test_missing_matplotlib_is_told_before_any_work(
    planned: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(plan_module, "plan", None)
    charts = tmp_path / "charts"
    ran = planned("--charts", str(charts))
    assert ran.code == 2 and ran.out == "" and "outrider[bench]" in ran.err
    assert not charts.exists()


def test_the_table_and_the_advice(planned: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "timed", clocked(1000.0, 100.0))
    ran = planned("--verify", "0")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].strip() == "1 at a time" and lines[1].split()[:2] == ["drafts", "rule"]
    assert lines[2].split()[0] == "none" and lines[2].split()[2] == lines[2].split()[3]
    assert "a speed-up is over its plain" in ran.out and "run, in turn" not in ran.out
    assert "Do not speculate 1 at a time" in ran.out and "would break even" not in ran.out
    assert "vllm serve" in ran.out and "speculat" not in ran.out.partition("elsewhere:")[2]


def test_drafters_that_guess_together_are_planned_for_as_one(
    planned: Command, model: str, tmp_path: Path
) -> None:
    spec, save = f"draft:{model}+ngram", tmp_path / "plan.toml"
    ran = planned("--drafters", spec, "--verify", "0", "--save", str(save), "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    kinds = {one["candidate"]["drafter"] for one in found["predictions"]}
    assert kinds == {"none", "draft+ngram"}
    assert found["best"]["1"]["drafter"] == "draft+ngram"
    assert read_profile(save)["drafter"] == spec
    assert all(one["command"] is None for one in found["equivalents"])


def test_what_was_run_has_a_table_of_its_own(planned: Command) -> None:
    """Nothing is wider than a usual terminal, and each figure stands below its name."""
    lines = [line.rstrip() for line in planned().out.partition("\n\n")[0].splitlines()]
    first = lines.index("run, in turn with plain decoding")
    head, row = lines[first + 1 : first + 3]
    assert head.split() == ["drafts", "rule", "tokens/s", "plain", "speed-up", "foretold"]
    assert row.startswith("ngram, k = ")
    assert all(len(line) <= 80 for line in lines if "speculate" not in line)


def test_missing_prompts_are_told_before_any_work(
    planned: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.options.Loading.load", None)
    ran = planned("--prompts", "/none")
    assert ran.code == 2 and "/none" in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "0"), "batches=0"),
        (("--batch", "x"), "such as 1,8"),
        (("--drafters", "none"), "looked at anyway"),
        (("--drafters", "draft:a,draft:b"), "two of one kind"),
        (("--drafters", "draft,nobody"), "drafter='nobody' does"),
        (("--drafters", "ngram+nobody"), "'nobody' in drafter='ngram+nobody'"),
        (("--drafters", "ngram,,suffix"), "set apart by commas"),
        (("--num-prompts", "0"), "num-prompts=0"),
        (("--depth", "0"), "depth=0"),
        (
            ("--prompts", "/none"),
            "cannot be read: No such file or directory; give a file of prompts",
        ),
        (("--rules", "blok"), "did you mean 'block'"),
        (("--save", "/none/plan.toml"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    planned: Command, words: tuple[str, ...], said: str
) -> None:
    ran = planned(*words)
    assert ran.code == 2 and ran.out == "" and said in ran.err
