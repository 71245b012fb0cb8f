"""Philox4x32-10 and the noise addresses: every random number Outrider uses has one.

An address is (seed; sample, stream, anchor, draw). The key is the seed; the counter is
(block, sample, anchor, stream), and draw i is word i mod 4 of block i div 4. Rules in law anchor
at the committed length at the start of the round, so that no address serves two rounds. TARGET
alone is anchored at the token's own position: plain sampling and `coupled` share it on purpose.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float32, Float64, Int64

STREAM_VERIFY, STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_EXTRA = 0, 1, 2, 3, 4
STREAM_NAMES = ("VERIFY", "TARGET", "DRAFT", "ACCEPT", "EXTRA")

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_2 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_U_MASK, _U_32, _U_2 = np.uint64(_MASK), np.uint64(32), np.uint64(2)
_U_MULTIPLIER_0, _U_MULTIPLIER_2 = np.uint64(_MULTIPLIER_0), np.uint64(_MULTIPLIER_2)
_U_WEYL_0, _U_WEYL_1 = np.uint64(_WEYL_0), np.uint64(_WEYL_1)
# A handful of addresses costs less in Python integers than in a hundred array operations.
_FEW = 32
# Blocks worked on at once: six arrays of them stay in a processor's cache.
_TILE = 12288
_BELOW_ONE = 1.0 - 2.0**-53


def philox4x32(
    counter: Int64[Tensor, "... 4"], key: Int64[Tensor, "... 2"]
) -> Int64[Tensor, "... 4"]:
    """Ten rounds of Philox4x32; counter, key and result are words in [0, 2**32) held in int64."""
    return torch.stack(torch.broadcast_tensors(*_rounds(*counter.unbind(-1), *key.unbind(-1))), -1)


def words(
    seed: Tensor | int, sample: Tensor | int, stream: int, anchor: Tensor | int, draw: Tensor | int
) -> Int64[Tensor, "..."]:
    """The 32-bit words at addresses broadcast together, in [0, 2**32).

    Seeds are Python ints in [0, 2**64) or int64 tensors of the same bits; sample, anchor and
    draw are not negative, anchor and sample below 2**32, draw below 2**34.
    """
    return _pick(seed, sample, stream, anchor, draw, 1)[0]


def uniforms(
    seed: Tensor | int, sample: Tensor | int, stream: int, anchor: Tensor | int, draw: Tensor | int
) -> Float64[Tensor, "..."]:
    """`(word >> 8) / 2**24` of each address: multiples of 2**-24 in [0, 1), for accept tests."""
    return (words(seed, sample, stream, anchor, draw) >> 8).double() / 2.0**24


def round_uniforms(
    seed_B: Int64[Tensor, " B"],
    sample_B: Int64[Tensor, " B"],
    anchor_B: Int64[Tensor, " B"],
    num_tests: int,
) -> tuple[Float64[Tensor, "B N"], Float64[Tensor, " B"]]:
    """`uniforms` of the first draws on ACCEPT, and `uniforms53` of index 0 on EXTRA.

    On the CPU all of them come from one pass, and a block serves four tests.
    """
    if seed_B.device.type != "cpu":
        address = seed_B[:, None], sample_B[:, None], STREAM_ACCEPT, anchor_B[:, None]
        tests_BN = uniforms(*address, torch.arange(num_tests, device=seed_B.device))
        return tests_BN, uniforms53(seed_B, sample_B, STREAM_EXTRA, anchor_B, 0)
    if _active.get() is not None:
        for stream, num in ((STREAM_ACCEPT, num_tests), (STREAM_EXTRA, 2)):
            address = seed_B[:, None], sample_B[:, None], stream, anchor_B[:, None]
            _record(*address, torch.arange(num))
    num_blocks = (num_tests + 3) // 4
    if 2 * len(seed_B) * (num_blocks + 1) <= _FEW:
        return _few_round_uniforms(seed_B, sample_B, anchor_B, num_tests)
    block_T = np.append(np.arange(num_blocks, dtype=np.uint64), np.uint64(0))
    stream_T = np.full_like(block_T, STREAM_ACCEPT)
    stream_T[-1] = STREAM_EXTRA
    seed, sample, anchor = (
        part.numpy().view(np.uint64)[:, None] for part in (seed_B, sample_B, anchor_B)
    )
    counter = block_T[None], sample & _U_MASK, anchor & _U_MASK, stream_T[None]
    words_BT4 = np.stack(_array_rounds(*counter, seed & _U_MASK, seed >> _U_32), -1)
    tests_BN = (words_BT4[:, :-1].reshape(len(seed), 4 * num_blocks) >> np.uint64(8)) / 2.0**24
    high, low = (torch.from_numpy(word.view(np.int64)) for word in words_BT4[:, -1, :2].T)
    return torch.from_numpy(tests_BN[:, :num_tests]), _uniform53(high, low)


def _few_round_uniforms(
    seed_B: Tensor, sample_B: Tensor, anchor_B: Tensor, num_tests: int
) -> tuple[Tensor, Tensor]:
    """`round_uniforms` of few texts in Python integers."""
    tests: list[list[float]] = []
    extra: list[list[int]] = []
    for parts in zip(seed_B.tolist(), sample_B.tolist(), anchor_B.tolist(), strict=True):
        seed, sample, anchor = parts[0], parts[1] & _MASK, parts[2] & _MASK
        key = seed & _MASK, seed >> 32 & _MASK
        blocks = [
            _scalar_rounds(block, sample, anchor, STREAM_ACCEPT, *key)
            for block in range((num_tests + 3) // 4)
        ]
        words_T = [word for block in blocks for word in block]
        tests.append([(word >> 8) / 2.0**24 for word in words_T[:num_tests]])
        extra.append(list(_scalar_rounds(0, sample, anchor, STREAM_EXTRA, *key)[:2]))
    tests_BN = torch.tensor(tests, dtype=torch.float64).view(len(tests), num_tests)
    return tests_BN, _uniform53(*torch.tensor(extra, dtype=torch.int64).view(-1, 2).unbind(1))


def uniforms53(
    seed: Tensor | int, sample: Tensor | int, stream: int, anchor: Tensor | int, index: Tensor | int
) -> Float64[Tensor, "..."]:
    """One uniform of 53 bits per index, never 0 nor 1, from draws 2*index (high) and 2*index + 1.

    It is `((high << 21 | low >> 11) + 0.5) / 2**53` rounded to float64; the one word that would
    round to 1 gives the largest float below 1.
    """
    return _uniform53(*_pick(seed, sample, stream, anchor, index, 2))


def gumbels(
    seed: Tensor | int, sample: Tensor | int, anchor: Tensor | int, token_ids: Tensor
) -> Float64[Tensor, "..."]:
    """Standard Gumbel noise `-log(-log u)` of tokens at positions `anchor`, on stream TARGET."""
    return _gumbel(uniforms53(seed, sample, STREAM_TARGET, anchor, token_ids))


def gumbel_rows(
    seed_R: Int64[Tensor, " R"],
    sample_R: Int64[Tensor, " R"],
    anchor_R: Int64[Tensor, " R"],
    vocab_size: int,
) -> Float64[Tensor, "R V"]:
    """`gumbels` of every token of each row at half the cost: one block serves two tokens."""
    if seed_R.device.type == "cpu":
        uniform_RV = torch.empty(len(seed_R), vocab_size, dtype=torch.float64)
        for rows, columns, made in _row_tiles(seed_R, sample_R, anchor_R, vocab_size):
            w0, w1, w2, w3 = (torch.from_numpy(word.view(np.int64)) for word in made)
            tile = uniform_RV[rows, columns]
            tile[:, 0::2] = _uniform53(w0, w1)
            tile[:, 1::2] = _uniform53(w2, w3)[:, : tile.shape[1] // 2]
        return _gumbel(uniform_RV)
    _record_rows(seed_R, sample_R, anchor_R, vocab_size)
    address = seed_R[:, None], sample_R[:, None], STREAM_TARGET, anchor_R[:, None]
    blocks = torch.arange((vocab_size + 1) // 2, device=seed_R.device)
    w0, w1, w2, w3 = torch.broadcast_tensors(*_blocks(*address, blocks))
    uniform = torch.stack((_uniform53(w0, w1), _uniform53(w2, w3)), -1)
    return _gumbel(uniform.flatten(1)[:, :vocab_size])


def shortfall_rows(
    seed_R: Int64[Tensor, " R"],
    sample_R: Int64[Tensor, " R"],
    anchor_R: Int64[Tensor, " R"],
    vocab_size: int,
) -> Float32[Tensor, "R V"]:
    """How far the uniforms behind `gumbel_rows` fall short of 1, rounded down to 2**-32.

    In units of 2**-32, on the CPU. They cost a fifth of the noise itself, and bound it: as
    `-log u >= 1 - u`, a token's Gumbel noise is at most `-log(shortfall * 2**-32)`.
    """
    out_RV = torch.empty(len(seed_R), vocab_size)
    full = out_RV.numpy()
    for rows, columns, (w0, _, w2, _) in _row_tiles(seed_R, sample_R, anchor_R, vocab_size):
        tile = full[rows, columns]
        # Rounding to float32 is by one part in 2**24, either way.
        np.subtract(_U_MASK, w0, out=tile[:, 0::2], casting="unsafe")
        odd = tile[:, 1::2]
        np.subtract(_U_MASK, w2[:, : odd.shape[1]], out=odd, casting="unsafe")
    return out_RV


def fresh_seed() -> int:
    """A seed of 64 bits from the system's entropy."""
    return secrets.randbits(64)


