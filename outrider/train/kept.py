"""What a target makes of rows that come again, kept instead of made anew."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.train.recipe import LearnedRecipe


class Kept:
    """What a target made of rows that come again, in the host's memory, as far as there is room.

    Such a row is read by itself and its law rounded to float16, whether there is room for it or
    not: a run that is resumed, and has nothing left, goes on with the same numbers.
    """

    def __init__(self, recipe: LearnedRecipe) -> None:
        self._room = 1e9 * recipe.kept_gb
        self._rows = recipe.written_rows if recipe.keeps else 0
        self._expected: set[bytes] = set()
        self._readings: dict[bytes, tuple[Tensor, Tensor]] = {}

    def size(self, row_bytes: int) -> int:
        """Bytes of what will be kept in the end, where a row takes so many."""
        return row_bytes * int(min(self._rows, self._room / row_bytes))

    def expect(self, rows_RT: Tensor) -> None:
        """These rows come again, and no others; what is kept of others is dropped."""
        self._readings.clear()
        self._expected = {_key(row_T) for row_T in rows_RT} if self._rows else set()

    def expects(self, row_T: Tensor) -> bool:
        """Whether a row is one of those."""
        return bool(self._expected) and _key(row_T) in self._expected

    def reading(
        self, row_1T: Tensor, read: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The features of a row that comes again, and its log law in float16; `read` makes both."""
        key = _key(row_1T)
        if (known := self._readings.get(key)) is not None:
            return known
        features, log_p = read(row_1T)
        log_p = log_p.clamp(min=torch.finfo(torch.float16).min)
        made = features.cpu(), log_p.half().cpu()
        if (len(self._readings) + 1) * row_bytes(*made) <= self._room:
            self._readings[key] = made
        return made


def row_bytes(features: Tensor, log_p: Tensor) -> int:
    """What one of some rows takes, its law in float16."""
    return features[0].nbytes + 2 * log_p[0].numel()


def _key(row: Tensor) -> bytes:
    return row.flatten().int().numpy().tobytes()
