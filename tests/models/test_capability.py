"""What cannot be a target is refused by name, with the reason; bad rows end in typed errors."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from outrider.errors import InvalidConfig, ModelError, TokenOutOfRange, UnsupportedModel
from outrider.models import hf, plan, trial
from outrider.models.attention_cpu import attend_cpu
from outrider.models.base import Rows
from outrider.models.device import device_of
from outrider.models.hf import HuggingFaceTarget, default_dtype
from tests.models.families import (
    one_thread,
    plain_logits,
    random_model,
    random_tokens,
    relative_error,
)

single = pytest.fixture(scope="module", autouse=True)(one_thread)
SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
REFUSED = {
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "position_ids"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "position_ids"),
    "falcon": ({"alibi": True}, "alibi"),
    "gpt_neo": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "bounded by window_size",
    ),
    "mamba2": ({"num_heads": 8, "head_dim": 8, "n_groups": 2}, "recurrent"),
    "bert": ({"is_decoder": False}, "masks attention"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_unfit_families_are_refused_by_name(family):
    options, reason = REFUSED[family]
    config = AutoConfig.for_model(family, **{**SIZE, **options})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*{reason}"):
        HuggingFaceTarget(model)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_are_refused_by_name(family, tmp_path):
    small = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    small |= {"encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    config = AutoConfig.for_model(family, **small)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*encoder-decoder"):
        HuggingFaceTarget(AutoModelForSeq2SeqLM.from_config(config))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{family}.*encoder-decoder"):
        HuggingFaceTarget.load(tmp_path)


def test_a_saved_image_text_model_loads_for_its_text(tmp_path):
    random_model("llava").save_pretrained(tmp_path)
    target = HuggingFaceTarget.load(tmp_path, dtype=torch.float32)
    tokens, seq = random_tokens(9), target.open(9)
    got = target.score(Rows((seq,), (9,), tokens))
    assert relative_error(got, plain_logits(random_model("llava"), tokens)) < 1e-5


@pytest.mark.parametrize("family", ["falcon", "qwen3"])
def test_the_trial_sees_what_shows_in_trees_alone(family, monkeypatch):
    """Negative control: where nodes see their neighbours, the model is refused."""
    work_out = plan.Span._work_out

    def as_chain(span, reach):
        if span.ancestors is None:
            return work_out(span, reach)
        return work_out(replace(span, ancestors=plan.chain_ancestors(span.num_staged)), reach)

    HuggingFaceTarget(random_model(family))
    monkeypatch.setattr(plan.Span, "_work_out", as_chain)
    with pytest.raises(UnsupportedModel, match=r"cached rows differ from its own"):
        HuggingFaceTarget(random_model(family))


def test_experts_in_16_bits_are_not_refused_for_a_last_bit(monkeypatch):
    """A row that another expert took is no fault; the same row wrong in every text is one."""
    for seed in range(3):
        HuggingFaceTarget(random_model("gpt-oss", seed=seed).to(torch.bfloat16))
    last_node = trial.FIRST + trial.SECOND + trial.LENGTH - trial.FIRST

    def wrong_branch(target, texts):
        rows = trial.trial_rows(target, texts).clone()
        rows[last_node] = rows[last_node].roll(1)
        return rows

    monkeypatch.setattr(hf, "trial_rows", wrong_branch)
    with pytest.raises(UnsupportedModel, match=r"gpt_oss.*differ from its own"):
        HuggingFaceTarget(random_model("gpt-oss").to(torch.bfloat16))


def test_rows_that_are_not_the_models_own_are_refused(monkeypatch):
    monkeypatch.setattr(hf, "attend_cpu", lambda *given: attend_cpu(*given) * 1.01)
    with pytest.raises(UnsupportedModel, match=r"llama.*differ from its own"):
        HuggingFaceTarget(random_model("llama"))


def test_a_forward_that_fails_is_refused(monkeypatch):
    model = random_model("llama")
    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", lambda **_: 1 / 0)
    with pytest.raises(UnsupportedModel, match=r"trial forward failed.*division"):
        HuggingFaceTarget(model)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        HuggingFaceTarget.load(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        HuggingFaceTarget.load("no-such-folder")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        HuggingFaceTarget.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UnsupportedModel, match="unheard-of"):
        HuggingFaceTarget.load(tmp_path)


def test_a_saved_model_loads_and_scores_alike(tmp_path):
    model = random_model("qwen3")
    model.save_pretrained(tmp_path)
    tokens = random_tokens(20)
    target = HuggingFaceTarget.load(tmp_path, dtype=torch.float32)
    assert (target.vocab_size, target.max_length) == (97, 1024)
    seq = target.open(20)
    got = target.score(Rows((seq,), (20,), tokens))
    assert relative_error(got, plain_logits(model, tokens)) < 1e-5
    # The wrapped model still works by itself.
    assert relative_error(plain_logits(target.model, tokens), plain_logits(model, tokens)) < 1e-5


def test_the_default_dtype_is_one_the_device_computes_in():
    assert default_dtype(torch.device("cuda")) == torch.bfloat16
    assert default_dtype(torch.device("cpu")) in (torch.float32, torch.bfloat16)


def test_bad_rows_end_in_typed_errors_and_stage_nothing():
    target = HuggingFaceTarget(random_model("llama"))
    seq = target.open(4)
    for bad in (97, -1):
        with pytest.raises(TokenOutOfRange, match=f"token {bad} "):
            target.score(Rows((seq,), (2,), torch.tensor([1, bad])))
    with pytest.raises(InvalidConfig, match="context of 1024"):
        target.score(Rows((seq,), (1025,), torch.zeros(1025, dtype=torch.int64)))
    with pytest.raises(InvalidConfig, match="not open"):
        target.score(Rows((seq + 1,), (1,), torch.tensor([1])))
    assert target.num_staged(seq) == 0


def test_an_exception_in_the_forward_leaves_nothing_to_undo(monkeypatch):
    model = random_model("llama")
    target = HuggingFaceTarget(model)
    tokens = random_tokens(12)
    seq = target.open(4)
    target.score(Rows((seq,), (8,), tokens[:8]))
    target.commit(seq, 8)
    norm = target.model.model.norm
    monkeypatch.setattr(norm, "forward", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.score(Rows((seq,), (3,), random_tokens(3, 5)))
    monkeypatch.undo()
    assert (target.length(seq), target.num_staged(seq)) == (8, 0)
    got = target.score(Rows((seq,), (4,), tokens[8:]))
    assert relative_error(got, plain_logits(random_model("llama"), tokens)[8:]) < 1e-5


def test_a_bad_sequence_does_not_touch_its_neighbour():
    """A NaN in one sequence reaches no other, nor the next owner of its blocks."""
    target = HuggingFaceTarget(random_model("llama"))
    with torch.no_grad():
        target.model.model.embed_tokens.weight[96] = float("nan")
    tokens = random_tokens(10) % 96
    wanted = plain_logits(random_model("llama"), tokens)
    good, bad = target.open(4), target.open(4)
    rows = torch.cat((tokens, torch.tensor([96, 1, 2])))
    got = target.score(Rows((good, bad), (10, 3), rows))
    assert got[10:].isnan().all()
    assert relative_error(got[:10], wanted) < 1e-5
    target.close(bad)
    target.close(good)
    seq = target.open(4)
    assert relative_error(target.score(Rows((seq,), (10,), tokens)), wanted) < 1e-5


def state_of(model):
    """What a user can see of a model: its layers' types, weights, modes and attention."""
    layers = {name: (type(module), module.training) for name, module in model.named_modules()}
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return layers, weights, tied, model.config._attn_implementation


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_refused_model_is_left_as_it_was(monkeypatch, strict, tied):
    config = AutoConfig.for_model("llama", **SIZE, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    layers, weights, was_tied, attention = state_of(model)
    tokens = random_tokens(9) % 64
    with torch.no_grad():
        wanted = model.eval()(tokens[None]).logits
    model.train()
    if strict:
        monkeypatch.setattr(hf, "rows_keep_their_bits", lambda _: False)
    else:
        monkeypatch.setattr(hf, "attend_cpu", lambda *args: 2 * attend_cpu(*args))
    with pytest.raises(UnsupportedModel):
        HuggingFaceTarget(model, strict=strict)
    after = state_of(model)
    assert (after[0], after[2], after[3]) == (layers, was_tied, attention)
    assert was_tied == tied and set(after[1]) == set(weights)
    assert all(torch.equal(after[1][name], weights[name]) for name in weights)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens[None]).logits, wanted)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:77", [], 3.5])
def test_a_device_that_is_not_here_is_named(device, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"device .* is not to be had: .*; give cpu"):
        HuggingFaceTarget.load(tmp_path, device=device)


def test_a_model_whose_weights_are_elsewhere_has_the_device_of_its_hook():
    model = random_model("llama")
    assert device_of(model) == torch.device("cpu")
    model.to("meta")
    assert device_of(model) == torch.device("meta")
    model._hf_hook = SimpleNamespace(execution_device="cpu")
    assert device_of(model) == torch.device("cpu")
