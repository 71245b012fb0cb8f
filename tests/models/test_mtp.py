"""MTP modules: found in checkpoints, equal to transformers' own, refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from outrider import LLM, SamplingParams
from outrider.control import ControlSettings
from outrider.drafters import EagleDrafter, NoDrafter
from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.llm.load import Placement, auto_specs, load_drafter
from outrider.llm.options import Speculation
from outrider.models import mtp
from outrider.models.bundled import bundled_path
from outrider.models.head import TargetParts
from outrider.models.hf import HuggingFaceTarget, LoadedTarget
from outrider.models.mtp import MtpHead, like_layer, module_of
from outrider.models.mtp_files import load_mtp, num_mtp_modules, save_mtp
from tests.drafters.heads import random_head, randomised, tiny_target
from tests.drafters.serving import RAGGED, served, texts
from tests.models.families import FAMILIES, VOCAB, one_thread, random_model, with_weights
from tests.models.recurrent_families import random_recurrent

single = pytest.fixture(scope="module", autouse=True)(one_thread)
LAYER = "model.layers.3."


def checkpoint(family: str, folder: Path, modules: int = 1) -> dict[str, Tensor]:
    """A model's folder with MTP modules named as its layers are; the modules' own tensors."""
    recurrent = family == "qwen3_next"
    model = random_recurrent(family) if recurrent else random_model(family)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, own = load_file(file), {}
    draw = torch.Generator().manual_seed(3)
    for module in range(modules):
        prefix = f"model.layers.{3 + module}."
        # A layer like the last, of other weights.
        for name, tensor in list(tensors.items()):
            if name.startswith("model.layers.2."):
                own[prefix + name.removeprefix("model.layers.2.")] = _like(tensor, draw)
        norm = tensors["model.norm.weight"]
        for name in ("enorm", "hnorm", "shared_head.norm"):
            own[f"{prefix}{name}.weight"] = _like(norm, draw)
        own[f"{prefix}eh_proj.weight"] = torch.randn(64, 128, generator=draw) * 0.1
        own[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **own}, file, {"format": "pt"})
    return own


def _like(tensor: Tensor, draw: torch.Generator) -> Tensor:
    if tensor.dim() < 2:
        return torch.rand(tensor.shape, generator=draw) + 0.5
    return torch.randn(tensor.shape, generator=draw) * 0.2


def loaded(folder: Path) -> LoadedTarget:
    return HuggingFaceTarget.load(folder, dtype=torch.float32)


def test_modules_of_deepseek_and_glm_checkpoints_are_transformers_own(tmp_path: Path) -> None:
    """The same rows through `MtpModel`, whose loader knows the published sizes alone."""
    for family in ("deepseek-v3", "glm4-moe"):
        folder = tmp_path / family
        own = checkpoint(family, folder)
        assert num_mtp_modules(folder) == 1
        target = loaded(folder)
        head = load_mtp(folder, target)
        (module,) = head.mtp
        assert torch.equal(module.eh_proj.weight, own[LAYER + "eh_proj.weight"])
        assert torch.equal(module.norm.weight, own[LAYER + "shared_head.norm.weight"])
        q = "self_attn.q_a_proj.weight" if family == "deepseek-v3" else "self_attn.q_proj.weight"
        assert torch.equal(module.block.get_parameter(q), own[LAYER + q])
        gate = own[LAYER + "mlp.experts.1.gate_proj.weight"]
        assert torch.equal(module.block.mlp.experts.gate_up_proj[1][: len(gate)], gate)
        model: Any = target.model
        stock = MtpModel(model, 1).eval()
        named = {stock_name(name): tensor for name, tensor in module.state_dict().items()}
        stock.load_state_dict(named, strict=False)
        stock.tie_with_main_model(model)
        head.borrow(TargetParts.of(target))
        tokens, h, places = torch.arange(6)[None], torch.randn(1, 6, 64), torch.arange(6)[None]
        with torch.no_grad():
            wanted = stock.layers[0](
                stock.embed_tokens(tokens),
                h,
                position_embeddings=stock.rotary_emb(h, position_ids=places),
                attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(),
                position_ids=places,
                past_key_values=None,
            )
            found = head.step(tokens, h, places, causal)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def stock_name(name: str) -> str:
    """What `MtpModel` calls a part of ours."""
    own = {"norm.weight": "post_norm.weight"}.get(name, name.replace("block.", "mtp_block.", 1))
    return f"layers.0.{own}"


def causal(query, keys, values, options=None, layer=0) -> Tensor:
    """torch's own attention of one text's rows."""
    scale = None if options is None else options.scaling
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def test_modules_under_mtp_are_the_same_ones(tmp_path: Path) -> None:
    """The names of Qwen3-Next: what is beside the layers stands a level up. They draft there."""
    own = checkpoint("qwen3_next", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    target = loaded(tmp_path)
    wanted = load_mtp(tmp_path, target).state_dict()
    beside = {
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
        "shared_head.norm": "norm",
    }  # fmt: skip
    for name, tensor in own.items():
        del tensors[name]
        rest = name.removeprefix(LAYER)
        part = beside.get(rest.removesuffix(".weight"))
        if rest not in ("embed_tokens.weight", "shared_head.head.weight"):
            tensors[f"mtp.{part}.weight" if part else f"mtp.layers.0.{rest}"] = tensor
    save_file(tensors, file, {"format": "pt"})
    assert num_mtp_modules(tmp_path) == 1
    head = load_mtp(tmp_path, target)
    found = head.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=11)
    due = texts(served(target, NoDrafter()), params, RAGGED[:2])
    requests = served(target, EagleDrafter(head))
    assert texts(requests, params, RAGGED[:2]) == due and requests.engine.metrics.drafted > 0
    with pytest.raises(UnsupportedModel, match="is of type linear_attention, and MTP modules"):
        target.reach(0)


def test_several_modules_are_saved_and_read_alone(tmp_path: Path) -> None:
    target = tiny_target()
    head = random_head("mtp of two", target)
    assert isinstance(head, MtpHead)
    save_mtp(head, tmp_path, verifier="x", target=target, dtype=torch.float32, options={})
    read = load_mtp(tmp_path, target)
    assert read.num_modules == 2 and read.taps == (3,)
    ours, theirs = head.state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    # Named like those of checkpoints.
    assert f"{LAYER}enorm.weight" in load_file(tmp_path / "model.safetensors")
    assert num_mtp_modules(tmp_path) == 2


def test_a_folder_of_modules_is_no_model(tmp_path: Path) -> None:
    """It would be one of random weights."""
    target = tiny_target()
    head = random_head("mtp", target)
    assert isinstance(head, MtpHead)
    save_mtp(head, tmp_path, verifier="x", target=target, dtype=torch.float32, options={})
    with pytest.raises(ModelError):
        HuggingFaceTarget.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part in ("target", "text_config"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "target": None, part: "x"}))
        assert num_mtp_modules(tmp_path) == 0
        with pytest.raises(ModelError, match="'x' stands where the target is described"):
            load_mtp(tmp_path, target)


def test_whether_a_checkpoint_has_any_is_told_by_names_alone(tmp_path: Path) -> None:
    assert num_mtp_modules(bundled_path("target")) == 0 == num_mtp_modules(tmp_path / "nowhere")
    config = {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert num_mtp_modules(tmp_path) == 0
    names = ["model.layers.2.x", "model.layers.3.eh_proj.weight", "model.layers.4.eh_proj.weight"]
    index = {"weight_map": dict.fromkeys(names, "absent.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_mtp_modules(tmp_path) == 2
    index = {"weight_map": dict.fromkeys(names[2:], "absent.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_mtp_modules(tmp_path) == 0
    with pytest.raises(ModelError, match=r"MTP modules \[1\] are there, counted from 0"):
        load_mtp(tmp_path, tiny_target())
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert num_mtp_modules(tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "tensor", "error", "says"),
    [
        ("embed_tokens", torch.zeros(99, 64), VocabularyMismatch, "of 99 tokens, the target has"),
        (
            "eh_proj",
            torch.zeros(32, 64),
            TargetShapeMismatch,
            "width 32, those of the target are 64",
        ),
        ("enorm", None, ModelError, r"enorm of .* has shape None, \(64,\) is due"),
        ("hnorm", torch.zeros(32), ModelError, r"hnorm of .* has shape \(32,\), \(64,\) is due"),
        ("self_attn.q_proj", None, ModelError, "differ in model.layers.0.self_attn.q_proj.weight"),
        ("mlp.more", torch.zeros(2), ModelError, "differ in model.layers.0.mlp.more.weight"),
        ("mlp.up_proj", torch.zeros(2, 64), ModelError, "of another shape than the target's"),
    ],
)
def test_what_does_not_fit_is_refused(name, tensor, error, says, tmp_path) -> None:
    checkpoint("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{LAYER}{name}.weight", None)
    if name == "embed_tokens":
        del tensors[f"{LAYER}shared_head.head.weight"]
    if tensor is not None:
        tensors[f"{LAYER}{name}.weight"] = tensor
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error, match=says):
        load_mtp(tmp_path, tiny_target())


def test_modules_of_another_target_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    head = random_head("mtp", target)
    assert isinstance(head, MtpHead)
    save_mtp(head, tmp_path, verifier="tiny", target=target, dtype=torch.float32, options={})
    deeper = FAMILIES["llama"].config()
    deeper.num_hidden_layers = 4
    with pytest.raises(ModelError, match=r"made for 'tiny', whose layer 3 .* last is layer 4"):
        load_mtp(tmp_path, HuggingFaceTarget(with_weights(deeper)))
    with pytest.raises(ModelError, match="a LlamaForCausalLM, and the target is a Qwen3ForCausal"):
        load_mtp(tmp_path, HuggingFaceTarget(random_model("qwen3")))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "target": {**config["target"], "vocab_size": 99}})
    )
    with pytest.raises(VocabularyMismatch, match="of 99 tokens, the target has 97"):
        load_mtp(tmp_path, target)
    for options in ([1], {"intermediate_size": "x"}, {"intermediate_sise": 7}):
        changed = {**config, "layer_options": options}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=r"layer_options in .* sizes by their names"):
            load_mtp(tmp_path, target)


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    checkpoint("llama", tmp_path)
    shallower = FAMILIES["llama"].config()
    shallower.num_hidden_layers = 2
    with pytest.raises(ModelError, match=r"whose layer 3 it reads, .* last is layer 2"):
        load_mtp(tmp_path, HuggingFaceTarget(with_weights(shallower)))
    with pytest.raises(ModelError, match="a LlamaForCausalLM, and the target is a Mistral"):
        load_mtp(tmp_path, HuggingFaceTarget(random_model("mistral")))
    with pytest.raises(VocabularyMismatch, match="of 4096 tokens, the target has 97"):
        load_mtp(bundled_path("draft"), tiny_target())
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "elsewhere.safetensors")
    name = f"{LAYER}eh_proj.weight"
    for index in (
        {"weight_map": {name: "../elsewhere.safetensors"}},
        {"weight_map": {name: 3}},
        {"weight_map": [name]},
        [],
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert num_mtp_modules(tmp_path) == 0
        with pytest.raises(ModelError, match="cannot be read"):
            load_mtp(tmp_path, tiny_target())


def test_layers_are_like_the_last_or_as_the_config_says() -> None:
    config = FAMILIES["gemma3"].config()
    assert like_layer(config, 0) == 3
    config.mtp_layer_types = ["sliding_attention"]
    assert like_layer(config, 0) == 2
    config.mtp_layer_types = ["linear_attention"]
    with pytest.raises(UnsupportedModel, match="of type linear_attention, and no layer"):
        like_layer(config, 0)
    config.mtp_layer_types = ["sliding_attention"]
    target = HuggingFaceTarget(with_weights(config))
    head = randomised(MtpHead([module_of(target, 0)], target), 0, 1.0)
    assert isinstance(head, MtpHead) and head.reaches == {0: target.reach(2)}
    with pytest.raises(UnsupportedModel, match="as its attention is its own"):
        HuggingFaceTarget(random_model("falcon")).reach(0)


def test_the_spec_reads_the_targets_own_folder_or_another(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_path("target"), folder)
    with pytest.raises(ModelError, match="holds no MTP modules behind 6 layers; train one"):
        LLM.load(folder, "mtp", compile=False)
    with pytest.raises(ModelError, match="drafter='mtp:/nowhere': no folder is there"):
        LLM.load(folder, "mtp:/nowhere", compile=False)
    with pytest.raises(InvalidConfig, match="take a folder"):
        LLM.load(folder, "medusa")
    target = loaded(bundled_path("target"))
    module = module_of(target, 0, options={"intermediate_size": 32})
    head = randomised(MtpHead([module], target), 0, 1.0)
    assert isinstance(head, MtpHead)
    save_mtp(
        head,
        tmp_path / "head",
        verifier="bundled",
        target=target,
        dtype=torch.float16,
        options={"intermediate_size": 32},
    )
    params = SamplingParams(max_tokens=6, temperature=0.0)
    (due,) = LLM.load("bundled", "none", compile=False).generate("import os\n", params)
    llm = LLM.load("bundled", f"mtp:{tmp_path / 'head'}", compile=False)
    (done,) = llm.generate("import os\n", params)
    assert done.token_ids == due.token_ids and done.stats.drafted > 0
    assert llm.info()["drafter"] == {"name": "mtp", "trusted": False}
    assert target.vocab_size != VOCAB


def test_auto_knows_the_modules_of_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    assert auto_specs("bundled") == ("draft", "ngram")
    checkpoint("llama", tmp_path)
    target = loaded(tmp_path)
    asked = Speculation("auto", control=ControlSettings())

    def names(spec: str = "auto") -> tuple[str, ...]:
        options = dataclasses.replace(asked, drafter=spec)
        # No drafter here asks for more of the tokenizer.
        tokenizer: Any = SimpleNamespace(folder=tmp_path)
        found = load_drafter(options, tmp_path, tokenizer, Placement(), lambda: target)
        return found.names

    assert names() == ("mtp", "ngram") and names("suffix,auto") == ("suffix", "mtp", "ngram")
    monkeypatch.setattr(mtp, "like_layer", refuse)
    assert names() == ("ngram",), "what cannot be had is left out"
    with pytest.raises(UnsupportedModel, match="not this one"):
        names("mtp,ngram")


def refuse(*_: object) -> None:
    raise UnsupportedModel("not this one")
