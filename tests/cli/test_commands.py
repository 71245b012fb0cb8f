"""`demo`, `doctor`, `train` and the help texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    MixtralConfig,
    MptConfig,
    PretrainedConfig,
)

from outrider import __version__
from outrider.cli.demo import Pair
from outrider.cli.timing import Run
from outrider.train.loop import Outcome, Progress
from outrider.types import Delta, SpeculativeMetrics
from tests.cli.conftest import Ran

Command = Callable[..., Ran]


def test_the_version(outrider: Command) -> None:
    assert outrider("--version") == Ran(0, f"outrider {__version__}\n", "")


@pytest.mark.parametrize(
    "words",
    [
        *((), ("generate",), ("demo",), ("doctor",), ("profile",), ("export",)),
        *(("train", name) for name in ("lm", "draft", "early-exit")),
    ],
)
def test_help_texts_carry_examples(outrider: Command, words: tuple[str, ...]) -> None:
    ran = outrider(*words, "--help")
    assert ran.code == 0
    assert "Examples:\n  outrider" in ran.out.replace("    outrider", "  outrider")


def test_the_demo_shows_equal_tokens(outrider: Command) -> None:
    ran = outrider("demo", "--smoke")
    assert ran.code == 0
    assert "tokens equal: yes; plain" in ran.out.splitlines()[-1]
    assert ran.out.splitlines()[-1].count("tokens/s") == 2


def made(tokens: tuple[int, ...]) -> Run:
    sources = ("bonus",) * len(tokens)
    return Run([Delta(0, "", tokens, sources)], SpeculativeMetrics(wall_s=1.0))


def test_the_demo_fails_when_one_token_differs(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Pair([made((1, 2))], [made((1, 2))]).tokens_equal
    assert not Pair([made((1, 2)), made((1, 3))], [made((1, 2))]).tokens_equal
    runs = iter([made((1, 2, 3)), made((1, 2, 4))])
    monkeypatch.setattr("outrider.cli.demo.warm_up", lambda *_: None)
    monkeypatch.setattr("outrider.cli.demo.measure", lambda *_, **__: next(runs))
    ran = outrider("demo", "--smoke")
    assert ran.code == 1
    assert "tokens equal: no" in ran.out and "under --strict they must be equal" in ran.out


def test_doctor_reports_the_pair(outrider: Command, model: str) -> None:
    ran = outrider("doctor", "--model", model, "--drafter", "ngram", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0
    assert report["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert report["machine"]["threads"] >= 1
    pair = report["pair"]
    assert pair["compatible"] is True
    assert pair["strict_self_test"] == "passed"
    assert pair["drafter"] == {"name": "ngram", "trusted": False}
    for name in ("dtype", "device", "attention", "linears", "strict", "architecture", "vocab_size"):
        assert name in pair
    assert pair["path"] == "attention interface"
    plain = outrider("doctor", "--model", model)
    assert "strict self test" in plain.out
    # Nothing was chosen yet, so there is nothing to tell of it.
    assert "name auto" in plain.out and "  control" not in plain.out


def test_doctor_says_why_a_pair_does_not_work(outrider: Command) -> None:
    ran = outrider("doctor", "--model", "no/such/folder", "--json")
    pair = json.loads(ran.out)["pair"]
    assert ran.code == 2
    assert pair["compatible"] is False
    assert "no/such/folder" in pair["reason"]


def test_a_failed_self_test_fails(
    outrider: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([made((1, 2)), made((1, 2)), made((1, 2)), made((1, 3))])
    monkeypatch.setattr("outrider.cli.doctor.measure", lambda *_, **__: next(runs))
    ran = outrider("doctor", "--model", model, "--drafter", "ngram", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["pair"]["strict_self_test"] == "failed: seeded tokens differ"


def test_an_interrupted_self_test_has_no_verdict(
    outrider: Command, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Run(interrupted=True)
    monkeypatch.setattr("outrider.cli.doctor.measure", lambda *_, **__: cut)
    ran = outrider("doctor", "--model", model, "--drafter", "ngram")
    assert (ran.code, ran.out) == (130, "")


def beside_tokenizer(model: str, shape: PretrainedConfig, folder: Path) -> str:
    """A random model of that shape in a folder with the small model's tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return str(folder)


