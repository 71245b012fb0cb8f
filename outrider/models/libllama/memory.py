"""A context of libllama: cells for keys and values, ids for sequences, and one pass over rows.

All sequences share one buffer of cells. It begins small; where cells or ids run out, a larger
context takes its place with everything that was held, so that nobody says beforehand how long texts
will be.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import ModelError, OutOfMemory
from outrider.models.libllama.file import ModelFile
from outrider.models.libllama.library import CHANGING, complaint, forget_complaints, interrupted

if TYPE_CHECKING:
    from jaxtyping import Float

CELL_STEP = 256
"""libllama gives cells in steps of so many."""

FIRST_CELLS = 2048
FIRST_IDS = 8
MAX_IDS = 256
"""libllama's own bound on sequences."""

BATCH_ROWS = 2048
UNIT_ROWS = 512
_NO_SLOT = 1


class Memory:
    """Cells and ids of one model's texts, which grow as they are needed.

    Args:
        file: the model.
        threads: threads of a pass.
        cells: tokens that are held at first.

    Raises:
        OutOfMemory: there is no room for the context.
        ModelError: libllama makes none of this model.
    """

    def __init__(self, file: ModelFile, *, threads: int, cells: int = FIRST_CELLS) -> None:
        self.file = file
        # A longer context would have other rotary frequencies.
        first = file.first_context
        self._ceiling = None if first is None else max(CELL_STEP, first // CELL_STEP * CELL_STEP)
        self.max_cells = self._ceiling
        self._bindings = file.bindings
        self._threads = threads
        self._free_ids = list(range(FIRST_IDS - 1, -1, -1))
        self._num_ids = FIRST_IDS
        self.cells = 0
        cells = cells if self._ceiling is None else min(cells, self._ceiling)
        self._context, self._close = self._make(cells, FIRST_IDS)

    def _make(self, cells: int, ids: int) -> tuple[Any, Any]:
        """A context, and what frees it; sets everything that belongs to it."""
        bindings = self._bindings
        params = bindings.llama_context_default_params()
        params.n_ctx = -(-cells // CELL_STEP) * CELL_STEP
        params.n_batch, params.n_ubatch = BATCH_ROWS, UNIT_ROWS
        params.n_seq_max, params.kv_unified = ids, True
        # Every layer keeps all its tokens: what a window has left is needed again after a rollback.
        params.swa_full = True
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        with CHANGING:
            forget_complaints()
            context = bindings.llama_init_from_model(self.file.handle, params)
            interrupt, reason = interrupted(), complaint()
        # The file outlives its contexts.
        close = weakref.finalize(self, _freed, bindings, context, self.file) if context else None
        if interrupt is not None:
            if close is not None:
                close()
            raise interrupt
        if close is None:
            raise OutOfMemory(
                f"no context of {cells} tokens for {str(self.file.path)!r}: {reason}; ask for "
                "shorter texts or fewer at a time (max_texts)"
            )
        self.cells = int(bindings.llama_n_ctx(context))
        self._num_ids = ids
        self._memory: Any = bindings.llama_get_memory(context)
        if not self._memory:
            raise ModelError(f"{str(self.file.path)!r} keeps nothing of a text; it is no decoder")
        self._batch = _Batch(bindings, int(bindings.llama_n_batch(context)))
        return context, close

    def limit(self, cells: int | None) -> None:
        """Hold no more tokens than these; None is no bound. Nothing may be held."""
        if cells is None or (self._ceiling is not None and self._ceiling < cells):
            cells = self._ceiling
        if cells is not None and cells < self.cells:
            close = self._close
            self._context, self._close = self._make(cells, self._num_ids)
            close()
        self.max_cells = cells

    def bytes_of_a_token(self) -> int:
        """What keys and values of a token take. Nothing may be held."""
        size: Any = self._bindings.llama_state_get_size
        before = int(size(self._context))
        self.read([0] * 8, range(8), [(0,)] * 8, ())
        taken = int(size(self._context)) - before
        self.remove(0, 0)
        return taken // 8

    def take_id(self) -> int | None:
        """An id that holds nothing; None where all there can be are taken."""
        if not self._free_ids and self._num_ids < MAX_IDS:
            before = self._num_ids
            self._grow(self.cells, min(2 * before, MAX_IDS))
            self._free_ids = list(range(self._num_ids - 1, before - 1, -1))
        return self._free_ids.pop() if self._free_ids else None

    def give_back(self, one: int) -> None:
        """Forget what an id holds; it may be taken again."""
        self.remove(one, 0)
        self._free_ids.append(one)

    def remove(self, one: int, first: int) -> None:
        """Forget what an id holds from a position on."""
        self._bindings.llama_memory_seq_rm(self._memory, one, first, -1)

    def copy(self, source: int, one: int, first: int, last: int) -> None:
        """Let an id hold the cells at positions `first..last-1` of another."""
        if first < last:
            self._bindings.llama_memory_seq_cp(self._memory, source, one, first, last)

    def read(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> Float[Tensor, "wanted V"]:
        """Read rows, whose cells the ids hold afterwards; return the logits of the wanted ones.

        Where it raises, some of the rows may be held.

        Raises:
            OutOfMemory: there are too few cells, and no more may be had.
            ModelError: libllama failed.
        """
        width = self.file.vocab_size
        logits = torch.empty(len(wanted), width)
        done = 0
        # A cache that grows meanwhile may take more at a time.
        step = self._batch.capacity
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            here = [row - first for row in wanted if part.start <= row < part.stop]
            self._batch.fill(tokens[part], positions[part], ids[part], here)
            self._decode(len(tokens))
            if here:
                # The library's buffer is overwritten by the next pass.
                found = self._bindings.llama_get_logits(self._context)
                size = len(here) * width * 4
                ctypes.memmove(logits.data_ptr() + done * width * 4, found, size)
                done += len(here)
        return logits

    def _decode(self, rows: int) -> None:
        forget_complaints()
        code = self._bindings.llama_decode(self._context, self._batch.struct)
        if code == _NO_SLOT:
            self._grow(max(2 * self.cells, self.cells + rows), self._num_ids)
            code = self._bindings.llama_decode(self._context, self._batch.struct)
        if code == _NO_SLOT:
            raise self._full()
        if code != 0:
            raise ModelError(
                f"libllama failed on {rows} rows of {str(self.file.path)!r} (code {code}): "
                f"{complaint()}; load the model anew"
            )

    def _full(self) -> OutOfMemory:
        if self.cells == self._ceiling:
            return OutOfMemory(
                f"the cache of {self.cells} tokens is full, and with a longer one this model has "
                "other rotary frequencies; ask for shorter texts or fewer at a time (max_texts)"
            )
        return OutOfMemory(
            f"the cache of {self.cells} tokens is full; ask for shorter texts, fewer at a time "
            "(max_texts), or raise cache_bytes"
        )

    def _grow(self, cells: int, ids: int) -> None:
        """Take a larger context in place of this one, with all that is held.

        Raises:
            OutOfMemory: it is not to be had; nothing has changed.
        """
        if self.max_cells is not None:
            cells = min(cells, self.max_cells // CELL_STEP * CELL_STEP)
        if (cells, ids) == (self.cells, self._num_ids):
            raise self._full()
        bindings, old, close = self._bindings, self._context, self._close
        size = int(bindings.llama_state_get_size(old))
        state = (ctypes.c_uint8 * size)()
        size = int(bindings.llama_state_get_data(old, state, size))
        before = self.cells, self._num_ids, self._memory, self._batch
        try:
            self._context, self._close = self._make(cells, ids)
            if int(bindings.llama_state_set_data(self._context, state, size)) != size:
                raise OutOfMemory(f"{size} bytes of cached tokens did not fit a larger context")
        except BaseException:
            if self._context is not old:
                self._close()
            self.cells, self._num_ids, self._memory, self._batch = before
            self._context, self._close = old, close
            raise
        self._batch.take_over(before[3])
        close()


class _Batch:
    """The struct a pass is given, over buffers that stay where they are."""

    def __init__(self, bindings: Any, capacity: int) -> None:
        self.capacity = capacity
        self._tokens = (ctypes.c_int32 * capacity)()
        self._positions = (ctypes.c_int32 * capacity)()
        self._counts = (ctypes.c_int32 * capacity)()
        self._wanted = (ctypes.c_int8 * capacity)()
        self._pointers = (ctypes.c_void_p * capacity)()
        self._ids = (ctypes.c_int32 * capacity)()
        self.struct: Any = bindings.llama_batch()
        for name, buffer in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._wanted),
        ):
            kind = dict(bindings.llama_batch._fields_)[name]
            setattr(self.struct, name, ctypes.cast(buffer, kind))

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        ids: Sequence[Sequence[int]],
        wanted: Sequence[int],
    ) -> None:
        """Say what the next pass reads."""
        count = len(tokens)
        self.struct.n_tokens = count
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        counts = [len(own) for own in ids]
        self._counts[:count] = counts
        flat = [one for own in ids for one in own]
        if len(flat) > len(self._ids):
            self._ids = (ctypes.c_int32 * (2 * len(flat)))()
        self._ids[: len(flat)] = flat
        place = ctypes.addressof(self._ids)
        for row, own in enumerate(counts):
            self._pointers[row] = place
            place += 4 * own
        ctypes.memset(self._wanted, len(wanted) == count, count)
        if len(wanted) < count:
            for row in wanted:
                self._wanted[row] = 1

    def take_over(self, other: _Batch) -> None:
        """Say what another batch says."""
        count = other.struct.n_tokens
        self.struct.n_tokens = count
        self._ids = other._ids
        for name in ("_tokens", "_positions", "_counts", "_pointers", "_wanted"):
            getattr(self, name)[:count] = getattr(other, name)[:count]


def _freed(bindings: Any, context: Any, _: ModelFile) -> None:
    """Free a context; the file is named so that it lives until then."""
    bindings.llama_free(context)
