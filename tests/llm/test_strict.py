"""strict: the logits behind every token are the same bits, whoever drafts, in any batch."""

from __future__ import annotations

import pytest
import torch

from outrider import SamplingParams, noise
from outrider.certify import real
from outrider.certify.bitwise import Comparison, compare, record
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer
from outrider.tree import TreeBudget

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


@pytest.mark.parametrize("seed", [None, 17], ids=["greedy", "coupled"])
def test_trees_leave_the_bits_as_they_are(pair, prompts, seed) -> None:
    target, draft = pair
    sampling = SamplingParams(max_tokens=LENGTH, temperature=float(seed is not None), seed=seed)
    plain = record(target, NoDrafter(), prompts, sampling, depth=4, batch=1)
    for batch in (1, 5):
        drafter, trees = ModelDrafter(draft), TreeBudget(3, 10)
        run = record(target, drafter, prompts, sampling, depth=4, batch=batch, trees=trees)
        result = compare(run, plain)
        assert result.equal and result.rows == NUM_PROMPTS * LENGTH, result


def test_without_strict_the_bits_differ(prompts) -> None:
    """The negative control: were arithmetic equal by itself, the test above would show nothing.

    In float32, where the form of a product goes by its rows; on an Intel processor these bits were
    equal in bfloat16 without it.
    """
    target = HuggingFaceTarget.load(bundled_path("target"), dtype=torch.float32)
    draft = HuggingFaceTarget.load(bundled_path("draft"), dtype=torch.float32)
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0)
    plain = record(target, NoDrafter(), prompts, sampling, depth=4, batch=1)
    run = record(target, ModelDrafter(draft), prompts, sampling, depth=4, batch=5)
    assert not compare(run, plain).equal


def test_without_strict_texts_part_at_near_ties_alone() -> None:
    lines = list(real.compare_settings("float32", True, False, 4, 10))
    assert [str(line.setting) for line in lines] == [
        "not strict, float32, greedy, draft, batch 5",
        "not strict, float32, greedy, ngram, batch 5",
    ]
    assert all(line.ok and line.result.rows == 40 for line in lines)
    assert any(line.result.equal_rows < 40 for line in lines)


@pytest.mark.parametrize(
    ("strict", "equal_rows", "gaps", "ok"),
    [
        (True, 20_000, (), True),
        (True, 19_999, (), False),
        (False, 100, (), True),
        (False, 100, (9e-5, 1e-6), True),
        (False, 100, (2e-4,), False),
        (False, 100, (1e-6,) * 3, False),
    ],
)
def test_what_a_comparison_must_be(strict, equal_rows, gaps, ok) -> None:
    setting = real.Setting("float32", True, strict, "draft", 1)
    result = Comparison(200, 20_000, 200, equal_rows)
    assert real.Compared(setting, result, gaps, 0.0).ok == ok


def test_the_gap_is_that_under_the_noise() -> None:
    """Row 3 of stream TARGET moves the lead: the race's winner leads, not the likeliest."""
    logits = torch.tensor([2.0, 1.5, -4.0])
    assert real.top_two_gap(logits, None) == pytest.approx(0.5)
    perturbed = logits.double().log_softmax(-1) + noise.gumbels(real.SEED, 0, 3, torch.arange(3))
    first, second = sorted(perturbed.tolist())[:0:-1]
    assert real.top_two_gap(logits, 3) == pytest.approx(first - second)
    assert real.top_two_gap(logits, 3) != pytest.approx(0.5)
