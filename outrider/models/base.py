"""The contract between engine and model: flat rows in, logits out, then commit or discard.

`score` stages rows and returns logits; `commit` alone moves a length; whatever was staged and not
committed is forgotten, so an exception between the two leaves nothing to undo. Targets and draft
models are one class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.errors import TokenOutOfRange, UnsupportedModel

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

MAX_TREE_NODES = 64
"""Staged nodes a tree may have: their ancestors are the bits of one int64."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The R flat rows of one forward: the rows of B sequences, one sequence after another.

    `seqs` are the handles of the sequences in row order, each at most once; `counts` their numbers
    of rows (at least 1); `tokens_R` int64 the rows' tokens.

    `ancestors_R` None means that each sequence's rows continue its staged chain. Otherwise it is
    int64 and bit j of a row is set when staged node j of its sequence (every row staged since the
    last commit counts, in the order of staging) is visible to the row, itself included: the nodes
    on its path from the root.

    A row's position is not given but follows: committed length + number of its ancestors - 1,
    itself being one of them.

    `logits_rows` int64 are the indices of the rows whose logits are wanted, ascending: None is
    every row, an empty tensor none (reading a prompt).
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    tokens_R: Int64[Tensor, " R"]
    ancestors_R: Int64[Tensor, " R"] | None = None
    logits_rows: Int64[Tensor, " wanted"] | None = None


@dataclass(slots=True)
class Taps:
    """Hidden states noted of the rows that a target scores.

    `layers` says behind how many layers: state i is what the first i layers give, before any final
    norm. `parts` holds the rows of each sequence, forward by forward, as `[n, F]`, the states of
    one row side by side in the order of `layers`.
    """

    layers: tuple[int, ...]
    parts: dict[int, list[Float[Tensor, "n F"]]] = field(default_factory=dict[int, list[Tensor]])

    def add(self, rows: Rows, hidden_RF: Float[Tensor, "R F"]) -> None:
        """Note the states of one forward's rows."""
        for seq, part in zip(rows.seqs, hidden_RF.split(rows.counts), strict=True):
            self.parts.setdefault(seq, []).append(part)

    def of(self, seq: int) -> Float[Tensor, "n F"]:
        """The states of all the sequence's rows, in the order in which they were scored."""
        parts = self.parts[seq]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse tokens that a vocabulary does not hold.

    Raises:
        TokenOutOfRange: naming one of them.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise TokenOutOfRange(
            f"token {wrong} with a vocabulary of {vocab_size}; give ids from 0 to {vocab_size - 1}"
        )


class Chain(Protocol):
    """Rows of one sequence that follow one another; they are staged together, at the end."""

    def __call__(self, token: int | Tensor) -> Float[Tensor, "1 V"]:
        """The logits behind one token more.

        Of a target that `takes_unread` it may be `[1]` int64, and where its logits are.
        """
        ...

    def stage(self, tokens: Sequence[int]) -> None:
        """Stage what was read, as one `score` of each token would have."""


class Target(ABC):
    """A language model with an opaque cache: `score` leaves no trace until `commit`."""

    vocab_size: int
    """Width of a row of logits."""
    max_length: int | None
    """Tokens a sequence may hold, None where the model has no limit of its own."""
    scores_trees: bool = True
    """Whether rows may name their ancestors."""
    prefix_block: int | None = None
    """Tokens in the blocks that sequences of a common beginning share; None: they share none."""

    @abstractmethod
    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new sequence that may grow to `reserve` tokens (a hint).

        It is empty, or holds already what is cached of the beginning of `prefix`: its `length` says
        how much. Only a target with a `prefix_block` is told a prefix.
        """

    def open_for(self, tokens: Sequence[int], reserve: int) -> int:
        """Open a sequence for a text: all its tokens but the last may be cached already."""
        return self.open(reserve) if self.prefix_block is None else self.open(reserve, tokens[:-1])

    @abstractmethod
    def length(self, seq: int) -> int:
        """Return the number of committed tokens: the text's tokens behind them are pending."""

    @abstractmethod
    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""

    @property
    def takes_unread(self) -> bool:
        """Whether chains go on from tokens on its device that the host has not read."""
        return False

    def expect(self, seqs: Sequence[int], counts: Sequence[int], tokens_R: Tensor) -> None:
        """A hint: the next rows are chains behind all that is staged, which will be kept.

        Their tokens are on its device, and the host has not read them. A target that `takes_unread`
        may score them while it does; what `score` and `num_staged` say is the same either way.
        """

    def foresee(
        self, seq: int, places: range, at_1: Int64[Tensor, " 1"], token_1: Int64[Tensor, " 1"]
    ) -> bool:
        """A hint: the sequence's next chain begins at the `at`-th of some places, with a token.

        Both are on its device, and the host has not read them. Of the staged rows those before that
        place will be kept. Whether the row is run at once.
        """
        return False

    @abstractmethod
    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return logits `[number wanted, V]` in the model's dtype or float32.

        Several calls stage one after another: a later row sees the earlier staged rows of its
        sequence (a chain) or those its ancestors name (a tree). When it raises, nothing of this
        call is staged.
        """

    def chain(self, seq: int, most: int) -> Chain | None:
        """Rows of one sequence one after another, up to `most`; None: `score` does as well."""
        return None

    def tapping(self, layers: tuple[int, ...]) -> AbstractContextManager[Taps]:
        """Note meanwhile the hidden states behind some numbers of layers; none cost nothing.

        Raises:
            UnsupportedModel: a target without hidden states to be had.
            InvalidConfig: layers that the model does not have.
        """
        if layers:
            raise UnsupportedModel(
                f"hidden states behind layers {layers} are asked for, and a {type(self).__name__} "
                "hands out none; use a drafter that needs none, such as drafter='ngram'"
            )
        return nullcontext(Taps(()))

    @abstractmethod
    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Make staged rows part of the sequence and forget the others.

        An int n keeps the first n staged rows; a list names the staged nodes to keep, in order of
        the text (ascending, as a node is staged after its parent).

        A target whose state cannot be cut at every row may keep fewer of them: `length` says how
        many, and what it does not keep is pending again, to be read once more.
        """

    @abstractmethod
    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""

    def read(self, seq: int, tokens: Sequence[int]) -> None:
        """Make `tokens` part of the sequence, its logits not being asked for: part of a prompt."""
        self.read_all({seq: tokens})

    def read_all(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """Make tokens part of each of some sequences, in one pass."""
        tokens = torch.tensor([token for piece in pieces.values() for token in piece])
        counts = tuple(map(len, pieces.values()))
        self.score(Rows(tuple(pieces), counts, tokens, None, torch.empty(0, dtype=torch.int64)))
        for seq, count in zip(pieces, counts, strict=True):
            self.commit(seq, count)

    @abstractmethod
    def close(self, seq: int) -> None:
        """Give back the sequence's memory; its handle means nothing afterwards."""
