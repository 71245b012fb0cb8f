"""An independent draft model with its own cache (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Sequenced

import torch

from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.models.base import Rows, Target
from outrider.sequence import Sequence


class ModelDrafter(Drafter):
    """Drafts chains with a smaller model of the same tokenizer.

    The draft's cache follows the text: the tokens it has not read yet are read with the first
    forward of a round, then each drafted token but the last takes one forward more.

    A token beyond the draft's own width is read as its last one: a guess made from a slightly
    wrong text costs speed only, and the drafting goes on.
    """

    name = "draft"

    def __init__(self, model: Target, *, vocab_size: int | None = None, chunk: int = 512) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.chunk = chunk
        self._width = vocab_size
        self._last = model.vocab_size - 1
        self._handles: dict[int, int] = {}

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """Draws up to `depths[b]` tokens after each text, one forward per depth for all of them."""
        limit = self.model.max_length
        depths = [
            depth if limit is None else max(0, min(depth, limit - len(text.tokens)))
            for text, depth in zip(texts, depths, strict=True)
        ]
        members = [b for b, depth in enumerate(depths) if depth > 0]
        pending = [self._pending(texts[b]) for b in members]
        for index in range(max(depths, default=0)):
            going = [i for i, b in enumerate(members) if depths[b] > index]
            members = [members[i] for i in going]
            pending = [pending[i] for i in going]
            handles = [self._handles[texts[b].key] for b in members]
            logits = self._read(handles, pending)
            tokens = draws.sample(logits[:, : self._width], members, index)
            pending = [[token] for token in tokens]
        return draws.drawn()

    def _pending(self, text: Sequence) -> list[int]:
        handle = self._handles.get(text.key)
        if handle is None:
            handle = self._handles[text.key] = self.model.open(text.expected)
        return text.tokens[self.model.length(handle) :]

    def _read(self, handles: list[int], pending: list[list[int]]) -> torch.Tensor:
        """Logits `[n, V]` after the pending tokens of n sequences; long texts go in chunks."""
        for handle, tokens in zip(handles, pending, strict=True):
            while len(tokens) > self.chunk:
                head, tokens[:] = tokens[: self.chunk], tokens[self.chunk :]
                nothing = torch.empty(0, dtype=torch.int64)
                read = torch.tensor([min(token, self._last) for token in head])
                self.model.score(Rows((handle,), (self.chunk,), read, None, nothing))
        counts = tuple(len(tokens) for tokens in pending)
        flat = torch.tensor([min(token, self._last) for tokens in pending for token in tokens])
        ends = torch.tensor(list(itertools.accumulate(counts)))
        last = None if len(flat) == len(counts) else ends - 1
        return self.model.score(Rows(tuple(handles), counts, flat, None, last))

    def commit(self, text: Sequence, accepted: int) -> None:
        """Keeps what the draft has read of the text's own tokens; the rest is read next round."""
        handle = self._handles.get(text.key)
        if handle is not None:
            read = self.model.length(handle) + self.model.num_staged(handle)
            kept = min(read, len(text.tokens) - 1) - self.model.length(handle)
            self.model.commit(handle, kept)

    def discard(self, text: Sequence) -> None:
        """Forgets the round's rows."""
        handle = self._handles.get(text.key)
        if handle is not None:
            self.model.discard(handle)

    def close(self, text: Sequence) -> None:
        """Gives the text's cache back."""
        handle = self._handles.pop(text.key, None)
        if handle is not None:
            self.model.close(handle)
