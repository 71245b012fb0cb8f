"""The training text as one endless stream: every epoch all documents, in its own order."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.train.chance import generator


class TokenStream:
    """Documents joined by end-of-text, epoch after epoch; a step's number gives its tokens."""

    def __init__(self, documents: Sequence[Sequence[int]], end_id: int, seed: int):
        """`documents` are token ids; each is read with one `end_id` before it."""
        self._documents = [torch.tensor([end_id, *ids], dtype=torch.int32) for ids in documents]
        self._seed = seed
        self.epoch_tokens = sum(len(d) for d in self._documents)
        self._epoch = lru_cache(maxsize=2)(self._build_epoch)

    def _build_epoch(self, epoch: int) -> Tensor:
        order = torch.randperm(
            len(self._documents), generator=generator(self._seed, "epoch", epoch)
        )
        return torch.cat([self._documents[i] for i in order.tolist()])

    def read(self, start: int, count: int) -> Tensor:
        """Tokens `start` to `start + count` of the stream, int64."""
        parts: list[Tensor] = []
        while count > 0:
            epoch, offset = divmod(start, self.epoch_tokens)
            part = self._epoch(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return torch.cat(parts).long()

    def rows(self, step: int, batch_tokens: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens `[B, T]` of one step."""
        tokens = self.read(step * batch_tokens, batch_tokens + 1)
        return tokens[:-1].view(-1, context), tokens[1:].view(-1, context)
