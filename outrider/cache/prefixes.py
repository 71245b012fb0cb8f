"""Which full blocks hold which tokens: what texts with a common beginning find each other's by.

A block is known by its own tokens and by the block before it, so by everything from the first token
on; the tokens themselves are the key, and what is found holds them for certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cache.blocks import BLOCK_SLOTS

NO_BLOCK = 0
"""The number of the block before the first."""


class PrefixIndex:
    """Blocks by their tokens. Those that no sequence uses are idle, and go the longest idle first.

    Blocks are numbered as they come, no number is given twice: a block that went and came back is
    another one to those that stood behind it.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._numbers: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        self._last_number = NO_BLOCK

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def num_idle(self) -> int:
        """Blocks that only the index holds."""
        return len(self._idle)

    def number(self, blocks: Sequence[int]) -> int:
        """The number of the last of these known blocks."""
        return self._numbers[blocks[-1]] if blocks else NO_BLOCK

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the beginning of the tokens, as far as it is known."""
        found: list[int] = []
        for first in range(0, len(tokens) - BLOCK_SLOTS + 1, BLOCK_SLOTS):
            key = self.number(found), tuple(tokens[first : first + BLOCK_SLOTS])
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, before: int, tokens: Sequence[int], block: int) -> int:
        """Know a block in use by its tokens and the number of the one before; returns its number.

        Where another block is known by them already it stays so, and its number is returned.
        """
        key = before, tuple(tokens)
        known = self._blocks.setdefault(key, block)
        if known == block:
            self._last_number += 1
            self._keys[block], self._numbers[block] = key, self._last_number
        return self._numbers[known]

    def use(self, block: int) -> None:
        """A sequence uses the block."""
        self._idle.pop(block, None)

    def rest(self, block: int) -> None:
        """No sequence uses the block any more."""
        self._idle[block] = None

    def oldest(self) -> int | None:
        """The block idle for longest; None where none is."""
        return next(iter(self._idle), None)

    def idle(self) -> list[int]:
        """The idle blocks, the longest idle first."""
        return list(self._idle)

    def forget(self, block: int) -> None:
        """Know the block no longer."""
        self._idle.pop(block, None)
        del self._numbers[block]
        del self._blocks[self._keys.pop(block)]

    def move(self, places: dict[int, int]) -> None:
        """Call every known block by its new place."""
        self._blocks = {key: places[block] for key, block in self._blocks.items()}
        self._keys = {places[block]: key for block, key in self._keys.items()}
        self._numbers = {places[block]: number for block, number in self._numbers.items()}
        self._idle = {places[block]: None for block in self._idle}
