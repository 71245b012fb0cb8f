"""strict: the logits behind every token are the same bits, whoever drafts, in any batch."""

from __future__ import annotations

import pytest
import torch

from outrider import SamplingParams
from outrider.certify.bitwise import compare, record
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer

NUM_PROMPTS, LENGTH = 5, 12


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = TextTokenizer(bundled_path("target"))
    return [tokenizer.encode(text) for text in eval_prompts("code")[:NUM_PROMPTS]]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def pair(request) -> tuple[HuggingFaceTarget, HuggingFaceTarget]:
    dtype = request.param
    target = HuggingFaceTarget.load(bundled_path("target"), dtype=dtype, strict=True)
    return target, HuggingFaceTarget.load(bundled_path("draft"), dtype=dtype)


def drafters(draft: HuggingFaceTarget) -> list[Drafter]:
    return [ModelDrafter(draft), NgramDrafter()]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=LENGTH, temperature=0.0),
        SamplingParams(max_tokens=LENGTH, seed=17),
    ],
    ids=["greedy", "coupled"],
)
def test_logits_are_equal_bit_for_bit(pair, prompts, sampling) -> None:
    target, draft = pair
    plain = record(target, NoDrafter(), prompts, sampling, depth=4, batch=1)
    for drafter in drafters(draft):
        for batch in (1, 5):
            run = record(target, drafter, prompts, sampling, depth=4, batch=batch)
            result = compare(run, plain)
            assert result.equal and result.rows == NUM_PROMPTS * LENGTH, result


def test_without_strict_the_bits_differ(prompts) -> None:
    """The negative control: were arithmetic equal by itself, the test above would show nothing."""
    target = HuggingFaceTarget.load(bundled_path("target"), dtype=torch.bfloat16)
    draft = HuggingFaceTarget.load(bundled_path("draft"), dtype=torch.bfloat16)
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0)
    plain = record(target, NoDrafter(), prompts, sampling, depth=4, batch=1)
    run = record(target, ModelDrafter(draft), prompts, sampling, depth=4, batch=5)
    assert not compare(run, plain).equal
