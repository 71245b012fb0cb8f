"""A recipe is one TOML file that fixes a training run: corpus, tokenizer, model, schedule and seed.

Everything that changes the resulting weights is in here, so equal recipes on equal machines give equal
weights. A key that means nothing is an error that names the nearest key.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import InvalidConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """Which files of the standard library are read; paths are relative to its root, folders end in `/`."""

    manifest: str
    held_out: tuple[str, ...]
    skip: tuple[str, ...] = ()
    max_files: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_files is None or self.max_files > 0, "corpus.max_files", self.max_files, "at least 1")


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """A byte-level BPE tokenizer of `vocab_size` tokens, `<|endoftext|>` being number 0."""

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        _require(self.vocab_size >= 257, "tokenizer.vocab_size", self.vocab_size, "at least 257 (256 bytes and end of text)")


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """The shape of a Llama with tied embeddings."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    head_size: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _require(self.layers > 0, "model.layers", self.layers, "at least 1")
        _require(self.heads % self.kv_heads == 0, "model.kv_heads", self.kv_heads, f"a divisor of heads ({self.heads})")


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """How many tokens, in which steps, at which rates.

    The constant phase does not depend on `tokens`: the decay (the last `decay_fraction` of the steps) and the
    long contexts (the last `long_fraction`) are counted from the end, so a run stopped in its constant phase
    may be resumed with another `tokens`.
    """

    tokens: int
    batch_tokens: int = 4096
    micro_tokens: int = 2048
    context: int = 512
    long_context: int = 2048
    long_fraction: float = 0.12
    warmup_steps: int = 20
    decay_fraction: float = 0.25
    matrix_rate: float = 0.02
    vector_rate: float = 3e-3
    weight_decay: float = 0.01
    layer_dropout: float = 0.1
    exit_weight: float = 0.2
    threads: int = 2

    def __post_init__(self) -> None:
        _require(self.tokens >= self.batch_tokens, "train.tokens", self.tokens, f"at least one step of {self.batch_tokens}")
        for name in ("context", "long_context"):
            value: int = getattr(self, name)
            _require(self.batch_tokens % value == 0, f"train.{name}", value, f"a divisor of batch_tokens ({self.batch_tokens})")
        for name in ("decay_fraction", "long_fraction", "layer_dropout"):
            value_f: float = getattr(self, name)
            _require(0.0 <= value_f <= 1.0, f"train.{name}", value_f, "between 0 and 1")

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.tokens // self.batch_tokens

    @property
    def decay_from(self) -> int:
        """The first step of the decay."""
        return self.steps - round(self.decay_fraction * self.steps)

    @property
    def long_from(self) -> int:
        """The first step that reads long contexts."""
        return self.steps - round(self.long_fraction * self.steps)


@dataclass(frozen=True, slots=True)
class DistilRecipe:
    """How a draft model learns the laws of the target in the folder `target`, which stands beside its own.

    A step mixes corpus rows with rows the target wrote itself (`target_share`) and rows the draft wrote
    (`draft_share`); the loss is the forward Kullback-Leibler divergence and, from the share `tv_from` of the run
    on, `tv_weight` times the total variation distance, one minus which is the acceptance rate.
    """

    target: str = "target"
    target_share: float = 0.5
    draft_share: float = 0.1
    prompt_tokens: int = 64
    continuation_tokens: int = 192
    pool_rows: int = 768
    greedy_share: float = 0.4
    refresh_steps: int = 25
    refresh_rows: int = 112
    inherit_embeddings: bool = True
    tv_weight: float = 1.0
    tv_from: float = 0.3

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.target_share + self.draft_share <= 1.0,
            "distil.target_share + distil.draft_share",
            self.target_share + self.draft_share,
            "between 0 and 1",
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole run; with `distil` a draft model learns from a target, without it a model learns from the corpus."""

    name: str
    seed: int
    corpus: CorpusRecipe
    model: ModelRecipe
    train: TrainRecipe
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    distil: DistilRecipe | None = None


SECTIONS: Mapping[str, type[Any]] = {
    "corpus": CorpusRecipe,
    "tokenizer": TokenizerRecipe,
    "model": ModelRecipe,
    "train": TrainRecipe,
    "distil": DistilRecipe,
}


def load_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file; InvalidConfig for a file, section, key or value that cannot be meant."""
    if not path.is_file():
        raise InvalidConfig(f"no recipe at {path}; give a TOML file or the name of a bundled recipe")
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"recipe {path} is not TOML: {error}; correct the file") from error
    return parse_recipe(table)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """The recipe of a parsed TOML table."""
    values = {
        key: _build(SECTIONS[key], value, key) if key in SECTIONS and isinstance(value, Mapping) else value
        for key, value in table.items()
    }
    return _build(Recipe, values, "recipe")


def _build(kind: type[T], table: Mapping[str, Any], section: str) -> T:
    """A record from a table whose keys are checked against the record's fields."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(fields))}"
            raise InvalidConfig(f"unknown key {key!r} in [{section}]; {hint}")
    missing = [
        name
        for name, f in fields.items()
        if name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidConfig(f"[{section}] lacks {', '.join(missing)}; add them to the recipe")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key, value in values.items():
        _check_type(fields[key].type, value, f"{section}.{key}")
    return kind(**values)


_PLAIN_TYPES: Mapping[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), int | None: (int,)}


def _check_type(annotation: Any, value: Any, name: str) -> None:
    """Plain fields hold what their annotation says; a bool is no number."""
    allowed = _PLAIN_TYPES.get(annotation)
    if allowed is not None and (isinstance(value, bool) or not isinstance(value, allowed)):
        raise InvalidConfig(f"{name} is {value!r}, a {type(value).__name__}; give a {allowed[-1].__name__}")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidConfig(f"{name} is {value}; give {expected}")
