"""Every family under the engine: plain decoding's tokens, whoever drafts, alone and in a batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from outrider.drafters import NgramDrafter
from outrider.models.hf import HuggingFaceTarget
from tests.engine.toys import decoder
from tests.models.families import (
    FAMILIES,
    SHAPE,
    one_thread,
    plain_logits,
    random_model,
    random_tokens,
    with_weights,
)

LENGTH = 64
SEED = 11
PROMPTS = [random_tokens(n, n).tolist() for n in (17, 26, 3, 9, 1)]

single = pytest.fixture(scope="module", autouse=True)(one_thread)


@cache
def draft_model() -> HuggingFaceTarget:
    """A smaller random model of the same vocabulary."""
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8})
    return HuggingFaceTarget(with_weights(config, seed=5))


def plain_greedy(family: str, prompt: list[int], count: int) -> list[int]:
    """The family's own eager forward over the whole text, one token at a time."""
    model, text = random_model(family), list(prompt)
    for _ in range(count):
        text.append(int(plain_logits(model, torch.tensor(text))[-1].argmax()))
    return text[len(prompt) :]


def families() -> list:
    """Soft caps and windows, the slab by default; the others when all is asked for."""
    by_default = ("gemma2", "qwen2", "falcon")
    return [
        pytest.param(family, marks=() if family in by_default else pytest.mark.slow)
        for family in FAMILIES
    ]


@pytest.mark.parametrize("family", families())
def test_greedy_and_coupled_tokens_are_plain_decodings(family: str) -> None:
    target = HuggingFaceTarget(random_model(family))
    rates: list[float] = []
    for sampling, seed in ({"temperature": 0.0}, None), ({"temperature": 0.7}, SEED):
        plain = decoder(None, target, **sampling).generate_batch(PROMPTS, LENGTH, seed=seed)
        assert all(len(text) == LENGTH for text in plain)
        if seed is None:
            assert plain[2] == plain_greedy(family, PROMPTS[2], LENGTH)
        for draft, k in ((NgramDrafter(1, 3), 4), (draft_model(), 2)):
            fast = decoder(draft, target, k, **sampling)
            assert fast.generate_batch(PROMPTS, LENGTH, seed=seed) == plain
            assert fast.generate(PROMPTS[0], LENGTH, seed=seed) == plain[0]
            rates.append(fast.metrics.acceptance_rate)
    # Some guesses were right and some wrong: rows were kept, and forgotten.
    assert max(rates) > 0 and min(rates) < 1
