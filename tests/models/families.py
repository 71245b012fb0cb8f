"""Tiny random models of the tested families, with weights wide enough that errors show.

Each entry is a model type of transformers, the options that make it small, and the path it takes:
`outrider`, the attention interface, or `slab`, its own attention over our blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

VOCAB = 97
STD = 0.2
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": STD,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OLD = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
GPT = {**OLD, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 1024}
FOUR = {"num_hidden_layers": 4}
WINDOW = {"sliding_window": 7}
HEAD_OF_8 = {"head_dim": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    **HEAD_OF_8, "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
DEEPSEEK = {
    **MLA, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LLAMA4 = {
    **FOUR, "intermediate_size_mlp": 96, "num_local_experts": 4, "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True, "floor_scale": 4, "attention_chunk_size": 8,
}  # fmt: skip
ALTERNATING = {**FOUR, **WINDOW, "query_pre_attn_scalar": 16}
GEMMA3 = {**ALTERNATING, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's tiny configuration and the path it must take.

    `shaped` False means that the options are all there is; else they stand beside the common shape,
    and None takes a name out of it. `vision` makes an image-text model of it.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "outrider"
    shaped: bool = True
    vision: dict[str, Any] | None = None
    text_type: str | None = None

    def config(self):
        """Return the configuration."""
        shape = SHAPE if self.shaped else {}
        text = {**shape, **self.options}
        text = {k: v for k, v in text.items() if v is not None or k.endswith("token_id")}
        if self.vision is None:
            return AutoConfig.for_model(self.model_type, **text)
        if self.text_type is not None:
            text["model_type"] = self.text_type
        return AutoConfig.for_model(
            self.model_type, text_config=text, vision_config=dict(self.vision)
        )


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
FAMILIES = {
    "llama": Family("llama"),
    "llama3": Family("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama4": Family("llama4_text", LLAMA4),
    "qwen2": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": Family("qwen3"),
    "qwen2-moe": Family(
        "qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
    ),
    "qwen3-moe": Family("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "mistral": Family("mistral", WINDOW),
    "ministral": Family("ministral", WINDOW),
    "mixtral": Family("mixtral", {**WINDOW, "num_local_experts": 4}),
    "gemma": Family("gemma"),
    "gemma2": Family(
        "gemma2", {**ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    ),
    "gemma3": Family("gemma3_text", GEMMA3),
    "gemma3n": Family(
        "gemma3n_text",
        {**GEMMA3, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
         "num_kv_shared_layers": 0},
    ),
    "phi": Family("phi", HEAD_OF_8),
    "phi3": Family("phi3", {**HEAD_OF_8, **WINDOW}),
    "phi4": Family("phi3", {**HEAD_OF_8, "partial_rotary_factor": 0.5}),
    "phimoe": Family("phimoe", {**HEAD_OF_8, **WINDOW, "num_local_experts": 4}),
    "gpt-oss": Family(
        "gpt_oss", {**FOUR, **WINDOW, **EXPERTS, "num_local_experts": 4, "rope_parameters": YARN}
    ),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "glm4-moe": Family(
        "glm4_moe",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1,
         "topk_group": 1},
    ),
    "granite": Family(
        "granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7}
    ),
    "granite-moe": Family("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo": Family("olmo", {**HEAD_OF_8, "clip_qkv": 2.0}),
    "olmo2": Family("olmo2", HEAD_OF_8),
    "olmo3": Family("olmo3", {**HEAD_OF_8, **FOUR, **WINDOW}),
    "olmoe": Family("olmoe", {**HEAD_OF_8, "num_experts": 4, "num_experts_per_tok": 2}),
    "cohere": Family("cohere", HEAD_OF_8),
    "cohere2": Family("cohere2", {**FOUR, **WINDOW}),
    "stablelm": Family("stablelm", HEAD_OF_8),
    "starcoder2": Family("starcoder2", {**HEAD_OF_8, **WINDOW}),
    "smollm3": Family("smollm3", FOUR),
    "nemotron": Family("nemotron"),
    "exaone4": Family("exaone4", {**FOUR, **WINDOW}),
    "ernie4.5": Family("ernie4_5"),
    "hunyuan": Family("hunyuan_v1_dense"),
    "helium": Family("helium", {"head_dim": 8}),
    "seed-oss": Family("seed_oss"),
    "arcee": Family("arcee"),
    "afmoe": Family("afmoe", {**FOUR, **WINDOW, **EXPERTS, "num_experts": 4, "n_group": 1,
                              "topk_group": 1, "num_dense_layers": 1}),
    "minicpm3": Family("minicpm3", MLA),
    "deepseek-v2": Family("deepseek_v2", DEEPSEEK),
    "deepseek-v3": Family("deepseek_v3", DEEPSEEK),
    "gpt2": Family("gpt2", GPT, shaped=False),
    "gpt-bigcode": Family("gpt_bigcode", GPT, shaped=False),
    "gpt-neox": Family("gpt_neox", {**HEAD_OF_8, "num_key_value_heads": None, "rotary_pct": 0.5}),
    "opt": Family(
        "opt",
        {**OLD, "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 8, "num_hidden_layers": 3,
         "max_position_embeddings": 1024, "word_embed_proj_dim": 64, "pad_token_id": 1},
        shaped=False,
    ),
    "biogpt": Family("biogpt", {**HEAD_OF_8, "num_key_value_heads": None, "pad_token_id": 1}),
    "gptj": Family("gptj", {**GPT, "rotary_dim": 4}, "slab", shaped=False),
    "codegen": Family("codegen", {**GPT, "rotary_dim": 4}, "slab", shaped=False),
    "falcon": Family(
        "falcon",
        {**OLD, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8},
        "slab",
        shaped=False,
    ),
    "falcon-40b": Family(
        "falcon",
        {**OLD, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_kv_heads": 2, "new_decoder_architecture": True},
        "slab",
        shaped=False,
    ),
    "xglm": Family(
        "xglm",
        {**OLD, "d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 8,
         "max_position_embeddings": 1024, "pad_token_id": 1},
        "slab",
        shaped=False,
    ),
    "gemma3-vision": Family("gemma3", GEMMA3, vision=VISION),
    "qwen2-vl": Family(
        "qwen2_vl",
        {"rope_parameters": SECTIONS, "head_dim": 8},
        vision={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64, "patch_size": 14},
    ),
    "qwen3-vl": Family(
        "qwen3_vl",
        {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2]}},
        vision={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64,
                "intermediate_size": 16, "deepstack_visual_indexes": [0]},
    ),
    "llava": Family("llava", vision=CLIP, text_type="llama"),
    "mistral3-vision": Family(
        "mistral3", WINDOW, vision={"model_type": "pixtral", **VISION}, text_type="mistral"
    ),
}  # fmt: skip


EXPERTS = (
    "llama4", "qwen2-moe", "qwen3-moe", "mixtral", "phimoe", "gpt-oss", "glm4-moe", "granite-moe",
    "olmoe", "afmoe", "deepseek-v2", "deepseek-v3",
)  # fmt: skip
"""Mixtures of experts, which strict refuses."""

TELLING = ("llama", "qwen2", "gemma2", "gpt-oss", "llama4", "falcon")
"""Families that stand for the ways keys are reached: all, windows, sinks, chunks, the slab."""


def random_model(family: str, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """Return the family's tiny model; all weights but norms are normal of deviation 0.2."""
    return with_weights(FAMILIES[family].config(), attention, seed)


def with_weights(config: Any, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """Return the model of a configuration, with such weights."""
    whole = hasattr(config, "vision_config")
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention)
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


def plain_tree_logits(
    model: PreTrainedModel, prefix: Tensor, tokens: Tensor, parents: Sequence[int]
) -> Tensor:
    """Return `[N, V]`: each node's row of a plain forward of prefix and path, one per leaf."""
    rows: dict[int, Tensor] = {}
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        logits = plain_logits(model, torch.cat((prefix, tokens[path])))
        rows.update(zip(path, logits[len(prefix) :], strict=True))
    return torch.stack([rows[node] for node in range(len(parents))])


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
