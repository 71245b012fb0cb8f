"""`outrider certify` from the command line: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.cli.certify_html import command_line
from outrider.cli.options import Loading
from tests.certify import fake_engine
from tests.certify.served import settings
from tests.certify.server import serving
from tests.cli.conftest import Ran

FAKE = str(fake_engine.__file__)
FEW = ("--budget", "200", "--max-tokens", "6", "--within", "0.3")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("import os\n\ndef f(x):\nclass A:\nx = \n")
    return str(path)


def test_a_model_is_certified_as_json(
    outrider: Callable[..., Ran], model: str, prompts: str
) -> None:
    options = ("--model", model, "--drafter", "ngram", "--file", prompts, "--json")
    ran = outrider("certify", "model", *options, "--near-tie", "0.5", *FEW)
    told = json.loads(ran.out)
    assert (ran.code, told["verdict"]) == (told["exit_code"], "lossless")
    names = [check["name"] for check in told["checks"]]
    certain = ["greedy", "ends", "seeds", "logprobs", "temperature"]
    assert names == [*certain, "captured rows", "sampled law"]
    assert told["checks"][0]["evidence"]["near tie"] == 0.5
    assert told["control"]["evidence"]["planted"] > 0


def test_one_drafter_is_certified_and_not_a_choice_among_them(
    outrider: Callable[..., Ran], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, as what is chosen by the clock may draft nothing for long."""
    seen: list[str] = []
    loaded = Loading.load

    def watched(loading: Loading) -> object:
        llm = loaded(loading)
        seen.append(llm.drafter.name)
        return llm

    monkeypatch.setattr(Loading, "load", watched)
    outrider("certify", "model", "--file", prompts, *FEW)
    outrider("profile", "-n", "2", "--file", prompts)
    assert seen == ["draft", "draft"]


def test_a_lossy_rule_is_found(outrider: Callable[..., Ran], prompts: str) -> None:
    options = ("--drafter", "draft", "--lossy", "--rule", "typical-acceptance", "--file", prompts)
    ran = outrider("certify", "model", *options, "--budget", "3000", "--within", "0.1")
    assert ran.code == 1
    assert "verdict: rule bias" in ran.out
    assert "to see it" in ran.out


def test_transformers_is_certified_from_the_command_line(
    outrider: Callable[..., Ran], model: str, prompts: str
) -> None:
    options = ("--model", model, "--drafter", "none", "--file", prompts, "--dtype", "float32")
    few = ("--budget", "40", "--max-tokens", "6", "--within", "0.5", "--top-k", "20")
    ours = ("-o", f"model={model}", "-o", "prompt_lookup_num_tokens=3", "-o", "threads=1")
    ran = outrider("certify", "model", *options, *few, "--engine", "transformers", *ours)
    assert ran.code in (0, 3), ran.out + ran.err
    assert "transformers" in ran.out
    refused = outrider("certify", "model", *options, *few, "--engine", FAKE, "--min-p", "0.1")
    assert (refused.code, "min_p=0.1: refused" in refused.err) == (2, True)
    lost = outrider("certify", "model", *options, "--python", sys.executable)
    assert (lost.code, "name one" in lost.err) == (2, True)


def test_a_file_without_prompts(outrider: Callable[..., Ran], model: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    ran = outrider("certify", "model", "--model", model, "--drafter", "none", "-f", str(empty))
    assert ran.code == 2
    assert "no prompt" in ran.err


def test_an_endpoint_is_certified_as_json(outrider: Callable[..., Ran], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\nb\nc\ne\n")
    few = ("--file", str(file), "--within", "0.5", "-n", "6", "--json")
    with serving(settings()) as url:
        ran = outrider("certify", "endpoint", url, *few)
        off = ("--switch-off", '{"speculate": false}', "--logprobs", "0")
        paired = outrider("certify", "endpoint", url, *off, *few)
    told, other = json.loads(ran.out), json.loads(paired.out)
    assert (ran.code, told["verdict"]) == (0, "lossless"), ran.out
    assert "requests" in ran.err
    assert "told with it" in told["subject"]
    assert "beside texts without" in other["subject"]


def test_an_endpoint_that_cannot_be_meant(outrider: Callable[..., Ran]) -> None:
    for words, said in (
        (("nowhere",), "no address"),
        (("http://127.0.0.1:9",), "cannot be reached"),
        (("http://127.0.0.1:9", "--at-once", "0"), "at-once=0"),
        (("http://127.0.0.1:9", "--switch-on", "{"), "no JSON"),
        (("http://127.0.0.1:9", "--switch-off", "[]"), "an object is due"),
    ):
        ran = outrider("certify", "endpoint", *words, "--served", "x")
        assert ran.code == 2, words
        assert said in ran.err


def test_vectors_are_written_and_answered(
    outrider: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = json.loads(outrider("certify", "vectors", "--emit").out)
    case = written["cases"][-1]
    due = case.pop("expect")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(case) + "\n"))
    assert json.loads(outrider("certify", "vectors", "--answer").out) == due


def test_vectors_of_another_version_are_refused(
    outrider: Callable[..., Ran], tmp_path: Path
) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"version": 0, "cases": []}')
    ran = outrider("certify", "vectors", "--check", "true", "--file", str(old))
    assert ran.code == 2
    assert "version 0" in ran.err


def test_vectors_want_to_be_told_what_to_do(outrider: Callable[..., Ran]) -> None:
    ran = outrider("certify", "vectors")
    assert ran.code == 2
    assert "--emit" in ran.err


def test_the_report_as_a_page(
    outrider: Callable[..., Ran], model: str, prompts: str, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    options = ("--model", model, "--drafter", "ngram", "--file", prompts, "--html", str(file))
    ran = outrider("certify", "model", *options, *FEW)
    written = file.read_text(encoding="utf-8")
    assert ran.code == 0
    assert f"outrider certify model --model {model}" in written
    nowhere = outrider("certify", "model", "--html", str(tmp_path / "none" / "page.html"))
    assert nowhere.code == 2
    assert "no folder" in nowhere.err


def test_keys_are_not_in_the_page() -> None:
    words = ("certify", "endpoint", "--api-key", "k1", "--other-key=k2", "--max-tokens", "3")
    words += ("--switch-on", '{"api_key": "k3"}', "-o", "hf_token=k4", "-o", "model=llama")
    context = SimpleNamespace(find_root=lambda: SimpleNamespace(obj=words))
    line = command_line(context)  # type: ignore[arg-type]
    assert not any(f"k{i}" in line for i in range(1, 5))
    assert "--max-tokens 3" in line
    assert "model=llama" in line
