"""Which sequence ids of libllama hold which rows of one text: chains, trees, and what is kept.

libllama has no trees. A cell of its memory belongs to any number of sequences, and a row attends
to the cells of its first sequence up to its own position. So every path through a drafted tree is a
sequence of its own, all of them hold the text's committed cells, and a row belongs to the sequences
of all the paths it lies on. Where the text has been read each of its ids holds all of it, so
beginning a tree copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import InvalidConfig
from outrider.models.base import MAX_TREE_NODES

NOWHERE = -1
"""The tip of an id that holds no staged row."""


@dataclass(frozen=True, slots=True)
class Copied:
    """An id that must hold another's cells at positions `first..last-1` before the rows come."""

    source: int
    into: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Staging:
    """Rows about to be staged: positions and ids of each, copies to make before, tips after."""

    positions: list[int]
    ids: list[tuple[int, ...]]
    copies: list[Copied]
    tips: dict[int, int]
    tree: list[int] | None


@dataclass(slots=True)
class Text:
    """One open sequence: its committed tokens, its staged rows, and the ids that hold them.

    `tips` maps each id to the last staged row it holds. `tree` are the bitmasks of the staged rows'
    ancestors (bit j: row j, itself included), None while they are a chain, which all ids hold.
    """

    tips: dict[int, int]
    tokens: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    tree: list[int] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The text's ids; the first is never given up."""
        return tuple(self.tips)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    def holder(self, row: int) -> int:
        """An id that holds a staged row, and so all its ancestors."""
        return next(one for one, tip in self.tips.items() if tip >= 0 and self.seen(tip) >> row & 1)

    def seen(self, row: int) -> int:
        """The bitmask of a staged row's ancestors, itself included."""
        return (2 << row) - 1 if self.tree is None else self.tree[row]

    def end(self, row: int) -> int:
        """The position behind a staged row, or behind the committed tokens."""
        return self.length if row == NOWHERE else self.length + self.seen(row).bit_count()

    def stage_chain(self, count: int) -> Staging:
        """Rows that follow one another behind what is staged."""
        if self.tree is not None:
            raise InvalidConfig(
                f"a staged tree of {len(self.staged)} nodes, and rows without ancestors continue a "
                "chain; give the rows' ancestors, or commit first"
            )
        first = len(self.staged)
        begin, ids = self.length + first, self.ids
        tips = dict.fromkeys(ids, first + count - 1)
        return Staging(list(range(begin, begin + count)), [ids] * count, [], tips, None)

    def stage_tree(self, ancestors: Sequence[int], spare: Callable[[], int]) -> Staging:
        """Rows that name their ancestors; `spare` gives an id that holds nothing.

        Raises:
            InvalidConfig: bitmasks that are no tree, or more nodes than one may have.
        """
        first = len(self.staged)
        masks = [self.seen(row) for row in range(first)] + [mask % (1 << 64) for mask in ancestors]
        parents = _parents(masks, first)
        inner = set(parents)
        leaves = [row for row in range(first, len(masks)) if row not in inner]
        length, tips, copies = self.length, dict(self.tips), list[Copied]()
        unclaimed = list(tips)
        held: list[list[int]] = [[] for _ in range(first, len(masks))]
        for leaf in leaves:
            path, at = [leaf], parents[leaf - first]
            while at >= first:
                path.append(at)
                at = parents[at - first]
            last = self.end(at)
            claimed = next((one for one in unclaimed if tips[one] == at), None)
            if claimed is None:
                claimed = next((one for one in unclaimed if tips[one] == NOWHERE), None)
                # An id that was free holds the committed tokens already.
                begin = 0 if claimed is None else length
                claimed = spare() if claimed is None else claimed
                source = self.ids[0] if at == NOWHERE else self.holder(at)
                copies.append(Copied(source, claimed, begin, last))
            if claimed in unclaimed:
                unclaimed.remove(claimed)
            tips[claimed] = leaf
            for row in path:
                held[row - first].append(claimed)
        positions = [length + mask.bit_count() - 1 for mask in masks[first:]]
        return Staging(positions, [tuple(ids) for ids in held], copies, tips, masks)

    def staged_now(self, staging: Staging, tokens: Sequence[int]) -> None:
        """Take over what has been read."""
        self.staged += tokens
        self.tips, self.tree = staging.tips, staging.tree

    def path(self, kept: int | Sequence[int]) -> list[int]:
        """The staged rows to keep, in order of the text.

        Raises:
            InvalidConfig: rows that are not staged, or no path from the text's end.
        """
        rows = list(range(kept)) if isinstance(kept, int) else list(kept)
        if isinstance(kept, int) and kept < 0:
            raise InvalidConfig(f"{kept} rows to commit; name staged rows")
        if rows and not 0 <= min(rows) <= max(rows) < len(self.staged):
            raise InvalidConfig(
                f"rows {rows} to commit where {len(self.staged)} are staged; name staged rows"
            )
        seen = 0
        for row in rows:
            seen |= 1 << row
            if self.seen(row) != seen:
                raise InvalidConfig(
                    f"rows {rows} to commit are no path: row {row} has other ancestors; name a "
                    "path from the text's end, in order"
                )
        return rows


def _parents(masks: Sequence[int], first: int) -> list[int]:
    """The parents of rows `first..`, NOWHERE for roots; a row's path is its parent's and itself.

    Raises:
        InvalidConfig: bitmasks that say something else, or too many nodes.
    """
    if len(masks) > MAX_TREE_NODES:
        raise InvalidConfig(
            f"a tree of {len(masks)} staged nodes; at most {MAX_TREE_NODES} fit, draft fewer"
        )
    parents: list[int] = []
    for row in range(first, len(masks)):
        above = masks[row] ^ (1 << row)
        parent = above.bit_length() - 1
        if parent >= row or above != (0 if parent < 0 else masks[parent]):
            raise InvalidConfig(
                "a row's ancestors must be its parent's and the row itself, as their highest bit; "
                "give bit j for the j-th row staged since the last commit"
            )
        parents.append(parent)
    return parents
