"""Greedy search through the callable is greedy search: the same tensor, whoever guesses."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import outrider
from outrider.drafters import EarlyExitDrafter, NgramDrafter
from outrider.models import HuggingFaceTarget
from outrider.models.bundled import bundled_path, eval_prompts
from tests.interop.tiny import near, padded, tiny

GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def eos_of(model, inputs) -> int:
    """A token that plain greedy search makes in the middle of one text."""
    out = model.generate(**inputs, **GREEDY)
    return int(out[0, inputs["input_ids"].shape[1] + 6])


def callables(model):
    """Each way of guessing, and what `generate` itself is told."""
    draft = near(model)
    return {
        "assistant": (outrider.custom_generate(assistant_model=draft), {}),
        "confident": (
            outrider.custom_generate(assistant_model=draft, assistant_confidence_threshold=0.5),
            {"num_assistant_tokens": 6},
        ),
        "lookup": (
            outrider.custom_generate(),
            {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2},
        ),
        "ngram": (outrider.custom_generate(drafter="ngram", num_assistant_tokens=2), {}),
        "none": (outrider.custom_generate(drafter="none"), {}),
        "object": (outrider.custom_generate(drafter=NgramDrafter(1, 3)), {}),
        "its own layers": (outrider.custom_generate(drafter=EarlyExitDrafter(1)), {}),
        "target": (outrider.custom_generate(drafter=HuggingFaceTarget(near(model))), {}),
        "nothing said": (outrider.custom_generate(), {}),
        "packed": (outrider.custom_generate(assistant_model=draft, max_texts=2), {}),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padded_batches_with_an_end_in_the_middle(family: str) -> None:
    model, inputs = tiny(family), padded()
    ends = [eos_of(model, inputs), 96]
    plain = model.generate(**inputs, **GREEDY, eos_token_id=ends)
    assert (plain[0, -3:] == 0).all(), "the first text must end early for this test to mean much"
    for name, (callable_, told) in callables(model).items():
        out = model.generate(
            **inputs, **GREEDY, eos_token_id=ends, custom_generate=callable_, **told
        )
        assert out.dtype == torch.int64
        assert torch.equal(out, plain), name
    wrong = model.generate(**inputs, **GREEDY, eos_token_id=[96], custom_generate=callable_)
    assert not torch.equal(wrong[:, : plain.shape[1]], plain), "another end is another tensor"


def test_speculation_took_place() -> None:
    model, inputs = tiny(), padded()
    for name, (callable_, told) in callables(model).items():
        model.generate(**inputs, **GREEDY, custom_generate=callable_, **told)
        assert (callable_.metrics.drafted > 0) == (name != "none"), name
    accepted = callables(model)["assistant"][0]
    model.generate(**inputs, **GREEDY, custom_generate=accepted)
    assert accepted.metrics.acceptance_rate > 0.3


def test_a_confident_draft_stops_early() -> None:
    model, inputs = tiny(), padded()
    made = {}
    for threshold in (0.0, 0.2, 1.0):
        callable_ = outrider.custom_generate(
            assistant_model=near(model), assistant_confidence_threshold=threshold
        )
        model.generate(**inputs, **GREEDY, custom_generate=callable_)
        made[threshold] = callable_.metrics
    per_round = {t: m.drafted / m.rounds for t, m in made.items()}
    assert per_round[1.0] == 1.0 < per_round[0.2] < per_round[0.0]
    assert made[0.2].acceptance_rate > made[0.0].acceptance_rate


def test_lengths_and_least_lengths() -> None:
    model, inputs = tiny(), padded()
    end = eos_of(model, inputs)
    callable_ = outrider.custom_generate(assistant_model=near(model))
    for told in (
        {"max_length": 20},
        {"max_new_tokens": 12, "min_new_tokens": 9},
        {"max_new_tokens": 12, "min_length": 22},
        {"max_new_tokens": 5, "min_new_tokens": 5},
        {"max_new_tokens": 1},
        {"max_new_tokens": 12, "prefill_chunk_size": 4},
    ):
        asked = {**inputs, **told, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
        plain = model.generate(**asked)
        assert torch.equal(model.generate(**asked, custom_generate=callable_), plain), told


def test_a_dictionary_where_one_is_asked_for() -> None:
    model, inputs = tiny(), padded()
    callable_ = outrider.custom_generate()
    out = model.generate(
        **inputs, **GREEDY, return_dict_in_generate=True, custom_generate=callable_
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, model.generate(**inputs, **GREEDY))
    assert out.scores is None and out.logits is None


def test_one_prompt_without_a_mask() -> None:
    model = tiny()
    ids = padded()["input_ids"][2:3]
    plain = model.generate(ids, **GREEDY)
    assert torch.equal(
        model.generate(ids, **GREEDY, custom_generate=outrider.custom_generate()), plain
    )


def test_the_bundled_pair() -> None:
    target = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(bundled_path("draft"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("target"), padding_side="left")
    texts = [text[:120] for text in eval_prompts("code")[:4]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    asked = {**inputs, "max_new_tokens": 32, "do_sample": False}
    plain = target.generate(**asked)
    for options in (
        {"assistant_model": draft},
        {"drafter": f"draft:{bundled_path('draft')}", "tokenizer": tokenizer},
        {"strict": True},
    ):
        callable_ = outrider.custom_generate(**options)
        assert torch.equal(target.generate(**asked, custom_generate=callable_), plain), options
    lookup = target.generate(
        **asked, custom_generate=outrider.custom_generate(), prompt_lookup_num_tokens=4
    )
    assert torch.equal(lookup, plain)
