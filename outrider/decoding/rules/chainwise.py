"""What a chain's rows leave of themselves, a row at a time in plain numbers: `leftover` on a host.

Where the host reads for free, a row's few numbers cost less in Python than in calls on small
tensors, and its wide part is subtracted from another one where both are. Rows of one length are
weighed together, texts that have stopped left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.draft import Draft, Kind
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Sifted, chain_draft_probs
from outrider.decoding.rules.leftover import MOST, room_beside


@dataclass(frozen=True, slots=True)
class Behind:
    """The target's row behind some tokens of one text.

    Attributes:
        text: whose.
        length: behind how many tokens.
        weights_V: its law times some number; not to be written to.
        total: the number.
        p: the law at the token that the draft has next, at the draft's end any number.
        ids_M: the tokens that the weights are of; None = all.
    """

    text: int
    length: int
    weights_V: Tensor
    total: float
    p: float
    ids_M: NDArray[np.int64] | None = None


class Chains:
    """B chains in hand, and the row that each of them leaves.

    Attributes:
        counts: drafted tokens of each text.
        q: the draft's law at each token, `[b][i]`; behind the last any numbers.
    """

    def __init__(self, draft: Draft, target: TargetRows) -> None:
        tree = draft.tree
        self._draft, self._target = draft, target
        self.counts: list[int] = tree.counts_B.tolist()
        self.q: list[list[float]] = chain_draft_probs(draft).tolist()
        self._tokens_BK = tree.tokens_BN.numpy()
        self._law_rows = draft.law_rows().numpy()
        self._left_BV: Tensor | None = None
        self._ids_BM: Tensor | None = None

    def behind(self, places: list[tuple[int, int]]) -> Iterator[Behind]:
        """The rows of some texts, each behind so many of its tokens."""
        num_rows, depth = self._target.shape[1], self._draft.tree.num_nodes
        flat = [text * num_rows + length for text, length in places]
        at_n = torch.tensor(flat, dtype=torch.int64)
        few = self._target.few(at_n)
        if few is not None and few.ids is not None:
            rows = zip(places, few.probs, few.ids.numpy(), strict=True)
            for (text, length), probs_M, ids_M in rows:
                same_M = ids_M == (self._tokens_BK[text, length] if length < depth else -1)
                yield Behind(
                    text, length, probs_M, 1.0, float(probs_M.numpy()[same_M].sum()), ids_M
                )
            return
        for part in self._target.parts(len(places)):
            chosen = places[part]
            weights_mV, sums_m1 = self._target.weighed(at_n[part])
            weights, sums = weights_mV.numpy(), None if sums_m1 is None else sums_m1.numpy()
            for i, (text, length) in enumerate(chosen):
                p = weights[i, self._tokens_BK[text, length]] if length < depth else 0.0
                total = 1.0
                if sums is not None:
                    p, total = p / sums[i, 0], float(sums[i, 0])
                yield Behind(text, length, weights_mV[i], total, float(p))

    def excess(self, row: Behind, share: float = 1.0) -> float:
        """Makes `max(0, share * P - Q)` what the text leaves, and tells its mass.

        P is the row, Q the draft's law that its next token came from.
        """
        left_V, text, length = self._room(row), row.text, row.length
        law, law_row = self._draft.law, self._law_rows[text, length]
        if law is None or self._is_point(text, length):
            left_V.copy_(row.weights_V)
            token = self._tokens_BK[text, length]
            left_V.numpy()[token if row.ids_M is None else row.ids_M == token] = 0.0
        else:
            alpha = min(row.total / share, MOST) if share > 0 else MOST
            if row.ids_M is not None:
                taken_M = torch.from_numpy(law.at(law_row, row.ids_M))
                torch.sub(row.weights_V, taken_M, alpha=alpha, out=left_V)
            elif law.ids is None:
                torch.sub(row.weights_V, law.probs[law_row], alpha=alpha, out=left_V)
            else:
                taken_M = law.probs[law_row].to(left_V.dtype) * -alpha
                left_V.copy_(row.weights_V).scatter_add_(0, law.ids[law_row], taken_M)
            left_V.clamp_(min=0)
        return float(left_V.sum()) * share / row.total

    def leave(self, row: Behind, share: float = 1.0) -> None:
        """The text stops at the row: what it leaves is the row, less the draft's law if refused."""
        refused = row.length < self.counts[row.text]
        # No mass is left only where rounding refused a token of equal laws.
        if not refused or self.excess(row, share) <= 0:
            self._room(row).copy_(row.weights_V)

    def sifted(self, kept: list[int]) -> Sifted:
        """So many tokens of each text stay, and what the texts leave draws the next."""
        if self._left_BV is None:
            self._left_BV = self._target.probs(torch.empty(0, dtype=torch.int64))
        return Sifted(torch.tensor(kept, dtype=torch.int64), self._left_BV, self._ids_BM)

    def _is_point(self, text: int, length: int) -> bool:
        draft = self._draft
        if draft.kinds_BN is None:
            return Kind.POINT in draft.kinds
        return int(draft.kinds_BN[text, length]) == Kind.POINT

    def _room(self, row: Behind) -> Tensor:
        """Where what a text leaves is written."""
        if self._left_BV is None:
            self._left_BV = room_beside(self._draft, row.weights_V[None], len(self.counts))
            if row.ids_M is not None:
                self._ids_BM = torch.zeros(self._left_BV.shape, dtype=torch.int64)
        if self._ids_BM is not None:
            self._ids_BM.numpy()[row.text] = row.ids_M
        return self._left_BV[row.text]
