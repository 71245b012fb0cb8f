"""The cache of one model: per layer one key and one value pool, one block table for all of them.

Staging is two steps, so that a failing forward leaves nothing behind: `reserve` finds slots,
`stage` counts them in once the forward has written them. `commit` keeps a prefix or a path of the
staged rows. Sequences that begin with the same tokens share the full blocks of those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from outrider.cache.blocks import BLOCK_SLOTS, BlockAllocator
from outrider.cache.prefixes import NO_BLOCK, PrefixIndex
from outrider.config import check_whole
from outrider.errors import InvalidConfig, OutOfMemory, not_open
from outrider.host import send

KEPT_BLOCKS = 64
"""Blocks an empty cache keeps, with the beginnings they hold, for the next text: made anew each
time they would cost more."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Where tokens `0..count-1` of a sequence lie: a run from `start`, or the blocks of a table."""

    count: int
    start: int | None
    table: tuple[int, ...]

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that the tokens fill, in order."""
        if self.start is None:
            return self.table
        first = self.start // BLOCK_SLOTS
        return range(first, first - (-self.count // BLOCK_SLOTS))

    def index(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return the slots of tokens `first..last-1`, int64."""
        if self.start is not None:
            return torch.arange(first + self.start, last + self.start, device=device)
        token, blocks = torch.arange(first, last), torch.tensor(self.table)
        return send(blocks[token // BLOCK_SLOTS] * BLOCK_SLOTS + token % BLOCK_SLOTS, device)


@dataclass(slots=True)
class _Sequence:
    length: int = 0
    num_staged: int = 0
    ancestors: Tensor | None = None
    blocks: list[int] = field(default_factory=list[int])
    # Tokens of the staged rows and of the last, partly filled block; None: not all are known.
    staged: list[int] | None = field(default_factory=list[int])
    tail: list[int] | None = field(default_factory=list[int])
    last_number: int = NO_BLOCK

    def forget_staged(self) -> None:
        self.num_staged, self.ancestors, self.staged = 0, None, []


@dataclass(slots=True)
class LayerPool:
    """Keys and values of one layer, each `[kv_heads, slots, head_dim]`."""

    keys: Tensor
    values: Tensor


class CacheManager:
    """Sequences of cached tokens: open, reserve, stage, commit or discard, close.

    `max_bytes` bounds what all pools may take, None is no bound. The pools' shapes are learnt from
    the first keys and values written, so families with layers of different shapes need no
    description. An empty cache gives large pools back while `gives_back`: what a GPU has captured
    is bound to where they lie.

    With `share_prefixes` a new sequence takes the full blocks that hold the beginning of its tokens
    by reference, also those of sequences closed since, as long as their blocks are not needed: idle
    blocks go, the longest idle first, before pools of more than `KEPT_BLOCKS` blocks grow.
    """

    def __init__(self, max_bytes: int | None = None, *, share_prefixes: bool = True) -> None:
        self._max_bytes = max_bytes
        self._shares = share_prefixes
        self.gives_back = True
        self._prefixes = PrefixIndex()
        self._allocator = BlockAllocator()
        self._sequences: dict[int, _Sequence] = {}
        self._pools: dict[int, LayerPool] = {}
        self._next_handle = 0
        self._known_block_bytes = 0
        # Counts up when pools are made, or made anew elsewhere.
        self.pools_made = 0

    @property
    def num_blocks(self) -> int:
        """Blocks the pools hold."""
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses and that hold nothing."""
        return self._allocator.num_free

    @property
    def num_idle_blocks(self) -> int:
        """Blocks no sequence uses, kept for one that begins with the same tokens."""
        return self._prefixes.num_idle

    @property
    def max_bytes(self) -> int | None:
        """What all pools may take; None is no bound."""
        return self._max_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes the pools take."""
        pools = self._pools.values()
        return sum(tensor.nbytes for pool in pools for tensor in (pool.keys, pool.values))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers; 0 until the first forward has shown them."""
        if not (self.num_blocks and self._pools):
            return self._known_block_bytes
        # A forward of the first layers alone has made their pools only.
        return max(self._known_block_bytes, self.cache_bytes // self.num_blocks)

    def limit(self, max_bytes: int | None) -> None:
        """Bound what the pools may take from now on; an empty cache gives its pools back.

        Raises:
            InvalidConfig: less than one block takes.
        """
        if max_bytes is not None:
            check_whole("cache_bytes", max_bytes, max(1, self.block_bytes))
        self._max_bytes = max_bytes
        if not self._sequences:
            self._drop_pools()

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new sequence that may grow to about `reserve` tokens.

        It holds the full blocks that are known to hold the beginning of `prefix`; else it is empty.
        """
        if reserve < 0:
            raise InvalidConfig(
                f"reserve is {reserve} tokens; give the length the sequence may grow to, 0 or more"
            )
        seq = self._next_handle
        self._next_handle += 1
        blocks = self._prefixes.find(prefix)
        sequence = _Sequence(len(blocks) * BLOCK_SLOTS, last_number=self._prefixes.number(blocks))
        self._sequences[seq] = sequence
        try:
            for block in blocks:
                self._allocator.hold(block)
                sequence.blocks.append(block)
                self._prefixes.use(block)
            wanted = -(-max(reserve, 1) // BLOCK_SLOTS) - len(blocks)
            if wanted > 0:
                self._promise(seq, blocks, wanted)
        except BaseException:
            self.close(seq)
            raise
        return seq

    def length(self, seq: int) -> int:
        """Return the sequence's committed tokens."""
        return self._sequence(seq).length

    def num_staged(self, seq: int) -> int:
        """Return the rows staged since the last commit or discard."""
        return self._sequence(seq).num_staged

    def reserve(self, seq: int, num_rows: int) -> Slots:
        """Find slots for `num_rows` more rows behind the staged ones; nothing is staged yet.

        Raises:
            OutOfMemory: the pools are full and may not grow.
        """
        sequence = self._sequence(seq)
        count = sequence.length + sequence.num_staged + num_rows
        blocks = sequence.blocks
        known = len(blocks)
        try:
            while len(blocks) * BLOCK_SLOTS < count:
                self._ensure_free_block()
                blocks.append(self._allocator.take(seq, blocks[-1] if blocks else None))
        except OutOfMemory:
            for block in blocks[known:]:
                self._allocator.drop(block)
            del blocks[known:]
            raise
        is_run = blocks[-1] - blocks[0] + 1 == len(blocks) and blocks == sorted(blocks)
        return Slots(
            count, blocks[0] * BLOCK_SLOTS if is_run else None, () if is_run else tuple(blocks)
        )

    @property
    def pools(self) -> Mapping[int, LayerPool]:
        """The pools there are, by layer; other ones whenever `pools_made` counts up."""
        return self._pools

    def pool(self, layer: int, keys_like: Tensor, values_like: Tensor) -> LayerPool:
        """Return the layer's pool, made at first use for rows `[kv_heads, rows, head_dim]`."""
        pool = self._pools.get(layer)
        if pool is None:
            pool = LayerPool(
                _empty_like(keys_like, self.num_blocks), _empty_like(values_like, self.num_blocks)
            )
            self._pools[layer] = pool
            self.pools_made += 1
        return pool

    def ancestors(self, seq: int) -> Tensor | None:
        """Return the bitmasks of the staged rows, int64 `[num_staged]`; None for a chain."""
        return self._sequence(seq).ancestors

    def stage(
        self,
        seq: int,
        num_rows: int,
        ancestors: Tensor | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Count in `num_rows` rows whose keys and values are now written.

        `ancestors` are the bitmasks of all staged rows, these included; None for a chain. `tokens`
        are those of the new rows; where they are not told, the sequence's further blocks are not
        shared.
        """
        sequence = self._sequence(seq)
        sequence.num_staged += num_rows
        sequence.ancestors = ancestors
        if tokens is None:
            sequence.staged = None
        elif sequence.staged is not None:
            sequence.staged += tokens

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or those it names, ascending; forget the others.

        Raises:
            InvalidConfig: the path names rows that are not staged, or not in ascending order.
        """
        sequence = self._sequence(seq)
        nodes = range(path) if isinstance(path, int) else path
        _check_path(path, nodes, sequence.num_staged)
        moved = next((i for i, node in enumerate(nodes) if node != i), len(nodes))
        if moved < len(nodes):
            self._move(seq, sequence, list(nodes[moved:]), moved)
        sequence.length += len(nodes)
        self._learn(sequence, nodes)
        sequence.forget_staged()

    def discard(self, seq: int) -> None:
        """Forget every staged row."""
        self._sequence(seq).forget_staged()

    def close(self, seq: int) -> None:
        """Let go of the sequence's blocks; its handle means nothing afterwards."""
        sequence = self._sequence(seq)
        del self._sequences[seq]
        self._allocator.release(seq, sequence.blocks)
        # From the end: what is behind goes before what it stands on.
        for block in reversed(sequence.blocks):
            if not self._allocator.users(block):
                self._wipe(block)
            elif self._allocator.users(block) == 1 and block in self._prefixes:
                self._prefixes.rest(block)
        if self.gives_back and not self._sequences and self.num_blocks > KEPT_BLOCKS:
            self._shrink()

    def forget_prefixes(self) -> None:
        """Share nothing of what is cached now: the model has changed.

        Raises:
            InvalidConfig: a sequence is open, and holds what the model was.
        """
        if self._sequences:
            raise InvalidConfig(
                f"{len(self._sequences)} sequences are open and hold keys and values of the old "
                "weights; close them first"
            )
        while self._evict():
            pass

    def _sequence(self, seq: int) -> _Sequence:
        sequence = self._sequences.get(seq)
        if sequence is None:
            raise not_open(seq)
        return sequence

    def _move(self, seq: int, sequence: _Sequence, nodes: list[int], first: int) -> None:
        slots = self.reserve(seq, 0)
        with torch.no_grad():
            index = slots.index(sequence.length, slots.count, torch.device("cpu"))
            moves = index[torch.tensor(nodes)], index[first : first + len(nodes)]
            sent: dict[torch.device, tuple[Tensor, Tensor]] = {}
            for pool in self._pools.values():
                device = pool.keys.device
                if device not in sent:
                    sent[device] = send(moves[0], device), send(moves[1], device)
                source, goal = sent[device]
                pool.keys[:, goal] = pool.keys[:, source]
                pool.values[:, goal] = pool.values[:, source]

    def _learn(self, sequence: _Sequence, nodes: Sequence[int]) -> None:
        """Know the blocks that the committed rows `nodes` have filled by their tokens."""
        if not self._shares or sequence.tail is None or not nodes:
            return
        if sequence.staged is None:
            sequence.tail = None
            return
        tail = sequence.tail
        tail += [sequence.staged[node] for node in nodes]
        while len(tail) >= BLOCK_SLOTS:
            block = sequence.blocks[(sequence.length - len(tail)) // BLOCK_SLOTS]
            full = tail[:BLOCK_SLOTS]
            sequence.last_number = self._prefixes.add(sequence.last_number, full, block)
            if block in self._prefixes:
                self._allocator.hold(block)
            del tail[:BLOCK_SLOTS]

    def _wipe(self, block: int) -> None:
        slots = slice(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS)
        with torch.no_grad():
            for pool in self._pools.values():
                # A stale NaN would survive a zero weight (0 * NaN): hand on clean blocks.
                pool.keys[:, slots].zero_()
                pool.values[:, slots].zero_()

    def _evict(self) -> bool:
        """Free the block that has been idle for longest; False where there is none."""
        block = self._prefixes.oldest()
        if block is None:
            return False
        self._prefixes.forget(block)
        self._allocator.drop(block)
        self._wipe(block)
        return True

    def _promise(self, seq: int, blocks: list[int], wanted: int) -> None:
        """Keep a run of blocks for the sequence, right behind its own if that is to be had."""
        if blocks and self._allocator.promise_behind(seq, blocks[-1], wanted):
            return
        total = self.num_blocks + wanted
        while not self._allocator.promise(seq, wanted):
            if not (self._may_hold(total) and total <= KEPT_BLOCKS) and self._evict():
                continue
            if not self._may_hold(total):
                return
            self._grow(total)

    def _drop_pools(self) -> None:
        self._known_block_bytes = self.block_bytes
        self._pools = {}
        self.pools_made += 1
        self._allocator = BlockAllocator()
        self._prefixes = PrefixIndex()

    def _shrink(self) -> None:
        """Keep the idle blocks used last, in pools as small as an empty cache may have."""
        idle = self._prefixes.idle()
        kept = sorted(idle[-KEPT_BLOCKS:])
        if not kept:
            self._drop_pools()
            return
        for block in idle[:-KEPT_BLOCKS]:
            self._prefixes.forget(block)
        small = {
            layer: LayerPool(_picked(pool.keys, kept), _picked(pool.values, kept))
            for layer, pool in self._pools.items()
        }
        # All or none: blocks have other numbers there.
        self.pools_made += 1
        self._pools = small
        self._prefixes.move({block: place for place, block in enumerate(kept)})
        self._allocator = BlockAllocator(KEPT_BLOCKS)
        for place in range(len(kept)):
            self._allocator.hold(place)

    def _may_hold(self, num_blocks: int) -> bool:
        return self._max_bytes is None or num_blocks * self.block_bytes <= self._max_bytes

    def _ensure_free_block(self) -> None:
        if self._allocator.num_free or (self.num_blocks >= KEPT_BLOCKS and self._evict()):
            return
        for wanted in (2 * self.num_blocks or 1, self.num_blocks + 1):
            if self._may_hold(wanted):
                self._grow(wanted)
                return
        if self._evict():
            return
        raise OutOfMemory(
            f"the cache holds {self.num_blocks * BLOCK_SLOTS} tokens in {self.cache_bytes} bytes "
            f"and may not pass max_bytes={self._max_bytes}; "
            "close sequences, admit fewer at a time, or raise max_bytes"
        )

    def _grow(self, num_blocks: int) -> None:
        # At least doubling keeps the copies amortised.
        num_blocks = max(
            num_blocks, 2 * self.num_blocks if self._may_hold(2 * self.num_blocks) else 0
        )
        # Whoever knows where pools are asks for the number: also where memory ends in the midst.
        self.pools_made += 1
        for layer, pool in self._pools.items():
            self._pools[layer] = LayerPool(
                _grown(pool.keys, num_blocks), _grown(pool.values, num_blocks)
            )
        self._allocator.grow(num_blocks)


def _check_path(path: int | Sequence[int], nodes: Sequence[int], num_staged: int) -> None:
    ascending = all(a < b for a, b in pairwise(nodes))
    if (
        (isinstance(path, int) and path < 0)
        or not ascending
        or (nodes and not 0 <= nodes[0] <= nodes[-1] < num_staged)
    ):
        raise InvalidConfig(
            f"commit of {path!r} with {num_staged} rows staged; "
            f"give a count up to {num_staged} or ascending node indices"
        )


def _empty_like(rows: Tensor, num_blocks: int) -> Tensor:
    heads, _, dim = rows.shape
    # A pool outlives the forward that made it, and must be writable outside of inference mode.
    with torch.inference_mode(False):
        return torch.zeros(
            heads, num_blocks * BLOCK_SLOTS, dim, dtype=rows.dtype, device=rows.device
        )


def _picked(pool: Tensor, blocks: list[int]) -> Tensor:
    """A pool as an empty cache keeps it, with these blocks first."""
    picked = _empty_like(pool, KEPT_BLOCKS)
    for place, block in enumerate(blocks):
        goal = slice(place * BLOCK_SLOTS, (place + 1) * BLOCK_SLOTS)
        picked[:, goal] = pool[:, block * BLOCK_SLOTS : (block + 1) * BLOCK_SLOTS]
    return picked


def _grown(pool: Tensor, num_blocks: int) -> Tensor:
    if pool.shape[1] >= num_blocks * BLOCK_SLOTS:
        # It grew before memory ended in the midst.
        return pool
    grown = _empty_like(pool, num_blocks)
    grown[:, : pool.shape[1]] = pool
    return grown
