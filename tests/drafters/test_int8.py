"""A model's own weights in eight bits: near the model, on its memory, and never its judge."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from outrider import LLM, SamplingParams
from outrider.drafters import ModelDrafter
from outrider.errors import UnsupportedModel
from outrider.models import quantised as module
from outrider.models.base import Rows
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.quantised import Int8Linear, quantised, quantised_engine

pytestmark = pytest.mark.skipif(quantised_engine() is None, reason="no quantised CPU operators")


def logits(target: HuggingFaceTarget) -> torch.Tensor:
    seq = target.open(40)
    out = target.score(Rows((seq,), (40,), torch.arange(40) * 31 % target.vocab_size))
    target.close(seq)
    return out.float()


@pytest.mark.parametrize(("dtype", "strict"), [(torch.float32, True), (torch.bfloat16, False)])
def test_it_is_near_its_model_and_on_its_memory(dtype: torch.dtype, strict: bool) -> None:
    target = HuggingFaceTarget.load(bundled_path("target"), dtype=dtype, strict=strict)
    before = logits(target)
    own = quantised(target)
    near = logits(own)
    assert 0 < (near - before).abs().max() < 0.1 * before.abs().max()
    assert (near.argmax(-1) == before.argmax(-1)).float().mean() > 0.85
    assert torch.equal(logits(target), before), "the target stays as it is"
    theirs = dict(target.model.named_parameters())
    for name, parameter in own.model.named_parameters():
        assert parameter.data_ptr() == theirs[name].data_ptr(), name
    assert not any(isinstance(one, Int8Linear) for one in target.model.modules())


def test_a_layer_in_eight_bits_is_near_the_layer() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 64)
    inputs = torch.randn(2, 5, 96)
    near = Int8Linear(layer.weight, layer.bias)(inputs)
    assert near.shape == (2, 5, 64) and near.dtype == torch.float32
    assert (near - layer(inputs)).abs().max() < 0.05
    nothing = Int8Linear(torch.zeros(8, 96), None)(inputs)
    assert nothing.abs().max() == 0


GREEDY, COUPLED = SamplingParams(max_tokens=24, temperature=0.0), SamplingParams(24, seed=7)
PROMPTS = [prompt[: 40 * (i + 1)] for i, prompt in enumerate(eval_prompts("code")[:5])]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM.load("bundled", "none", strict=True)


@pytest.mark.parametrize(
    ("spec", "params"),
    [("int8", GREEDY), ("suffix+int8", COUPLED), ("recycle+suffix", GREEDY)],
)
def test_drafting_with_it_changes_no_token(spec: str, params: SamplingParams, plain: LLM) -> None:
    wanted = [done.token_ids for done in plain.generate(PROMPTS, params)]
    llm = LLM.load("bundled", spec, strict=True)
    assert [done.token_ids for done in llm.generate(PROMPTS, params)] == wanted
    (alone,) = llm.generate(PROMPTS[3], params)
    assert alone.token_ids == wanted[3]
    assert llm.info()["drafter"]["name"] == spec and llm.metrics.accepted > 0
    if spec == "int8":
        assert llm.metrics.acceptance_rate > 0.7


def test_it_follows_the_targets_new_weights() -> None:
    """Beside a target of wholly other weights stale ones would guess next to nothing."""
    llm = LLM.load("bundled", "suffix+int8", cache_bytes=64_000_000)
    drafter = llm._requests.engine.choice.of("int8")
    assert isinstance(drafter, ModelDrafter) and isinstance(drafter.model, HuggingFaceTarget)
    before, stale = logits(llm._target), drafter.model
    held = {name: one.clone() for name, one in llm._target.model.state_dict().items()}
    turned = {
        name: one.roll(1, 0) if one.ndim == 2 and "layers" in name else one
        for name, one in held.items()
    }
    for weights in (turned, held):
        llm.update_weights(weights)
        assert isinstance(drafter.model, HuggingFaceTarget) and drafter.model is not stale
        wanted = logits(llm._target)
        near = (logits(drafter.model) - wanted).abs().max()
        assert near < 0.2 * wanted.abs().max()
        if weights is turned:
            assert (logits(stale) - wanted).abs().max() > 2 * near
        assert drafter.model.cache_plan()["max_bytes"] == stale.cache_plan()["max_bytes"]
    assert torch.equal(wanted, before)
    assert llm.generate(PROMPTS[0], GREEDY, drafter="int8")[0].stats.acceptance_rate > 0.6


def tiny(kind, config, **options) -> HuggingFaceTarget:
    torch.manual_seed(0)
    return HuggingFaceTarget(kind(config(vocab_size=64, **options)).eval())


def test_models_without_linear_layers_are_refused_by_name() -> None:
    gpt2 = tiny(GPT2LMHeadModel, GPT2Config, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    with pytest.raises(UnsupportedModel, match=r"gpt2 model: its weights are not plain linear"):
        quantised(gpt2)
    mixtral = tiny(
        MixtralForCausalLM,
        MixtralConfig,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    with pytest.raises(UnsupportedModel, match=r"mixtral model"):
        quantised(mixtral)


def test_machines_that_cannot_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HuggingFaceTarget.load(bundled_path("draft"))
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    with pytest.raises(
        UnsupportedModel, match=r"llama model is on cuda; load it with device='cpu'"
    ):
        quantised(target)
    monkeypatch.setattr(target, "device", torch.device("cpu"))
    monkeypatch.setattr(module, "quantised_engine", lambda: None)
    with pytest.raises(UnsupportedModel, match="this torch has none"):
        quantised(target)


def test_no_engine_is_found_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised_engine.cache_clear()
    monkeypatch.setattr(module, "ENGINES", ("none such",))
    assert quantised_engine() is None
    monkeypatch.undo()
    quantised_engine.cache_clear()
    assert quantised_engine() is not None
