"""Steps: what each sampling control does to the rows of a text, given the paths to them.

A step may keep count of its text; it reads what the text has gained since it was asked last, and
never the whole text again. Steps of several texts are applied together where they are alike: a few
calls for a batch instead of a few for each of its texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import LogitsProcessor, SamplingParams
from outrider.decoding import penalties
from outrider.engine.memory import out_of_memory
from outrider.errors import ModelError, OutriderError
from outrider.sequence import Sequence
from outrider.types import Guide

Paths = Sequenced[Sequenced[int]]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


class Step(ABC):
    """One control of one text."""

    alike: Hashable = None
    """Steps of a class are applied together where theirs are equal."""

    def acts(self, text: Sequence) -> bool:
        """Whether rows after this text, or after tokens drafted from there, may be changed."""
        return True

    def follow(self, text: Sequence) -> None:
        """Reads what the text has gained."""

    @classmethod
    @abstractmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Any]]) -> None:
        """Changes the rows of some texts, one text after another, in place."""


S_co = TypeVar("S_co", bound=Step, covariant=True)


@dataclass(frozen=True, slots=True)
class Stand(Generic[S_co]):
    """A step and where its rows stand: row r after the text and the drafted tokens `paths[r]`."""

    step: S_co
    text: Sequence
    paths: Paths


@lru_cache(maxsize=64)
def _ids(tokens: tuple[int, ...]) -> Tensor:
    """Tokens as a tensor, which texts that ask for the same share."""
    return torch.tensor(tokens)


@lru_cache(maxsize=64)
def _columns(pairs: tuple[tuple[int, float], ...]) -> tuple[Tensor, Tensor]:
    """Tokens and numbers as tensors, likewise."""
    tokens, values = zip(*pairs, strict=True)
    return torch.tensor(tokens), torch.tensor(values, dtype=torch.float64)


class Allowed(Step):
    """allowed_token_ids: nothing else may come."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.alike = ids
        self._ids_M = _ids(ids)

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """The same tokens at every row."""
        penalties.allow(rows_nV, stands[0].step._ids_M.to(rows_nV.device))


class BadWords(Step):
    """bad_words: a word's last token may not come where the tokens before it stand."""

    def __init__(self, words: Sequenced[Sequenced[int]]) -> None:
        self._words = words
        self._reach = max(map(len, words)) - 1

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """No more of a text is looked at than its longest word is long."""
        penalties.forbid(
            rows_nV, [ends for one in stands for ends in one.step._ends(one.text, one.paths)]
        )

    def _ends(self, text: Sequence, paths: Paths) -> Iterable[set[int]]:
        tail = text.tokens[max(0, len(text.tokens) - self._reach) :]
        return (penalties.last_of_words(self._words, [*tail, *path]) for path in paths)


class MinTokens(Step):
    """min_tokens: no end before the text has so many tokens."""

    def __init__(self, num: int, ends: Sequenced[int]) -> None:
        self._num = num
        self._ends = ends

    def acts(self, text: Sequence) -> bool:
        """Until the text itself is long enough."""
        return text.num_output < self._num

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """Drafted tokens count."""
        penalties.forbid(
            rows_nV,
            [
                one.step._ends if one.text.num_output + len(path) < one.step._num else ()
                for one in stands
                for path in one.paths
            ],
        )


