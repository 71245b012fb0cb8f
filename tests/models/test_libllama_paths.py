"""Which ids hold which rows: every row's ids hold its ancestors and nothing else of the tree."""

from __future__ import annotations

import random

import pytest

from outrider.errors import InvalidConfig
from outrider.models.libllama.paths import NOWHERE, Text


class Cells:
    """libllama's memory in miniature: which positions' rows each id holds.

    Refuses what libllama refuses: a row of an id that is not the one behind its last, and rows of
    ids that have parted.
    """

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {0: []}

    def spare(self) -> int:
        self.held[len(self.held)] = []
        return len(self.held) - 1

    def read(self, staging, names) -> None:
        for copy in staging.copies:
            source, own = self.held[copy.source], self.held[copy.into]
            assert len(own) == copy.first
            own += source[copy.first : copy.last]
        before = {one: list(held) for one, held in self.held.items()}
        for name, place, ids in zip(names, staging.positions, staging.ids, strict=True):
            assert ids and len(set(ids)) == len(ids)
            assert all(before[one] == before[ids[0]] for one in ids)
            for one in ids:
                assert len(self.held[one]) == place
                self.held[one].append(name)


def random_tree(chance: random.Random, masks: list[int], count: int) -> list[int]:
    """Bitmasks of so many more nodes below some of the staged ones, or beside them."""
    masks = list(masks)
    first = len(masks)
    for row in range(first, first + count):
        parent = chance.randrange(-1, row)
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << row)
    return masks[first:]


@pytest.mark.parametrize("seed", range(25))
def test_rows_see_their_ancestors_alone(seed: int) -> None:
    chance = random.Random(seed)
    cells, text = Cells(), Text({0: NOWHERE})
    for _ in range(6):
        masks: list[int] = []
        chain = chance.random() < 0.3
        for _ in range(chance.randrange(1, 4)):
            count = chance.randrange(1, 6)
            if chain:
                new = [(2 << row) - 1 for row in range(len(masks), len(masks) + count)]
                staging = text.stage_chain(count)
            else:
                new = random_tree(chance, masks, count)
                staging = text.stage_tree(new, cells.spare)
            names = [chance.random() for _ in new]
            cells.read(staging, names)
            text.staged_now(staging, names)  # type: ignore[arg-type]
            masks += new
            for row, mask in enumerate(masks):
                path = [text.staged[i] for i in range(len(masks)) if mask >> i & 1]
                held = cells.held[text.holder(row)]
                assert held[: text.length + len(path)] == text.tokens + path
        leaf = chance.randrange(len(masks))
        path = [i for i in range(len(masks)) if masks[leaf] >> i & 1]
        kept = text.path(path[: chance.randrange(len(path) + 1)])
        text.tokens += [text.staged[row] for row in kept]
        text.staged, text.tree = [], None
        text.tips = dict.fromkeys(text.tips, NOWHERE)
        cells.held = {one: list(text.tokens) for one in cells.held}


def test_a_chain_takes_no_id_and_a_tree_as_many_as_leaves() -> None:
    cells, text = Cells(), Text({0: NOWHERE})
    assert text.stage_chain(5).ids == [(0,)] * 5
    staging = text.stage_tree([1, 3, 5, 9], cells.spare)
    assert sorted(staging.tips) == [0, 1, 2] and len(staging.copies) == 2
    assert sorted(staging.ids[0]) == [0, 1, 2]


@pytest.mark.parametrize("masks", [[2], [1, 2, 7], [1, 3, 6], [3], [1, 1], [0]])
def test_bitmasks_that_are_no_tree_are_refused(masks: list[int]) -> None:
    text = Text({0: NOWHERE})
    with pytest.raises(InvalidConfig, match="parent's and the row itself"):
        text.stage_tree(masks, Cells().spare)


def test_what_is_no_path_is_refused() -> None:
    cells, text = Cells(), Text({0: NOWHERE})
    text.staged_now(text.stage_tree([1, 3, 5, 13], cells.spare), [7, 8, 9, 10])
    assert text.path([0, 2, 3]) == [0, 2, 3] and text.path(2) == [0, 1]
    for wrong in ([0, 1, 2], [2], [0, 3], 3, [1, 0]):
        with pytest.raises(InvalidConfig, match="no path"):
            text.path(wrong)
    for wrong in (5, [0, 4], [-1]):
        with pytest.raises(InvalidConfig, match="4 are staged"):
            text.path(wrong)
    with pytest.raises(InvalidConfig, match="continue a chain"):
        text.stage_chain(1)
    with pytest.raises(InvalidConfig, match="at most 64"):
        text.stage_tree([0] * 61, cells.spare)