def as_key(seeds: Iterable[int]) -> Int64[Tensor, " B"]:
    """Seeds in [0, 2**64) as an int64 tensor of the same bits."""
    return torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64)


class NoiseLedger:
    """Records every address used while it is active, and refuses a second use.

    `with NoiseLedger() as ledger:` makes any second use of an address an AssertionError that
    names it, except on TARGET, which is shared on purpose. `addresses` are the tuples
    (seed, sample, stream, anchor, draw) seen so far. Without an active ledger nothing is recorded.
    """

    def __init__(self) -> None:
        self.addresses: set[tuple[int, int, int, int, int]] = set()
        self._token: Token[NoiseLedger | None] | None = None

    def __enter__(self) -> Self:
        self._token = _active.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._token is not None
        _active.reset(self._token)

    def record(self, addresses: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Adds addresses; raises AssertionError where one outside TARGET was there before."""
        for address in addresses:
            seed, sample, stream, anchor, draw = address
            if stream != STREAM_TARGET and address in self.addresses:
                raise AssertionError(
                    f"noise address used twice: seed {seed}, sample {sample}, stream "
                    f"{STREAM_NAMES[stream]}, anchor {anchor}, draw {draw}"
                )
            self.addresses.add(address)


_active: ContextVar[NoiseLedger | None] = ContextVar("noise_ledger", default=None)


def _pick(
    seed: Tensor | int,
    sample: Tensor | int,
    stream: int,
    anchor: Tensor | int,
    index: Tensor | int,
    width: int,
) -> tuple[Tensor, ...]:
    """Item `index` of the stream, items being `width` (1 or 2) consecutive words of a block."""
    if _active.get() is not None:
        first = torch.as_tensor(index)[..., None] * width
        wide = [p[..., None] if isinstance(p, Tensor) else p for p in (seed, sample, anchor)]
        _record(wide[0], wide[1], stream, wide[2], first + torch.arange(width, device=first.device))
    shift = 3 - width  # log2 of the items in a block of four words
    few = _few(seed, sample, stream, anchor, index, shift)
    if few is not None:
        shape, blocks, items = few
        rows = zip(blocks, items, strict=True)
        picked = [block[width * item : width * (item + 1)] for block, item in rows]
        return torch.tensor(picked, dtype=torch.int64).view(*shape, width).unbind(-1)
    index = torch.as_tensor(index)
    made = torch.broadcast_tensors(*_blocks(seed, sample, stream, anchor, index >> shift))
    item = (index & ((1 << shift) - 1)).expand(made[0].shape)
    if width == 2:
        odd = item == 1
        return torch.where(odd, made[2], made[0]), torch.where(odd, made[3], made[1])
    return (torch.stack(made, -1).gather(-1, item[..., None]).squeeze(-1),)


def _few(
    seed: Tensor | int,
    sample: Tensor | int,
    stream: int,
    anchor: Tensor | int,
    index: Tensor | int,
    shift: int,
) -> tuple[torch.Size, list[tuple[int, int, int, int]], list[int]] | None:
    """Blocks and items in Python integers where the addresses are few and on the CPU, else None."""
    parts = (seed, sample, anchor, index)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if any(part.numel() > _FEW or part.device.type != "cpu" for part in tensors):
        return None
    shape = torch.Size(np.broadcast_shapes(*(part.shape for part in tensors)))
    if shape.numel() > _FEW:
        return None
    columns = [_column(part, shape) for part in parts]
    made: dict[tuple[int, int, int, int], tuple[int, int, int, int]] = {}
    blocks: list[tuple[int, int, int, int]] = []
    for row in zip(*columns, strict=True):
        seed_, sample_, anchor_, index_ = row
        place = (seed_, sample_, anchor_, index_ >> shift)
        if place not in made:
            counter = (index_ >> shift & _MASK, sample_ & _MASK, anchor_ & _MASK, stream)
            made[place] = _scalar_rounds(*counter, seed_ & _MASK, seed_ >> 32 & _MASK)
        blocks.append(made[place])
    return shape, blocks, [index_ & ((1 << shift) - 1) for index_ in columns[3]]


def _column(part: Tensor | int, shape: torch.Size) -> list[int]:
    if not isinstance(part, Tensor):
        return [part] * shape.numel()
    if part.numel() == 1:
        return [int(part)] * shape.numel()
    return part.expand(shape).flatten().tolist()


def _blocks(
    seed: Tensor | int, sample: Tensor | int, stream: int, anchor: Tensor | int, block: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block; shapes broadcast against each other but may differ."""
    seed, sample, anchor = (
        part
        if isinstance(part, Tensor)
        else torch.tensor(signed(part), dtype=torch.int64, device=block.device)
        for part in (seed, sample, anchor)
    )
    lane = torch.full((), stream, dtype=torch.int64, device=block.device)
    low, high = seed & _MASK, seed >> 32 & _MASK
    return _rounds(block & _MASK, sample & _MASK, anchor & _MASK, lane, low, high)


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds; the arguments only broadcast, so that equal words are computed once."""
    parts = (c0, c1, c2, c3, k0, k1)
    if any(part.device.type != "cpu" for part in parts):
        return _tensor_rounds(*parts)
    # numpy's arrays take half the time of CPU tensors here, and a quarter where they are small.
    made = _array_rounds(*(part.numpy().view(np.uint64) for part in parts))
    w0, w1, w2, w3 = (torch.from_numpy(np.asarray(word).view(np.int64)) for word in made)
    return w0, w1, w2, w3


def _array_rounds(
    c0: NDArray[np.uint64],
    c1: NDArray[np.uint64],
    c2: NDArray[np.uint64],
    c3: NDArray[np.uint64],
    k0: NDArray[np.uint64],
    k1: NDArray[np.uint64],
    *,
    num_rounds: int | None = None,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """`_tensor_rounds` on unsigned arrays; None = all rounds."""
    for _ in range(_NUM_ROUNDS if num_rounds is None else num_rounds):
        product_0, product_2 = c0 * _U_MULTIPLIER_0, c2 * _U_MULTIPLIER_2
        c0 = ((product_2 >> _U_32) ^ c1 ^ k0) & _U_MASK
        c2 = ((product_0 >> _U_32) ^ c3 ^ k1) & _U_MASK
        c1, c3 = product_2, product_0
        k0, k1 = k0 + _U_WEYL_0, k1 + _U_WEYL_1
    return c0, c1 & _U_MASK, c2, c3 & _U_MASK


def _row_tiles(
    seed_R: Tensor, sample_R: Tensor, anchor_R: Tensor, vocab_size: int
) -> Iterator[tuple[slice, slice, tuple[NDArray[np.uint64], ...]]]:
    """The four words of each block of tokens on TARGET, tile by tile: rows, columns, words.

    A tile's words share memory with the next one's: they are in a processor's cache, and theirs
    to keep for nobody. A block serves two tokens; the last may serve one.
    """
    _record_rows(seed_R, sample_R, anchor_R, vocab_size)
    seed, sample, anchor = (
        part.numpy().view(np.uint64)[:, None] for part in (seed_R, sample_R, anchor_R)
    )
    num_blocks = (vocab_size + 1) // 2
    width = min(num_blocks, _TILE)
    height = max(1, _TILE // max(1, width))
    room = np.empty((6, height, width), dtype=np.uint64)
    for top in range(0, len(seed), height):
        rows = slice(top, min(top + height, len(seed)))
        low, high = seed[rows] & _U_MASK, seed[rows] >> _U_32
        for first in range(0, num_blocks, width):
            last = min(first + width, num_blocks)
            buffers = room[:, : rows.stop - top, : last - first]
            counter = np.arange(first, last, dtype=np.uint64)[None] & _U_MASK
            yield (
                rows,
                slice(2 * first, min(2 * last, vocab_size)),
                _tile_rounds(counter, sample[rows], anchor[rows], low, high, buffers),
            )


def _tile_rounds(
    block: NDArray[np.uint64],
    sample: NDArray[np.uint64],
    anchor: NDArray[np.uint64],
    k0: NDArray[np.uint64],
    k1: NDArray[np.uint64],
    room: NDArray[np.uint64],
) -> tuple[NDArray[np.uint64], ...]:
    """`_array_rounds` of blocks `[1, n]` under keys `[R, 1]` in six given arrays `[R, n]`."""
    c0, c1, c2, c3, p0, p2 = room
    # Two rounds on what is one word a row or one a block, before all words are wide.
    parts = block, sample & _U_MASK, anchor & _U_MASK, np.full((1, 1), STREAM_TARGET, np.uint64)
    for given, own in zip(
        _array_rounds(*parts, k0, k1, num_rounds=2), (c0, c1, c2, c3), strict=True
    ):
        own[...] = given
    k0, k1 = k0 + _U_2 * _U_WEYL_0, k1 + _U_2 * _U_WEYL_1
    for _ in range(2, _NUM_ROUNDS):
        np.multiply(c0, _U_MULTIPLIER_0, out=p0)
        np.multiply(c2, _U_MULTIPLIER_2, out=p2)
        # Words 1 and 3 and the keys keep stray high bits, which the masks remove.
        np.right_shift(p2, _U_32, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, k0, out=c0)
        np.bitwise_and(c0, _U_MASK, out=c0)
        np.right_shift(p0, _U_32, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, k1, out=c2)
        np.bitwise_and(c2, _U_MASK, out=c2)
        c1, c3, p0, p2 = p2, p0, c3, c1
        k0, k1 = k0 + _U_WEYL_0, k1 + _U_WEYL_1
    np.bitwise_and(c1, _U_MASK, out=c1)
    np.bitwise_and(c3, _U_MASK, out=c3)
    return c0, c1, c2, c3


def _tensor_rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds in int64 on any device.

    A product of two 32-bit words wraps in int64, but its bits are right. Words 1 and 3 and the
    keys keep stray high bits, which the mask of the next round removes.
    """
    for _ in range(_NUM_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0 = ((product_2 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = product_2, product_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1 & _MASK, c2, c3 & _MASK


def _scalar_rounds(
    c0: int, c1: int, c2: int, c3: int, k0: int, k1: int
) -> tuple[int, int, int, int]:
    """`_rounds` in Python integers."""
    for _ in range(_NUM_ROUNDS):
        product_0, product_2 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_2
        c0, c1 = (product_2 >> 32) ^ c1 ^ k0, product_2 & _MASK
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = k0 + _WEYL_0 & _MASK, k1 + _WEYL_1 & _MASK
    return c0, c1, c2, c3


def _uniform53(high: Tensor, low: Tensor) -> Tensor:
    return ((high << 21 | low >> 11).double().add_(0.5)).mul_(2.0**-53).clamp_(max=_BELOW_ONE)


def _gumbel(uniform: Tensor) -> Tensor:
    return uniform.log_().neg_().log_().neg_()


def signed(word: int) -> int:
    """64 bits as the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word


def _record_rows(seed_R: Tensor, sample_R: Tensor, anchor_R: Tensor, vocab_size: int) -> None:
    if _active.get() is not None:
        draws = torch.arange(2 * vocab_size, device=seed_R.device)
        _record(seed_R[:, None], sample_R[:, None], STREAM_TARGET, anchor_R[:, None], draws)


def _record(
    seed: Tensor | int, sample: Tensor | int, stream: int, anchor: Tensor | int, draw: Tensor
) -> None:
    ledger = _active.get()
    assert ledger is not None
    parts = [torch.as_tensor(signed(p) if isinstance(p, int) else p) for p in (seed, sample)]
    parts += [torch.tensor(stream), torch.as_tensor(anchor), draw]
    columns = [part.flatten().tolist() for part in torch.broadcast_tensors(*parts)]
    seeds = [seed % 2**64 for seed in columns[0]]
    ledger.record(zip(seeds, *columns[1:], strict=True))