class Guided(Step):
    """json_schema, regex, grammar, choice: only what the grammar lets come next may come."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def follow(self, text: Sequence) -> None:
        """The grammar goes on with the text."""
        self._guide.follow(text.tokens)

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """Each goes along each path, and is back where it was for the next."""
        bits_nM = np.concatenate([one.step._guide.allowed(one.paths) for one in stands])
        penalties.allow_bits(rows_nV, torch.from_numpy(bits_nM).to(rows_nV.device))


class Bias(Step):
    """logit_bias: numbers added to logits."""

    def __init__(self, pairs: tuple[tuple[int, float], ...]) -> None:
        self.alike = pairs
        self._ids_M, self._bias_M = _columns(pairs)

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """The same numbers at every row."""
        step, device = stands[0].step, rows_nV.device
        penalties.bias(rows_nV, step._ids_M.to(device), step._bias_M.to(device))


class Penalties(Step):
    """The repetition, presence and frequency penalties: distinct tokens and how often they came."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self._strengths = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.alike = self._strengths
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

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """Only the places of tokens seen are read and written."""
        tokens: list[IntArray] = []
        counts: list[FloatArray] = []
        num_known: list[int] = []
        new: list[tuple[int, int, int]] = []
        for one in stands:
            known, count_nM, unknown = one.step._seen(one.paths)
            new += [(len(num_known) + row, token, count) for row, token, count in unknown]
            tokens += [known] * len(count_nM)
            counts.append(count_nM.ravel())
            num_known += [len(known)] * len(count_nM)
        new_3E = np.array(new, np.int64).reshape(-1, 3).T
        row_E = np.concatenate([np.repeat(np.arange(len(num_known)), num_known), new_3E[0]])
        if not len(row_E):
            return
        device = rows_nV.device
        at_E = (
            torch.from_numpy(row_E).to(device),
            torch.from_numpy(np.concatenate([*tokens, new_3E[1]])).to(device),
        )
        count_E = torch.from_numpy(np.concatenate([*counts, new_3E[2].astype(np.float32)]))
        seen_1E = torch.ones(1, len(row_E), dtype=torch.bool, device=device)
        repetition, presence, frequency = stands[0].step._strengths
        rows_nV[at_E] = penalties.penalised(
            rows_nV[at_E][None],
            seen_1E,
            count_E[None].to(device),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )[0]

    def _seen(self, paths: Paths) -> tuple[IntArray, FloatArray, list[tuple[int, int, int]]]:
        """Tokens seen in the text, their counts before each row, and rows' own as triples."""
        known = len(self._columns)
        count_nM = np.repeat(self._counts[None, :known], len(paths), axis=0)
        unknown: Counter[tuple[int, int]] = Counter()
        for row, path in enumerate(paths):
            for token in path:
                column = self._columns.get(token)
                if column is None:
                    unknown[row, token] += 1
                else:
                    count_nM[row, column] += 1
        new = [(row, token, count) for (row, token), count in unknown.items()]
        return self._ids[:known], count_nM, new


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

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """A text's n-grams are looked up, those that end in a path are read."""
        penalties.forbid(
            rows_nV, [ends for one in stands for ends in one.step._ends(one.text, one.paths)]
        )

    def _ends(self, text: Sequence, paths: Paths) -> Iterable[set[int]]:
        tail = text.tokens[max(0, len(text.tokens) - self._size + 1) :]
        return (self._banned(tail, path) for path in paths)

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

    @classmethod
    def apply(cls, rows_nV: Tensor, stands: Sequenced[Stand[Self]]) -> None:
        """Each sees the text up to its row, and a row of its own to write to.

        Raises:
            ModelError: a function that failed, or gave something else than a row.
        """
        places = ((one.step, path) for one in stands for path in one.paths)
        for row_V, (step, path) in zip(rows_nV, places, strict=True):
            drafted = torch.tensor(path, dtype=torch.int64)
            ids_1n = torch.cat([step._tokens[: step._read], drafted])[None].to(row_V.device)
            scores_1V = row_V[None].clone()
            for processor in step._processors:
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


ORDER: tuple[type[Step], ...] = (
    Allowed,
    BadWords,
    MinTokens,
    Guided,
    Bias,
    Penalties,
    NoRepeat,
    Processors,
)
"""The order in which controls act, each on what those before it left."""


def steps_of(text: Sequence) -> tuple[Step, ...]:
    """The steps of a text's own controls, one of a class at most."""
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
