"""Tiny random models as GGUF files, and whether libllama is there to read them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.bench.gguf_file import write, write_gguf
from outrider.models.bundled import bundled_path
from tests.models.families import FAMILIES, GEMMA3, SHAPE, random_model, with_weights

needs_libllama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed: make .venv/installed-gguf",
)


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="outrider-gguf-"))


@cache
def random_file(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Path]:
    """The tiny random Llama of the family tests, and the same as a file."""
    model = random_model("llama")
    file = _folder() / f"llama-{str(dtype).removeprefix('torch.')}.gguf"
    write_gguf(model, file, tokenizer=None, dtype=dtype)
    return model, file


@cache
def draft_file() -> Path:
    """A smaller random model of the same vocabulary."""
    shape = {**SHAPE, "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8}
    file = _folder() / "draft.gguf"
    write_gguf(with_weights(LlamaConfig(**shape), seed=5), file, tokenizer=None)
    return file


@cache
def bundled_file(part: str, dtype: torch.dtype = torch.float16) -> Path:
    """The bundled target or draft model, with its tokenizer."""
    folder = bundled_path(part)
    file = _folder() / f"{part}-{str(dtype).removeprefix('torch.')}.gguf"
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_gguf(model, file, tokenizer=folder, dtype=dtype)
    return file


@cache
def quantised_file(kind: str) -> Path:
    """The bundled target quantised by libllama itself, such as Q4_K_M."""
    import llama_cpp

    file = _folder() / f"target-{kind}.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 1
    source = bundled_file("target", torch.float32)
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params) == 0
    return file


WINDOW = 70


@cache
def windowed_file() -> tuple[PreTrainedModel, Path]:
    """A Gemma 3 whose layers reach back 70 tokens, but every fourth, and the same as a file."""
    family = replace(FAMILIES["gemma3"], options={**GEMMA3, "sliding_window": WINDOW})
    model: Any = with_weights(family.config())
    config = model.config
    facts = {
        "general.architecture": "gemma3",
        "gemma3.block_count": config.num_hidden_layers,
        "gemma3.context_length": config.max_position_embeddings,
        "gemma3.embedding_length": config.hidden_size,
        "gemma3.feed_forward_length": config.intermediate_size,
        "gemma3.attention.head_count": config.num_attention_heads,
        "gemma3.attention.head_count_kv": config.num_key_value_heads,
        "gemma3.attention.key_length": config.head_dim,
        "gemma3.attention.value_length": config.head_dim,
        "gemma3.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "gemma3.attention.sliding_window": WINDOW,
        "gemma3.attention.sliding_window_pattern": 4,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "none",
    }
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        path = name.removesuffix(".weight")
        # The family's norms scale by one more than their weight; libllama's by the weight.
        values = weight + 1 if "norm" in path else weight
        if path in ("model.embed_tokens", "model.norm"):
            whole = "token_embd" if path.endswith("tokens") else "output_norm"
            tensors[f"{whole}.weight"] = values
        elif path.startswith("model.layers."):
            _, _, block, rest = path.split(".", 3)
            tensors[f"blk.{block}.{names[rest]}.weight"] = values
    file = _folder() / "windowed.gguf"
    write(file, facts, tensors)
    return model, file
