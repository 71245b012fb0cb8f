"""A GGUF model as a target: chains and trees through sequence ids, committed and rolled back.

The exact law is the law of the file's own, quantised weights as libllama computes them, its cache
of keys and values in float16 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import InvalidConfig, OutOfMemory, not_open
from outrider.models.base import MAX_TREE_NODES, Rows, Target, check_tokens
from outrider.models.libllama.file import ModelFile
from outrider.models.libllama.memory import CELL_STEP, FIRST_CELLS, Memory
from outrider.models.libllama.paths import NOWHERE, Copied, Staging, Text
from outrider.models.libllama.products import Products
from outrider.models.libllama.trial import check_rows_of
from outrider.models.plan import check_rows

if TYPE_CHECKING:
    from jaxtyping import Float

SHARED_TOKENS = 64
"""A beginning of so many tokens is read once for all open texts that have it."""


class LibllamaTarget(Target):
    """A model of a GGUF file behind `score`, `commit` and `discard`, on the processor.

    The weights stay in the file's quantisation. A trial at load compares chunks, trees and
    rolled-back rows with a plain pass. A row's last bits may depend on where its text's cells lie,
    and on whether it is alone in its pass (docs/gguf.md).

    Args:
        file: the model, or the path of its file.
        threads: threads of a pass; None = torch's.
        cache_bytes: what keys and values may take; None is no bound.
        share_prefixes: texts that begin alike share the cells of their beginning.
        products: of a path, which lay out the weights they are for; None leaves all to libllama.

    Raises:
        ModelError, UnsupportedModel, MissingExtra: what ModelFile refuses; rows that are wrong.
        OutOfMemory: there is no room for a first context.
    """

    def __init__(
        self,
        file: ModelFile | str | Path,
        *,
        threads: int | None = None,
        cache_bytes: int | None = None,
        share_prefixes: bool = True,
        products: Products | None = None,
    ) -> None:
        self.file = file if isinstance(file, ModelFile) else ModelFile(file, products=products)
        self.vocab_size = self.file.vocab_size
        self._context = self.max_length = self.file.context
        # Rows of a tree that a window has left are not kept for who holds them alone.
        self.scores_trees = not 0 < self.file.window <= MAX_TREE_NODES
        self.prefix_block = SHARED_TOKENS if share_prefixes else None
        self._texts: dict[int, Text] = {}
        self._next = 0
        cells = min(FIRST_CELLS, self._context)
        self._memory = Memory(self.file, threads=threads or torch.get_num_threads(), cells=cells)
        check_rows_of(self, self.file)
        self.block_bytes = CELL_STEP * self._memory.bytes_of_a_token()
        self.limit_cache(cache_bytes)

    def limit_cache(self, cache_bytes: int | None) -> None:
        """Bound what keys and values may take; None is no bound.

        Raises:
            InvalidConfig: less than the smallest context takes, or than what is held.
        """
        if cache_bytes is None:
            self._memory.limit(None)
            return
        cells = cache_bytes // self.block_bytes * CELL_STEP
        if cells < CELL_STEP:
            raise InvalidConfig(
                f"cache_bytes={cache_bytes}: {CELL_STEP} tokens take {self.block_bytes} bytes; "
                "give as many at least"
            )
        if self._texts:
            raise InvalidConfig(
                f"cache_bytes={cache_bytes}: texts are open; bound the cache before"
            )
        self._memory.limit(cells)

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new sequence, which holds what an open one has read of its prefix.

        Raises:
            OutOfMemory: libllama has no sequence left.
        """
        text = Text({self._take_id(): NOWHERE})
        if self.file.window:
            # libllama gives away cells that a window has left where one sequence alone holds them,
            # and a rollback may need them again.
            try:
                text.tips[self._take_id()] = NOWHERE
            except BaseException:
                for one in text.ids:
                    self._memory.give_back(one)
                raise
        shared, source = self._shared(prefix)
        if source is not None:
            for one in text.ids:
                self._memory.copy(source.ids[0], one, 0, shared)
            text.tokens = list(prefix[:shared])
        self._next += 1
        self._texts[self._next] = text
        return self._next

    def _shared(self, prefix: Sequence[int]) -> tuple[int, Text | None]:
        """The most tokens that an open text has read of a prefix, and that text."""
        best: tuple[int, Text | None] = (0, None)
        wanted = list(prefix)
        for text in self._texts.values() if len(wanted) >= SHARED_TOKENS else ():
            common = _num_common(wanted, text.tokens)
            if common >= SHARED_TOKENS and common > best[0]:
                best = common, text
        return best

    def _take_id(self, beside: Sequence[Text] = ()) -> int:
        """An id that holds nothing, where need be one that a text can do without.

        Those `beside` are in the same pass, and what they have is theirs.
        """
        one = self._memory.take_id()
        if one is not None:
            return one
        kept = 2 if self.file.window else 1
        for text in self._texts.values():
            idle = not text.staged and not any(text is other for other in beside)
            if idle and len(text.tips) > kept:
                one, _ = text.tips.popitem()
                self._memory.remove(one, 0)
                return one
        raise OutOfMemory(
            "libllama has no sequence left for another text or another path of a tree; ask for "
            "fewer texts at a time (max_texts) or narrower trees (width)"
        )

    def _text(self, seq: int) -> Text:
        found = self._texts.get(seq)
        if found is None:
            raise not_open(seq)
        return found

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return self._text(seq).length

    def num_staged(self, seq: int) -> int:
        """Return the number of rows staged since the last commit or discard."""
        return len(self._text(seq).staged)

    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return the wanted logits `[number wanted, V]` in float32.

        Raises:
            TokenOutOfRange: a token the model's vocabulary does not hold.
            InvalidConfig: rows that contradict each other, or pass the model's context.
            OutOfMemory: the cache is full.
        """
        check_rows(rows)
        texts = [self._text(seq) for seq in rows.seqs]
        tokens = rows.tokens_R.tolist()
        check_tokens(tokens, self.vocab_size)
        wanted = range(len(tokens)) if rows.logits_rows is None else rows.logits_rows.tolist()
        begun: list[tuple[Text, Staging]] = []
        new: list[int] = []
        try:
            first = 0
            for text, count in zip(texts, rows.counts, strict=True):
                own = slice(first, first + count)
                begun.append((text, self._staging(text, rows, own, texts, new)))
                first += count
            for _, staging in begun:
                self._copy(staging.copies)
            positions = [place for _, staging in begun for place in staging.positions]
            ids = [own for _, staging in begun for own in staging.ids]
            logits = self._memory.read(tokens, positions, ids, wanted)
        except BaseException:
            self._undo(begun, new)
            raise
        first = 0
        for (text, staging), count in zip(begun, rows.counts, strict=True):
            text.staged_now(staging, tokens[first : first + count])
            first += count
        return logits

    def _staging(
        self, text: Text, rows: Rows, own: slice, beside: list[Text], new: list[int]
    ) -> Staging:
        """Work out where some rows go; ids taken for them are noted in `new`."""

        def spare() -> int:
            new.append(self._take_id(beside))
            return new[-1]

        if rows.ancestors_R is None:
            staging = text.stage_chain(own.stop - own.start)
        else:
            staging = text.stage_tree(rows.ancestors_R[own].tolist(), spare)
        longest = max(staging.positions) + 1
        if longest > self._context:
            raise InvalidConfig(
                f"a sequence of {longest} tokens passes the model's context of {self._context}; "
                "ask for fewer tokens"
            )
        return staging

    def _copy(self, copies: Sequence[Copied]) -> None:
        for each in copies:
            self._memory.copy(each.source, each.into, each.first, each.last)

    def _undo(self, begun: list[tuple[Text, Staging]], new: list[int]) -> None:
        """Forget what a pass that broke off may have left."""
        for text, _ in begun:
            for one, tip in text.tips.items():
                self._memory.remove(one, text.end(tip))
        for one in new:
            self._memory.give_back(one)

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged rows, or those it names; forget the others.

        Raises:
            InvalidConfig: rows that are not staged, or no path.
        """
        text = self._text(seq)
        kept = text.path(path)
        begin, end = text.length, text.length + len(kept)
        if text.tree is None:
            if len(kept) < len(text.staged):
                for one in text.ids:
                    self._memory.remove(one, end)
        else:
            holder = text.holder(kept[-1]) if kept else text.ids[0]
            for one, tip in text.tips.items():
                if tip != NOWHERE:
                    self._memory.remove(one, end if one == holder else begin)
            for one in text.ids:
                if one != holder:
                    self._memory.copy(holder, one, begin, end)
        text.tokens += [text.staged[row] for row in kept]
        self._forget(text)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        text = self._text(seq)
        # All ids: an interrupt may have come between a pass and the note of what it staged.
        for one in text.ids:
            self._memory.remove(one, text.length)
        self._forget(text)

    def _forget(self, text: Text) -> None:
        text.staged, text.tree = [], None
        text.tips = dict.fromkeys(text.tips, NOWHERE)

    def close(self, seq: int) -> None:
        """Give back the sequence's cells and ids."""
        text = self._text(seq)
        del self._texts[seq]
        for one in text.ids:
            self._memory.give_back(one)

    def info(self) -> dict[str, Any]:
        """What runs, and in which arithmetic, for reports."""
        return {
            "architecture": self.file.family,
            "parameters": self.file.num_parameters,
            "dtype": self.file.quantisation,
            "device": "cpu",
            "attention": "libllama",
            "path": "sequence ids" if self.scores_trees else "sequence ids, chains alone",
            "exact_law": f"that of the file's own weights ({self.file.quantisation})",
            "own_products": self.file.laid_out_bytes > 0,
            "strict": False,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "cache": self.cache_plan(),
        }

    def cache_plan(self) -> dict[str, Any]:
        """What cached tokens take: more where texts need it, never above `max_bytes`."""
        per_token, bound = self.block_bytes // CELL_STEP, self._memory.max_cells
        return {
            "bytes_per_token": per_token,
            "block_tokens": CELL_STEP,
            "held_bytes": self._memory.cells * per_token,
            "max_bytes": None if bound is None else bound * per_token,
            "share_prefixes": self.prefix_block is not None,
        }


def _num_common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(ours), len(theirs))
    if ours[:most] == theirs[:most]:
        return most
    return next(i for i in range(most) if ours[i] != theirs[i])
