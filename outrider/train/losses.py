"""How far a head's laws are from its target's: row by row, or chain by chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


def distance(
    loss: str,
    log_p_RM: Float[Tensor, "R M"],
    log_q_RM: Float[Tensor, "R M"],
    next_R: Int64[Tensor, " R"],
    known: float | None = None,
) -> Float[Tensor, ""]:
    """Mean distance of the head's laws from the target's, of which the draft vocabulary is a part.

    `kl` and `reverse-kl` are taken from the target's law within that part. `tv` is one minus the
    acceptance rate, sum min(p, q): what p has outside is lost.
    `next_R` are the text's own next tokens as draft ids, -100 where they are none. `ce` is a mean
    over those that are some: `known` is their share of all rows of which these are a part, their
    share of these where it is None; so the means of equal parts have the whole's as their mean.
    """
    if loss == "ce":
        lost = F.nll_loss(log_q_RM, next_R, ignore_index=-100, reduction="sum")
        if known is None:
            known = float((next_R >= 0).float().mean())
        return lost / (known * len(next_R)) if known else lost
    if loss == "tv":
        return (log_q_RM.exp() - log_p_RM.exp()).clamp(min=0).sum(-1).mean()
    within_RM = log_p_RM.log_softmax(-1)
    if loss == "kl":
        return F.kl_div(log_q_RM, within_RM, reduction="batchmean", log_target=True)
    return F.kl_div(within_RM, log_q_RM, reduction="batchmean", log_target=True)


def divergence(
    log_p_RM: Float[Tensor, "R M"], logits_RM: Float[Tensor, "R M"]
) -> Float[Tensor, ""]:
    """`distance("kl", ...)` of logits, with fewer passes over them."""
    return cast("Tensor", _Divergence.apply(log_p_RM.log_softmax(-1), logits_RM))


class _Divergence(torch.autograd.Function):
    """Mean of KL(p, q) over rows, of log p and of q's logits, whose gradient is q - p.

    Told outright it is a third of what autograd passes over of numbers as many as rows and tokens.
    """

    @staticmethod
    def forward(ctx: Any, log_p_RM: Tensor, logits_RM: Tensor) -> Tensor:
        p_RM, log_q_RM = log_p_RM.exp(), logits_RM.log_softmax(-1)
        ctx.save_for_backward(p_RM, log_q_RM)
        return (log_p_RM - log_q_RM).mul_(p_RM).sum() / len(p_RM)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        p_RM, log_q_RM = ctx.saved_tensors
        return None, log_q_RM.exp().sub_(p_RM).mul_(grads[0] / len(p_RM))


def text_distance(
    loss: str,
    log_p_BTV: Float[Tensor, "B T V"],
    log_q_BTV: Float[Tensor, "B T V"],
    tokens_BT: Int64[Tensor, "B T"],
    steps: int,
) -> Float[Tensor, ""]:
    """Mean distance of laws behind every place of some text; `block`: of chains of `steps`."""
    following_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=-100)
    if loss != "block":
        flat = log_p_BTV.flatten(0, 1), log_q_BTV.flatten(0, 1), following_BT.flatten()
        return distance(loss, *flat)
    rows = tokens_BT.shape[1] - steps
    spans = [slice(step, step + rows) for step in range(steps)]
    return block_shortfall(
        [log_p_BTV[:, span].flatten(0, 1) for span in spans],
        [log_q_BTV[:, span].flatten(0, 1) for span in spans],
        [following_BT[:, span].flatten() for span in spans],
    )


def block_shortfall(
    log_p: Sequence[Float[Tensor, "R M"]],
    log_q: Sequence[Float[Tensor, "R M"]],
    path: Sequence[Int64[Tensor, " R"]],
) -> Float[Tensor, ""]:
    """Tokens of a chain that `block` verification is expected to refuse, a mean over R rows.

    `log_p` and `log_q` are the laws of both along the text, step by step, `path` the text's own
    tokens as draft ids, -100 where they are none; the target's law may have mass beside the M.
    Block verification keeps a prefix with mass w(x^i) = min(q(x^i), p(x_i | before) w(x^(i-1)))
    (Sun et al., ICLR 2025, theorem 2). Along paths drawn from p the sum over all prefixes is the
    mean of

        sum_i sum_v min(r_(i-1) q_i(v), a_(i-1) p_i(v)),   a_i = min(a_(i-1), r_i),

    where r_i = q(x^i) / p(x^i) and r_0 = a_0 = 1: the last token of each prefix is summed over, the
    ones before it are the path's. On other texts than the target's own the paths are weighed
    as the text has them. Its first term alone is one minus the total variation.
    """
    log_r_R = torch.zeros_like(log_p[0][:, 0])
    log_a_R = log_r_R
    kept = log_r_R.new_zeros(())
    for step, (p_RM, q_RM) in enumerate(zip(log_p, log_q, strict=True)):
        mass_RM = torch.minimum(log_r_R[:, None] + q_RM, log_a_R[:, None] + p_RM).exp()
        kept = kept + mass_RM.sum(-1).mean()
        own_R1 = path[step].clamp(min=0)[:, None]
        gained_R = (q_RM.gather(1, own_R1) - p_RM.gather(1, own_R1))[:, 0]
        log_r_R = torch.where(path[step] >= 0, log_r_R + gained_R, -torch.inf)
        log_a_R = torch.minimum(log_a_R, log_r_R)
    return len(log_p) - kept
