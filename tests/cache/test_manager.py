"""The cache: staging leaves no trace, commit moves a length, paths move, pools grow and end."""

import pytest
import torch

from outrider.cache import BLOCK_SLOTS, CacheManager
from outrider.errors import InvalidConfig, OutOfMemory

LAYERS = 2


def write(cache, seq, numbers):
    """Stage one row per number; its key and value hold the number."""
    slots = cache.reserve(seq, len(numbers))
    index = slots.index(slots.count - len(numbers), slots.count, torch.device("cpu"))
    rows = torch.tensor(numbers, dtype=torch.float32)[None, :, None].expand(2, -1, 4)
    for layer in range(LAYERS):
        pool = cache.pool(layer, rows, rows)
        pool.keys[:, index] = rows
        pool.values[:, index] = rows + 1000 * layer
    cache.stage(seq, len(numbers))


def committed(cache, seq):
    """Return the numbers of the committed tokens, checked in every layer."""
    length = cache.length(seq)
    if not length:
        return []
    index = cache.reserve(seq, 0).index(0, length, torch.device("cpu"))
    like = torch.empty(2, 1, 4)
    keys = [cache.pool(layer, like, like).keys[:, index] for layer in range(LAYERS)]
    values = [cache.pool(layer, like, like).values[:, index] for layer in range(LAYERS)]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(values[0] + 1000, values[1])
    assert torch.equal(keys[0], values[0])
    return keys[0][0, :, 0].int().tolist()


def test_commit_keeps_a_prefix_and_forgets_the_rest():
    cache = CacheManager()
    seq = cache.open(8)
    write(cache, seq, [1, 2, 3])
    assert (cache.length(seq), cache.num_staged(seq)) == (0, 3)
    cache.commit(seq, 2)
    assert (cache.length(seq), cache.num_staged(seq)) == (2, 0)
    write(cache, seq, [4, 5])
    write(cache, seq, [6])
    cache.commit(seq, 3)
    assert committed(cache, seq) == [1, 2, 4, 5, 6]


def test_commit_of_a_path_moves_its_rows_together():
    cache = CacheManager()
    seq = cache.open(8)
    write(cache, seq, list(range(60)))
    cache.commit(seq, 60)
    # The path crosses a block's border.
    write(cache, seq, [100, 101, 102, 103, 104, 105, 106, 107])
    cache.commit(seq, [0, 2, 3, 5, 7])
    assert committed(cache, seq) == [*range(60), 100, 102, 103, 105, 107]
    write(cache, seq, [200])
    cache.commit(seq, [])
    assert cache.length(seq) == 65


def test_discard_leaves_no_trace():
    cache = CacheManager()
    seq = cache.open(8)
    write(cache, seq, [1])
    cache.commit(seq, 1)
    write(cache, seq, [7, 8, 9])
    cache.discard(seq)
    assert (cache.length(seq), cache.num_staged(seq)) == (1, 0)
    write(cache, seq, [2])
    cache.commit(seq, 1)
    assert committed(cache, seq) == [1, 2]


def test_reserving_without_staging_changes_nothing():
    cache = CacheManager()
    seq = cache.open(1)
    cache.reserve(seq, 500)
    assert (cache.length(seq), cache.num_staged(seq)) == (0, 0)


def test_pools_double_and_keep_what_they_hold():
    cache = CacheManager()
    seqs = [cache.open(1) for _ in range(3)]
    texts = {seq: [] for seq in seqs}
    for step in range(9):
        for seq in seqs:
            numbers = [1000 * seq + 40 * step + i for i in range(40)]
            write(cache, seq, numbers)
            cache.commit(seq, 40)
            texts[seq] += numbers
    assert all(committed(cache, seq) == texts[seq] for seq in seqs)
    assert any(cache.reserve(seq, 0).start is None for seq in seqs)


