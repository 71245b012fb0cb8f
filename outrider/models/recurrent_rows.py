"""Flat rows taken apart: what one forward of one sequence is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.models.base import MAX_TREE_NODES, Rows
from outrider.models.plan import chain_ancestors, check_rows

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one sequence; `wanted` are those of them whose logits are wanted, ascending."""

    seq: int
    tokens_r: Int64[Tensor, " r"]
    ancestors_r: Int64[Tensor, " r"] | None
    wanted: list[int]

    def continues(self, num_staged: int) -> bool:
        """Return whether each row follows the one before it, behind `num_staged` staged ones."""
        if self.ancestors_r is None:
            return True
        total = num_staged + len(self.ancestors_r)
        if total > MAX_TREE_NODES:
            return False
        return torch.equal(self.ancestors_r.cpu(), chain_ancestors(total)[num_staged:])


def pieces_of(rows: Rows, device: torch.device) -> list[Piece]:
    """The rows, sequence by sequence.

    Raises:
        InvalidConfig: rows that contradict each other.
    """
    check_rows(rows)
    tokens = rows.tokens_R.to(device)
    total = len(tokens)
    wanted = list(range(total)) if rows.logits_rows is None else rows.logits_rows.tolist()
    pieces: list[Piece] = []
    first = 0
    for seq, count in zip(rows.seqs, rows.counts, strict=True):
        last = first + count
        own = None if rows.ancestors_R is None else rows.ancestors_R[first:last]
        here = [row - first for row in wanted if first <= row < last]
        pieces.append(Piece(seq, tokens[first:last], own, here))
        first = last
    return pieces
