"""The attention body of strict: one fixed order of arithmetic, whatever goes along with a row.

Keys stand in blocks aligned to their positions. A row's scores, maximum and weights do not depend on an
order; its sums do, so they run over each block in one product of fixed width, and over the blocks one after
another. Hidden and absent keys weigh exactly zero, which leaves every sum as it was. A tree row sees its own
path gathered behind the committed tokens, where the chain would have it. All arithmetic is float32.
Dimension key: H query heads, G key heads, M folded rows, n keys, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.attention_op import Options
from outrider.models.plan import Visible

STRICT_BLOCK = 256
"""Keys of one block of the canonical order."""


@dataclass(frozen=True, slots=True)
class StrictBody:
    """Attention in canonical order, `rows_at_once` rows a product, folded rows padded up to `multiple`.

    The products of one row must not depend on the number of rows beside it: by measurement with a
    `multiple` of 8 folded rows, by construction with `whole=True`, where every product has exactly
    `rows_at_once` rows.
    """

    rows_at_once: int = 64
    multiple: int = 8
    whole: bool = False

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, visible: Visible, options: Options
    ) -> Tensor:
        """Return the attention of one span, `[r, H, D]` in the query's dtype.

        `query` `[H, r, D]`; `keys`, `values` `[G, n, D]` are the tokens from `visible.first` on, which is
        a multiple of the block.
        """
        rows = query.shape[1]
        parts: list[Tensor] = []
        if visible.paths is None:
            for first in range(0, rows, self.rows_at_once):
                last = min(first + self.rows_at_once, rows)
                count = keys.shape[1] - rows + last
                hidden = _hidden(visible, first, last, count)
                own = query[:, first:last]
                parts.append(self._attend(own, keys[:, :count], values[:, :count], hidden, options))
        else:
            for row, path in enumerate(visible.paths):
                parts.append(
                    self._tree_row(
                        query[:, row : row + 1], keys, values, visible, row, path, options
                    )
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tree_row(
        self, query, keys, values, visible: Visible, row: int, path: Tensor, options: Options
    ) -> Tensor:
        committed = visible.length - visible.first
        whole = committed // STRICT_BLOCK * STRICT_BLOCK
        index = torch.cat((torch.arange(whole, committed, device=path.device), committed + path))
        assert visible.hidden is not None
        before, staged = visible.hidden[row : row + 1].tensor_split(
            [visible.length - visible.masked], -1
        )
        hidden = torch.cat((before, staged[:, path]), -1)
        tail = keys[:, index], values[:, index]
        return self._attend(query, keys[:, :whole], values[:, :whole], hidden, options, tail)

    def _attend(
        self, query, keys, values, hidden: Tensor | None, options: Options, tail=None
    ) -> Tensor:
        heads, rows, dim = query.shape
        groups = keys.shape[0]
        if tail is None:
            whole = keys.shape[1] // STRICT_BLOCK * STRICT_BLOCK
            tail = keys[:, whole:], values[:, whole:]
            keys, values = keys[:, :whole], values[:, :whole]
        folded = self._folded(query.float(), groups)
        scores = torch.bmm(folded, _padded(tail[0]).transpose(1, 2))
        if keys.shape[1]:
            scores = torch.cat((torch.bmm(folded, keys.float().transpose(1, 2)), scores), -1)
        scores = scores.mul_(options.scaling)
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        count = keys.shape[1] + tail[0].shape[1]
        scores[..., count:] = float("-inf")
        if hidden is not None:
            used = heads // groups * self._slab_rows(rows)
            shown = scores[:, :used].view(groups, heads // groups, -1, scores.shape[-1])[
                :, :, :rows
            ]
            shown[..., count - hidden.shape[1] : count].masked_fill_(hidden, float("-inf"))
        out = _weighted(
            scores, values, _padded(tail[1]), options, heads // groups * self._slab_rows(rows)
        )
        out = out.view(groups, heads // groups, -1, out.shape[-1])[:, :, :rows]
        return out.reshape(heads, rows, -1).transpose(0, 1).to(query.dtype)

    def _slab_rows(self, rows: int) -> int:
        return self.rows_at_once if self.whole else rows

    def _folded(self, query: Tensor, groups: int) -> Tensor:
        heads, rows, dim = query.shape
        if self.whole:
            query = torch.nn.functional.pad(query, (0, 0, 0, self.rows_at_once - rows))
        folded = query.reshape(groups, -1, dim)
        missing = -folded.shape[1] % self.multiple
        return torch.nn.functional.pad(folded, (0, 0, 0, missing)) if missing else folded


def _weighted(scores: Tensor, values: Tensor, tail: Tensor, options: Options, used: int) -> Tensor:
    """Return `[G, used, D]`: values weighted by softmax, summed block after block."""
    groups, rows, width = scores.shape
    top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).min)
    sinks = None
    if options.sinks is not None:
        sinks = torch.full_like(top, float("-inf"))
        heads = options.sinks.float().view(groups, -1, 1)
        sinks[:, :used, 0] = heads.expand(-1, -1, used // heads.shape[1]).reshape(groups, used)
        top = torch.maximum(top, sinks)
    weights = (
        scores.sub_(top)
        .exp_()
        .view(groups, rows, -1, STRICT_BLOCK)
        .permute(2, 0, 1, 3)
        .contiguous()
    )
    sums = weights.sum(-1)
    total = torch.zeros_like(sums[0])
    out = torch.zeros(groups, rows, values.shape[-1], device=scores.device)
    for block in range(width // STRICT_BLOCK):
        first = block * STRICT_BLOCK
        own = (
            values[:, first : first + STRICT_BLOCK]
            if first < values.shape[1]
            else tail[:, first - values.shape[1] :][:, :STRICT_BLOCK]
        )
        total = total.add_(sums[block])
        out = out.baddbmm_(weights[block], own.float())
    if sinks is not None:
        total = total.add_((sinks - top).exp_().squeeze(-1))
    return out[:, :used] / total[:, :used, None]


def _padded(tail: Tensor) -> Tensor:
    # At least one block, so that every product of a row has the same form; zeros weigh nothing.
    missing = -tail.shape[1] % STRICT_BLOCK
    if tail.shape[1] == 0:
        missing = STRICT_BLOCK
    return torch.nn.functional.pad(tail.float(), (0, 0, 0, missing))


def _hidden(visible: Visible, first: int, last: int, count: int) -> Tensor | None:
    if visible.hidden is None:
        return None
    width = visible.first + count - visible.masked
    return visible.hidden[first:last, :width] if width > 0 else None
