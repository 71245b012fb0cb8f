"""Other engines' command lines: ours read back what vLLM is told, and none is made up."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from outrider.interop.commands import ENGINES, Speculating, equivalents, speculative_config
from outrider.llm.options import Speculation

DRAFT = Speculating("/m", "draft:/d", 5, "block", draft="/d")


def command(how: Speculating, engine: str) -> list[str] | None:
    found = {one.engine: one.command for one in equivalents(how)}[engine]
    return None if found is None else shlex.split(found)


def test_vllms_dictionary_is_the_one_that_is_read() -> None:
    for how in (
        DRAFT,
        Speculating("/m", "ngram", 3, "greedy"),
        Speculating("/m", "suffix", 8, "coupled"),
        Speculating("/m", "eagle:/h", 4, "token", draft="/h"),
        Speculating("/m", "medusa:/h", 3, "token", draft="/h"),
        Speculating("/m", "mtp", 2, "block"),
    ):
        config = speculative_config(how)
        assert config is not None
        read = Speculation("auto").updated(config)
        assert (read.drafter, read.k) == (how.drafter, how.depth)
        assert read.rule == (how.rule if how.rule in ("token", "block") else None)
        words = command(how, "vLLM")
        assert words is not None and json.loads(words[-1]) == config


def test_what_an_engine_cannot_take_is_not_said() -> None:
    for spec in ("mtp:/h", "early-exit:/h", "int8"):
        how = Speculating("/m", spec, 4, "token", draft=spec.partition(":")[2] or None)
        assert speculative_config(how) is None and command(how, "vLLM") is None


def test_drawn_texts_are_drafted_by_drawing() -> None:
    """vLLM's own choice is the likeliest token, of which little is kept there."""
    for how in (DRAFT, replace(DRAFT, rule="coupled"), replace(DRAFT, drafter="eagle:/d")):
        config = speculative_config(how)
        assert config is not None and config["draft_sample_method"] == "probabilistic"
    assert "draft_sample_method" not in (speculative_config(replace(DRAFT, rule="greedy")) or {})
    assert "draft_sample_method" not in (speculative_config(replace(DRAFT, drafter="ngram")) or {})


def test_texts_at_a_time_and_rules_that_nobody_has_are_said() -> None:
    for engine, flag in zip(
        ENGINES, ("--max-num-seqs", "--max-running-requests", "-np"), strict=True
    ):
        words = command(replace(DRAFT, batch=8), engine)
        assert words is not None and words[words.index(flag) + 1] == "8"
    for one in equivalents(replace(DRAFT, rule="coupled")):
        assert "no rule 'coupled'" in one.note
    assert not any("no rule" in one.note for one in equivalents(DRAFT))
    files = replace(DRAFT, model="/m.gguf", draft="/d.gguf")
    words = command(files, "llama.cpp")
    assert words is not None and {"/m.gguf", "/d.gguf"} <= set(words)


def test_flags() -> None:
    assert command(DRAFT, "SGLang") == shlex.split(
        "python -m sglang.launch_server --model-path /m --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path /d --speculative-num-steps 5 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 6"
    )
    tree = Speculating("/m", "eagle:/h", 4, "greedy", 3, 12, draft="/h")
    assert command(tree, "SGLang") == shlex.split(
        "python -m sglang.launch_server --model-path /m --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path /h --speculative-num-steps 4 --speculative-eagle-topk 3 "
        "--speculative-num-draft-tokens 13"
    )
    assert command(DRAFT, "llama.cpp") == shlex.split(
        "llama-server -m /m.gguf --spec-type draft-simple -md /d.gguf --spec-draft-n-max 5 "
        "--spec-draft-n-min 0 --spec-draft-p-min 0"
    )
    ngram = command(Speculating("/m", "ngram", 3, "greedy"), "llama.cpp")
    assert ngram is not None and ngram[-2:] == ["--spec-ngram-mod-n-max", "3"]


def test_plain_decoding_is_plain_everywhere() -> None:
    for engine in ENGINES:
        words = command(Speculating("/m", "none", 0, "greedy"), engine)
        assert words is not None and not any("spec" in word for word in words)


@pytest.mark.parametrize("drafter", ["recycle", "early-exit:4", "int8"])
def test_what_others_do_not_have_is_said(drafter: str) -> None:
    for one in equivalents(Speculating("/m", drafter, 3, "greedy")):
        assert one.command is None and one.engine in one.note
