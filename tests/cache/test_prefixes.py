"""Shared beginnings: full blocks by reference, the same tokens for certain, and nothing is lost."""

from __future__ import annotations

import random
import resource

import pytest
import torch

from outrider.cache import BLOCK_SLOTS, CacheManager, PrefixIndex
from outrider.cache.manager import KEPT_BLOCKS
from outrider.errors import InvalidConfig, OutOfMemory

BLOCK_BYTES = 2 * 2 * 4 * 4 * BLOCK_SLOTS


def write(cache: CacheManager, seq: int, tokens: list[int], *, told: bool = True) -> None:
    """Commit one row per token; its key and value hold everything up to that token."""
    start, count = cache.length(seq), len(tokens)
    slots = cache.reserve(seq, count)
    index = slots.index(start, start + count, torch.device("cpu"))
    sums = torch.tensor(tokens, dtype=torch.float32).cumsum(0) + total(cache, seq)
    rows = sums[None, :, None].expand(2, -1, 4)
    pool = cache.pool(0, rows, rows)
    pool.keys[:, index], pool.values[:, index] = rows, -rows
    cache.stage(seq, count, tokens=tokens if told else None)
    cache.commit(seq, count)


def total(cache: CacheManager, seq: int) -> float:
    """The sum of the sequence's tokens, as its last row has it."""
    rows = stored(cache, seq)
    return float(rows[-1]) if len(rows) else 0.0


def stored(cache: CacheManager, seq: int) -> torch.Tensor:
    length = cache.length(seq)
    if not length:
        return torch.empty(0)
    index = cache.reserve(seq, 0).index(0, length, torch.device("cpu"))
    pool = cache.pool(0, torch.empty(2, 1, 4), torch.empty(2, 1, 4))
    assert torch.equal(pool.keys[:, index], -pool.values[:, index])
    return pool.keys[0, index, 0]


def holds(cache: CacheManager, seq: int, tokens: list[int]) -> bool:
    return torch.equal(stored(cache, seq), torch.tensor(tokens, dtype=torch.float32).cumsum(0))


def tokens_of(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(count)]


def opened(cache: CacheManager, tokens: list[int], reserve: int | None = None) -> int:
    """A sequence of these tokens; what is not shared is written."""
    seq = cache.open(reserve or len(tokens), tokens[:-1])
    write(cache, seq, tokens[cache.length(seq) :])
    return seq


def test_full_blocks_of_a_common_beginning_are_shared_while_open_and_afterwards() -> None:
    cache = CacheManager()
    system, rest = tokens_of(1, 150), tokens_of(2, 100)
    first = opened(cache, system + rest)
    used = cache.num_blocks - cache.num_free_blocks
    second = cache.open(250, system + rest[::-1])
    assert cache.length(second) == 128
    assert cache.num_blocks - cache.num_free_blocks == used
    write(cache, second, (system + rest[::-1])[128:])
    assert holds(cache, first, system + rest) and holds(cache, second, system + rest[::-1])
    cache.close(first)
    assert holds(cache, second, system + rest[::-1])
    cache.close(second)
    third = cache.open(250, system + rest)
    assert cache.length(third) == 192
    assert holds(cache, third, (system + rest)[:192])


def test_only_whole_blocks_of_told_committed_tokens_are_shared() -> None:
    cache = CacheManager()
    tokens = tokens_of(3, 200)
    seq = cache.open(200)
    write(cache, seq, tokens[:63])
    other = cache.open(200, tokens)
    assert cache.length(other) == 0
    # What is staged, or thrown away, is nobody's.
    cache.reserve(seq, 100)
    cache.stage(seq, 100, tokens=tokens[63:163])
    assert cache.length(cache.open(200, tokens)) == 0
    cache.discard(seq)
    write(cache, seq, tokens[63:70])
    assert cache.length(cache.open(200, tokens)) == 64
    assert cache.length(cache.open(200, tokens[:63])) == 0
    write(cache, seq, tokens[70:], told=False)
    assert cache.length(cache.open(200, tokens)) == 64


