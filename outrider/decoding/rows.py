"""The target's rows of a round, handed out as they are needed: laws, or logits not yet read.

A flat row is `b * T + t`: row t (0 is the root) of tree b. Rows nobody asks for are not read, and
what is needed of many rows (one probability, the mass beyond a draft's law) is taken from a few of
them at a time, which never leave a processor's cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import host
from outrider.decoding import laws
from outrider.decoding.laws import Law, likeliest, softmax, softmax_of, weighed, weighed_row

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

# Numbers in the rows worked on at once: two megabytes of float32 stay in a processor's caches, and
# calls are few; an accelerator wants all rows at once, and its memory bounds how many.
_CACHED = 1 << 19
_RESIDENT = 1 << 26


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

    def weighed(self, at_n: Int64[Tensor, " n"]) -> tuple[Tensor, Tensor | None]:
        """The rows times numbers `[n, 1]`, and these; None where they are 1.

        Their quotient is `probs`, to the bit, which costs a pass more.
        """
        return self.probs(at_n), None

    def few(self, at_n: Int64[Tensor, " n"]) -> Law | None:
        """The laws of flat rows on the few tokens that have any chance; None where they are not."""
        return None

    def row(self, at: int) -> tuple[Tensor, float]:
        """One row `[V]` times a number, and the number; not to be written to."""
        rows_1V, sums_11 = self.weighed(torch.tensor([at], device=self.device))
        return rows_1V[0], 1.0 if sums_11 is None else float(sums_11)

    @abstractmethod
    def argmax(self, at_n: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The likeliest token of flat rows, the lowest id of several."""

    def likeliest(self) -> Int64[Tensor, "B T"]:
        """The likeliest token of every row."""
        num_texts, num_rows, _ = self.shape
        every_R = torch.arange(num_texts * num_rows, device=self.device)
        return self.argmax(every_R).view(num_texts, num_rows)

    @property
    def on_host(self) -> bool:
        """Whether the host reads tensors there at no cost, so that it can leave work out."""
        return host.reads_free(self.device)

    @property
    def fits_caches(self) -> bool:
        """Whether all rows fit into a processor's caches, so that reading them all costs little."""
        return math.prod(self.shape) <= _CACHED

    def excess_mass(
        self,
        at_n: Int64[Tensor, " n"],
        scale_n: Float[Tensor, " n"],
        law: Law,
        law_rows_n: Int64[Tensor, " n"],
    ) -> Float[Tensor, " n"]:
        """`sum max(0, scale * row - law)`, float64; no table of all the rows is made."""
        mass_n = scale_n.new_empty(len(at_n), dtype=torch.float64)
        for part in self.parts(len(at_n)):
            rows_mV = self.probs(at_n[part])
            mass_n[part] = law.excess_mass_at(law_rows_n[part], rows_mV, scale_n[part])
        return mass_n

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Slices of a list of rows, each of about as many rows as a cache holds."""
        size = _CACHED if self.device.type == "cpu" else _RESIDENT
        step = max(1, size // self.shape[2])
        for start in range(0, num_rows, step):
            yield slice(start, min(num_rows, start + step))


class _Table(TargetRows):
    """Rows of one tensor."""

    def __init__(self, rows_BTV: Float[Tensor, "B T V"]) -> None:
        self._shape = rows_BTV.shape
        self._rows_RV = rows_BTV.flatten(0, 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        num_texts, num_rows, width = self._shape
        return num_texts, num_rows, width

    @property
    def device(self) -> torch.device:
        """The table's."""
        return self._rows_RV.device


class TargetLaws(_Table):
    """Rows that are laws already; for `argmax` alone any scores of the same order will do.

    Args:
        laws_BTV: any floating dtype; float64 stays what it is, all else becomes float32.
    """

    def __init__(self, laws_BTV: Float[Tensor, "B T V"]) -> None:
        super().__init__(laws_BTV if laws_BTV.dtype == torch.float64 else laws_BTV.float())

    def probs(self, at_n: Tensor) -> Tensor:
        """The rows as they were given."""
        return self._rows_RV.index_select(0, at_n)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of each row."""
        return self._rows_RV[at_n, tokens_n].double()

    def row(self, at: int) -> tuple[Tensor, float]:
        """The row where it stands."""
        return self._rows_RV[at], 1.0

    def argmax(self, at_n: Tensor) -> Tensor:
        """The first largest entry of each row."""
        return likeliest(self._rows_RV[at_n])


class TargetBest(TargetRows):
    """Rows of which the likeliest tokens are known, which is all that most ask for.

    Args:
        best_BT: of every row.
        width: V.
        rows: makes the rows themselves, for those who ask for more.
    """

    def __init__(
        self, best_BT: Int64[Tensor, "B T"], width: int, rows: Callable[[], TargetRows]
    ) -> None:
        self._best_BT, self._width, self._make = best_BT, width, rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        num_texts, num_rows = self._best_BT.shape
        return num_texts, num_rows, self._width

    @property
    def device(self) -> torch.device:
        """That of the tokens."""
        return self._best_BT.device

    @property
    def fits_caches(self) -> bool:
        """Nobody reads the rows again."""
        return True

    @cached_property
    def _rows(self) -> TargetRows:
        return self._make()

    def probs(self, at_n: Tensor) -> Tensor:
        """As the rows have it."""
        return self._rows.probs(at_n)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """As the rows have it."""
        return self._rows.prob_of(at_n, tokens_n)

    def argmax(self, at_n: Tensor) -> Tensor:
        """The tokens that were given."""
        return self._best_BT.flatten()[at_n]

    def likeliest(self) -> Tensor:
        """All of them."""
        return self._best_BT


class TargetFew(TargetRows):
    """Rows that are laws on few tokens.

    Args:
        law: `B * T` sparse laws, as flat rows count.
        shape: B, T and V.
    """

    def __init__(self, law: Law, shape: tuple[int, int, int]) -> None:
        self._law, self._shape = law, shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        return self._shape

    @property
    def device(self) -> torch.device:
        """That of the laws."""
        return self._law.probs.device

    def probs(self, at_n: Tensor) -> Tensor:
        """The rows written out."""
        return self._law.select(at_n).table(self._shape[2])

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of each row."""
        return self._law.select(at_n).prob_of(tokens_n).double()

    def few(self, at_n: Tensor) -> Law | None:
        """The rows as they were given."""
        return self._law.select(at_n)

    def argmax(self, at_n: Tensor) -> Tensor:
        """The likeliest token of each row."""
        return self._law.select(at_n).argmax()


