"""The records of one round: what was drafted, the noise it may use, what was decided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.laws import Law
from outrider.tree import TokenTree

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64


class Kind(IntEnum):
    """How a node was drawn from its base law q.

    POINT: it is certain; its law is the one-hot of its token, whatever q.
    IID: from q, whatever its siblings.
    WITHOUT: from q without the tokens of its earlier siblings.
    TAIL: from q without the tokens of its POINT siblings, wherever those stand.
    """

    POINT = 0
    IID = 1
    WITHOUT = 2
    TAIL = 3


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """Where B sequences find their noise in one round.

    Attributes:
        seed_B: int64, the bits of 64-bit seeds.
        sample_B: int64, which of a prompt's samples.
        anchor_B: int64, tokens committed when the round began.
    """

    seed_B: Int64[Tensor, " B"]
    sample_B: Int64[Tensor, " B"]
    anchor_B: Int64[Tensor, " B"]

    def select(self, rows: Tensor) -> RoundNoise:
        """The noise of some of the sequences."""
        return RoundNoise(self.seed_B[rows], self.sample_B[rows], self.anchor_B[rows])


_POINTS, _DRAWN = frozenset({Kind.POINT}), frozenset({Kind.IID})


@dataclass(frozen=True, slots=True)
class Draft:
    """B drafted trees and the laws their nodes were drawn from.

    Attributes:
        tree: the tokens and who follows whom.
        law: base laws; None where every node is certain.
        law_rows_BN: int64, the row of `law` that node j was drawn from, shared by siblings unless
            different drafters drew them; None stands for row `b * N + j`, a chain's own.
        kinds_BN: int64, the Kind of each node; None where all are of the one in `kinds`.
        kinds: the kinds that occur, known without reading a tensor.
        part_BN: int64, which part of a combination of drafters drafted node j; None where one
            drafted all. No rule looks at it.
        worth_BN: float64, what each node was judged by; None where none was. No rule looks at it.
        part: which part drafted all, where one did.
    """

    tree: TokenTree
    law: Law | None
    law_rows_BN: Int64[Tensor, "B N"] | None = None
    kinds_BN: Int64[Tensor, "B N"] | None = None
    kinds: frozenset[Kind] = _POINTS
    part_BN: Int64[Tensor, "B N"] | None = None
    worth_BN: Float64[Tensor, "B N"] | None = None
    part: int = 0

    @classmethod
    def chain(
        cls, tokens_BK: Int64[Tensor, "B K"], lengths_B: Int64[Tensor, " B"], law: Law | None
    ) -> Draft:
        """Chains; row `b * K + i` of `law` is that of token i of chain b, None = certain tokens."""
        kinds = _POINTS if law is None else _DRAWN
        return cls(TokenTree.chain(tokens_BK, lengths_B), law, kinds=kinds)

    def to(self, device: torch.device) -> Draft:
        """The same draft on a device."""
        rows, kinds, part, worth = (
            None if table is None else host.send(table, device)
            for table in (self.law_rows_BN, self.kinds_BN, self.part_BN, self.worth_BN)
        )
        return replace(
            self,
            tree=self.tree.to(device),
            law=None if self.law is None else self.law.to(device),
            law_rows_BN=rows,
            kinds_BN=kinds,
            part_BN=part,
            worth_BN=worth,
        )

    def law_rows(self) -> Int64[Tensor, "B N"]:
        """Rows of `law`, written out."""
        if self.law_rows_BN is not None:
            return self.law_rows_BN
        tokens_BN = self.tree.tokens_BN
        return torch.arange(tokens_BN.numel(), device=tokens_BN.device).view_as(tokens_BN)

    def parts(self) -> Int64[Tensor, "B N"]:
        """Which part drafted each node, written out."""
        if self.part_BN is not None:
            return self.part_BN
        return torch.full_like(self.tree.tokens_BN, self.part)

    def node_kinds(self) -> Int64[Tensor, "B N"]:
        """The Kind of each node, written out."""
        if self.kinds_BN is not None:
            return self.kinds_BN
        (kind,) = self.kinds
        return torch.full_like(self.tree.tokens_BN, int(kind))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided.

    Attributes:
        num_accepted_B: int64, drafted tokens kept.
        token_B: int64, the one token the target adds after them.
        path_BD: int64, rows of the kept nodes from the root down, 0 behind them; D is the trees'
            depth. Of a chain it is 1, 2, ... as far as it was kept.
    """

    num_accepted_B: Int64[Tensor, " B"]
    token_B: Int64[Tensor, " B"]
    path_BD: Int64[Tensor, "B D"]

    @classmethod
    def of_chain(
        cls, num_accepted_B: Int64[Tensor, " B"], token_B: Int64[Tensor, " B"], depth: int
    ) -> Verdict:
        """The verdict on chains of up to `depth` tokens."""
        rows_D = torch.arange(1, depth + 1, device=num_accepted_B.device)
        path_BD = torch.where(rows_D <= num_accepted_B[:, None], rows_D, 0)
        return cls(num_accepted_B, token_B, path_BD)
