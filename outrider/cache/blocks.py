"""Which block belongs to which sequence: a free list that prefers one run of blocks per sequence.

A block is 64 consecutive slots. A sequence whose blocks are consecutive is a plain view of the
pool, so the allocator keeps the blocks behind a sequence free for it (its promise) as long as
others fit elsewhere.
"""

from outrider.cache.runs import Runs
from outrider.errors import OutOfMemory

BLOCK_SLOTS = 64
"""Slots (tokens) of one block."""


class BlockAllocator:
    """Hands out blocks `0..num_blocks-1` and counts who uses each; one that nobody uses is free.

    Nothing here goes through all blocks: a pool may hold a great many.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self._users: list[int] = []
        self._num_free = 0
        # A free block is either unclaimed or kept for the sequence it is promised to.
        self._unclaimed, self._kept = Runs(), Runs()
        self._owner: dict[int, int] = {}
        self._promised: dict[int, set[int]] = {}
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks that exist, free or not."""
        return len(self._users)

    @property
    def num_free(self) -> int:
        """Blocks nobody uses; a promised block is free."""
        return self._num_free

    def users(self, block: int) -> int:
        """How many use the block."""
        return self._users[block]

    def grow(self, num_blocks: int) -> None:
        """Add free blocks at the end until there are `num_blocks`."""
        before = self.num_blocks
        if num_blocks > before:
            self._users += [0] * (num_blocks - before)
            self._num_free += num_blocks - before
            self._unclaimed.add(before, num_blocks)

    def promise(self, seq: int, num_blocks: int) -> bool:
        """Keep a run of free, unpromised blocks for the sequence; False where there is none."""
        first = self._unclaimed.find(num_blocks)
        if first is None:
            return False
        self._keep(seq, first, first + num_blocks)
        return True

    def promise_behind(self, seq: int, block: int, num_blocks: int) -> bool:
        """Keep the blocks behind `block` for the sequence; False where they are not to be had."""
        first, end = block + 1, block + 1 + num_blocks
        if not self._unclaimed.holds(first, end):
            return False
        self._keep(seq, first, end)
        return True

    def take(self, seq: int, after: int | None) -> int:
        """Give the sequence one more block: the one behind `after`, else the best free one.

        Raises:
            OutOfMemory: no block is free.
        """
        block = self._choose(seq, after)
        if block is None:
            raise OutOfMemory(
                f"all {self.num_blocks} cache blocks of {BLOCK_SLOTS} tokens are in use; "
                "close sequences, admit fewer at a time, or raise max_bytes"
            )
        self.hold(block)
        return block

    def hold(self, block: int) -> None:
        """Count one more user of a block; a free one is nobody's promise any more."""
        if not self._users[block]:
            self._num_free -= 1
            owner = self._owner.pop(block, None)
            if owner is None:
                self._unclaimed.remove(block, block + 1)
            else:
                self._promised[owner].discard(block)
                self._kept.remove(block, block + 1)
        self._users[block] += 1

    def drop(self, block: int) -> None:
        """Count one user less."""
        self._users[block] -= 1
        if not self._users[block]:
            self._num_free += 1
            self._unclaimed.add(block, block + 1)

    def release(self, seq: int, blocks: list[int]) -> None:
        """Count the sequence out of its blocks' users and forget its promise."""
        for block in blocks:
            self.drop(block)
        for block in self._promised.pop(seq, ()):
            del self._owner[block]
            self._kept.remove(block, block + 1)
            self._unclaimed.add(block, block + 1)

    def _keep(self, seq: int, first: int, end: int) -> None:
        self._unclaimed.remove(first, end)
        self._kept.add(first, end)
        self._promised.setdefault(seq, set()).update(range(first, end))
        self._owner.update(dict.fromkeys(range(first, end), seq))

    def _choose(self, seq: int, after: int | None) -> int | None:
        own = self._promised.get(seq)
        behind = None if after is None else after + 1
        if behind is not None and (self._owner.get(behind) == seq or behind in self._unclaimed):
            return behind
        if own:
            return min(own)
        found = self._unclaimed.lowest()
        # Of others' promises the last block: its loss leaves the longest run.
        return self._kept.highest() if found is None else found
