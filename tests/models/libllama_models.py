"""Tiny random models as GGUF files, and whether libllama is there to read them."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.bench.gguf_file import write_gguf
from outrider.models.bundled import bundled_path
from tests.models.families import SHAPE, random_model, with_weights

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
