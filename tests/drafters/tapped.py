"""An exact target that hands out hidden states, and a head that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.drafters import EagleDrafter
from outrider.models.base import Rows, Taps, Target
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.eagle_cache import CachedHead
from outrider.models.protocol import ProtocolTarget


class TappedTarget(ProtocolTarget):
    """Hands out hidden states: behind every layer a row's is its token's, one-hot."""

    _taps: Taps | None = None

    @contextmanager
    def tapping(self, layers: tuple[int, ...]) -> Iterator[Taps]:
        taps = Taps(layers)
        before, self._taps = self._taps, taps if layers else None
        try:
            yield taps
        finally:
            self._taps = before

    def score(self, rows: Rows) -> torch.Tensor:
        logits = super().score(rows)
        if self._taps is not None:
            states = torch.eye(self.vocab_size)[rows.tokens_R]
            self._taps.add(rows, states.repeat(1, len(self._taps.layers)))
        return logits


class ToyEagle(EagleDrafter):
    """A random head for a `TappedTarget`, over all tokens but the second."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        tokens = torch.tensor([0, *range(2, vocab_size)])
        heads = 2 if vocab_size % 2 == 0 else 1
        shape = EagleShape(vocab_size, len(tokens), vocab_size, 8, heads, 1, 4, (1, 2))
        draw = torch.Generator().manual_seed(seed)
        self._toy = EagleHead(shape, tokens, own_embeddings=True).requires_grad_(False)
        for parameter in self._toy.parameters():
            parameter.normal_(0.0, 0.7, generator=draw)
        super().__init__(self._toy)

    def attach(self, target: Target) -> Target:
        if self._head is None:
            self._head = CachedHead(self._toy)
        return target
