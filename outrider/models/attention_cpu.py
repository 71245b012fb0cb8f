"""The fast attention body for processors: the query heads of one key head folded into rows.

A few rows are one call of torch's fused kernel: what lies between several calls costs more than
their arithmetic, most of all where threads wait for each other. Else one small context is one
masked product, and a long one goes in pieces of keys whose scores stay in the processor's cache,
or, in 16 bits or of many rows, through the fused kernel; parts are merged by log-sum-exp.
Dimension key: H query heads, G key heads, r rows, n keys, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.models.attention_op import Options
from outrider.models.plan import Visible

if TYPE_CHECKING:
    from jaxtyping import Float

PIECE_SCORES = 1 << 19
"""Scores computed at a time: 2 MB of float32, which stays in the processor's cache."""

MASK_NUMBERS = 1 << 19
"""Numbers in a mask for which all keys are seen in one call; it is read as the keys are."""

FUSED_KEYS = 512
"""Keys of a single key head up to which one call is made: what the kernel takes at a time."""

FLASH_KEYS = 256
"""Keys seen by all rows from which torch's flash kernel pays."""

FLASH_ROWS = 32
"""Rows from which it pays in float32 too, as when a prompt is read."""


def attend_cpu(
    query: Float[Tensor, "H r D"],
    keys: Float[Tensor, "G n D"],
    values: Float[Tensor, "G n E"],
    visible: Visible,
    options: Options,
) -> Float[Tensor, "r H E"]:
    """Return the attention of one span, `[r, H, D]` in the query's dtype.

    `query` `[H, r, D]`; `keys`, `values` `[G, n, D]` are the tokens from `visible.first` on.
    """
    heads, rows, dim = query.shape
    groups, count, _ = keys.shape
    folded = query.reshape(groups, heads // groups * rows, dim)
    if _fused_pays(folded, keys, values, options):
        out = _fused(folded, keys, values, visible, options)
    elif keys.shape[-1] == values.shape[-1] and _flash_pays(query, visible, options):
        out = _in_two_parts(folded, keys, values, visible, options)
    elif (
        options.softcap is None
        and options.sinks is None
        and groups * folded.shape[1] * count <= PIECE_SCORES
    ):
        out = _whole(folded, keys, values, visible, options)
    else:
        out = _in_pieces(folded, keys, values, visible, options)
    return out.view(heads, rows, -1).transpose(0, 1)


def _fused_pays(folded: Tensor, keys: Tensor, values: Tensor, options: Options) -> bool:
    groups, count, width = keys.shape
    # One key head is one thread's, and each product inside of it another's call for all of them.
    return (
        options.softcap is None
        and options.sinks is None
        and width == values.shape[-1]
        and (groups > 1 or count <= FUSED_KEYS)
        and folded.shape[1] * count <= MASK_NUMBERS
        and folded.device.type == "cpu"
    )


def _fused(
    folded: Tensor, keys: Tensor, values: Tensor, visible: Visible, options: Options
) -> Tensor:
    mask = visible.mask(folded.shape[1], keys.shape[1], folded.dtype)
    attend = nn.functional.scaled_dot_product_attention
    return attend(folded[None], keys[None], values[None], mask, scale=options.scaling)


def _whole(
    folded: Tensor, keys: Tensor, values: Tensor, visible: Visible, options: Options
) -> Tensor:
    scores = torch.baddbmm(
        folded.new_empty(()), folded, keys.transpose(1, 2), beta=0, alpha=options.scaling
    )
    _hide(scores, visible, 0)
    if scores.dtype == torch.float32:
        return torch.bmm(torch.softmax(scores, -1), values)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype), values)


def _flash_pays(query: Tensor, visible: Visible, options: Options) -> bool:
    # torch's kernel has no soft cap, no mask and one width for keys and values, and few float32
    # rows are faster as a product.
    if query.device.type != "cpu" or options.softcap is not None:
        return False
    short = query.dtype in (torch.bfloat16, torch.float16)
    return (short or query.shape[1] >= FLASH_ROWS) and visible.masked - visible.first >= FLASH_KEYS


def _in_two_parts(
    folded: Tensor, keys: Tensor, values: Tensor, visible: Visible, options: Options
) -> Tensor:
    """Attend to what all rows see and to the masked rest, and merge the two by log-sum-exp."""
    seen = visible.masked - visible.first
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = flash(
        folded[None], keys[None, :, :seen], values[None, :, :seen], scale=options.scaling
    )
    out, log_sum = out[0].float(), log_sum[0][..., None]
    if visible.hidden is not None:
        scores = torch.bmm(folded.float(), keys[:, seen:].float().transpose(1, 2))
        scores = scores.mul_(options.scaling)
        _hide(scores, visible, seen)
        own_sum = scores.logsumexp(-1, keepdim=True)
        own = torch.bmm(scores.sub_(own_sum).exp_(), values[:, seen:].float())
        # Each part counts with its share of the sum of all exponentials.
        out = out.lerp_(own, torch.sigmoid(own_sum - log_sum))
        log_sum = torch.logaddexp(log_sum, own_sum)
    if options.sinks is not None:
        groups, rows, _ = out.shape
        sinks = options.sinks.float().view(groups, -1, 1)
        share = torch.sigmoid(log_sum.view(groups, sinks.shape[1], -1) - sinks)
        out = out * share.view(groups, rows, 1)
    return out.to(values.dtype)


def _in_pieces(
    folded: Tensor, keys: Tensor, values: Tensor, visible: Visible, options: Options
) -> Tensor:
    groups, rows, _ = folded.shape
    count = keys.shape[1]
    piece = max(64, PIECE_SCORES // (groups * rows))
    # A row may see nothing of the first pieces: its top must stay finite.
    lowest = torch.finfo(torch.float32).min
    top = torch.full((groups, rows, 1), lowest, device=folded.device)
    total = torch.zeros(groups, rows, 1, device=folded.device)
    out = torch.zeros(groups, rows, values.shape[-1], device=folded.device)
    for first in range(0, count, piece):
        last = min(first + piece, count)
        scores = torch.baddbmm(
            folded.new_empty(()),
            folded,
            keys[:, first:last].transpose(1, 2),
            beta=0,
            alpha=options.scaling,
        ).float()
        if options.softcap is not None:
            scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
        _hide(scores, visible, first)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_top).exp_()
        scale = top.sub_(new_top).exp_()
        total = total.mul_(scale).add_(weights.sum(-1, keepdim=True))
        part = torch.bmm(weights.to(values.dtype), values[:, first:last])
        out = out.mul_(scale).add_(part)
        top = new_top
    if options.sinks is not None:
        sinks = options.sinks.float().view(groups, -1, 1, 1)
        per_head = top.view(groups, sinks.shape[1], -1, 1)
        total = total + (sinks - per_head).exp().view(groups, rows, 1)
    return (out / total).to(values.dtype)


def _hide(scores: Tensor, visible: Visible, first: int) -> None:
    """Set hidden scores to -inf; `scores` `[G, g * r, m]` are of keys `first..first + m - 1`."""
    hidden = visible.hidden
    if hidden is None:
        return
    groups, _, count = scores.shape
    rows, start = hidden.shape[0], visible.masked - visible.first
    last = first + count
    if last <= start:
        return
    begin = max(first, start)
    part = scores.view(groups, -1, rows, count)[..., begin - first :]
    part.masked_fill_(hidden[:, begin - start : last - start], float("-inf"))
