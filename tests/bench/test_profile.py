"""The profile: stages that add up, bytes that are those of the model, and hooks that are gone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import outrider.engine.engine as engine_module
from outrider import LLM, SamplingParams
from outrider.bench import profile as profiling
from outrider.bench.machine import read_bandwidth
from outrider.bench.profile import STAGES, Clock, Profile, hooked, profile
from outrider.engine.controls import Controls
from outrider.engine.draws import GroupDraws
from outrider.engine.group import Scores
from outrider.errors import InvalidConfig, NonFinite, UnsupportedModel
from outrider.models.attention_op import Forward
from outrider.models.checkpoint import load_llama
from tests.bench.conftest import SHAPE, Pair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 11], [7, 7, 30, 21]]
GB = 1e9
OPTIONS: dict[str, Any] = {"compile": False, "share_prefixes": False, "dtype": "float32"}


@pytest.fixture(scope="module")
def plain(pair: Pair) -> LLM:
    return LLM.load(pair.target, "none", **OPTIONS)


@pytest.fixture(scope="module")
def fast(pair: Pair) -> LLM:
    return LLM.load(pair.target, f"draft:{pair.stranger}", **OPTIONS)


def stages_of(found: Profile) -> dict[str, Any]:
    return {STAGES[one.part, one.stage]: one for one in found.stages}


def owned(llm: LLM) -> list[dict[str, Any]]:
    """What hooks are placed in: every class, module and object, with what it holds."""
    engine = llm._requests.engine
    models = profiling._models(llm)
    owners = [engine_module, Controls, GroupDraws, Scores, Forward, engine, *models]
    owners += [module for model in models for module in model.model.modules()]
    return [dict(vars(owner)) for owner in owners]


@pytest.mark.parametrize("batch", [1, 2])
def test_stages_add_up_to_the_wall(fast: LLM, batch: int) -> None:
    clock = Clock()
    with hooked(fast, clock):
        started = time.perf_counter()
        for first in range(0, len(PROMPTS), batch):
            fast.generate(PROMPTS[first : first + batch], GREEDY)
        elapsed = time.perf_counter() - started
        clock.switch(profiling.OTHER)
    counted = clock.decoding.wall_s + clock.reading.wall_s
    assert counted == pytest.approx(elapsed, rel=0.05, abs=0.01)
    assert clock.reading.steps == len(PROMPTS) // batch
    seconds = {STAGES[key]: spent.seconds for key, spent in clock.decoding.stages.items()}
    assert min(seconds.values()) > 0, "a draft model uses every stage"


def test_means_add_up(fast: LLM) -> None:
    found = profile(fast, PROMPTS, GREEDY, batch=2, bandwidth=GB)
    assert sum(one.ms for one in found.stages) == pytest.approx(found.ms_per_step)
    assert sum(one.share for one in found.stages) == pytest.approx(1)
    assert found.tokens == 24 and 0 < found.steps < 24
    assert found.ms_without_hooks > 0 and found.reading_ms > 0 and found.notes == ()


def test_bytes_are_those_of_the_model(plain: LLM, pair: Pair) -> None:
    found = stages_of(profile(plain, PROMPTS[:1], GREEDY, bandwidth=GB))
    model = load_llama(pair.target)
    layers = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and "embed" not in name
    )
    assert found["target: linears"].num_bytes == layers
    assert found["target: head"].num_bytes == model.get_input_embeddings().weight.nbytes
    # Steps behind the first see 4, 5, ... 14 tokens, a key and a value each in every layer.
    per_token = 2 * 4 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    cached = per_token * SHAPE["num_hidden_layers"] * sum(range(4, 15)) / 11
    assert found["target: attention"].num_bytes == pytest.approx(cached)
    assert found["target: attention"].calls == SHAPE["num_hidden_layers"]
    for name in ("target: linears", "target: attention"):
        one = found[name]
        assert one.gb_per_s == pytest.approx(one.num_bytes / one.ms * 1e3 / GB)
        assert one.of_bandwidth == pytest.approx(one.gb_per_s)
    assert found["commit"].gb_per_s is None and "draft: linears" not in found


def test_drafts_are_read_as_often_as_they_are_asked(fast: LLM) -> None:
    found = stages_of(profile(fast, PROMPTS[:1], GREEDY, bandwidth=GB))
    target, draft = found["target: head"], found["draft: head"]
    assert target.calls == 1 < draft.calls <= 4
    assert draft.num_bytes == pytest.approx(draft.calls * target.num_bytes), "the same width"


def test_time_is_charged_where_it_is_spent(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    target = plain.target
    body = target._body

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.004)
        return body(*arguments)

    before = stages_of(profile(plain, PROMPTS[:1], GREEDY, bandwidth=GB))
    monkeypatch.setattr(target, "_body", slow)
    after = stages_of(profile(plain, PROMPTS[:1], GREEDY, bandwidth=GB))
    assert after["target: attention"].ms > before["target: attention"].ms + 7
    assert max(after, key=lambda name: after[name].ms) == "target: attention"
    assert after["target: attention"].share > 0.5 > before["target: attention"].share


def test_without_hooks_all_is_other(plain: LLM) -> None:
    """What tells the stages apart is the hooks: without them nothing is attributed."""
    clock = Clock()
    with hooked(plain, clock, inside=False):
        plain.generate(PROMPTS, GREEDY)
    spent = {key for key, one in clock.decoding.stages.items() if one.seconds}
    assert spent == {profiling.OTHER}


def test_hooks_are_gone_afterwards(fast: LLM) -> None:
    before = owned(fast)
    with hooked(fast, Clock()):
        assert owned(fast) != before
    after = owned(fast)
    assert [set(one) for one in after] == [set(one) for one in before]
    for old, new in zip(before, after, strict=True):
        assert all(new[name] is old[name] for name in old if callable(old[name]))


def test_hooks_are_gone_when_a_text_fails(fast: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [set(one) for one in owned(fast)]
    target = fast.target
    body = target._body
    monkeypatch.setattr(target, "_body", lambda *a: body(*a) * float("nan"))
    with pytest.raises(NonFinite):
        profile(fast, PROMPTS, GREEDY, bandwidth=GB)
    assert [set(one) for one in owned(fast)] == before


def test_texts_are_the_same_under_hooks(fast: LLM) -> None:
    seeded = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    plainly = [done.token_ids for done in fast.generate(PROMPTS, seeded)]
    with hooked(fast, Clock()):
        assert [done.token_ids for done in fast.generate(PROMPTS, seeded)] == plainly


@pytest.mark.parametrize("spec", ["early-exit:1", "int8", "suffix+ngram"])
def test_other_drafters(pair: Pair, spec: str) -> None:
    llm = LLM.load(pair.target, spec, **OPTIONS)
    found = stages_of(profile(llm, [[5, 9, 5, 9, 5, 9]], GREEDY, bandwidth=GB))
    assert found["target: linears"].num_bytes > 0
    assert ("draft: linears" in found) == (spec != "suffix+ngram")


def test_what_cannot_be_profiled_is_refused(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="give one at least"):
        profile(plain, [], GREEDY)
    with pytest.raises(InvalidConfig, match="more tokens"):
        profile(plain, PROMPTS, SamplingParams(temperature=0, max_tokens=1), bandwidth=GB)
    monkeypatch.setattr(plain.target, "device", torch.device("meta"))
    with pytest.raises(UnsupportedModel, match="before they are done"):
        profile(plain, PROMPTS, GREEDY)


def test_the_bandwidth_is_a_machine_s() -> None:
    assert 1e7 < read_bandwidth(1 << 22, 2) < 1e13
