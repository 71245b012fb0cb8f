"""Tiny random models of the tested families, with weights wide enough that errors show."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

VOCAB = 97
STD = 0.2
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": STD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, num_hidden_layers=3),
    "qwen2": lambda: Qwen2Config(
        **SHAPE, num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, num_hidden_layers=3),
    "mistral": lambda: MistralConfig(**SHAPE, num_hidden_layers=3, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **SHAPE,
        num_hidden_layers=4,
        sliding_window=7,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=16,
    ),
    "gpt-oss": lambda: GptOssConfig(
        **SHAPE, num_hidden_layers=4, sliding_window=7, num_local_experts=4, num_experts_per_tok=2
    ),
}


def random_model(family: str, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """Return the family's tiny model; all weights but norms are normal of deviation 0.2."""
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attention)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, STD, generator=noise)
    return model.eval()


def one_thread() -> Iterator[None]:
    """Run with one thread: small products gain nothing from more, and suffer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_tokens(count: int, seed: int = 1) -> Tensor:
    """Return `count` random token ids, int64."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return `[n, V]`: one plain forward of the model's own eager attention."""
    return model(tokens[None]).logits[0]


@torch.no_grad()
def plain_tree_logits(
    model: PreTrainedModel, prefix: Tensor, tokens: Tensor, parents: Sequence[int]
) -> Tensor:
    """Return `[N, V]`: each node's last row of a plain forward of prefix and path."""
    rows = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        rows.append(plain_logits(model, torch.cat((prefix, tokens[path])))[-1])
    return torch.stack(rows)


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Return the bitmasks of a tree given by parents (-1: a root), int64."""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    bits = [mask % (1 << 64) for mask in masks]
    return torch.tensor([mask - (1 << 64) if mask >= 1 << 63 else mask for mask in bits])


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference in units of the largest wanted logit."""
    return float((got - want).abs().max() / want.abs().max())
