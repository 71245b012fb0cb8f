"""The attention body of strict: one fixed order of arithmetic, whatever goes along with a row.

Keys stand in blocks aligned to their positions. A row's scores, maximum and weights do not depend
on an order; its sums do, so they run over each block in one product of fixed width, and over the
blocks one after another. Hidden and absent keys weigh exactly zero, which leaves every sum as it
was. A tree row sees its own path gathered behind the committed tokens, where the chain would have
it. All arithmetic is float32. Dimension key: H query heads, G key heads, M folded rows, n keys, D
width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.models.attention_op import Options
from outrider.models.plan import Visible

if TYPE_CHECKING:
    from jaxtyping import Float

STRICT_BLOCK = 256
"""Keys of one block of the canonical order."""

FOLDED_MULTIPLE = 8
"""Folded rows of a product are a multiple: from 6 on, measured, more change no row's bits."""


@dataclass(frozen=True, slots=True)
class _Context:
    """What some rows see: `count` keys, whole blocks first, then a tail padded with zeros.

    `hidden` (bool `[rows, m]`, None: nothing) marks what a row must not see among the last m keys.
    """

    keys: Tensor
    values: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    count: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class StrictBody:
    """Attention in canonical order, `rows_at_once` rows a product.

    The products of one row must not depend on the number of rows beside it: by measurement when
    the folded rows are padded to a multiple of 8, by construction with `whole=True`, where every
    product has exactly `rows_at_once` rows.
    """

    rows_at_once: int = 64
    whole: bool = False

    def __call__(
        self,
        query: Float[Tensor, "H r D"],
        keys: Float[Tensor, "G n D"],
        values: Float[Tensor, "G n E"],
        visible: Visible,
        options: Options,
    ) -> Float[Tensor, "r H E"]:
        """Return the attention of one span, `[r, H, D]` in the query's dtype.

        `query` `[H, r, D]`; `keys`, `values` `[G, n, D]` are the tokens from `visible.first` on,
        which is a multiple of the block.
        """
        rows = query.shape[1]
        parts: list[Tensor] = []
        if visible.paths is None:
            for first in range(0, rows, self.rows_at_once):
                last = min(first + self.rows_at_once, rows)
                context = _chain_context(keys, values, visible, first, last, rows)
                parts.append(self._attend(query[:, first:last], context, options))
        else:
            for row, path in enumerate(visible.paths):
                context = _path_context(keys, values, visible, row, path)
                parts.append(self._attend(query[:, row : row + 1], context, options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, query: Tensor, context: _Context, options: Options) -> Tensor:
        heads, rows, _ = query.shape
        groups = context.keys.shape[0]
        folded = self._folded(query.float(), groups)
        scores = torch.bmm(folded, context.tail_keys.transpose(1, 2))
        if context.keys.shape[1]:
            first = torch.bmm(folded, context.keys.float().transpose(1, 2))
            scores = torch.cat((first, scores), -1)
        scores = scores.mul_(options.scaling)
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        used = heads // groups * (self.rows_at_once if self.whole else rows)
        scores[..., context.count :] = float("-inf")
        if context.hidden is not None:
            by_head = scores[:, :used].view(groups, heads // groups, -1, scores.shape[-1])
            begin = context.count - context.hidden.shape[1]
            shown = by_head[:, :, :rows, begin : context.count]
            shown.masked_fill_(context.hidden, float("-inf"))
        out = _weighted(scores, context, options, used)
        out = out.view(groups, heads // groups, -1, out.shape[-1])[:, :, :rows]
        return out.reshape(heads, rows, -1).transpose(0, 1).to(query.dtype)

    def _folded(self, query: Tensor, groups: int) -> Tensor:
        _, rows, dim = query.shape
        if self.whole:
            query = nn.functional.pad(query, (0, 0, 0, self.rows_at_once - rows))
        folded = query.reshape(groups, -1, dim)
        missing = -folded.shape[1] % FOLDED_MULTIPLE
        return nn.functional.pad(folded, (0, 0, 0, missing)) if missing else folded


def _weighted(scores: Tensor, context: _Context, options: Options, used: int) -> Tensor:
    """Return `[G, used, D]`: values weighted by softmax, summed block after block."""
    groups, rows, width = scores.shape
    top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    sinks = None
    if options.sinks is not None:
        sinks = torch.full_like(top, float("-inf"))
        heads = options.sinks.float().view(groups, -1, 1)
        sinks[:, :used, 0] = heads.expand(-1, -1, used // heads.shape[1]).reshape(groups, used)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top).exp_().view(groups, rows, -1, STRICT_BLOCK)
    weights = weights.permute(2, 0, 1, 3).contiguous()
    sums = weights.sum(-1)
    total = torch.zeros_like(sums[0])
    out = torch.zeros(groups, rows, context.values.shape[-1], device=scores.device)
    whole = context.values.shape[1]
    for block, first in enumerate(range(0, width, STRICT_BLOCK)):
        last = first + STRICT_BLOCK
        if first < whole:
            values = context.values[:, first:last].float()
        else:
            values = context.tail_values[:, first - whole : last - whole]
        total = total.add_(sums[block])
        out = out.baddbmm_(weights[block], values)
    if sinks is not None:
        total = total.add_((sinks - top).exp_().squeeze(-1))
    return out[:, :used] / total[:, :used, None]


def _chain_context(
    keys: Tensor, values: Tensor, visible: Visible, first: int, last: int, rows: int
) -> _Context:
    """Return what rows `first..last-1` of a chain's `rows` see: nothing behind the last of them."""
    count = keys.shape[1] - rows + last
    whole = count // STRICT_BLOCK * STRICT_BLOCK
    hidden = None
    if visible.hidden is not None and (width := visible.first + count - visible.masked) > 0:
        hidden = visible.hidden[first:last, :width]
    tail = slice(whole, count)
    return _Context(
        keys[:, :whole], values[:, :whole], _padded(keys[:, tail]), _padded(values[:, tail]),
        count, hidden,
    )  # fmt: skip


def _path_context(
    keys: Tensor, values: Tensor, visible: Visible, row: int, path: Tensor
) -> _Context:
    """Return what one tree row sees: its own path behind the committed tokens, like a chain."""
    committed = visible.length - visible.first
    whole = committed // STRICT_BLOCK * STRICT_BLOCK
    index = torch.cat((torch.arange(whole, committed, device=path.device), committed + path))
    assert visible.hidden is not None
    cut = visible.length - visible.masked
    own = visible.hidden[row : row + 1]
    hidden = torch.cat((own[:, :cut], own[:, cut:][:, path]), -1)
    return _Context(
        keys[:, :whole], values[:, :whole], _padded(keys[:, index]), _padded(values[:, index]),
        committed + len(path), hidden,
    )  # fmt: skip


def _padded(tail: Tensor) -> Tensor:
    # At least one block, so that every product of a row has the same form; zeros weigh nothing.
    missing = -tail.shape[1] % STRICT_BLOCK if tail.shape[1] else STRICT_BLOCK
    return nn.functional.pad(tail.float(), (0, 0, 0, missing))
