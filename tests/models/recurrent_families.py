"""Tiny random models with recurrent state: those that can be targets, and two that cannot."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models.families import VOCAB

STD = 0.08
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
OPTIONS = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "qwen3_next": {**DELTA, **EXPERTS},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
"""State-space alone, beside attention, together with it in a layer; delta rule; convolution."""

UNFIT = {
    "mamba": {"state_size": 8},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}
"""Their passes of several rows begin from an empty state."""


def random_recurrent(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: object
) -> PreTrainedModel:
    """Return the family's tiny model, its matrices normal of deviation 0.08."""
    known = {**OPTIONS, **UNFIT}[family]
    config = AutoConfig.for_model(family, **{**SHAPE, **known, **options})
    with torch.random.fork_rng(devices=[]):
        # Steps and decays of state-space layers are drawn by the constructor.
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=noise) * STD)
    return model.eval()
