"""Tabular models: laws small enough to write down, which exact tests enumerate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.errors import InvalidConfig, TokenOutOfRange
from outrider.models.protocol import DraftProposal, Rng, TargetScores

Table = NDArray[np.float64]


def _law(name: str, weights: ArrayLike) -> Table:
    table = np.asarray(weights, dtype=np.float64)
    if table.ndim == 0 or table.size == 0:
        raise InvalidConfig(f"{name} is empty: one weight per token is due")
    mass = table.sum(-1, keepdims=True)
    if not np.isfinite(table).all() or (table < 0).any() or (mass <= 0).any():
        raise InvalidConfig(
            f"{name}={np.array2string(table, threshold=8)}: every law needs finite weights, "
            "none negative, not all zero"
        )
    return table / mass


def _draw(probs: Table, rng: Rng) -> int:
    """Inverse cdf; the last token with mass where rounding leaves the uniform above the sum."""
    point = rng.uniform()
    above = np.flatnonzero(np.cumsum(probs) > point)
    return int(above[0]) if len(above) else int(np.flatnonzero(probs)[-1])


class MarkovModel:
    """A Markov law of any order, as draft and as target.

    Args:
        init: `[V]` weights of the token after a prefix shorter than the order.
        rows: `[V, ..., V]` weights of the next token given the last `rows.ndim - 1` tokens, oldest
            first; rows are normalised.

    Raises:
        InvalidConfig: weights that are negative, not finite or without mass; unequal sides.
    """

    def __init__(self, init: ArrayLike, rows: ArrayLike) -> None:
        self.init = _law("init", init)
        self.rows = _law("rows", rows)
        self.vocab_size = len(self.init)
        self.order = self.rows.ndim - 1
        if self.init.ndim != 1 or self.rows.shape != (self.vocab_size,) * self.rows.ndim:
            raise InvalidConfig(
                f"rows has shape {self.rows.shape} and init {self.init.shape}: every side of rows "
                "must be the vocabulary"
            )

    def law(self, prefix: Sequence[int]) -> Table:
        """The law `[V]` of the token after `prefix`."""
        for token in prefix[len(prefix) - self.order :]:
            if not 0 <= token < self.vocab_size:
                raise TokenOutOfRange(f"token {token} is outside 0..{self.vocab_size - 1}")
        if len(prefix) < self.order:
            return self.init
        return self.rows[tuple(prefix[len(prefix) - self.order :])]

    def propose(self, prefix: Sequence[int], k: int, rng: Rng) -> DraftProposal:
        """Draws k tokens one after another and reports the laws they came from."""
        text, laws = list(prefix), list[Table]()
        for _ in range(k):
            laws.append(self.law(text))
            text.append(_draw(laws[-1], rng))
        tokens = text[len(prefix) :]
        with np.errstate(divide="ignore"):
            rows = [np.log(law) for law in laws]
        logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        return DraftProposal(tokens, logprobs, rows)

    def verify(self, prefix: Sequence[int], draft_tokens: Sequence[int]) -> TargetScores:
        """The laws along the drafted tokens, one more than tokens."""
        text = [*prefix, *draft_tokens]
        with np.errstate(divide="ignore"):
            return TargetScores(
                [np.log(self.law(text[:end])) for end in range(len(prefix), len(text) + 1)]
            )


class _FixedDist(MarkovModel):
    """The same law whatever the prefix: a Markov law of order 0."""

    def __init__(self, probs: ArrayLike) -> None:
        super().__init__(probs, probs)

    def probs(self) -> list[float]:
        """The normalised law."""
        return self.rows.tolist()

    def logprobs(self) -> list[float]:
        """Its natural logarithms; -inf where a token has no mass."""
        with np.errstate(divide="ignore"):
            return np.log(self.rows).tolist()


class FixedDistDraftModel(_FixedDist):
    """A draft model whose every token has the law `probs` (normalised when built)."""


class FixedDistTargetModel(_FixedDist):
    """A target whose every token has the law `probs` (normalised when built)."""
