"""Steps: what each sampling control does to the rows of one text, given the paths to them.

A step may keep count of its text; it reads what the text has gained since it was asked last, and
never the whole text again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequenced

import numpy as np
import torch
from torch import Tensor

from outrider.config import LogitsProcessor, SamplingParams
from outrider.decoding import penalties
from outrider.engine.memory import out_of_memory
from outrider.errors import ModelError, OutriderError
from outrider.sequence import Sequence
from outrider.types import Guide

Paths = Sequenced[Sequenced[int]]


class Step(ABC):
    """One control of one text."""

    def acts(self, text: Sequence) -> bool:
        """Whether rows after this text, or after tokens drafted from there, may be changed."""
        return True

    def follow(self, text: Sequence) -> None:
        """Reads what the text has gained."""

    @abstractmethod
    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """Changes rows in place; row r stands after the text and the drafted tokens `paths[r]`."""


class Allowed(Step):
    """allowed_token_ids: nothing else may come."""

    def __init__(self, ids: Sequenced[int]) -> None:
        self._ids_M = torch.tensor(ids)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """The same tokens at every row."""
        penalties.allow(rows_nV, self._ids_M.to(rows_nV.device))


class BadWords(Step):
    """bad_words: a word's last token may not come where the tokens before it stand."""

    def __init__(self, words: Sequenced[Sequenced[int]]) -> None:
        self._words = words
        self._reach = max(map(len, words)) - 1

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """No more of the text is looked at than the longest word is long."""
        tail = text.tokens[max(0, len(text.tokens) - self._reach) :]
        banned = [penalties.last_of_words(self._words, [*tail, *path]) for path in paths]
        penalties.forbid(rows_nV, banned)


class MinTokens(Step):
    """min_tokens: no end before the text has so many tokens."""

    def __init__(self, num: int, ends: Sequenced[int]) -> None:
        self._num = num
        self._ends = ends

    def acts(self, text: Sequence) -> bool:
        """Until the text itself is long enough."""
        return text.num_output < self._num

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """Drafted tokens count."""
        short = [text.num_output + len(path) < self._num for path in paths]
        penalties.forbid(rows_nV, [self._ends if early else () for early in short])


class Guided(Step):
    """json_schema, regex, grammar, choice: only what the grammar lets come next may come."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def follow(self, text: Sequence) -> None:
        """The grammar goes on with the text."""
        self._guide.follow(text.tokens)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """It goes along each path, and is back where it was for the next."""
        bits_nM = torch.from_numpy(self._guide.allowed(paths)).to(rows_nV.device)
        penalties.allow_bits(rows_nV, bits_nM)


class Bias(Step):
    """logit_bias: numbers added to logits."""

    def __init__(self, pairs: Sequenced[tuple[int, float]]) -> None:
        self._ids_M = torch.tensor([token for token, _ in pairs])
        self._bias_M = torch.tensor([value for _, value in pairs], dtype=torch.float64)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """The same numbers at every row."""
        device = rows_nV.device
        penalties.bias(rows_nV, self._ids_M.to(device), self._bias_M.to(device))


class Penalties(Step):
    """The repetition, presence and frequency penalties: distinct tokens and how often they came."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._num_prompt = num_prompt
        # The prompt matters to repetition alone.
        self._read = 0 if params.repetition_penalty != 1 else num_prompt
        self._columns: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def follow(self, text: Sequence) -> None:
        """Counts new tokens."""
        for position in range(self._read, len(text.tokens)):
            token = text.tokens[position]
            column = self._columns.setdefault(token, len(self._columns))
            if column == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[column] = token
            self._counts[column] += position >= self._num_prompt
        self._read = len(text.tokens)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """Only the columns of tokens seen are read and written."""
        known = len(self._columns)
        drafted = sorted({t for path in paths for t in path if t not in self._columns})
        ids = np.concatenate([self._ids[:known], np.array(drafted, np.int64)])
        if not len(ids):
            return
        counts_nM = np.zeros((len(paths), len(ids)), np.float32)
        counts_nM[:, :known] = self._counts[:known]
        seen_nM = np.zeros(counts_nM.shape, np.bool_)
        seen_nM[:, :known] = True
        own = {token: known + i for i, token in enumerate(drafted)}
        for row, path in enumerate(paths):
            for token in path:
                column = own[token] if token in own else self._columns[token]
                counts_nM[row, column] += 1
                seen_nM[row, column] = True
        ids_M = torch.from_numpy(ids).to(rows_nV.device)
        rows_nV[:, ids_M] = penalties.penalised(
            rows_nV[:, ids_M],
            torch.from_numpy(seen_nM).to(rows_nV.device),
            torch.from_numpy(counts_nM).to(rows_nV.device),
            repetition=self._repetition,
            presence=self._presence,
            frequency=self._frequency,
        )


