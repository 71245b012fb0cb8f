"""What an LLM's caches take, what its texts share, and new weights under way."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidConfig
from outrider.models.bundled import eval_prompts

PROMPT = "".join(eval_prompts("code")[:3])[:900]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", "draft", dtype="float32", max_texts=3)


def moved(llm: LLM) -> dict[str, torch.Tensor]:
    """The target's weights after a step in a random direction."""
    noise = torch.Generator().manual_seed(0)
    weights = llm._target.model.state_dict()
    return {
        name: weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=noise)
        for name, weight in weights.items()
        if weight.dim() == 2 and "layers" in name
    }


def test_the_plan_of_the_caches_is_told(llm: LLM) -> None:
    llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    plan = llm.info()["cache"]
    config = llm._target.model.config
    draft = llm._requests.engine.drafter.model.model.config
    per_token = sum(
        2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim for c in (config, draft)
    )
    assert plan["bytes_per_token"] == per_token
    assert plan["context_bytes"] == per_token * config.max_position_embeddings
    assert plan["planned_bytes"] == 3 * plan["context_bytes"]
    assert plan["max_bytes"] is None and plan["share_prefixes"]
    assert plan["held_bytes"] % (64 * per_token) == 0 or plan["held_bytes"] > 0


def test_a_bound_is_told_and_kept_with_sharing() -> None:
    free = LLM.load("bundled", "draft", dtype="float32")
    wanted = [done.token_ids for done in free.generate([PROMPT] * 3, GREEDY)]
    bound = free.info()["cache"]["bytes_per_token"] * 64 * 12
    tight = LLM.load("bundled", "draft", dtype="float32", cache_bytes=bound)
    assert bound * 0.99 <= tight.info()["cache"]["max_bytes"] <= bound
    done = tight.generate([PROMPT] * 3, GREEDY)
    assert sum(a.token_ids == b for a, b in zip(done, wanted, strict=True)) >= 2
    assert tight.info()["cache"]["held_bytes"] <= bound


def test_sharing_can_be_switched_off(llm: LLM) -> None:
    alone = LLM.load("bundled", "draft", dtype="float32", share_prefixes=False)
    assert not alone.info()["cache"]["share_prefixes"]
    for one in (llm, alone):
        one.generate(PROMPT, GREEDY)
        idle = one._target._cache.num_idle_blocks
        assert (idle > 0) == (one is llm)
    with pytest.raises(InvalidConfig, match="share_prefixes"):
        LLM.load("bundled", share_prefixes="no")


def test_new_weights_while_a_text_is_under_way(llm: LLM) -> None:
    old = {name: weight.clone() for name, weight in llm._target.model.state_dict().items()}
    (before,) = llm.generate(PROMPT, GREEDY)
    with pytest.raises(InvalidConfig, match="did you mean"):
        llm.update_weights({"model.norm.weigth": torch.ones(1)})
    stream = llm.stream(PROMPT, GREEDY)
    made = list(next(stream).token_ids)
    llm.update_weights(moved(llm))
    start = llm.tokenizer.encode(PROMPT) + made
    rest = [token for delta in stream for token in delta.token_ids]
    fresh = LLM.load("bundled", drafter="none", dtype="float32")
    fresh.update_weights(llm._target.model.state_dict())
    params = SamplingParams(max_tokens=24 - len(made), temperature=0.0)
    assert tuple(rest) == fresh.generate([start], params)[0].token_ids
    assert tuple(made + rest) != before.token_ids
    llm.update_weights(old)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == before.token_ids
