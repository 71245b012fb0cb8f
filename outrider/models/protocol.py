"""Bring your own model: the protocols of one method each, and the target they become.

A DraftModel and a TargetModel are plain objects over whole prefixes, with no cache to manage: the
smallest thing that can be decoded speculatively, and what exact tests use.
"""

from __future__ import annotations

import math
import reprlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from outrider.errors import (
    DegenerateDistribution,
    DistributionWidthMismatch,
    InvalidConfig,
    ModelError,
    OutriderError,
    TargetShapeMismatch,
)
from outrider.models.base import Rows, Target

MASS_TOLERANCE = 0.05
"""How far a target row's mass may be from one: log-probabilities in bfloat16 are off by 0.03."""

LogProbs = Any  # a sequence, array or tensor of natural log-probabilities, one per token


class Rng(Protocol):
    """Where a model that draws for itself gets its chance from."""

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """What a DraftModel proposes: up to k tokens and the laws they were drawn from.

    Attributes:
        tokens: drafted token ids.
        token_logprobs: log q of each token under its own law.
        distributions: one row of `vocab_size` log-probabilities per token: the law the token was
            really drawn from; None = every token was certain (a point mass).
    """

    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    distributions: Sequence[LogProbs] | None = None


@dataclass(frozen=True, slots=True)
class TargetScores:
    """One row of log-probabilities per drafted token, and one more for the token after them."""

    distributions: Sequence[LogProbs]


@runtime_checkable
class DraftModel(Protocol):
    """A drafter in one method. Its rows are trusted: they must be the laws its tokens came from."""

    vocab_size: int

    def propose(self, prefix: Sequence[int], k: int, rng: Rng) -> DraftProposal:
        """At most `k` tokens after `prefix`, drawn with `rng` alone."""
        ...


@runtime_checkable
class TargetModel(Protocol):
    """A target in one method."""

    vocab_size: int

    def verify(self, prefix: Sequence[int], draft_tokens: Sequence[int]) -> TargetScores:
        """The laws after `prefix`, after `prefix` and one drafted token, and so on to the last."""
        ...


def as_row(row: LogProbs, vocab_size: int) -> Tensor:
    """A row of log-probabilities as float64 `[V]`.

    Raises:
        DistributionWidthMismatch: a row that is not `vocab_size` wide.
        ModelError: a row that holds no numbers.
    """
    try:
        tensor = (
            row.detach().to("cpu", torch.float64)
            if isinstance(row, Tensor)
            else torch.from_numpy(np.asarray(row, dtype=np.float64))
        )
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"a law came as {reprlib.repr(row)}; a row of log-probabilities holds one number per "
            "token"
        ) from error
    if tensor.shape != (vocab_size,):
        raise DistributionWidthMismatch(
            f"a law of shape {tuple(tensor.shape)} came from a model of vocab_size={vocab_size}; "
            "every row needs one log-probability per token"
        )
    return tensor


@dataclass(slots=True)
class _Text:
    committed: list[int] = field(default_factory=list[int])
    staged: list[int] = field(default_factory=list[int])


