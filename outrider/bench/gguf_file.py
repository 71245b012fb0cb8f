"""Llamas written as GGUF files: the bundled pair and its inflated copies, for libllama.

For tests and measurements. Models that people use come as GGUF files, or are converted by
llama.cpp's own script, which knows every family and tokenizer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import InvalidConfig

VERSION = 3
ALIGNMENT = 32
KINDS = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}
"""GGUF's numbers of a tensor's kind and of a file's."""

_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# Splits words, numbers and signs; the bundled pair's own way of splitting is not one libllama has.
_SPLIT = "smaug-bpe"


def write_gguf(
    model: nn.Module, file: Path, *, tokenizer: Path | None, dtype: torch.dtype = torch.float16
) -> None:
    """Write a Llama of transformers as a GGUF file; norms stay in float32.

    `tokenizer` is the folder of a byte-level BPE; None writes tokens without a text. Text may be
    split otherwise than by the folder's own tokenizer, as libllama has a fixed number of ways.

    Raises:
        InvalidConfig: another family, a dtype GGUF has not.
    """
    config: Any = model.config
    if config.model_type != "llama":
        raise InvalidConfig(f"a {config.model_type} model cannot be written as GGUF here; a llama")
    if dtype not in KINDS:
        raise InvalidConfig(f"dtype={dtype}: GGUF files are written in float32, float16, bfloat16")
    tensors = dict(_tensors(model, config, dtype))
    facts = _facts(config, dtype) | _vocabulary(tokenizer, config)
    write(file, facts, tensors)


def _facts(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "a model of Outrider's tests",
        "general.file_type": KINDS[dtype][1],
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }


def _vocabulary(folder: Path | None, config: Any) -> dict[str, Any]:
    if folder is None:
        return {"tokenizer.ggml.model": "none"}
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {i: text for text, i in saved["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in saved["added_tokens"]}
    known |= special
    size = config.vocab_size
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _SPLIT,
        "tokenizer.ggml.tokens": [known.get(i, f"[unused {i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [
            _CONTROL if i in special else _NORMAL if i in known else _UNUSED for i in range(size)
        ],
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in saved["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors(model: nn.Module, config: Any, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
    """The weights under GGUF's names, matrices in the file's dtype."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.state_dict().items():
        path = name.removesuffix(".weight")
        if path in whole:
            if path == "lm_head" and config.tie_word_embeddings:
                continue
            found = whole[path]
        else:
            _, _, block, rest = path.split(".", 3)
            found = names[rest]
            if found in heads:
                weight = _interleaved(weight, heads[found])
            found = f"blk.{block}.{found}"
        yield f"{found}.weight", weight.to(dtype if weight.dim() > 1 else torch.float32)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in libllama's order: a rotation's two halves beside each other."""
    parts = weight.view(heads, 2, -1, weight.shape[1])
    return parts.transpose(1, 2).reshape(weight.shape)


def write(file: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a GGUF file of these facts and tensors."""
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(facts)))
        for key, value in facts.items():
            out.write(_text(key) + _typed(value))
        place = 0
        for name, tensor in tensors.items():
            sizes = tensor.shape[::-1]
            kind = KINDS[tensor.dtype][0]
            out.write(_text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            out.write(struct.pack("<IQ", kind, place))
            place += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        for tensor in tensors.values():
            out.write(bytes(-out.tell() % ALIGNMENT))
            out.write(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        out.write(bytes(-out.tell() % ALIGNMENT))


def _text(value: str) -> bytes:
    said = value.encode()
    return struct.pack("<Q", len(said)) + said


def _typed(value: Any) -> bytes:
    """A value behind its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    kind = _STRING if isinstance(value[0], str) else _I32
    items = (
        b"".join(map(_text, value)) if kind == _STRING else struct.pack(f"<{len(value)}i", *value)
    )
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
