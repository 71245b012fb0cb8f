"""Bit equality: the logits behind every emitted token, with and without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.config import SamplingParams
from outrider.drafters import Drafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.base import Rows, Target
from outrider.tree import TreeBudget
from outrider.types import Request


class RecordingTarget(Target):
    """Another target's behaviour, with the logits of every committed row kept by text and position.

    Texts are numbered in the order they were opened.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.vocab_size, self.max_length = target.vocab_size, target.max_length
        self.prefix_block = target.prefix_block
        self.rows: list[dict[int, Tensor]] = []
        self._number: dict[int, int] = {}
        self._staged: dict[int, dict[int, Tensor]] = {}

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the other target's handle."""
        handle = self.target.open(reserve, prefix) if prefix else self.target.open(reserve)
        self._number[handle] = len(self.rows)
        self.rows.append({})
        return handle

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return self.target.length(seq)

    def num_staged(self, seq: int) -> int:
        """Return the number of staged rows."""
        return self.target.num_staged(seq)

    def score(self, rows: Rows) -> Tensor:
        """Score, and keep a copy of every wanted row until it is committed."""
        starts = [self.num_staged(seq) for seq in rows.seqs]
        logits = self.target.score(rows)
        wanted = range(sum(rows.counts)) if rows.logits_rows is None else rows.logits_rows.tolist()
        owners = [
            (seq, start + i)
            for seq, start, count in zip(rows.seqs, starts, rows.counts, strict=True)
            for i in range(count)
        ]
        for row, flat in zip(logits, wanted, strict=True):
            seq, number = owners[flat]
            self._staged.setdefault(seq, {})[number] = row.clone()
        return logits

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Commit in the other target, and the rows of what stays with it."""
        start, staged = self.length(seq), self._staged.pop(seq, {})
        self.target.commit(seq, path)
        for i, number in enumerate(range(path) if isinstance(path, int) else path):
            if number in staged:
                self.rows[self._number[seq]][start + i] = staged[number]

    def discard(self, seq: int) -> None:
        """Discard in the other target."""
        self._staged.pop(seq, None)
        self.target.discard(seq)

    def close(self, seq: int) -> None:
        """Close in the other target."""
        self._staged.pop(seq, None)
        self.target.close(seq)


@dataclass(frozen=True, slots=True)
class Run:
    """Texts made from some prompts, and the logits row each token was chosen from."""

    tokens: list[tuple[int, ...]]
    rows: list[list[Tensor]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        texts, rows: how many were compared.
        equal_texts: texts of equal tokens.
        equal_rows: rows equal bit for bit, over all rows up to each text's first difference.
    """

    texts: int
    rows: int
    equal_texts: int
    equal_rows: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs at all."""
        return self.texts == self.equal_texts and self.rows == self.equal_rows


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    depth: int,
    batch: int,
    trees: TreeBudget | None = None,
) -> Run:
    """Makes one text per prompt, `batch` at a time, and keeps the rows its tokens came from."""
    recorder = RecordingTarget(target)
    engine = Engine(recorder, drafter, Emitter(None), max_texts=batch, trees=trees)
    requests = Requests(engine, depth=depth, end_tokens=frozenset())
    done = requests.complete([Request(tuple(prompt), sampling) for prompt in prompts])
    tokens = [completion.token_ids for completion in done]
    rows = [
        [recorder.rows[i][len(prompt) - 1 + n] for n in range(len(tokens[i]))]
        for i, prompt in enumerate(prompts)
    ]
    return Run(tokens, rows)


def compare(ours: Run, theirs: Run) -> Comparison:
    """Counts what is equal; rows behind a text's first different token are not compared."""
    rows = equal_rows = 0
    for mine, other, a_rows, b_rows in zip(
        ours.tokens, theirs.tokens, ours.rows, theirs.rows, strict=True
    ):
        for a, b, x, y in zip(mine, other, a_rows, b_rows, strict=True):
            rows += 1
            equal_rows += torch.equal(x, y)
            if a != b:
                break
    return Comparison(
        texts=len(ours.tokens),
        rows=rows,
        equal_texts=sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)),
        equal_rows=equal_rows,
    )