def test_one_sequence_alone_stays_one_run():
    cache = CacheManager()
    seq = cache.open(0)
    for _ in range(20):
        write(cache, seq, list(range(50)))
        cache.commit(seq, 50)
        assert cache.reserve(seq, 0).start == 0


def test_a_closed_sequence_gives_its_blocks_back_clean():
    cache = CacheManager()
    seq = cache.open(64)
    write(cache, seq, [float("nan")] * 70)
    before = cache.num_free_blocks
    cache.close(seq)
    assert cache.num_free_blocks == before + 2
    like = torch.empty(2, 1, 4)
    assert not cache.pool(0, like, like).keys.isnan().any()
    for call in (cache.length, cache.close, lambda seq: cache.commit(seq, 0)):
        with pytest.raises(InvalidConfig, match="not open"):
            call(seq)


def test_a_full_cache_says_so_and_what_was_there_stays():
    rows = torch.zeros(2, 1, 4)
    block_bytes = LAYERS * 2 * rows.nbytes * BLOCK_SLOTS
    cache = CacheManager(max_bytes=3 * block_bytes)
    seq = cache.open(1)
    # The pools' shapes, and so a block's bytes, are known from the first rows on.
    write(cache, seq, [0])
    cache.discard(seq)
    write(cache, seq, list(range(180)))
    cache.commit(seq, 180)
    with pytest.raises(OutOfMemory, match="max_bytes"):
        cache.reserve(seq, 100)
    assert cache.cache_bytes <= 3 * block_bytes
    assert committed(cache, seq) == list(range(180))
    other = cache.open(10_000)
    with pytest.raises(OutOfMemory, match="max_bytes"):
        cache.reserve(other, 1)
    cache.close(seq)
    cache.reserve(other, 100)


@pytest.mark.parametrize("path", [4, -1, [1, 0], [0, 0], [3], [-1, 0]])
def test_a_path_that_is_not_staged_is_refused(path):
    cache = CacheManager()
    seq = cache.open(4)
    write(cache, seq, [1, 2, 3])
    with pytest.raises(InvalidConfig, match="staged"):
        cache.commit(seq, path)
    assert (cache.length(seq), cache.num_staged(seq)) == (0, 3)


def test_a_negative_reserve_is_refused():
    with pytest.raises(InvalidConfig, match="reserve"):
        CacheManager().open(-1)


def test_an_empty_cache_gives_large_pools_back_and_keeps_its_bound():
    cache = CacheManager()
    seq, other = cache.open(1), cache.open(1)
    write(cache, seq, [1])
    write(cache, other, list(range(70 * BLOCK_SLOTS)))
    block_bytes = cache.block_bytes
    cache.close(other)
    assert cache.cache_bytes
    cache.close(seq)
    assert (cache.cache_bytes, cache.num_blocks) == (0, 0)
    assert cache.block_bytes == block_bytes > 0
    with pytest.raises(InvalidConfig, match="cache_bytes"):
        cache.limit(block_bytes - 1)
    # The bound holds from the first row on, whatever is reserved.
    cache.limit(3 * block_bytes)
    seq = cache.open(10_000)
    write(cache, seq, list(range(180)))
    assert cache.cache_bytes <= 3 * block_bytes
    with pytest.raises(OutOfMemory, match="max_bytes"):
        cache.reserve(seq, 100)


def test_room_that_is_not_all_to_be_had_is_not_taken():
    cache = CacheManager()
    seq, other = cache.open(8), cache.open(8)
    write(cache, seq, [1, 2, 3])
    cache.limit(cache.block_bytes * cache.num_blocks)
    free = cache.num_free_blocks
    with pytest.raises(OutOfMemory, match="max_bytes"):
        cache.reserve(seq, BLOCK_SLOTS * (cache.num_blocks + 1))
    assert cache.num_free_blocks == free
    # Another sequence has it then.
    write(cache, other, list(range(BLOCK_SLOTS * free)))
    cache.commit(seq, 3)
    assert committed(cache, seq) == [1, 2, 3]
