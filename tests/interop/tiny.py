"""Tiny random models for `generate`, wide enough in their weights that errors show."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config}


def tiny(family: str = "llama", *, vocab: int = 97, seed: int = 0, std: float = 0.3, **options):
    """A model in float32 whose weights but norms are normal; seeds near each other share most."""
    config = FAMILIES[family](vocab_size=vocab, **{**SHAPE, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, std, generator=noise)
    return model.eval()


def near(model: PreTrainedModel, share: float = 0.03, seed: int = 5) -> PreTrainedModel:
    """A draft model: the same weights with some noise."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "norm" not in name:
                weight.add_(share * weight.std() * torch.randn(weight.shape, generator=noise))
    return other


def padded(vocab: int = 97, lengths: tuple[int, ...] = (9, 4, 13), pad: int = 0) -> dict:
    """Prompts of several lengths, padded on the left; each repeats itself, so that lookup finds."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros_like(ids)
    noise = torch.Generator().manual_seed(3)
    for row, length in enumerate(lengths):
        piece = torch.randint(1, vocab, (length // 2 + 1,), generator=noise)
        ids[row, width - length :] = piece.repeat(2)[:length]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def new_tokens(out: Tensor, inputs: dict) -> list[list[int]]:
    """What was added to the prompts."""
    return out[:, inputs["input_ids"].shape[1] :].tolist()