def test_a_path_is_known_by_the_tokens_it_keeps() -> None:
    cache = CacheManager()
    seq = cache.open(100)
    write(cache, seq, list(range(60)))
    rows = torch.zeros(2, 8, 4)
    cache.reserve(seq, 8)
    cache.pool(0, rows, rows)
    cache.stage(seq, 8, tokens=list(range(100, 108)))
    cache.commit(seq, [0, 2, 4, 6])
    assert cache.length(cache.open(9, [*range(60), 100, 102, 104, 106])) == 64
    assert cache.length(cache.open(9, [*range(60), 100, 101, 102, 103])) == 0


def test_sharing_can_be_off() -> None:
    cache = CacheManager(share_prefixes=False)
    tokens = tokens_of(4, 200)
    first = opened(cache, tokens)
    assert cache.length(cache.open(200, tokens)) == 0
    cache.close(first)
    assert cache.num_idle_blocks == 0


def test_equal_hashes_are_not_equal_tokens() -> None:
    """hash(-1) == hash(-2): a table that trusted hashes would take the one for the other."""
    ours, others = [-1] * BLOCK_SLOTS, [-2] * BLOCK_SLOTS
    assert hash(tuple(ours)) == hash(tuple(others))
    index = PrefixIndex()
    index.add(0, ours, 7)
    assert index.find(ours) == [7] and index.find(others) == []


def test_a_block_that_came_back_is_not_taken_for_what_it_was() -> None:
    index = PrefixIndex()
    first, second = [1] * BLOCK_SLOTS, [2] * BLOCK_SLOTS
    number = index.add(0, first, 0)
    index.add(number, second, 1)
    assert index.find(first + second) == [0, 1]
    index.forget(0)
    assert index.find(first + second) == [] and index.find(second) == []
    # The same tokens again, in the same place: what stood behind the old block stays behind it.
    assert index.add(0, first, 0) != number
    assert index.find(first + second) == [0]


def test_two_who_read_the_same_at_once_keep_their_own() -> None:
    cache = CacheManager()
    tokens = tokens_of(5, 200)
    one, two = cache.open(200), cache.open(200)
    write(cache, one, tokens)
    write(cache, two, tokens)
    cache.close(one)
    third = cache.open(300, tokens)
    assert cache.length(third) == 192
    write(cache, two, [5] * 100)
    assert holds(cache, two, tokens + [5] * 100) and holds(cache, third, tokens[:192])
    cache.close(two)
    cache.close(third)
    assert cache.num_free_blocks + cache.num_idle_blocks == cache.num_blocks


def test_idle_blocks_give_way_the_longest_idle_first() -> None:
    cache = CacheManager(max_bytes=8 * BLOCK_BYTES)
    texts = [tokens_of(i, 193) for i in range(3)]
    cache.close(opened(cache, texts[0]))
    cache.close(opened(cache, texts[1]))
    assert cache.cache_bytes <= 8 * BLOCK_BYTES and cache.num_idle_blocks == 6
    cache.close(cache.open(1, texts[0]))
    cache.close(opened(cache, texts[2]))
    assert cache.cache_bytes <= 8 * BLOCK_BYTES
    # The first was used after the second, of which the end went, as much as was needed.
    assert [cache.length(cache.open(1, text)) for text in texts] == [192, 64, 192]


def test_shared_blocks_count_once_against_the_bound() -> None:
    tokens = tokens_of(6, 256)
    alone = CacheManager(max_bytes=8 * BLOCK_BYTES, share_prefixes=False)
    shared = CacheManager(max_bytes=8 * BLOCK_BYTES)
    for cache, fit in ((alone, 0), (shared, 4)):
        opened(cache, tokens)
        for number in range(fit):
            opened(cache, [*tokens, number], reserve=1)
        with pytest.raises(OutOfMemory, match="max_bytes"):
            opened(cache, [*tokens, fit], reserve=1)
        assert cache.cache_bytes <= 8 * BLOCK_BYTES


