"""`outrider generate`: what is printed where, and in which colours."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.options import why_unequal
from outrider.cli.terminal import escaped
from outrider.cli.timing import Run
from outrider.types import Delta, SpeculativeMetrics
from tests.cli.conftest import PROMPT, Ran
from tests.house.layout import ROOT

Command = Callable[..., Ran]


def test_the_text_goes_to_standard_output_and_the_figures_to_standard_error(
    generate: Command, model: str
) -> None:
    llm = LLM.load(model, "none")
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].text
    ran = generate(PROMPT)
    assert (ran.code, ran.out) == (0, escaped(expected) + "\n")
    for word in ("24 tokens", "tokens/s", "acceptance rate", "mean acceptance length"):
        assert word in ran.err
    assert re.search(
        r"\d s: draft .*, score .*, verify .*, commit .*, other .*the five sum", ran.err
    )
    assert "\x1b" not in ran.out + ran.err


def test_json_carries_everything(generate: Command) -> None:
    ran = generate(PROMPT, "--json", "--compare", "--temperature", "0.9", "--seed", "3")
    report = json.loads(ran.out)
    assert ran.code == 0
    assert len(report["token_ids"]) == len(report["sources"]) == 24
    assert set(report["sources"]) <= {"draft", "correction", "bonus"}
    assert report["finish_reason"] == "length"
    assert report["stats"]["committed"] == 24
    assert report["tokens_equal"] is True
    assert report["plain"]["token_ids"] == report["token_ids"]
    assert report["plain"]["stats"]["drafted"] == 0 < report["stats"]["drafted"]
    assert [one["source"] for one in report["provenance"]] == report["sources"]
    guessed = [one for one in report["provenance"] if one["source"] == "draft"]
    assert guessed and all(one["drafter"] == "ngram" and one["depth"] > 0 for one in guessed)
    stats = report["stats"]
    parts = [stats[f"{name}_s"] for name in ("draft", "score", "verify", "commit", "other")]
    assert sum(parts) == pytest.approx(stats["wall_s"])
    assert "the five sum to wall_s" in report["definitions"]["other_s"]


def test_a_trace_is_a_line_per_round(generate: Command, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    ran = generate(PROMPT, "--json", "--trace", str(file), "--drafter", "ngram+suffix")
    first, *rounds = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["trace"] == 2 and first["drafter"] == "ngram+suffix"
    tokens: list[int] = []
    for one in rounds:
        path = [one["tokens"][row - 1] for row in one["path"]]
        tokens += [*path, one["added"]][: one["kept"]]
    assert tokens == json.loads(ran.out)["token_ids"]
    assert {name for one in rounds for name in one["drafters"]} <= {"ngram", "suffix"}
    refused = generate(PROMPT, "--compare", "--trace", str(file))
    assert refused.code == 2 and "leave one out" in refused.err
    nowhere = generate(PROMPT, "--trace", str(tmp_path / "none" / "file"))
    assert nowhere.code == 2 and "cannot be written" in nowhere.err


def test_controls_of_the_command_line_are_the_requests(generate: Command, model: str) -> None:
    flags = (
        "--repetition-penalty 1.3 --presence-penalty 0.5 --frequency-penalty 0.25 "
        "--no-repeat-ngram 3 --logit-bias 5=-2.5 --logit-bias 7=1 --bad-word self --min-tokens 20 "
        "--typical-p 0.9 --temperature 0.7 --seed 3 --logprobs 2 --json"
    )
    ran = generate(PROMPT, *flags.split())
    report = json.loads(ran.out)
    asked = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, no_repeat_ngram=3,
        logit_bias={5: -2.5, 7: 1.0}, bad_words=("self",), min_tokens=20, typical_p=0.9,
        temperature=0.7, seed=3, logprobs=2, max_tokens=24,
    )  # fmt: skip
    (done,) = LLM.load(model, "none").generate(PROMPT, asked)
    assert tuple(report["token_ids"]) == done.token_ids
    assert [record["token"] for record in report["logprobs"]] == list(done.token_ids)
    assert [len(record["top"]) for record in report["logprobs"]] == [2] * 24


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--logit-bias", "x=1"), "logit-bias 'x=1': a token id and a number"),
        (("--logit-bias", "5"), "logit-bias '5'"),
        (("--logprobs", "2"), "add --json"),
        (("--typical-p", "0"), "typical_p=0.0"),
    ],
)
def test_controls_that_cannot_be_meant(
    generate: Command, flags: tuple[str, ...], message: str
) -> None:
    ran = generate(PROMPT, *flags)
    assert ran.code == 2 and message in ran.err


def test_json_names_the_seed_that_was_drawn(generate: Command) -> None:
    report = json.loads(generate(PROMPT, "--json", "--temperature", "1", "-n", "8").out)
    assert report["rule"] == "block"
    again = ("--seed", str(report["seed"]), "--rule", report["rule"])
    same = json.loads(generate(PROMPT, "--json", "--temperature", "1", "-n", "8", *again).out)
    assert same["token_ids"] == report["token_ids"]
    other = json.loads(generate(PROMPT, "--json", "--temperature", "1", "-n", "8").out)
    assert other["seed"] != report["seed"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_half_a_comparison_is_none(
    generate: Command, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    whole, half = (
        Run([Delta(0, "text", (1,), ("bonus",), "length")], interrupted=interrupted)
        for interrupted in (False, True)
    )
    runs = iter([whole, half])
    monkeypatch.setattr("outrider.cli.generate.warm_up", lambda *_: None)
    monkeypatch.setattr("outrider.cli.generate.measure", lambda *_, **__: next(runs))
    ran = generate(PROMPT, "--compare", *form)
    assert ran.code == 130
    assert "equal" not in ran.out + ran.err
    assert "plain:" not in ran.err
    assert '"plain"' not in ran.out
    assert "interrupted before the comparison" in ran.err


def parted(generate: Command, monkeypatch: pytest.MonkeyPatch, *words: str) -> Ran:
    """A comparison in which the last token differs."""
    runs = iter(
        Run([Delta(0, "x", (1, last), ("bonus", "bonus"))], SpeculativeMetrics(wall_s=1.0))
        for last in (2, 3)
    )
    monkeypatch.setattr("outrider.cli.generate.warm_up", lambda *_: None)
    monkeypatch.setattr("outrider.cli.generate.measure", lambda *_, **__: next(runs))
    return generate(PROMPT, "--compare", *words)


def test_compare_says_why_tokens_are_not_equal(
    generate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = parted(generate, monkeypatch)
    assert "tokens equal: no" in loose.err and "--strict makes them equal" in loose.err
    strict = parted(generate, monkeypatch, "--strict")
    assert "tokens equal: no" in strict.err and "this is a fault" in strict.err
    assert "makes them equal" not in strict.err
    file = {"strict": False, "attention": "libllama"}
    assert "a GGUF file has no --strict" in why_unequal(file)
    in_law = parted(generate, monkeypatch, "--temperature", "1")
    assert "equal in law only" in in_law.err and "--strict" not in in_law.err


def test_one_thing_is_not_several(generate: Command) -> None:
    err = generate(PROMPT, "-n", "1").err
    assert err.startswith("1 token, ")


def test_compare_says_where_only_the_law_is_equal(generate: Command) -> None:
    ran = generate(PROMPT, "--compare", "--temperature", "1", "-n", "4")
    assert "plain:" in ran.err
    assert "equal in law only" in ran.err


def test_the_prompt_comes_from_a_file_or_standard_input(
    generate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    from_file = generate("--file", str(tmp_path / "prompt.txt"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    from_stdin = generate("-")
    assert from_file.out == from_stdin.out == generate(PROMPT).out


def test_colours_tell_the_sources_and_a_legend_says_which(
    generate: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = (
        "--drafter",
        f"draft:{model}",
    )  # guesses what the target says, so guesses are accepted
    plain = generate(PROMPT).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = generate(PROMPT, *itself)
    assert "\x1b[32m" in coloured.out, "accepted guesses are green"
    assert "\x1b[1;36m" in coloured.out, "bonus tokens are cyan"
    for source in ("draft", "correction", "bonus"):
        assert source in coloured.err
    monkeypatch.setenv("NO_COLOR", "1")
    assert generate(PROMPT, *itself).out == plain


def test_stop_strings_may_be_repeated(generate: Command) -> None:
    text = generate(PROMPT).out
    stop = text.strip()[2:5]
    ran = generate(PROMPT, "--stop", "never in any text", "--stop", stop, "--json")
    report = json.loads(ran.out)
    assert (report["finish_reason"], report["stop_reason"]) == ("stop", stop)
    assert text.startswith(report["text"])


def test_control_c_ends_cleanly_with_the_text_so_far(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    words = ["generate", "--model", model, "--drafter", "ngram", "-n", "1900", PROMPT]
    words += ["--trace", str(file)]
    code = f"from outrider.cli import run; import sys; sys.exit(run({words!r}))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that runs in the background of a shell ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) > 1
    assert "(interrupted)" in err.decode()
    assert "Traceback" not in err.decode()
    first_line, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    rounds = [line["round"] for line in lines]
    assert first_line["trace"] == 2
    assert rounds == list(range(len(rounds))) and rounds, "whole lines, none left out"


def test_grammars_come_as_files_or_as_they_are(generate: Command, tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    lark = tmp_path / "call.lark"
    lark.write_text('start: "f(" /[0-9]/ ")"')
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, str(tmp_path / "schema.json")):
        ran = generate("x = ", "--json-schema", given, "--drafter", "grammar")
        assert ran.code == 0 and json.loads(ran.out)["a"] in (1, 2)
    assert generate("x = ", "--grammar", str(lark)).out.startswith("f(")
    ran = generate("x = ", "--regex", "ab{2}c", "--json")
    assert json.loads(ran.out)["text"] == "abbc"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--regex", "a{2"), "unclosed"),
        (("--grammar", "nowhere.lark"), "nowhere.lark"),
        (("--json-schema", "nowhere.json"), "nowhere.json"),
        (("--json-schema", '{"type": '), "json_schema"),
        (("--regex", "a", "--json-schema", "{}"), "exclude each other"),
    ],
)
def test_a_grammar_that_is_none_is_one_line(
    generate: Command, words: tuple[str, ...], message: str
) -> None:
    ran = generate("x = ", *words)
    assert ran.code == 2 and ran.out == ""
    assert message in ran.err and len(ran.err.strip().splitlines()) == 1
