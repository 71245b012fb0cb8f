"""A recipe is one TOML file that fixes a training run: corpus, tokenizer, model, schedule and seed.

Everything that changes the resulting weights is in here, so equal recipes on equal machines give
equal weights.
"""

from dataclasses import dataclass, field, fields
from typing import ClassVar

from outrider.errors import InvalidConfig

PRECISIONS = ("float32", "bfloat16", "auto")
LOSSES = ("ce", "kl", "reverse-kl", "tv", "block")
"""Losses of what drafts: cross entropy of the text's own tokens, forward and reverse divergence
from the target's law, total variation from it, and what block verification refuses of a chain."""


@dataclass(frozen=True, slots=True)
class CorpusRecipe:
    """Which files of the standard library are read; paths from its root, folders end in `/`."""

    manifest: str
    held_out: tuple[str, ...]
    skip: tuple[str, ...] = ()
    max_files: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.max_files is None or self.max_files > 0,
            "corpus.max_files",
            self.max_files,
            "at least 1",
        )


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """A byte-level BPE tokenizer of `vocab_size` tokens, `<|endoftext|>` being number 0."""

    vocab_size: int = 4096

    def __post_init__(self) -> None:
        _require(
            self.vocab_size >= 257,
            "tokenizer.vocab_size",
            self.vocab_size,
            "at least 257 (256 bytes and end of text)",
        )


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """The shape of a Llama; `tied` shares one matrix between embeddings and head.

    With `bigram_start` a model that is not tied starts as a bigram model of the corpus.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    head_size: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    tied: bool = False
    bigram_start: bool = False

    def __post_init__(self) -> None:
        _require(not (self.tied and self.bigram_start), "model.bigram_start", True, "tied = false")
        _require(self.layers > 0, "model.layers", self.layers, "at least 1")
        _require(
            self.heads % self.kv_heads == 0,
            "model.kv_heads",
            self.kv_heads,
            f"a divisor of heads ({self.heads})",
        )


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """How many tokens, in which steps, at which rates.

    The constant phase does not depend on `tokens`: the decay (the last `decay_fraction` of the
    steps) and the long contexts (the last `long_fraction`) are counted from the end, so a run
    stopped in its constant phase may be resumed with another `tokens`.

    `growth` holds (step, layers): from that step on so many layers are read and trained. A layer
    adds nothing until it is trained, so the model that grows predicts what it predicted; few layers
    learn the same first things from three times as many tokens in the same time. Empty: all layers
    from the start.

    `precision` is that of the products, "auto" bfloat16 where the device computes in it;
    parameters, losses and optimiser states are float32 always.
    """

    tokens: int
    batch_tokens: int = 2048
    micro_tokens: int = 2048
    context: int = 512
    long_context: int = 2048
    long_fraction: float = 0.12
    warmup_steps: int = 20
    decay_fraction: float = 0.25
    matrix_rate: float = 0.02
    embedding_rate: float = 0.1
    vector_rate: float = 4e-3
    weight_decay: float = 0.01
    growth: tuple[tuple[int, int], ...] = ()
    layer_dropout: float = 0.1
    exit_weight: float = 0.2
    precision: str = "float32"
    threads: int = 2

    def __post_init__(self) -> None:
        _require(
            self.tokens >= self.batch_tokens,
            "train.tokens",
            self.tokens,
            f"at least one step of {self.batch_tokens}",
        )
        for name in ("context", "long_context"):
            value: int = getattr(self, name)
            _require(
                self.batch_tokens % value == 0,
                f"train.{name}",
                value,
                f"a divisor of batch_tokens ({self.batch_tokens})",
            )
        for name in ("decay_fraction", "long_fraction", "layer_dropout"):
            value_f: float = getattr(self, name)
            _require(0.0 <= value_f <= 1.0, f"train.{name}", value_f, "between 0 and 1")
        precisions = f"{', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}"
        _require(self.precision in PRECISIONS, "train.precision", self.precision, precisions)

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
    """How a draft model learns the laws of the target in the folder `target` beside its own.

    A step mixes corpus rows with rows the target wrote itself (`target_share`) and rows the draft
    wrote (`draft_share`); `loss` is one of LOSSES, `block` of chains of `steps` tokens. From step
    `tv_from_step` on comes `tv_weight` times the total variation distance, one minus which is the
    acceptance rate.
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
    loss: str = "kl"
    steps: int = 4
    tv_weight: float = 1.0
    tv_from_step: int = 50

    def __post_init__(self) -> None:
        _require(self.loss in LOSSES, "distil.loss", self.loss, f"one of {', '.join(LOSSES)}")
        _require(self.steps >= 1, "distil.steps", self.steps, "at least 1")
        _require(
            0.0 <= self.target_share + self.draft_share <= 1.0,
            "distil.target_share + distil.draft_share",
            self.target_share + self.draft_share,
            "between 0 and 1",
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole run: a model learns from the corpus, or with `distil` a draft from its target."""

    name: str
    seed: int
    corpus: CorpusRecipe
    model: ModelRecipe
    train: TrainRecipe
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    distil: DistilRecipe | None = None


@dataclass(frozen=True, slots=True)
class LearnedRecipe:
    """How a head of any kind learns its target's laws from the target's hidden states.

    `loss` is one of LOSSES, taken over the tokens that the head can guess; `block` takes `steps`
    tokens in a row as one chain.

    `written_share` of the rows are the target's own continuations of `prompt_tokens` tokens of the
    text, `written_rows` in all, `greedy_share` of them greedy. They come again, so what the target
    makes of them is kept, in `kept_gb` gigabytes of a process's memory at most.
    """

    steps: int = 3
    loss: str = "kl"
    written_share: float = 0.0
    written_rows: int = 512
    prompt_tokens: int = 64
    greedy_share: float = 0.5
    kept_gb: float = 0.0
    kind: ClassVar[str]
    section: ClassVar[str]

    def __post_init__(self) -> None:
        losses = f"one of {', '.join(LOSSES)}"
        _require(self.loss in LOSSES, f"{self.section}.loss", self.loss, losses)
        for name in ("steps", "written_rows", "prompt_tokens"):
            self._require_least(name, 1)
        self._require_least("kept_gb", 0)
        for name in ("written_share", "greedy_share"):
            self._require_share(name)

    @property
    def keeps(self) -> bool:
        """Whether rows are read as those are that may be kept, however few of them are."""
        return self.kept_gb > 0 and self.written_share > 0

    def _require_least(self, name: str, least: float) -> None:
        value: float = getattr(self, name)
        _require(value >= least, f"{self.section}.{name}", value, f"at least {least}")

    def _require_share(self, name: str) -> None:
        value: float = getattr(self, name)
        _require(0.0 <= value <= 1.0, f"{self.section}.{name}", value, "between 0 and 1")


@dataclass(frozen=True, slots=True)
class UnrolledRecipe(LearnedRecipe):
    """How a head learns that goes on from its own features.

    A step reads the head `steps` times, from the second on its own features (training-time test),
    each time weighted `step_decay` less, but by `block`. `ffn_size` 0 is the target's.

    `step_from` are the parts of the run from which the second, third ... reading is taken, the last
    holding for all further ones; empty: from the start. What is learned first is the same for all,
    and a step of one reading takes some six tenths of the time of one of three.
    """

    ffn_size: int = 0
    step_decay: float = 0.8
    step_from: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        LearnedRecipe.__post_init__(self)
        self._require_least("ffn_size", 0)
        self._require_share("step_decay")
        parts = self.step_from
        _require(
            len(parts) < self.steps
            and all(type(part) in (int, float) and 0 <= part < 1 for part in parts)
            and list(parts) == sorted(parts),
            f"{self.section}.step_from",
            list(parts),
            f"at most {self.steps - 1} ascending numbers, 0 to under 1, as steps = {self.steps}",
        )

    def changes(self, steps: int) -> tuple[int, ...]:
        """From which of a run's steps on the second, third ... reading is taken."""
        late = [round(part * steps) for part in self.step_from]
        return (*late, *[late[-1] if late else 0] * (self.steps - 1 - len(late)))


@dataclass(frozen=True, slots=True)
class EagleRecipe(UnrolledRecipe):
    """How an EAGLE-3 head learns.

    `taps` are the layers read, empty: low, middle and high ones; `draft_vocab` the most frequent
    tokens of the text, which alone are guessed.
    """

    taps: tuple[int, ...] = ()
    draft_vocab: int = 32000
    kind: ClassVar[str] = "eagle3"
    section: ClassVar[str] = "eagle"

    def __post_init__(self) -> None:
        UnrolledRecipe.__post_init__(self)
        self._require_least("draft_vocab", 1)


@dataclass(frozen=True, slots=True)
class MtpRecipe(UnrolledRecipe):
    """How one MTP module learns: a layer of the target's class, but for `ffn_size`."""

    kind: ClassVar[str] = "mtp"
    section: ClassVar[str] = "mtp"


@dataclass(frozen=True, slots=True)
class ExitRecipe(LearnedRecipe):
    """How an early-exit head learns, from the states behind the first `layers`.

    `layers` 0 is a third of the target's. `rank` is the adapter's width. The confidence's cross
    entropy is added `confidence_weight` times. `exit_threshold` is written beside the head:
    drafting stops where the confidence is below.
    """

    steps: int = 4
    layers: int = 0
    rank: int = 256
    confidence_weight: float = 0.5
    exit_threshold: float = 0.3
    kind: ClassVar[str] = "early-exit"
    section: ClassVar[str] = "exit"

    def __post_init__(self) -> None:
        LearnedRecipe.__post_init__(self)
        self._require_least("layers", 0)
        self._require_least("rank", 1)
        self._require_least("confidence_weight", 0)
        self._require_share("exit_threshold")


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """A whole run of a head: what it learns from its target, and from which text.

    It is an EAGLE-3 head, with `mtp` an MTP module, with `exit` an early-exit head. Without a
    `corpus` the text is given with the run.
    """

    name: str
    seed: int
    train: TrainRecipe
    eagle: EagleRecipe = field(default_factory=EagleRecipe)
    corpus: CorpusRecipe | None = None
    mtp: MtpRecipe | None = None
    exit: ExitRecipe | None = None

    def __post_init__(self) -> None:
        run, head = self.train, self.head
        others = [part for part in (self.mtp, self.exit) if part is not None]
        heads = len(others) + (self.eagle != EagleRecipe())
        _require(heads <= 1, "recipe", "of several heads", "[eagle], [mtp] or [exit]")
        _require(run.context == run.long_context, "train.long_context", run.long_context, "context")
        least = max(head.steps + 1, head.prompt_tokens + 1)
        _require(run.context > least, "train.context", run.context, f"more than {least}")
        # What a head does not read is nobody's to set.
        plain = {one.name: one.default for one in fields(TrainRecipe)}
        for name in ("growth", "layer_dropout", "exit_weight"):
            value: object = getattr(run, name)
            wanted = f"{plain[name]!r}, as heads know no other"
            _require(value == plain[name], f"train.{name}", value, wanted)

    @property
    def head(self) -> EagleRecipe | MtpRecipe | ExitRecipe:
        """What is learned."""
        return self.mtp or self.exit or self.eagle


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidConfig(f"{name} is {value}; give {expected}")
