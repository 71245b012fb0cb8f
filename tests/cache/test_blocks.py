"""The allocator: runs are kept together, nothing is handed out twice, a full pool says so."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache import BlockAllocator
from outrider.errors import OutOfMemory


def test_a_sequence_grows_in_place_where_it_can():
    blocks = BlockAllocator(8)
    first = blocks.take(0, None)
    assert [blocks.take(0, first + i) for i in range(3)] == [1, 2, 3]


def test_a_promise_keeps_others_away():
    blocks = BlockAllocator(8)
    assert blocks.promise(0, 4)
    assert blocks.take(1, None) == 4
    assert blocks.take(0, None) == 0
    assert not blocks.promise(2, 4)
    assert blocks.num_free == 6


def test_a_promise_gives_way_before_the_pool_is_full():
    blocks = BlockAllocator(3)
    assert blocks.promise(0, 2)
    taken = [blocks.take(1, None) for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(OutOfMemory, match="raise max_bytes"):
        blocks.take(0, None)
    blocks.release(1, taken)
    assert blocks.num_free == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_no_block_has_two_owners(steps):
    blocks, owned = BlockAllocator(12), {seq: [] for seq in range(4)}
    for seq, action in steps:
        if action == 4:
            blocks.release(seq, owned[seq])
            owned[seq] = []
        elif action == 3:
            blocks.promise(seq, 3)
        elif blocks.num_free:
            owned[seq].append(blocks.take(seq, owned[seq][-1] if owned[seq] else None))
    every = [block for own in owned.values() for block in own]
    assert len(every) == len(set(every)) == 12 - blocks.num_free


class Naive:
    """The allocator as it is meant: everything found by going through all blocks."""

    def __init__(self, num: int) -> None:
        self.users, self.promised = [0] * num, [None] * num

    def unclaimed(self) -> list[int]:
        return [b for b in range(len(self.users)) if not self.users[b] and self.promised[b] is None]

    def promise(self, seq: int, num: int) -> bool:
        free = set(self.unclaimed())
        for first in range(len(self.users)):
            if free.issuperset(range(first, first + num)):
                return self.keep(seq, first, num)
        return False

    def promise_behind(self, seq: int, block: int, num: int) -> bool:
        free = set(self.unclaimed())
        return free.issuperset(range(block + 1, block + 1 + num)) and self.keep(seq, block + 1, num)

    def keep(self, seq: int, first: int, num: int) -> bool:
        self.promised[first : first + num] = [seq] * num
        return True

    def take(self, seq: int, after: int | None) -> int | None:
        free = [block for block, users in enumerate(self.users) if not users]
        behind = [] if after is None else [b for b in free if b == after + 1]
        wanted = [b for b in behind if self.promised[b] in (None, seq)]
        wanted += [b for b in free if self.promised[b] == seq] + self.unclaimed() + free[::-1]
        if not wanted:
            return None
        self.users[wanted[0]], self.promised[wanted[0]] = 1, None
        return wanted[0]

    def release(self, seq: int, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        self.promised = [None if who == seq else who for who in self.promised]

    def grow(self, num: int) -> None:
        more = max(0, num - len(self.users))
        self.users, self.promised = self.users + [0] * more, self.promised + [None] * more


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 4)), max_size=60))
def test_every_choice_is_that_of_going_through_all_blocks(steps):
    blocks, naive, owned = BlockAllocator(9), Naive(9), {seq: [] for seq in range(4)}
    for seq, action, num in steps:
        own = owned[seq]
        if action == 0:
            blocks.release(seq, own)
            naive.release(seq, own)
            owned[seq] = []
        elif action == 1:
            assert blocks.promise(seq, num) == naive.promise(seq, num)
        elif action == 2 and own:
            assert blocks.promise_behind(seq, own[-1], num) == naive.promise_behind(
                seq, own[-1], num
            )
        elif action == 3 and blocks.num_blocks < 20:
            blocks.grow(blocks.num_blocks + num)
            naive.grow(blocks.num_blocks)
        else:
            after = own[-1] if own else None
            wanted = naive.take(seq, after)
            if wanted is None:
                with pytest.raises(OutOfMemory):
                    blocks.take(seq, after)
            else:
                assert blocks.take(seq, after) == wanted
                own.append(wanted)
        assert blocks.num_free == naive.users.count(0)


def test_a_text_costs_the_same_in_a_pool_of_any_size():
    def seconds(make: Callable[[int], Any], num_blocks: int) -> float:
        blocks = make(num_blocks)
        best = float("inf")
        for seq in range(20):
            start = time.perf_counter()
            blocks.promise(seq, 8)
            taken = [blocks.take(seq, None)]
            blocks.release(seq, taken)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(BlockAllocator, 1 << 18) < 5 * seconds(BlockAllocator, 1 << 6)
    assert seconds(Naive, 1 << 12) > 5 * seconds(Naive, 1 << 6), "the measure tells them apart"
