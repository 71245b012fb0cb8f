"""A head with a cache of keys and values: rows staged, then committed or discarded.

Row i of a sequence is the head's reading of the feature behind token i and of token i + 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.cache import CacheManager
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, Options
from outrider.models.base import Rows, check_tokens
from outrider.models.head import Head
from outrider.models.plan import make_plan

if TYPE_CHECKING:
    from jaxtyping import Float


class CachedHead:
    """A head behind `score`, `commit` and `discard`, as a target is; each module has a cache."""

    def __init__(self, head: Head, body: Body = attend_cpu) -> None:
        self.head = head
        self._body = body
        self._caches = [CacheManager(share_prefixes=False) for _ in range(head.num_modules)]
        # Handles in all caches, by the first.
        self._seqs: dict[int, tuple[int, ...]] = {}

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._seqs)

    def open(self, reserve: int) -> int:
        """Return the handle of a new, empty sequence that may grow to `reserve` rows (a hint)."""
        seqs = tuple(cache.open(reserve) for cache in self._caches)
        self._seqs[seqs[0]] = seqs
        return seqs[0]

    def length(self, seq: int, module: int = 0) -> int:
        """Return the number of committed rows."""
        return self._caches[module].length(self._seqs[seq][module])

    @torch.inference_mode()
    def score(
        self, rows: Rows, h_RD: Float[Tensor, "R D"], module: int = 0
    ) -> Float[Tensor, "wanted D"]:
        """Stage rows of tokens and of the features before them; the features after wanted rows."""
        check_tokens(rows.tokens_R.tolist(), self.head.vocab_size)
        device, cache = h_RD.device, self._caches[module]
        rows = replace(rows, seqs=tuple(self._seqs[seq][module] for seq in rows.seqs))
        plan = make_plan(cache, rows, device)
        forward = Forward(cache, plan, self._body, self.head.reaches)

        def attend(
            query: Tensor,
            keys: Tensor,
            values: Tensor,
            options: Options | None = None,
            layer: int = 0,
        ) -> Tensor:
            options = options or Options(query.shape[-1] ** -0.5)
            return forward.attend(layer, query, keys, values, options)

        tokens_1R = rows.tokens_R.to(device)[None]
        out_RD = self.head.step(tokens_1R, h_RD[None], plan.positions[None], attend, module)[0]
        for seq, span in zip(rows.seqs, plan.spans, strict=True):
            cache.stage(seq, span.num_rows, span.ancestors)
        return out_RD if rows.logits_rows is None else out_RD[rows.logits_rows]

    def commit(self, seq: int, rows: int, module: int = 0) -> None:
        """Keep the first `rows` staged rows of a module; forget its others."""
        self._caches[module].commit(self._seqs[seq][module], rows)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        for cache, own in zip(self._caches, self._seqs[seq], strict=True):
            cache.discard(own)

    def close(self, seq: int) -> None:
        """Give back the sequence's memory."""
        for cache, own in zip(self._caches, self._seqs.pop(seq), strict=True):
            cache.close(own)
