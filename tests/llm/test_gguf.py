"""GGUF files under the LLM: the tokens of plain decoding, whoever drafts, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import outrider
from outrider import LLM, SamplingParams
from outrider.bench.gguf_file import write_gguf
from outrider.errors import (
    InvalidConfig,
    ModelError,
    OutOfMemory,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.llm.load import draft_models
from outrider.models.bundled import bundled_path
from tests.models.families import one_thread
from tests.models.libllama_models import bundled_file, needs_libllama, quantised_file

pytestmark = needs_libllama
single = pytest.fixture(scope="module", autouse=True)(one_thread)

PROMPTS = ["def mean(values):\n", "class Stack:\n    def push(self, item):\n", "import os\n"]
LAWS = {
    "greedy": SamplingParams(max_tokens=32, temperature=0),
    "coupled": SamplingParams(max_tokens=32, temperature=0.8, seed=5),
    "controlled": SamplingParams(
        max_tokens=32, temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=9, min_tokens=20
    ),
}
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"width": 3, "nodes": 10}}


@cache
def loaded(drafter: str, shape: str = "chain") -> LLM:
    spec = drafter.replace("draft", f"draft:{bundled_file('draft')}")
    return LLM.load(exact_file(), spec, k=4, **SHAPES[shape])


def exact_file() -> Path:
    """The target in float32, where rows of passes of other widths differ least."""
    return bundled_file("target", torch.float32)


@cache
def plain(law: str) -> list[list[int]]:
    """One by one, without a draft."""
    llm = loaded("none")
    return [llm.generate(prompt, LAWS[law])[0].token_ids for prompt in PROMPTS]


def texts_of(llm: LLM, law: str) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, LAWS[law])]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("drafter", "shape"),
    [
        ("ngram", "chain"),
        ("suffix", "tree"),
        ("recycle", "tree"),
        ("draft", "chain"),
        ("draft", "tree"),
        ("ngram+draft", "tree"),
    ],
)
def test_tokens_are_plain_decodings(drafter: str, shape: str, law: str) -> None:
    llm = loaded(drafter, shape)
    assert texts_of(llm, law) == plain(law)
    assert llm.metrics.accepted > 0
    # Nothing is left of the texts, with the target or with the draft model.
    assert not llm._target._texts  # type: ignore[union-attr]


def test_the_comparison_can_fail() -> None:
    other = SamplingParams(max_tokens=32, temperature=0.8, seed=6)
    assert loaded("draft").generate(PROMPTS[0], other)[0].token_ids != plain("coupled")[0]


def test_the_file_is_the_model_it_was_made_from() -> None:
    """In float32, greedily, from the same tokens."""
    folder = LLM.load("bundled", "none", dtype="float32")
    llm = loaded("none")
    tokens = [folder.tokenizer.encode(prompt) for prompt in PROMPTS]
    ours, theirs = (model.generate(tokens, LAWS["greedy"]) for model in (llm, folder))
    assert [done.text for done in ours] == [done.text for done in theirs]


@pytest.mark.parametrize(
    "kind",
    ["Q4_K_M", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q8_0", "Q4_0", "Q6_K"))],
)
def test_quantisations_are_decoded_and_told(kind: str) -> None:
    """Activations are eight-bit numbers: texts are equal to the first near tie."""
    target = quantised_file(kind)
    llm = LLM.load(target, f"draft:{bundled_file('draft')}", k=4)
    info = llm.info()
    assert info["dtype"].startswith(kind[:4]) and kind[:4] in info["exact_law"]
    params = SamplingParams(max_tokens=24, temperature=0)
    fast, slow = (llm.generate(PROMPTS, params, depth=depth) for depth in (None, 0))
    assert [len(done.token_ids) for done in fast] == [24] * 3
    pairs = [zip(a.token_ids, b.token_ids, strict=True) for a, b in zip(fast, slow, strict=True)]
    common = [sum(1 for _ in takewhile(lambda both: both[0] == both[1], pair)) for pair in pairs]
    assert sum(common) >= 24, common
    assert fast[0].stats.accepted > 0


@pytest.mark.parametrize("mixed", ["file drafts", "folder drafts"])
def test_a_file_and_a_folder_are_a_pair(mixed: str) -> None:
    folder, file = bundled_path("draft"), bundled_file("draft")
    if mixed == "file drafts":
        llm = LLM.load("bundled", f"draft:{file}", dtype="float32")
    else:
        llm = LLM.load(exact_file(), f"draft:{folder}")
    fast, slow = (llm.generate(PROMPTS, LAWS["coupled"], depth=depth) for depth in (None, 0))
    assert [done.token_ids for done in fast] == [done.token_ids for done in slow]
    assert llm.metrics.acceptance_rate > 0.2


def test_a_file_drafts_inside_transformers_generate() -> None:
    model = LlamaForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
    ids = torch.tensor([[304, 457, 292, 1052, 83, 291, 199]])
    ask = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    callable_ = outrider.custom_generate(drafter=f"draft:{bundled_file('draft')}")
    ours = model.generate(ids, **ask, custom_generate=callable_)
    assert torch.equal(ours, model.generate(ids, **ask))


def test_a_bridged_file_drafts() -> None:
    llm = LLM.load(exact_file(), f"bridge:{bundled_file('draft')}")
    assert texts_of(llm, "greedy") == plain("greedy")
    assert llm.metrics.accepted > 0


def test_samples_share_their_prompt_and_say_how_likely_they_are() -> None:
    llm = loaded("draft")
    params = SamplingParams(n=3, max_tokens=12, temperature=0.8, seed=3, logprobs=2)
    prompt = llm.tokenizer.encode(PROMPTS[1] * 8)
    assert len(prompt) > 64
    done = llm.generate([prompt], params)
    alone = llm.generate([prompt], params, depth=0)
    assert [one.token_ids for one in done] == [one.token_ids for one in alone]
    for one, other in zip(done, alone, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 0.02 for a, b in pairs)


def test_stop_strings_streams_and_grammars() -> None:
    llm = loaded("draft")
    stopped = llm.generate(PROMPTS[0], SamplingParams(temperature=0, stop=("return",)))[0]
    assert stopped.stop_reason == "return" and "return" not in stopped.text
    deltas = list(llm.stream(PROMPTS[0], LAWS["greedy"]))
    whole = llm.generate(PROMPTS[0], LAWS["greedy"])[0].text
    assert "".join(delta.text for delta in deltas) == whole
    dated = SamplingParams(max_tokens=20, seed=1, regex="[0-9]{4}-[0-9]{2}", temperature=1.0)
    fast, slow = (llm.generate("date = ", dated, depth=depth)[0] for depth in (None, 0))
    assert fast.text == slow.text and len(fast.text) == 7 and fast.finish_reason == "stop"


def test_a_cache_that_is_too_small_for_all_serves_them_in_turn() -> None:
    target = exact_file()
    room = LLM.load(target, "none").info()["cache"]["bytes_per_token"] * 520
    llm = LLM.load(target, "none", cache_bytes=room)
    prompts = [llm.tokenizer.encode(text * 40)[:230] for text in PROMPTS]
    done = llm.generate(prompts, LAWS["greedy"])
    free = loaded("none").generate(prompts, LAWS["greedy"])
    assert [one.token_ids for one in done] == [one.token_ids for one in free]
    with pytest.raises(OutOfMemory, match="cache of 512 tokens is full"):
        llm.generate([prompts[0] * 3], LAWS["greedy"])


def test_more_trees_at_once_than_libllama_has_sequences_for() -> None:
    """Drafts are left out where they do not fit, texts are the same, and all is given back."""
    llm, params = loaded("draft", "tree"), SamplingParams(max_tokens=8, temperature=0)
    prompts = [[7 + i, 304, 457, 292, 100 + i] for i in range(40)]
    before = llm.metrics.plain_rounds
    trees = llm.generate(prompts, params)
    assert llm.metrics.plain_rounds > before
    plain = loaded("none").generate(prompts, params)
    assert [done.token_ids for done in trees] == [done.token_ids for done in plain]
    target: Any = llm._target
    assert not target._texts and len(target._memory._free_ids) == 256


def test_what_a_file_cannot_honour_is_refused() -> None:
    target = bundled_file("target")
    for option in ({"strict": True}, {"pack": True}, {"dtype": "float32"}):
        with pytest.raises(InvalidConfig, match=rf"{next(iter(option))}=.*leave it out"):
            LLM.load(target, "none", **option)
    with pytest.raises(InvalidConfig, match="device='cuda'"):
        LLM.load(target, "none", device="cuda")
    with pytest.raises(UnsupportedModel, match=r"int8.*quantised already"):
        LLM.load(target, "int8")
    with pytest.raises(UnsupportedModel, match=r"early-exit.*LibllamaTarget"):
        LLM.load(target, "early-exit:2")
    with pytest.raises(UnsupportedModel, match="cannot be updated"):
        loaded("none").update_weights({})
    with pytest.raises(InvalidConfig, match="cache_bytes"):
        LLM.load(target, "none", cache_bytes=10)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    saved = json.loads((bundled_path("draft") / "tokenizer.json").read_text())
    vocabulary = saved["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    model = LlamaForCausalLM.from_pretrained(bundled_path("draft"))
    write_gguf(model, tmp_path / "other.gguf", tokenizer=tmp_path)
    with pytest.raises(VocabularyMismatch, match="first at 'a'"):
        LLM.load(bundled_file("target"), f"draft:{tmp_path / 'other.gguf'}")


def test_a_bound_is_shared_in_tokens_with_a_folder() -> None:
    """A folder's blocks are of 64 tokens, a file's of 256: neither side may starve."""
    sizes = {"target": bundled_path("target"), "draft": bundled_file("draft")}
    llm = LLM.load(sizes["target"], f"draft:{sizes['draft']}", cache_bytes=8 << 20)
    plans = [model.cache_plan() for model in (llm.target, *draft_models(llm.drafter))]
    tokens = [plan["max_bytes"] // plan["bytes_per_token"] for plan in plans]
    assert len(tokens) == 2
    assert abs(tokens[0] - tokens[1]) <= 256


def test_a_missing_draft_file_is_called_the_drafter() -> None:
    with pytest.raises(ModelError, match=r"drafter=.*none\.gguf' is no file"):
        LLM.load(bundled_file("target"), "draft:/nowhere/none.gguf")
