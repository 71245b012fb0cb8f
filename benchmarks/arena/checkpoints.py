"""Checkpoints for every engine: inflated copies of the bundled pair, real shapes at random.

A folder holds `target`, a `draft-C` for each cost ratio, and what other engines' own converters
make of them. All weights are float32, the tokenizer is the bundled one.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from outrider.bench.inflate import Size, inflate, size_of, weights_read
from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path
from outrider.models.checkpoint import load_llama

CONTEXT = 4096
SIZES = {
    "small": Size(10, 6144, 32768),
    "half": Size(24, 16384, 152064),
    "billion": Size(40, 20480, 152064),
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
}
NAMES = (*SIZES, *SHAPES)


@dataclass(frozen=True, slots=True)
class Made:
    """Where a checkpoint is, and how many weights a forward of its models reads."""

    folder: Path
    target_weights: int
    draft_weights: dict[float, int]


def make(name: str, folder: Path, costs: Sequence[float], seed: int = 0) -> Made:
    """Writes a checkpoint's target and drafts; what is there already is left.

    Raises:
        InvalidConfig: no such checkpoint.
    """
    if name not in NAMES:
        raise InvalidConfig(f"checkpoint {name!r} does not exist; there are {', '.join(NAMES)}")
    target = _target(name, seed)
    weights = weights_read(target)
    _save(target, folder / "target")
    drafts: dict[float, int] = {}
    for cost in costs:
        draft_of = _random_draft if name in SHAPES else _inflated_draft
        draft = draft_of(name, cost * weights, seed + 1)
        drafts[cost] = weights_read(draft)
        _save(draft, folder / f"draft-{cost:g}")
    return Made(folder, weights, drafts)


def _target(name: str, seed: int) -> nn.Module:
    if name in SIZES:
        return inflate(load_llama(bundled_path("target")), SIZES[name], seed)
    return _random(_config(name, SHAPES[name]), seed)


def _inflated_draft(name: str, weights: float, seed: int) -> nn.Module:
    """The bundled draft grown to read about so many weights, by the width of its feed-forwards.

    Where the target's vocabulary alone is too much for it, it stays at its own width and costs more
    than was wanted.
    """
    small = load_llama(bundled_path("draft"))
    own, vocab = size_of(small), SIZES[name].vocab
    least, wider = (
        weights_read(inflate(small, Size(own.num_layers, own.feed_forward + more, vocab), 0))
        for more in (0, 64)
    )
    steps = max(0, round((weights - least) / (wider - least)))
    return inflate(small, Size(own.num_layers, own.feed_forward + 64 * steps, vocab), seed)


def _random_draft(name: str, weights: float, seed: int) -> nn.Module:
    """A narrower model of the same kind: two layers and the target's vocabulary.

    The output layer takes most of the weights, as it does in real drafts of large vocabularies.
    """
    shape = {
        **SHAPES[name],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    found: list[tuple[float, int]] = []
    for hidden in range(64, 1025, 32):
        # Output layer, attention, and feed-forwards of three times the width.
        read = hidden * shape["vocab_size"] + 2 * (6 * 64 * hidden + 9 * hidden * hidden)
        found.append((abs(read - weights), hidden))
    hidden = min(found)[1]
    shape |= {"hidden_size": hidden, "intermediate_size": 3 * hidden}
    return _random(_config(name, shape), seed)


def _config(name: str, shape: dict[str, Any]) -> Any:
    kind = Qwen3Config if name.startswith("qwen") else LlamaConfig
    return kind(**shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=0)


def _random(config: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _save(model: nn.Module, folder: Path) -> None:
    """Writes it with the bundled tokenizer, unless it is there already."""
    if (folder / "config.json").is_file():
        return
    whole: Any = model
    whole.config.max_position_embeddings = CONTEXT
    whole.config.dtype = torch.float32
    whole.generation_config.eos_token_id = whole.generation_config.bos_token_id = 0
    whole.generation_config.pad_token_id = 0
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    whole.save_pretrained(part, max_shard_size="2GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("target") / name, part / name)
    part.rename(folder)
