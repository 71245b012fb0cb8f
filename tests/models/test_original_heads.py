"""Heads in their authors' files: tensors come back equal, what does not fit is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaModel

from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.models import head as heads_of_targets
from outrider.models.base import Rows
from outrider.models.eagle import EagleHead
from outrider.models.eagle1 import FeatureHead
from outrider.models.head import TargetParts, check_fits, final_norm
from outrider.models.hf import HuggingFaceTarget
from outrider.models.medusa import MedusaHeads
from outrider.models.originals import load_eagle, load_medusa, save_original
from outrider.models.speculators import TAPS
from tests.drafters.heads import layer_config, random_head, tiny_target
from tests.models.families import (
    FAMILIES,
    VOCAB,
    Family,
    one_thread,
    plain_logits,
    random_model,
    random_tokens,
    relative_error,
    with_weights,
)
from tests.models.test_eagle import SHAPE, TOKENS
from tests.models.test_eagle import random_head as random_eagle3

single = pytest.fixture(scope="module", autouse=True)(one_thread)
TARGET = tiny_target()


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


def eagle1(folder: Path, name: str = "pytorch_model.bin", **changes: Any) -> tuple[Path, Any]:
    """An EAGLE folder as the authors write it: two layers, biases, embeddings of its own."""
    config = layer_config(64, VOCAB, 2)
    head = FeatureHead(config, 3, own_embeddings=True)
    said = {
        key: getattr(config, key)
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
            "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act",
        )
    }  # fmt: skip
    said |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "bias": True, **changes}
    said = {key: value for key, value in said.items() if value is not None}
    return write(folder, said, head.state_dict(), name), head


def eagle3(folder: Path, name: str = "pytorch_model.bin", **changes: Any) -> tuple[Path, EagleHead]:
    head = random_eagle3()
    tensors = {k.replace("layers.0.", "midlayer."): t for k, t in head.state_dict().items()}
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, TOKENS, True)
    said = {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": 40,
        "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "eagle_aux_hidden_state_layer_ids": list(SHAPE.taps),
    }  # fmt: skip
    return write(folder, {**said, **changes}, tensors, name), head


def medusa(
    folder: Path, name: str = "medusa_lm_head.pt", prefix: str = "", **changes: Any
) -> tuple[Path, MedusaHeads]:
    heads = random_head("medusa", TARGET)
    assert isinstance(heads, MedusaHeads)
    tensors = {prefix + k.removeprefix("heads."): t for k, t in heads.state_dict().items()}
    said = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "some/base"}
    return write(folder, {**said, **changes}, tensors, name), heads


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_heads_come_back_as_their_authors_saved_them(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder, head = eagle1(tmp_path / f"one {name}", name)
        assert equal(load_eagle(folder, TARGET), head)
        folder, head = eagle3(tmp_path / f"three {name}", name)
        read = load_eagle(folder, TARGET)
        assert equal(read, head) and isinstance(read, EagleHead) and read.shape == SHAPE
    for name, prefix in (
        ("medusa_lm_head.pt", ""),
        ("medusa_lm_head.safetensors", "medusa_head."),
        ("model.safetensors", "heads."),
    ):
        folder, heads = medusa(tmp_path / f"medusa {name}", name, prefix)
        assert equal(load_medusa(folder, TARGET), heads)
    # The base model's own weights may lie beside the heads.
    folder, heads = medusa(tmp_path / "whole", "medusa_lm_head.safetensors")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    assert equal(load_medusa(folder, TARGET), heads)
    # As the published ones are: the file holds more heads than its configuration says.
    folder, heads = medusa(tmp_path / "more", medusa_num_heads=2)
    assert equal(load_medusa(folder, TARGET), heads)


def test_an_eagle_head_computes_what_stock_layers_do(tmp_path: Path) -> None:
    """A Llama without first and last norm reads the output of `fc`."""
    folder, _ = eagle1(tmp_path)
    head = load_eagle(folder, TARGET)
    assert isinstance(head, FeatureHead)
    head.borrow(TargetParts.of(TARGET))
    config = layer_config(64, VOCAB, 2)
    stock: Any = LlamaModel(config)
    stock.norm = stock.layers[0].input_layernorm = torch.nn.Identity()
    stock.layers.load_state_dict(head.layers.state_dict())
    stock.set_attn_implementation("eager")
    tokens, states = torch.arange(7)[None], torch.randn(1, 7, 64)
    both = torch.cat((head.embeddings(tokens), final_norm(TARGET)(states)), -1)
    wanted = stock(inputs_embeds=head.fc(both)).last_hidden_state

    def causal(query, keys, values, options=None, layer=0) -> Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, keys, values, is_causal=True, enable_gqa=True).transpose(1, 2)

    found = head.step(tokens, head.fused(states), torch.arange(7)[None], causal)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    output: Any = TARGET.model.get_output_embeddings()
    torch.testing.assert_close(head.logits(found), output(found))


def test_medusa_heads_are_residual_blocks_and_a_linear() -> None:
    heads = random_head("medusa", TARGET)
    assert isinstance(heads, MedusaHeads)
    state, h = heads.state_dict(), torch.randn(2, 64)
    wanted = h
    for block in range(2):
        linear = [state[f"heads.1.{block}.linear.{name}"] for name in ("weight", "bias")]
        wanted = wanted + torch.nn.functional.silu(wanted @ linear[0].T + linear[1])
    torch.testing.assert_close(heads.logits(1, h), wanted @ state["heads.1.2.weight"].T)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
def test_what_is_borrowed_makes_the_targets_own_logits(family: str, monkeypatch) -> None:
    """Soft caps and factors behind the output layer too; what is not known is refused."""
    model: Any = random_model(family)
    target = HuggingFaceTarget(model)
    assert final_norm(target) is model.model.norm
    TargetParts.of(target)
    if family != "llama":
        monkeypatch.setattr(heads_of_targets, "scaled", lambda logits, config: logits)
        with pytest.raises(UnsupportedModel, match="makes more of its output layer's logits"):
            TargetParts.of(target)


class Renamed(LlamaModel):
    """A Llama whose final norm has a name that nobody expects."""

    norm = property(lambda self: self.closing)


def test_the_final_norm_is_found_whatever_its_name() -> None:
    """And what hands its result on is not taken for it."""
    model: Any = random_model("llama")
    own = model.model._modules.pop("norm")
    model.model.__class__ = Renamed
    model.model.closing = torch.nn.Sequential(own, torch.nn.Identity())
    model.model.norm_of_nothing = torch.nn.Identity()
    with torch.no_grad():
        own.weight.uniform_(0.2, 2.0, generator=torch.Generator().manual_seed(8))
    assert final_norm(HuggingFaceTarget(model)) is own


PROJECTED = {
    **FAMILIES["opt"].options, "word_embed_proj_dim": 32, "do_layer_norm_before": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "family", ["gpt2", "falcon", "gptj", "codegen", "gpt-bigcode", "opt", "gpt-neox"]
)
def test_older_families_lend_their_norm_and_output_layer(family: str) -> None:
    """What heads make of a target's last states by its parts are the target's own logits."""
    model: Any = random_model(family)
    target = HuggingFaceTarget(model)
    parts, tokens = TargetParts.of(target), random_tokens(9, 4)
    seq = target.open(9)
    with target.tapping((3,)) as taps, torch.inference_mode():
        target.score(Rows((seq,), (9,), tokens))
        found_RV = parts.output(parts.norm(taps.of(seq)))
    assert relative_error(found_RV, plain_logits(model, tokens)) < 1e-4


def test_a_target_without_such_a_norm_is_refused_truly() -> None:
    """Its last states are made narrower, and no norm stands before the output layer."""
    target = HuggingFaceTarget(with_weights(Family("opt", PROJECTED, shaped=False).config()))
    with pytest.raises(UnsupportedModel, match="no norm of the opt model"):
        TargetParts.of(target)


def test_layers_are_read_by_either_way_of_counting_them(tmp_path: Path) -> None:
    """SGLang's ids are from 0, of the layer that gave a state; ours say how many ran."""
    said = {"eagle_config": {TAPS: [tap - 1 for tap in SHAPE.taps], "use_aux_hidden_state": True}}
    for i, changes in enumerate(({TAPS: None}, {})):
        folder, _ = eagle3(tmp_path / str(i), **changes, **said)
        read = load_eagle(folder, TARGET)
        assert isinstance(read, EagleHead) and read.shape.taps == SHAPE.taps
    save_original(read, tmp_path / "saved", torch.float32)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    del config[TAPS]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    again = load_eagle(tmp_path / "saved", TARGET)
    assert isinstance(again, EagleHead) and again.shape.taps == SHAPE.taps


