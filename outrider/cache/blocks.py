"""Which block belongs to which sequence: a free list that prefers one run of blocks per sequence.

A block is 64 consecutive slots. A sequence whose blocks are consecutive is a plain view of the
pool, so the allocator keeps the blocks behind a sequence free for it (its promise) as long as
others fit elsewhere.
"""

from outrider.errors import OutOfMemory

BLOCK_SLOTS = 64
"""Slots (tokens) of one block."""


class BlockAllocator:
    """Hands out blocks `0..num_blocks-1` and counts who uses each; one that nobody uses is free."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._users = [0] * num_blocks
        self._promised: list[int | None] = [None] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that exist, free or not."""
        return len(self._users)

    @property
    def num_free(self) -> int:
        """Blocks nobody uses; a promised block is free."""
        return self._users.count(0)

    def users(self, block: int) -> int:
        """How many use the block."""
        return self._users[block]

    def grow(self, num_blocks: int) -> None:
        """Add free blocks at the end until there are `num_blocks`."""
        more = num_blocks - self.num_blocks
        self._users += [0] * more
        self._promised += [None] * more

    def promise(self, seq: int, num_blocks: int) -> bool:
        """Keep a run of free, unpromised blocks for the sequence; False where there is none."""
        run = 0
        for block in range(self.num_blocks):
            run = run + 1 if self._is_unclaimed(block) else 0
            if run == num_blocks:
                first = block + 1 - num_blocks
                self._promised[first : block + 1] = [seq] * num_blocks
                return True
        return False

    def promise_behind(self, seq: int, block: int, num_blocks: int) -> bool:
        """Keep the blocks behind `block` for the sequence; False where they are not to be had."""
        last = block + num_blocks
        run = range(block + 1, last + 1)
        if last >= self.num_blocks or not all(map(self._is_unclaimed, run)):
            return False
        self._promised[block + 1 : last + 1] = [seq] * num_blocks
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
        self._users[block] = 1
        self._promised[block] = None
        return block

    def hold(self, block: int) -> None:
        """Count one more user of a block in use."""
        self._users[block] += 1

    def drop(self, block: int) -> None:
        """Count one user less."""
        self._users[block] -= 1

    def release(self, seq: int, blocks: list[int]) -> None:
        """Count the sequence out of its blocks' users and forget its promise."""
        for block in blocks:
            self.drop(block)
        self._promised = [None if promised == seq else promised for promised in self._promised]

    def _is_unclaimed(self, block: int) -> bool:
        return not self._users[block] and self._promised[block] is None

    def _choose(self, seq: int, after: int | None) -> int | None:
        behind = None if after is None else after + 1
        free = [block for block, users in enumerate(self._users) if not users]
        if behind in free and self._promised[behind] in (None, seq):
            return behind
        for wanted in (seq, None):
            found = next((block for block in free if self._promised[block] == wanted), None)
            if found is not None:
                return found
        # Of others' promises the last block: its loss leaves the longest run.
        return free[-1] if free else None
