"""The target's rows of a round, handed out as they are needed: laws, or logits not yet read.

A flat row is `b * T + t`: row t (0 is the root) of tree b. A rule that asks for few rows makes few
of them be normalised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


class TargetRows(ABC):
    """T rows of each of B trees over V tokens."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the rows are, and where decisions are made."""

    @abstractmethod
    def probs(self, at_n: Int64[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """The laws of flat rows, float32 or float64; not to be written to."""

    @abstractmethod
    def prob_of(
        self, at_n: Int64[Tensor, " n"], tokens_n: Int64[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """The float64 probability of one token in each of some flat rows."""

    @abstractmethod
    def argmax(self, at_n: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The likeliest token of flat rows, the lowest id of several."""


class TargetLaws(TargetRows):
    """Rows that are laws already; for `argmax` alone any scores of the same order will do."""

    def __init__(self, probs_BTV: Float[Tensor, "B T V"]) -> None:
        self._shape = probs_BTV.shape
        self._rows_RV = probs_BTV.flatten(0, 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        num_texts, num_rows, width = self._shape
        return num_texts, num_rows, width

    @property
    def device(self) -> torch.device:
        """The table's."""
        return self._rows_RV.device

    def probs(self, at_n: Tensor) -> Tensor:
        """The rows as they were given."""
        return self._rows_RV[at_n]

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of each row."""
        return self._rows_RV[at_n, tokens_n].double()

    def argmax(self, at_n: Tensor) -> Tensor:
        """The first largest entry of each row."""
        return self._rows_RV[at_n].argmax(-1)


class TargetLogits(TargetRows):
    """Rows of logits under a temperature; each is normalised when its first token is asked for.

    Args:
        logits_BTV: any floating dtype; sums are taken in float32, of float64 logits in float64.
        temperature_B: positive, one per tree; None = 1.
    """

    def __init__(
        self,
        logits_BTV: Float[Tensor, "B T V"],
        temperature_B: Float[Tensor, " B"] | None = None,
    ) -> None:
        self._shape = logits_BTV.shape
        self._rows_RV = logits_BTV.flatten(0, 1)
        self._temperature_B = temperature_B

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        num_texts, num_rows, width = self._shape
        return num_texts, num_rows, width

    @property
    def device(self) -> torch.device:
        """The table's."""
        return self._rows_RV.device

    def probs(self, at_n: Tensor) -> Tensor:
        """Softmax of the rows."""
        return torch.softmax(self._scaled(at_n), -1)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of the softmax of each row."""
        rows_nV = self._scaled(at_n)
        picked_n = rows_nV.gather(1, tokens_n[:, None]).squeeze(1)
        return (picked_n - rows_nV.logsumexp(-1)).double().exp()

    def argmax(self, at_n: Tensor) -> Tensor:
        """The first largest logit of each row."""
        return self._rows_RV[at_n].argmax(-1)

    def _scaled(self, at_n: Tensor) -> Tensor:
        rows_nV = self._rows_RV[at_n]
        rows_nV = rows_nV if rows_nV.dtype == torch.float64 else rows_nV.float()
        if self._temperature_B is None:
            return rows_nV
        return rows_nV / self._temperature_B[at_n // self._shape[1]][:, None].to(rows_nV.dtype)
