"""The contract between engine and model: flat rows in, logits out, then commit or discard.

`score` stages rows and returns logits; `commit` alone moves a length; whatever was staged and not
committed is forgotten, so an exception between the two leaves nothing to undo. Targets and draft
models are one class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.errors import TokenOutOfRange

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

    @abstractmethod
    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return logits `[number wanted, V]` in the model's dtype or float32.

        Several calls stage one after another: a later row sees the earlier staged rows of its
        sequence (a chain) or those its ancestors name (a tree). When it raises, nothing of this
        call is staged.
        """

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