def test_an_empty_cache_keeps_what_was_used_last() -> None:
    cache = CacheManager()
    system = tokens_of(7, 20 * BLOCK_SLOTS)
    texts = [system + tokens_of(i, 700) for i in range(10)]
    seqs = [opened(cache, text) for text in texts]
    assert cache.num_blocks > KEPT_BLOCKS
    for seq in seqs:
        cache.close(seq)
    assert cache.num_blocks == KEPT_BLOCKS and cache.num_idle_blocks == KEPT_BLOCKS
    for text in texts:
        seq = cache.open(1, text)
        assert cache.length(seq) >= len(system) and holds(cache, seq, text[: cache.length(seq)])
        cache.close(seq)
    assert cache.length(cache.open(1, texts[-1])) > len(system) + 512


def test_new_weights_forget_every_prefix() -> None:
    cache = CacheManager()
    tokens = tokens_of(8, 300)
    seq = opened(cache, tokens)
    with pytest.raises(InvalidConfig, match="1 sequences are open"):
        cache.forget_prefixes()
    cache.close(seq)
    cache.forget_prefixes()
    assert cache.num_free_blocks == cache.num_blocks and cache.num_idle_blocks == 0
    assert cache.length(cache.open(1, tokens)) == 0


def resident_kb() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize("share", [True, False], ids=["shared", "not shared"])
def test_ten_thousand_blocks_used_again_leak_nothing(share: bool) -> None:
    """Random texts with common beginnings come and go under a bound, some run out of memory."""
    chance = random.Random(9)
    cache = CacheManager(max_bytes=20 * BLOCK_BYTES, share_prefixes=share)
    systems = [tokens_of(i, 64 * i + 30) for i in range(5)]
    open_texts: dict[int, list[int]] = {}
    refused = released = 0

    def close(seq: int) -> int:
        count = -(-cache.length(seq) // BLOCK_SLOTS)
        cache.close(seq)
        del open_texts[seq]
        return count

    def turn(number: int) -> int:
        nonlocal released
        text = chance.choice(systems) + tokens_of(number, chance.randrange(1, 150))
        seq = cache.open(chance.choice((1, len(text), 400)), text[:-1])
        open_texts[seq] = []
        try:
            open_texts[seq] = text[: cache.length(seq)]
            write(cache, seq, text[cache.length(seq) :])
            open_texts[seq] = text
        except OutOfMemory:
            return 1
        finally:
            while len(open_texts) > chance.randrange(1, 9):
                closed = chance.choice(list(open_texts))
                if number % 10 == 0:
                    assert holds(cache, closed, open_texts[closed])
                released += close(closed)
        return 0

    number = 0
    while released < 12_000:
        refused += turn(number)
        number += 1
        if released < 2_000:
            before = resident_kb()
    assert resident_kb() <= before * 1.01
    assert refused > 0
    for seq in list(open_texts):
        assert holds(cache, seq, open_texts[seq])
        cache.close(seq)
    assert cache.num_free_blocks + cache.num_idle_blocks == cache.num_blocks <= 20
    cache.forget_prefixes()
    assert cache.num_free_blocks == cache.num_blocks
    assert not cache._allocator._owner and not any(cache._allocator._users)
    assert not cache._prefixes._blocks and not cache._prefixes._keys
    pool = cache.pool(0, torch.empty(2, 1, 4), torch.empty(2, 1, 4))
    assert not pool.keys.any() and not pool.values.any()


def test_a_cache_that_gives_nothing_back_stays_where_it_is() -> None:
    """What graphs of a GPU are bound to; blocks that are needed are taken all the same."""
    cache = CacheManager()
    cache.gives_back = False
    text = tokens_of(3, 100 * BLOCK_SLOTS + 5)
    first = opened(cache, text)
    size, made = cache.num_blocks, cache.pools_made
    assert size > KEPT_BLOCKS
    cache.close(first)
    again = cache.open(1, text)
    assert cache.length(again) == 100 * BLOCK_SLOTS and holds(
        cache, again, text[: 100 * BLOCK_SLOTS]
    )
    cache.close(again)
    cache.close(opened(cache, tokens_of(4, 90 * BLOCK_SLOTS)))
    assert (cache.num_blocks, cache.pools_made) == (size, made)
    cache.limit(None)
    assert cache.num_blocks == 0
