"""Growing trees to a budget of nodes, where the drafter thinks that they are worth most.

Children are drawn level by level from the rows that look best, then the best nodes of all stay
(EAGLE-2's expansion and re-ranking: Li et al., EMNLP 2024, arXiv 2406.16858). What a node is judged
by is the drawing's `worth`, multiplied along its path; that is a function of nothing that could
bias the rule the drawing is for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, Kind
from outrider.decoding.draw import Draws
from outrider.decoding.grow import Expand
from outrider.decoding.laws import Law, one_table
from outrider.tree import TokenTree, TreeBudget

if TYPE_CHECKING:
    from jaxtyping import Int64

_LEAST = 1e-200


def grow_best(
    draws: Draws, budget: TreeBudget, depths_B: Int64[Tensor, " B"], expand: Expand
) -> Draft:
    """Trees of at most `budget.nodes` nodes, text b's of at most `depths_B[b]` levels.

    Each level's `budget.width` best rows get `budget.width` children each. Candidates are numbered
    in the order in which they are drawn, and that number is the index of their noise.

    Args:
        draws: the round's draws, whose drawing is `ranked`.
        budget: children of a row, rows of a level that are expanded, and nodes in all.
        depths_B: levels of each text's tree.
        expand: the drafter; rows are those of all candidates so far.
    """
    assert draws.drawing.ranked, "only ranked children can be told which is best"
    found = _Candidates(len(depths_B), budget.width, draws.device)
    rows_B1 = torch.zeros_like(depths_B)[:, None]
    worth_B1 = torch.ones_like(rows_B1, dtype=torch.float64)
    for depth in range(int(depths_B.max()) if len(depths_B) else 0):
        law = expand(found.tree(depth), rows_B1)
        worth_B1 = worth_B1 * (depths_B > depth)[:, None]
        found.add(draws, law, rows_B1, worth_B1, depth)
        rows_B1, worth_B1 = found.best_rows()
    return found.best(budget.nodes, draws)


@dataclass(slots=True)
class _Candidates:
    """Every child drawn so far, `[B, C]`; one that is not there is worth nothing."""

    num_texts: int
    width: int
    device: torch.device
    tokens: list[Tensor] = field(default_factory=list[Tensor])
    parents: list[Tensor] = field(default_factory=list[Tensor])
    kinds: list[Tensor] = field(default_factory=list[Tensor])
    law_rows: list[Tensor] = field(default_factory=list[Tensor])
    worths: list[Tensor] = field(default_factory=list[Tensor])
    laws: list[Law] = field(default_factory=list[Law])
    count: int = 0

    def tree(self, depth: int) -> TokenTree:
        """The candidates as they hang together."""
        counts_B = torch.full((self.num_texts,), self.count, device=self.device)
        parts = (self.tokens, self.parents)
        tokens_BC, parents_BC = (_side_by_side(part, counts_B) for part in parts)
        return TokenTree(tokens_BC, parents_BC, counts_B, depth, self.width)

    def add(self, draws: Draws, law: Law, rows_BL: Tensor, worth_BL: Tensor, depth: int) -> None:
        """Draws the children of one level's rows, of a row worth nothing in vain."""
        num_rows, width = rows_BL.shape[1], self.width
        index_LK = torch.arange(num_rows * width, device=self.device).view(num_rows, width)
        numbers_nK = (index_LK + self.count).repeat(self.num_texts, 1)
        texts_n = torch.arange(self.num_texts, device=self.device).repeat_interleave(num_rows)
        made = draws.children(law, texts_n, numbers_nK, depth)
        assert made.worth_nK is not None
        there_nK = torch.arange(width, device=made.counts_n.device) < made.counts_n[:, None]
        worth_nK = torch.where(there_nK, made.worth_nK, 0.0).to(self.device)
        shape = self.num_texts, num_rows * width
        base_n = sum(map(len, self.laws)) + torch.arange(len(texts_n), device=self.device)
        self.tokens.append(made.tokens_nK.to(self.device).view(shape))
        self.kinds.append(made.kinds_nK.to(self.device).view(shape))
        self.parents.append(rows_BL.repeat_interleave(width, 1))
        self.law_rows.append(base_n[:, None].expand(-1, width).reshape(shape))
        worth_nK = worth_nK * worth_BL.reshape(-1, 1)
        # Products stay where float64 keeps a tail apart from its siblings.
        self.worths.append(torch.where(worth_nK > _LEAST, worth_nK, 0.0).view(shape))
        self.laws.append(law)
        self.count += shape[1]

    def best_rows(self) -> tuple[Tensor, Tensor]:
        """The last level's most promising rows `[B, width]` and their worths; row 0 is none."""
        last_BM = self.worths[-1]
        worth_BW, column_BW = last_BM.sort(dim=1, descending=True, stable=True)
        worth_BW, column_BW = worth_BW[:, : self.width], column_BW[:, : self.width]
        rows_BW = column_BW + (self.count - last_BM.shape[1] + 1)
        return torch.where(worth_BW > 0, rows_BW, 0), worth_BW

    def best(self, num_nodes: int, draws: Draws) -> Draft:
        """The draft of the best nodes, in the order in which they were drawn.

        No node is worth more than its parent, and parents were drawn first: what stays is a tree.
        """
        counts_B = torch.zeros(self.num_texts, dtype=torch.int64, device=self.device)
        depth = len(self.laws)
        if depth == 0:
            none_B0 = counts_B[:, None][:, :0]
            return Draft(TokenTree.chain(none_B0, counts_B), None)
        worth_BC = torch.cat(self.worths, 1)
        order_BC = worth_BC.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
        num_nodes = order_BC.shape[1]
        kept_BC = torch.zeros_like(worth_BC, dtype=torch.bool).scatter_(1, order_BC, True)
        kept_BC &= worth_BC > 0
        places_BC = torch.where(kept_BC, kept_BC.cumsum(1) - 1, num_nodes)
        rows_BT = torch.nn.functional.pad(places_BC + 1, (1, 0))
        parents_BC = rows_BT.gather(1, torch.cat(self.parents, 1))
        made = [
            part_BC.new_zeros(self.num_texts, num_nodes + 1)
            .scatter_(1, places_BC, part_BC)[:, :num_nodes]
            .contiguous()
            for part_BC in (
                torch.cat(self.tokens, 1),
                torch.where(kept_BC, parents_BC, 0),
                torch.cat(self.kinds, 1),
                torch.cat(self.law_rows, 1),
                worth_BC,
            )
        ]
        tokens_BN, parents_BN, kinds_BN, rows_BN, worth_BN = made
        tree = TokenTree(tokens_BN, parents_BN, kept_BC.sum(1), depth, self.width)
        kinds = draws.drawing.kinds
        if kinds == {Kind.POINT}:
            return Draft(tree, None, worth_BN=worth_BN)
        law, kinds_BN = one_table(self.laws), kinds_BN if len(kinds) > 1 else None
        return Draft(tree, law, rows_BN, kinds_BN, kinds, worth_BN=worth_BN)


def _side_by_side(parts: list[Tensor], counts_B: Tensor) -> Tensor:
    return torch.cat(parts, 1) if parts else counts_B[:, None][:, :0]
