"""New weights in place: as a fresh model with them, and nothing changes where they do not fit."""

from __future__ import annotations

import pytest
import torch
from families import random_model

from outrider import SamplingParams
from outrider.drafters import ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models import HuggingFaceTarget
from outrider.models.packing import PackedLinear
from outrider.models.strict import SlabLinear, slab_linears
from outrider.types import Request

PROMPT = tuple(i * i % 97 for i in range(150))
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def served(target, drafter=None) -> Requests:
    engine = Engine(target, drafter or NoDrafter(), Emitter(None))
    return Requests(engine, depth=3, end_tokens=frozenset())


def text(target, prompt=PROMPT) -> tuple[int, ...]:
    return served(target).complete([Request(tuple(prompt), GREEDY)])[0].token_ids


def new_weights(**options) -> dict[str, torch.Tensor]:
    return dict(random_model(options.pop("family", "llama"), seed=7).state_dict())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_an_updated_model_is_the_fresh_one(family: str, dtype) -> None:
    target = HuggingFaceTarget(random_model(family).to(dtype))
    fresh = HuggingFaceTarget(random_model(family, seed=7).to(dtype))
    old = text(target)
    # In another dtype than the model's, as a trainer has them.
    target.update_weights(new_weights(family=family))
    assert text(target) == text(fresh)
    # A random model whose output layer is its embedding repeats itself.
    assert family == "gemma2" or text(target) != old
    ours, theirs = target.model.state_dict(), fresh.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("slabs", [False, True])
def test_packed_layers_are_packed_again_in_strict_too(slabs: bool) -> None:
    target = HuggingFaceTarget(random_model("llama"), strict=True)
    fresh = HuggingFaceTarget(random_model("llama", seed=7), strict=True)
    if slabs:
        slab_linears(target.model, 8)
    kinds = [type(module) for module in target.model.modules()]
    assert (PackedLinear in kinds) and slabs == (SlabLinear in kinds)
    target.update_weights(new_weights())
    assert [type(module) for module in target.model.modules()] == kinds
    assert text(target) == text(fresh)


def test_tied_weights_stay_one() -> None:
    def tied(seed: int) -> HuggingFaceTarget:
        model = random_model("llama", seed=seed)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        return HuggingFaceTarget(model, pack=True)

    target, fresh = tied(0), tied(7)
    state = new_weights()
    with pytest.raises(InvalidConfig, match="are one in this model"):
        target.update_weights(state)
    del state["lm_head.weight"]
    target.update_weights(state)
    assert text(target) == text(fresh)


def test_some_weights_alone() -> None:
    target, name = HuggingFaceTarget(random_model("llama")), "model.layers.1.mlp.up_proj.weight"
    fresh = random_model("llama")
    fresh.load_state_dict({name: new_weights()[name]}, strict=False)
    target.update_weights({name: new_weights()[name]})
    assert text(target) == text(HuggingFaceTarget(fresh))


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("model.norm.wait", torch.ones(64), "did you mean 'model.norm.weight'"),
        ("model.norm.weight", torch.ones(63), r"shape \(63,\) and the model's \(64,\)"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int64), "torch.int64"),
        ("model.norm.weight", [1.0] * 64, "is list"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(name: str, weight, message: str) -> None:
    target = HuggingFaceTarget(random_model("llama"))
    old = text(target)
    with pytest.raises(InvalidConfig, match=message):
        target.update_weights({**new_weights(), name: weight})
    assert text(target) == old


def test_open_sequences_are_in_the_way() -> None:
    target = HuggingFaceTarget(random_model("llama"))
    old, seq = text(target), target.open(9)
    with pytest.raises(InvalidConfig, match="1 sequences are open"):
        target.update_weights(new_weights())
    target.close(seq)
    assert text(target) == old


class Derived(NgramDrafter):
    """A drafter made from the target: it is told of new weights while no text holds anything."""

    def __init__(self) -> None:
        super().__init__(1, 2)
        self.told: list[int] = []

    def target_changed(self) -> None:
        self.told.append(len(self._indices))


@pytest.mark.parametrize("draft", ["model", "derived"])
def test_texts_under_way_go_on_with_the_new_weights(draft: str) -> None:
    target, fresh = (HuggingFaceTarget(random_model("llama", seed=seed)) for seed in (0, 7))
    drafter = (
        Derived()
        if draft == "derived"
        else ModelDrafter(HuggingFaceTarget(random_model("llama", seed=7)))
    )
    requests = served(target, drafter)
    several = [Request(PROMPT, GREEDY), Request(PROMPT[:70], GREEDY)]
    with requests.running(several) as texts:
        for _ in range(3):
            requests.engine.step()
        before = [list(one.tokens) for one in texts]
        assert all(0 < one.num_output < 12 for one in texts)
        with requests.engine.without_caches():
            target.update_weights(new_weights())
        assert [one.tokens for one in texts] == before
        while not requests.engine.settled(texts):
            requests.engine.step()
        for one, start in zip(texts, before, strict=True):
            left = 12 - (len(start) - one.num_prompt)
            params = SamplingParams(max_tokens=left, temperature=0.0)
            (rest,) = served(fresh).complete([Request(tuple(start), params)])
            assert tuple(one.tokens[len(start) :]) == rest.token_ids
    if isinstance(drafter, Derived):
        assert drafter.told == [0]


def test_an_old_prefix_would_be_seen() -> None:
    """The negative control: keys and values of the old weights give another text."""
    target, fresh = (HuggingFaceTarget(random_model("llama", seed=seed)) for seed in (0, 7))
    text(target)
    target._cache.forget_prefixes = lambda: None  # type: ignore[method-assign]
    target.update_weights(new_weights())
    assert text(target) != text(fresh)
