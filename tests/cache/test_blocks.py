"""The allocator: runs are kept together, nothing is handed out twice, a full pool says so."""

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
