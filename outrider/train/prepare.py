"""What every run starts from: the pinned corpus as token ids, and the tokenizer that made them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.checkpoint import build_llama
from outrider.models.tokenizer import (
    END_OF_TEXT_ID,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from outrider.train.chance import generator
from outrider.train.corpus import Corpus, load_corpus
from outrider.train.recipe import ModelRecipe, Recipe

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Corpus and tokenizer; `train` and `held_out` are the documents' token ids.

    `inputs` are the sha256 of what the run reads besides its recipe.
    """

    corpus: Corpus
    tokenizer: Any
    train: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    inputs: Mapping[str, str]


def prepare(
    recipe: Recipe,
    folder: Path,
    manifest: Path,
    root: Path | None = None,
    *,
    speaks: Path | None = None,
) -> Prepared:
    """Read the corpus and tokenize it.

    The tokenizer is the one in the folder `speaks`; without one it is trained, into `folder`.
    """
    corpus = load_corpus(recipe.corpus, manifest, root)
    if speaks is None:
        trained = train_tokenizer((d.text for d in corpus.train), recipe.tokenizer.vocab_size)
        save_tokenizer(trained, folder, recipe.model.max_positions)
    known = folder if speaks is None else speaks
    tokenizer = load_tokenizer(known)

    def encode(texts: list[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(e.ids) for e in tokenizer.encode_batch(texts))

    return Prepared(
        corpus,
        tokenizer,
        encode([d.text for d in corpus.train]),
        encode([d.text for d in corpus.held_out]),
        {"manifest": sha256_of(manifest), "tokenizer": sha256_of(known / TOKENIZER_FILE)},
    )


def sha256_of(*paths: Path) -> str:
    """The hash of some files, in this order, as of one."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_model(recipe: Recipe, vocab_size: int) -> Any:
    """A fresh model of the recipe's shape."""
    seed = int(generator(recipe.seed, "weights").initial_seed() % 2**31)
    return build_llama(config_of(recipe.model, vocab_size), seed)


def config_of(shape: ModelRecipe, vocab_size: int) -> dict[str, Any]:
    """The keyword arguments of LlamaConfig."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }
