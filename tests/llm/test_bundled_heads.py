"""The heads that are shipped: each drafts for the bundled target, and better than chance."""

from __future__ import annotations

import pytest
from outrider_models import HEADS

from outrider import LLM, SamplingParams
from outrider.errors import InvalidConfig
from outrider.models.bundled import eval_prompts

PROMPTS = [text[:200] for text in eval_prompts("code")[20:24]]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
SEEDED = SamplingParams(seed=11, max_tokens=24)


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    llm = LLM.load("bundled", drafter="none", dtype="float32")
    return [done.token_ids for p in (GREEDY, SEEDED) for done in llm.generate(PROMPTS, p)]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("head", HEADS)
def test_it_drafts_for_the_bundled_target(
    head: str, width: int, plain: list[tuple[int, ...]]
) -> None:
    llm = LLM.load("bundled", drafter=f"{head}:bundled", k=3, width=width, dtype="float32")
    greedy, seeded = (llm.generate(PROMPTS, params) for params in (GREEDY, SEEDED))
    assert [done.token_ids for done in (*greedy, *seeded)] == plain
    rounds, kept = (
        sum(getattr(one.stats, name) for one in greedy) for name in ("rounds", "accepted")
    )
    # Random weights keep next to nothing.
    assert kept / rounds > 0.4, (kept, rounds)


def test_a_head_that_is_not_shipped_is_named() -> None:
    with pytest.raises(InvalidConfig, match="'medusa' does not exist; parts are target, draft"):
        LLM.load("bundled", drafter="medusa:bundled")
