"""Llama checkpoints in the usual Hugging Face folder layout: build, save in shards, load.

Weights are stored at two bytes each and read back in float32, so what is evaluated is what is
shipped.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from outrider.errors import ModelError, UnsupportedModel

SHARD_BYTES = "14MB"


def build_llama(shape: Mapping[str, Any], seed: int) -> nn.Module:
    """A float32 Llama of `shape` (arguments of LlamaConfig) with weights drawn from `seed`.

    Matrices into a block have standard deviation 1/sqrt(fan-in), those out of it are zero: at the
    start every block adds nothing and gradients flow through the residual alone. A head of its own
    is zero too and embeddings are 1, so that no block's first outputs drown the token; tied they
    are 0.02.
    """
    # The constructor's own draws would touch the global generator; they are overwritten below.
    with torch.random.fork_rng(devices=[]):
        model = _empty(LlamaConfig(**shape)).float()
    draw = torch.Generator().manual_seed(seed)
    embedding_std = 0.02 if model.config.tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                parameter.zero_()
            else:
                std = embedding_std if "embed" in name else parameter.size(1) ** -0.5
                parameter.normal_(0.0, std, generator=draw)
    return model


def _empty(config: Any) -> Any:
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def save_llama(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the model, rounded once to `dtype`, in safetensors shards of at most 14 MB."""
    whole: Any = model
    with torch.random.fork_rng(devices=[]):
        rounded = _empty(whole.config).to(dtype)
    rounded.load_state_dict(model.state_dict())
    rounded.config.dtype = dtype
    end = whole.config.eos_token_id
    rounded.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    with _quiet():
        rounded.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    # safetensors writes for its owner alone; a checkpoint is to be read by whoever may read the
    # folder.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def load_llama(folder: Path) -> nn.Module:
    """The model of a checkpoint folder in float32, of any family of causal language models.

    Raises:
        ModelError: no model is there.
        UnsupportedModel: one of another kind.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds no config.json, so it is no model; give a checkpoint folder"
        )
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except ValueError as error:
        raise UnsupportedModel(
            f"{str(folder)!r} holds no causal language model ({str(error).splitlines()[0][:200]}); "
            "give a checkpoint of one"
        ) from error
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers' own within; the user's setting stands again afterwards."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