MAKERS = {"eagle": (eagle1, load_eagle), "eagle3": (eagle3, load_eagle),
          "medusa": (medusa, load_medusa)}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "error", "says"),
    [
        ("eagle", {"hidden_size": 32}, ModelError, r"has shape \(.*\), and config.json says \("),
        ("eagle", {"num_hidden_layers": 1}, ModelError, "other tensors than an EAGLE head"),
        ("eagle", {"hidden_act": "gelu"}, ModelError, "another hidden_act than silu"),
        ("eagle", {"intermediate_size": None}, ModelError, "lacks intermediate_size"),
        ("eagle", {"rope_scaling": "x"}, ModelError, "json in .* has rope_scaling='x', where an"),
        ("eagle", {"num_attention_heads": 0}, ModelError, "has num_attention_heads=0, where a who"),
        ("eagle", {"num_hidden_layers": "2"}, ModelError, "has num_hidden_layers='2', where a who"),
        ("eagle", {"rms_norm_eps": "x"}, ModelError, "has rms_norm_eps='x', where a number above"),
        ("eagle", {"rope_theta": True}, ModelError, "has rope_theta=True, where a number above 0"),
        ("eagle", {"rope_scaling": {"rope_type": "x"}}, ModelError, "is none of an EAGLE head"),
        ("eagle3", {"num_attention_heads": 0}, ModelError, "has num_attention_heads=0, where a wh"),
        ("eagle3", {"rope_scaling": "x"}, ModelError, "has rope_scaling='x', where an object is"),
        ("eagle3", {"draft_vocab_size": 41}, ModelError, "d2t"),
        ("eagle3", {"hidden_size": 32}, ModelError, "has shape"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, ModelError, "fc.weight in"),
        ("eagle3", {"num_hidden_layers": 2}, UnsupportedModel, "num_hidden_layers=2"),
        (
            "eagle3",
            {TAPS: None, "eagle_config": {TAPS: [1, "3"]}},
            ModelError,
            r"of eagle_config in .* is \[1, '3'\], no list of layers",
        ),
        ("medusa", {"medusa_num_heads": 4}, ModelError, "other tensors than Medusa heads"),
        ("medusa", {"medusa_num_heads": 0}, InvalidConfig, "num_heads=0; give at least 1"),
        ("medusa", {"medusa_num_layers": 1}, ModelError, "no output layer behind 1 blocks"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_forward(
    kind, changes, error, says, tmp_path
) -> None:
    make, load = MAKERS[kind]
    folder, _ = make(tmp_path, **changes)
    with pytest.raises(error, match=says):
        load(folder, TARGET)


@pytest.mark.parametrize("kind", MAKERS)
def test_code_in_a_pickle_is_refused_and_missing_files_are_named(kind, tmp_path) -> None:
    make, load = MAKERS[kind]
    folder, _ = make(tmp_path)
    (weights,) = (p for p in folder.iterdir() if p.suffix in (".pt", ".bin"))
    torch.save({"fc.weight": 3}, weights)
    number = weights.read_bytes()
    for held in (pickle.dumps(print, protocol=2), number, b"", b"\x80", b"\x80\x02."):
        weights.write_bytes(held)
        with pytest.raises(ModelError, match="hold more than tensors"):
            load(folder, TARGET)
    weights.unlink()
    with pytest.raises(ModelError, match="holds neither model"):
        load(folder, TARGET)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json in .* is no object"):
        load(folder, TARGET)


def test_heads_of_another_target_are_refused_and_both_are_named(tmp_path: Path) -> None:
    other = write(tmp_path / "none", {}, {"more": torch.zeros(1)}, "model.safetensors")
    with pytest.raises(UnsupportedModel, match="holds no EAGLE head that is read here"):
        load_eagle(other, TARGET)
    with pytest.raises(ModelError, match="says no medusa_num_heads"):
        load_medusa(other, TARGET)
    wide, many = FeatureHead(layer_config(32, VOCAB), 3), FeatureHead(layer_config(64, 99), 3)
    with pytest.raises(TargetShapeMismatch, match="width 32, those of the target are 64 wide"):
        check_fits(wide, TARGET)
    with pytest.raises(VocabularyMismatch, match="of 99 tokens, the target has 97"):
        check_fits(many, TARGET)