def test_a_model_that_cannot_be_strict_is_compatible(
    outrider: Command, model: str, tmp_path: Path
) -> None:
    """Experts are chosen by row: strict decoding refuses them, plain decoding does not."""
    shape = MixtralConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    folder = beside_tokenizer(model, shape, tmp_path / "experts")
    ran = outrider("doctor", "--model", folder, "--drafter", "ngram", "--json")
    pair = json.loads(ran.out)["pair"]
    assert (ran.code, pair["compatible"], pair["strict"]) == (0, True, False)
    assert pair["strict_self_test"].startswith("not to be had: ")
    assert "experts" in pair["strict_self_test"]


def test_doctor_names_the_path_a_model_takes(outrider: Command, model: str, tmp_path: Path) -> None:
    """The slab with its reason; refused with its reason."""
    shape = FalconConfig(
        vocab_size=4096, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    folder = beside_tokenizer(model, shape, tmp_path / "slab")
    ran = outrider("doctor", "--model", folder, "--drafter", "ngram", "--json")
    pair = json.loads(ran.out)["pair"]
    assert (ran.code, pair["attention"]) == (0, "slab")
    assert pair["path"].startswith("slab (its attention does not go through")
    assert "attention interface" in pair["strict_self_test"]
    folder = beside_tokenizer(
        model, MptConfig(vocab_size=4096, d_model=32, n_heads=2, n_layers=1), tmp_path / "refused"
    )
    ran = outrider("doctor", "--model", folder, "--drafter", "ngram", "--json")
    pair = json.loads(ran.out)["pair"]
    assert (ran.code, pair["compatible"], pair["path"]) == (2, False, "refused")
    assert "mpt" in pair["reason"] and "position_ids" in pair["reason"]


def test_training_reports_its_steps(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_recipe(recipe: str, *, progress: Callable[[Progress], None], **rest: Any) -> Outcome:
        assert (recipe, rest["resume"], rest["max_minutes"]) == ("tiny", True, 0.5)
        progress(Progress(1, 2, 6.5, None, 100.0, 1.0))
        progress(Progress(2, 2, 6.0, 400.0, 100.0, 2.0))
        return Outcome(True, 2, 2048, 2.0, ())

    monkeypatch.setattr("outrider.train.run_recipe", run_recipe)
    ran = outrider("train", "lm", "tiny", "--out", str(tmp_path), "--max-minutes", "0.5")
    assert ran.code == 0
    assert "step 2/2  loss 6.000, held-out perplexity 400.00, 100 tokens/s" in ran.err
    assert "step 2, 2048 tokens" in ran.out


def test_interrupted_training_can_be_resumed(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_recipe(*_: Any, **__: Any) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.train.run_recipe", run_recipe)
    ran = outrider("train", "lm", "tiny", "--out", str(tmp_path))
    assert ran.code == 130
    assert "resumes" in ran.err


def test_a_head_wants_text(outrider: Command, tmp_path: Path) -> None:
    ran = outrider("train", "eagle3", "--out", str(tmp_path / "head"))
    assert ran.code == 2
    assert "no text to train on; give files, folders or JSONL with --text" in ran.err
    ran = outrider("train", "eagle3", "--out", str(tmp_path / "head"), "--loss", "mse")
    assert ran.code == 2
    assert "eagle.loss is mse" in ran.err
    ran = outrider("train", "mtp", "--out", str(tmp_path / "head"), "--loss", "mse")
    assert ran.code == 2
    assert "mtp.loss is mse" in ran.err


def test_an_unknown_recipe_is_refused(outrider: Command, tmp_path: Path) -> None:
    ran = outrider("train", "lm", "no-such.toml", "--out", str(tmp_path))
    assert ran.code == 2
    assert "no-such.toml" in ran.err
