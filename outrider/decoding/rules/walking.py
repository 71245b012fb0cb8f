"""Walking down token trees, all texts at once: each stands on one row, and reads that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.draft import Draft, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import all_rows, first_rows, while_equal
from outrider.tree import TokenTree

Own: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The target's own tokens `[n]`, given texts, the row each stands on, and its flat row."""


class Walk:
    """B texts on their way down, each on a row of its tree.

    What is decided on a row must be a function of text and row alone: where texts are not left
    out, a row is asked again after its text has stopped on it.

    Attributes:
        texts_n: the texts still walking, or all of them.
        at_B: the row each text stands on.
    """

    def __init__(self, tree: TokenTree, target: TargetRows) -> None:
        self.at_B = torch.zeros_like(tree.counts_B)
        self.texts_n = torch.arange(len(self.at_B), device=self.at_B.device)
        self._first_B = first_rows(target)
        self._children_BTW = children_of(tree)
        self._path: list[Tensor] = []

    @property
    def at_n(self) -> Tensor:
        """The rows the texts stand on."""
        return self.at_B[self.texts_n]

    @property
    def flat_n(self) -> Tensor:
        """Those rows among all rows of the batch."""
        return self._first_B[self.texts_n] + self.at_n

    def children(self) -> Tensor:
        """Rows of the children in drawing order, 0 where there are no more."""
        return self._children_BTW[self.texts_n, self.at_n]

    def step(self, next_n: Tensor) -> None:
        """Each text goes on to a child's row; one whose next row is 0 has stopped."""
        level_B = torch.zeros_like(self.at_B)
        level_B[self.texts_n] = next_n
        self._path.append(level_B)
        self.at_B = torch.where(level_B > 0, level_B, self.at_B)
        self.texts_n = self.texts_n[host.some(next_n > 0)]

    def verdict(self, token_B: Tensor, depth: int) -> Verdict:
        """The rows passed, padded to `depth`, and the token added behind them."""
        path_BD = self.at_B.new_zeros(len(self.at_B), depth)
        for i, level_B in enumerate(self._path):
            path_BD[:, i] = level_B
        return Verdict((path_BD > 0).sum(1), token_B, path_BD)


def children_of(tree: TokenTree) -> Tensor:
    """`tree.children()`, of chains without comparing nodes with each other."""
    if not tree.is_chain:
        return tree.children()
    rows_T = torch.arange(tree.num_nodes + 1, device=tree.counts_B.device)
    return torch.where(rows_T < tree.counts_B[:, None], rows_T + 1, 0)[:, :, None]


def follow(draft: Draft, target: TargetRows, own: Own) -> Verdict:
    """Walks down while a child bears the target's own token, and adds the target's next.

    Only rows on the path are read, but for chains where leaving texts out would cost a wait: all
    their rows go in one pass. Of equal siblings the first is taken.
    """
    tree = draft.tree.to(target.device)
    if tree.is_chain and not host.reads_free(target.device):
        return while_equal(draft, _at_every_row(target, own))
    walk = Walk(tree, target)
    # Row 0 bears no token and is nobody's child.
    tokens_BT = torch.nn.functional.pad(tree.tokens_BN, (1, 0))
    token_B = torch.zeros_like(tree.counts_B)
    for level in range(tree.depth + 1):
        texts_n = walk.texts_n
        if len(texts_n) == 0:
            break
        own_n = own(texts_n, walk.at_n, walk.flat_n)
        token_B[texts_n] = own_n
        if level < tree.depth:
            kids_nW = walk.children()
            equal_nW = (tokens_BT[texts_n[:, None], kids_nW] == own_n[:, None]) & (kids_nW > 0)
            first_n1 = equal_nW.byte().argmax(1, keepdim=True)
            walk.step((kids_nW * equal_nW).gather(1, first_n1).squeeze(1))
    return walk.verdict(token_B, tree.depth)


def _at_every_row(target: TargetRows, own: Own) -> Tensor:
    """The target's own tokens, `[B, T]`."""
    flat_BT = all_rows(target)
    num_texts, num_rows = flat_BT.shape
    texts_B = torch.arange(num_texts, device=target.device)
    rows_T = torch.arange(num_rows, device=target.device)
    own_R = own(texts_B.repeat_interleave(num_rows), rows_T.repeat(num_texts), flat_BT.flatten())
    return own_R.view_as(flat_BT)