class NoRepeat(Step):
    """no_repeat_ngram: no n-gram comes twice."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._read = 0
        self._after: dict[tuple[int, ...], set[int]] = {}

    def follow(self, text: Sequence) -> None:
        """Notes what each run of n - 1 tokens was followed by."""
        num = self._size - 1
        for end in range(max(num, self._read), len(text.tokens)):
            before = tuple(text.tokens[end - num : end])
            self._after.setdefault(before, set()).add(text.tokens[end])
        self._read = len(text.tokens)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """The text's n-grams are looked up, those that end in the path are read."""
        tail = text.tokens[max(0, len(text.tokens) - self._size + 1) :]
        penalties.forbid(rows_nV, [self._banned(tail, path) for path in paths])

    def _banned(self, tail: list[int], path: Sequenced[int]) -> set[int]:
        before = [*tail, *path]
        last = tuple(before[max(0, len(before) - self._size + 1) :])
        return self._after.get(last, set()) | penalties.repeating(before, self._size, len(tail))


class Processors(Step):
    """logits_processors: the user's functions, one row at a time."""

    def __init__(self, processors: Sequenced[LogitsProcessor]) -> None:
        self._processors = processors
        self._read = 0
        self._tokens = torch.empty(64, dtype=torch.int64)

    def follow(self, text: Sequence) -> None:
        """Copies new tokens; room for them doubles."""
        if len(text.tokens) > len(self._tokens):
            roomy = torch.empty(2 * len(text.tokens), dtype=torch.int64)
            roomy[: self._read] = self._tokens[: self._read]
            self._tokens = roomy
        self._tokens[self._read : len(text.tokens)] = torch.tensor(
            text.tokens[self._read :], dtype=torch.int64
        )
        self._read = len(text.tokens)

    def apply(self, rows_nV: Tensor, text: Sequence, paths: Paths) -> None:
        """Each sees the text up to its row, and a row of its own to write to.

        Raises:
            ModelError: a function that failed, or gave something else than a row.
        """
        for row_V, path in zip(rows_nV, paths, strict=True):
            drafted = torch.tensor(path, dtype=torch.int64)
            ids_1n = torch.cat([self._tokens[: self._read], drafted])[None].to(row_V.device)
            scores_1V = row_V[None].clone()
            for processor in self._processors:
                scores_1V = _called(processor, ids_1n, scores_1V)
            row_V.copy_(scores_1V[0])


def _called(processor: LogitsProcessor, ids_1n: Tensor, scores_1V: Tensor) -> Tensor:
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        made = processor(ids_1n, scores_1V)
    except Exception as error:
        if isinstance(error, OutriderError) or out_of_memory(error):
            raise
        raise ModelError(f"logits processor {name} failed: {error!r}") from error
    if not isinstance(made, Tensor) or made.shape != scores_1V.shape:
        what = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ModelError(
            f"logits processor {name} returned {what}; scores of shape "
            f"{tuple(scores_1V.shape)} are due"
        )
    return made


def steps_of(text: Sequence) -> tuple[Step, ...]:
    """The steps of a text's own controls, in the order in which they act."""
    params = text.request.sampling
    steps: list[Step] = []
    if params.allowed_token_ids is not None:
        steps.append(Allowed(params.allowed_token_ids))
    if params.bad_words:
        steps.append(BadWords([word for word in params.bad_words if not isinstance(word, str)]))
    ends = text.end_tokens | set(params.stop_token_ids)
    if params.min_tokens and ends:
        steps.append(MinTokens(params.min_tokens, sorted(ends)))
    if text.guide is not None:
        steps.append(Guided(text.guide))
    if params.logit_bias:
        steps.append(Bias(params.bias_pairs))
    penalised = params.presence_penalty or params.frequency_penalty
    if params.repetition_penalty != 1 or penalised:
        steps.append(Penalties(params, text.num_prompt))
    if params.no_repeat_ngram:
        steps.append(NoRepeat(params.no_repeat_ngram))
    if params.logits_processors:
        steps.append(Processors(params.logits_processors))
    return tuple(steps)
