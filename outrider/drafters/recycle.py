"""Token recycling: the target's own best successors of each token, as it last gave them.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (arXiv 2408.08696). What the target's rows say beside the token that came out is kept in
an adjacency matrix, and drafts are read off it: no model, no training, one row per known token.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.config import check_whole
from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.points import Budget, PointTree, grow_likeliest, ordered
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

UNKNOWN = -1


class RecycleDrafter(Drafter):
    """Drafts the target's own earlier guesses; every drafted token is certain (a point mass).

    The matrix serves all texts and outlives them: a text finds what the target said in others. It
    says nothing of a text but which tokens the target finds likely after one token of it.

    Args:
        width: successors kept of each token, the likeliest first.
    """

    name = "recycle"
    certain = True
    wants_rows = True

    def __init__(self, width: int = 8) -> None:
        check_whole("width", width, 1, 2**10)
        self.width = width
        self._after: NDArray[np.int32] = np.empty((0, width), dtype=np.int32)
        self._shapes: dict[Budget, PointTree] = {}

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The best successor's best successor and so on; a tree of ranks where trees are taken."""
        if not draws.max_certain:
            return draws.points(self.chains(texts, depths))
        trees = [
            self._tree(text.tokens[-1], Budget(draws.max_certain, depth))
            for text, depth in zip(texts, depths, strict=True)
        ]
        return draws.point_trees(
            [list(tree.tokens) for tree in trees], [list(tree.parents) for tree in trees]
        )

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]]:
        """The best successor's best successor and so on."""
        return [
            self._chain(text.tokens[-1], depth) for text, depth in zip(texts, depths, strict=True)
        ]

    def _chain(self, token: int, depth: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < depth and token < len(self._after):
            token = int(self._after[token, 0])
            if token == UNKNOWN:
                break
            chain.append(token)
        return chain

    def _tree(self, token: int, budget: Budget) -> PointTree:
        """The shape's ranks as tokens; what is not known is left out with all below it."""
        shape = self._shapes.get(budget)
        if shape is None:
            shape = self._shapes[budget] = rank_tree(self.width, budget)
        # By row of the shape: its token, and its row in the tree that comes out.
        found, rows = [token], [0]
        tokens: list[int] = []
        parents: list[int] = []
        for rank, parent in zip(shape.tokens, shape.parents, strict=True):
            above, child = found[parent], UNKNOWN
            if 0 <= above < len(self._after):
                child = int(self._after[above, rank])
            found.append(child)
            rows.append(len(tokens) + 1)
            if child != UNKNOWN:
                tokens.append(child)
                parents.append(rows[parent])
        return ordered(tokens, parents)

    def observe(
        self, text: Sequence, tokens: Sequenced[int], logits_nV: Float[Tensor, "n V"]
    ) -> None:
        """Keeps the likeliest successors of each token, the latest row's."""
        vocab = logits_nV.shape[-1]
        if vocab > len(self._after):
            more: NDArray[Any] = np.full((vocab, self.width), UNKNOWN, dtype=np.int32)
            more[: len(self._after)] = self._after
            self._after = more
        width = min(self.width, vocab)
        best = logits_nV.topk(width, dim=-1).indices
        self._after[list(tokens), :width] = best.cpu().numpy()


def rank_tree(width: int, budget: Budget) -> PointTree:
    """The tree whose nodes are ranks of successors: node chances fall by rank and multiply.

    A successor of rank r is taken to be right with chance 0.5 / (r + 1) ** 1.5, a plain guess: deep
    at the first rank, wide at the root, as the paper's own tree is.
    """
    shares = [(rank, 0.5 / (rank + 1) ** 1.5, None) for rank in range(width)]
    return grow_likeliest(None, lambda _: shares, budget)