class TargetLogits(_Table):
    """Rows of logits under a temperature; each is normalised when something of it is asked for.

    Args:
        logits_BTV: any floating dtype; sums are taken in float32, of float64 logits in float64.
        temperature_B: positive, one per tree; None = 1.
    """

    def __init__(
        self,
        logits_BTV: Float[Tensor, "B T V"],
        temperature_B: Float[Tensor, " B"] | None = None,
    ) -> None:
        super().__init__(logits_BTV)
        self._temperature_B = temperature_B

    def probs(self, at_n: Tensor) -> Tensor:
        """Softmax of the rows."""
        spans = list(self.parts(len(at_n)))
        if len(spans) <= 1:
            return softmax(self._scaled(at_n))
        dtype = torch.float64 if self._rows_RV.dtype == torch.float64 else torch.float32
        probs_nV = self._rows_RV.new_empty(len(at_n), self.shape[2], dtype=dtype)
        for span in spans:
            probs_nV[span] = softmax(self._scaled(at_n[span]))
        return probs_nV

    def weighed(self, at_n: Tensor) -> tuple[Tensor, Tensor | None]:
        """On a processor the exponentials of the scores, not divided by their sums."""
        if not self.on_host or self._rows_RV.dtype == torch.float64:
            return self.probs(at_n), None
        return weighed(self._scaled(at_n))

    def row(self, at: int) -> tuple[Tensor, float]:
        """On a processor its exponentials, not divided by their sum."""
        if not self.on_host or self._rows_RV.dtype == torch.float64:
            return super().row(at)
        scores_V = self._rows_RV[at].float()
        if self._temperature_B is not None:
            scores_V = scores_V / self._temperature_B[at // self.shape[1]].float()
        return weighed_row(scores_V)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of the softmax of each row; on a CPU the very number `probs` has there."""
        if self._fused():
            from outrider.decoding import triton_rows

            return triton_rows.prob_of(self._rows_RV, at_n, tokens_n, self._heat(at_n))
        found_n = tokens_n.new_empty(len(at_n), dtype=torch.float64)
        for span in self.parts(len(at_n)):
            found_n[span] = softmax_of(self._scaled(at_n[span]), tokens_n[span])
        return found_n

    def argmax(self, at_n: Tensor) -> Tensor:
        """The first largest logit of each row."""
        return likeliest(self._select(at_n))

    def excess_mass(self, at_n: Tensor, scale_n: Tensor, law: Law, law_rows_n: Tensor) -> Tensor:
        """On a GPU in two passes over the rows where they are."""
        probs = law.probs
        dense = law.ids is None and probs.dtype == torch.float32 and probs.is_contiguous()
        if not (dense and self._fused()):
            return super().excess_mass(at_n, scale_n, law, law_rows_n)
        from outrider.decoding import triton_rows

        heat_n = self._heat(at_n)
        return triton_rows.excess_mass(self._rows_RV, at_n, heat_n, scale_n, probs, law_rows_n)

    def _fused(self) -> bool:
        return (
            laws.fused(self.device)
            and self._rows_RV.dtype != torch.float64
            and self._rows_RV.is_contiguous()
        )

    def _heat(self, at_n: Tensor) -> Tensor | None:
        return None if self._temperature_B is None else self._temperature_B[at_n // self.shape[1]]

    def _scaled(self, at_n: Tensor) -> Tensor:
        rows_nV = self._select(at_n)
        rows_nV = rows_nV if rows_nV.dtype == torch.float64 else rows_nV.float()
        heat_n = self._heat(at_n)
        return rows_nV if heat_n is None else rows_nV / heat_n[:, None].to(rows_nV.dtype)

    def _select(self, at_n: Tensor) -> Tensor:
        if not self.on_host or len(at_n) == 0:
            return self._rows_RV.index_select(0, at_n)
        # Rows at equal distances are looked at where they are: a copy costs half an exp.
        places = at_n.tolist()
        first, last = places[0], places[-1]
        step = max(1, (last - first) // max(1, len(places) - 1))
        if places == list(range(first, last + 1, step)):
            return self._rows_RV[first : last + 1 : step]
        return self._rows_RV.index_select(0, at_n)
