"""Places: where rows of logits stand, so that controls know what each of them follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from outrider.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Places:
    """Where R rows stand in a group's texts.

    Attributes:
        owners: the text of each row.
        paths: the drafted tokens between the text's end and each row, in their order.
    """

    owners: Sequence[int]
    paths: Sequence[Sequence[int]]

    @classmethod
    def of(cls, tree: TokenTree) -> Places:
        """Text after text the root's row and one row per node: the rows that are scored."""
        owners: list[int] = []
        paths: list[Sequence[int]] = []
        lists = tree.tokens_BN.tolist(), tree.parents_BN.tolist(), tree.counts_B.tolist()
        for text, (tokens, parents, count) in enumerate(zip(*lists, strict=True)):
            own: list[tuple[int, ...]] = [()]
            for token, parent in zip(tokens[:count], parents[:count], strict=True):
                own.append((*own[parent], token))
            owners += [text] * (count + 1)
            paths += own
        return cls(owners, paths)

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Texts and the rows that stand together for them."""
        start = 0
        for owner, rows in groupby(self.owners):
            stop = start + sum(1 for _ in rows)
            yield owner, slice(start, stop)
            start = stop


def path_to(row: int, tokens: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """The drafted tokens on the way from the root to a row of one tree, its own included."""
    path: list[int] = []
    while row:
        path.append(tokens[row - 1])
        row = parents[row - 1]
    return tuple(reversed(path))