class ProtocolTarget(Target):
    """A TargetModel behind `score / commit / discard`: one `verify` per sequence, or per path.

    Logits are the model's own log-probabilities in float64.
    """

    def __init__(self, model: TargetModel) -> None:
        if not isinstance(getattr(model, "vocab_size", None), int) or model.vocab_size < 1:
            raise InvalidConfig(
                f"vocab_size={getattr(model, 'vocab_size', None)!r} of {type(model).__name__}: "
                "a target needs the number of its tokens"
            )
        self.model = model
        self.vocab_size = model.vocab_size
        self.max_length = None
        self._texts: dict[int, _Text] = {}
        self._next = 0

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return a new handle; nothing is shared."""
        self._next += 1
        self._texts[self._next] = _Text()
        return self._next

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return len(self._texts[seq].committed)

    def num_staged(self, seq: int) -> int:
        """Return the number of staged rows."""
        return len(self._texts[seq].staged)

    def score(self, rows: Rows) -> Tensor:
        """Stage the rows; the model reads those before the first wanted one as prefix."""
        if rows.ancestors_R is not None:
            return self._score_trees(rows, rows.ancestors_R.tolist())
        tokens = rows.tokens_R.tolist()
        wanted = range(len(tokens)) if rows.logits_rows is None else rows.logits_rows.tolist()
        out: list[Tensor] = []
        start = 0
        staged: list[tuple[_Text, list[int]]] = []
        for seq, count in zip(rows.seqs, rows.counts, strict=True):
            text, new = self._texts[seq], tokens[start : start + count]
            place = bisect_left(wanted, start)
            if place < len(wanted) and wanted[place] < start + count:
                first = wanted[place] - start
                prefix = text.committed + text.staged + new[: first + 1]
                out += self._verify(prefix, new[first + 1 :])
            staged.append((text, new))
            start += count
        for text, new in staged:
            text.staged += new
        return torch.stack(out) if out else torch.empty(0, self.vocab_size, dtype=torch.float64)

    def _score_trees(self, rows: Rows, ancestors: list[int]) -> Tensor:
        """One `verify` per leaf: the rows on the way to it that no leaf before it has had."""
        tokens = rows.tokens_R.tolist()
        laws: dict[int, Tensor] = {}
        grown: list[tuple[_Text, list[int]]] = []
        start = 0
        for seq, count in zip(rows.seqs, rows.counts, strict=True):
            text, before = self._texts[seq], len(self._texts[seq].staged)
            staged = text.staged + tokens[start : start + count]
            masks = ancestors[start : start + count]
            inner = {i for j, mask in enumerate(masks) for i in _bits(mask) if i != before + j}
            for j, mask in enumerate(masks):
                if before + j in inner:
                    continue
                path = _bits(mask)
                own = [staged[i] for i in path]
                old = sum(i < before for i in path) + 1
                found = self._verify(text.committed + own[:old], own[old:])
                for i, law in zip(path[old - 1 :], found, strict=True):
                    laws.setdefault(start + i - before, law)
            grown.append((text, staged))
            start += count
        for text, staged in grown:
            text.staged = staged
        wanted = range(len(tokens)) if rows.logits_rows is None else rows.logits_rows.tolist()
        return torch.stack([laws[row] for row in wanted])

    def _verify(self, prefix: list[int], draft: list[int]) -> list[Tensor]:
        try:
            scores = list(self.model.verify(prefix, draft).distributions)
        except OutriderError:
            raise
        except Exception as error:
            raise ModelError(
                f"{type(self.model).__name__}.verify failed on a prefix of {len(prefix)} tokens "
                f"and {len(draft)} drafted ones: {error!r}"
            ) from error
        if len(scores) != len(draft) + 1:
            raise TargetShapeMismatch(
                f"{type(self.model).__name__}.verify returned {len(scores)} rows for "
                f"{len(draft)} drafted tokens; one row more than tokens is due"
            )
        rows = [as_row(row, self.vocab_size) for row in scores]
        for i, mass in enumerate(torch.stack(rows).exp().sum(-1).tolist()):
            # A row with NaN or +inf, or without mass, is refused by the engine, for its text alone.
            if math.isfinite(mass) and mass > 0 and abs(mass - 1) > MASS_TOLERANCE:
                raise DegenerateDistribution(
                    f"{type(self.model).__name__}.verify returned a law of mass {mass:.6g} in row "
                    f"{i}; a row holds natural log-probabilities, whose exponentials sum to one: "
                    "give log_softmax of logits, the logarithm of probabilities"
                )
        return rows

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged tokens, or those it names."""
        text = self._texts[seq]
        kept = range(path) if isinstance(path, int) else path
        text.committed += [text.staged[i] for i in kept]
        text.staged = []

    def discard(self, seq: int) -> None:
        """Forget the staged tokens."""
        self._texts[seq].staged = []

    def close(self, seq: int) -> None:
        """Forget the sequence."""
        del self._texts[seq]


def _bits(mask: int) -> list[int]:
    """The bits set in a bitmask, ascending."""
    found: list[int] = []
    mask %= 1 << 64
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found
