"""A tiny pair in folders: a random Llama with a byte-level tokenizer, and drafts for it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from outrider.models.checkpoint import build_llama, save_llama
from outrider.models.tokenizer import save_tokenizer, train_tokenizer

TEXT = "def add(self, key, value):\n    return self.table[key] + value\n"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Folders of a target, of a draft that is the same model, and of one that is another."""

    target: Path
    draft: Path
    stranger: Path


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small gain nothing from threads, and waiting for a busy core costs much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def pair(tmp_path_factory) -> Pair:
    """Weights have standard deviation 0.2, so that every one of them matters."""
    tokenizer = train_tokenizer([TEXT * 3], 280)
    root = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 1), ("draft", 1), ("stranger", 2)):
        model = build_llama({**SHAPE, "vocab_size": tokenizer.get_vocab_size()}, 0)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2, generator=draw)
        save_llama(model, root / name)
        save_tokenizer(tokenizer, root / name, 256)
    return Pair(root / "target", root / "draft", root / "stranger")
