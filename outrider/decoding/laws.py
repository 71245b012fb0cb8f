"""Laws: logits in, the law tokens are drawn from out; one object for drawing and for ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import host
from outrider.decoding.penalties import typical

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64

# Sums in between leave float32 room for all that matters beside the largest weight.
_LEAST_SUM, _MOST_SUM = 1e-10, 1e17
# Candidates looked at first when a nucleus has to be found in a wide row.
_NUCLEUS_GUESS = 256
# Entries that stand for themselves by their largest one while the likeliest tokens are looked for.
_BLOCK = 64
# Tokens beyond top_k that are looked at: in bfloat16 some often equal the last that stays.
_TIED = 24
# Rows narrower than this are quicker worked on whole.
_WIDE = 16_384


def fused(device: torch.device) -> bool:
    """Whether Triton's bodies work there: on a GPU, where Triton is installed."""
    return host.on_gpu(device) and find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Law:
    """R laws over a vocabulary, dense or on a few tokens.

    Attributes:
        probs: `[R, V]` dense, or `[R, M]` beside `ids`; float32 or float64.
        ids: `[R, M]` int64 tokens of a sparse law, distinct where `probs` is positive; padding has
            probability 0. None where the law is dense.
    """

    probs: Tensor
    ids: Tensor | None = None

    @classmethod
    def dense(cls, probs_RV: Float[Tensor, "R V"]) -> Law:
        """One probability per token."""
        return cls(probs_RV)

    @classmethod
    def sparse(cls, ids_RM: Int64[Tensor, "R M"], probs_RM: Float[Tensor, "R M"]) -> Law:
        """Probabilities of the tokens in `ids_RM`, zero elsewhere."""
        return cls(probs_RM, ids_RM)

    @classmethod
    def point(cls, ids_R: Int64[Tensor, " R"]) -> Law:
        """One certain token per row."""
        return cls(torch.ones(len(ids_R), 1, device=ids_R.device), ids_R[:, None])

    def __len__(self) -> int:
        return len(self.probs)

    def to(self, device: torch.device) -> Law:
        """The same laws on a device."""
        ids = None if self.ids is None else host.send(self.ids, device)
        return Law(host.send(self.probs, device), ids)

    def at(self, row: int, tokens: NDArray[np.int64]) -> NDArray[np.floating]:
        """Probabilities of several tokens in one law, where the host reads for free."""
        probs_M = self.probs[row].numpy()
        if self.ids is None:
            return probs_M[tokens]
        same_WM = tokens[:, None] == self.ids[row].numpy()
        return np.where(same_WM, probs_M, 0).sum(1)

    def select(self, rows: Tensor) -> Law:
        """The laws of `rows`, in their order."""
        rows = host.send(rows, self.probs.device)
        ids = None if self.ids is None else self.ids.index_select(0, rows)
        return Law(self.probs.index_select(0, rows), ids)

    def prob_of(self, tokens_R: Int64[Tensor, " R"]) -> Float[Tensor, " R"]:
        """The probability of one token per row."""
        if self.ids is None:
            return self.probs.gather(1, tokens_R[:, None]).squeeze(1)
        return torch.where(self.ids == tokens_R[:, None], self.probs, 0).sum(1)

    def excess(self, weights_RV: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        """`max(0, weights - law)`: what is left of the weights beyond this law, not normalised."""
        if self.ids is None:
            return (weights_RV - self.probs).clamp_(min=0)
        dtype = torch.promote_types(weights_RV.dtype, self.probs.dtype)
        minus_RM = -self.probs.to(dtype)
        return weights_RV.to(dtype).scatter_add(1, self.ids, minus_RM).clamp_(min=0)

    def excess_at(
        self, rows: Int64[Tensor, " n"], weights_nV: Tensor, scale_n: Tensor | None = None
    ) -> Float[Tensor, "n V"]:
        """`excess` of some of the laws over `scale * weights`."""
        if fused(weights_nV.device) and self._fits(weights_nV):
            from outrider.decoding import triton_rows

            scale_n = torch.ones_like(weights_nV[:, 0]) if scale_n is None else scale_n
            return triton_rows.less_law(weights_nV, scale_n, self.probs, rows)[0]
        if scale_n is not None:
            weights_nV = weights_nV * scale_n[:, None].to(weights_nV.dtype)
        law = self.select(rows)
        if self.ids is None and law.probs.dtype == weights_nV.dtype:
            return torch.sub(weights_nV, law.probs, out=law.probs).clamp_(min=0)
        return law.excess(weights_nV)

    def excess_mass_at(
        self, rows: Int64[Tensor, " n"], weights_nV: Tensor, scale_n: Tensor
    ) -> Float[Tensor, " n"]:
        """The sums of `excess_at`, float64."""
        scale_n1 = scale_n[:, None].to(weights_nV.dtype)
        if self.ids is None and self.probs.dtype == weights_nV.dtype:
            short_nV = self.select(rows).probs.addcmul_(weights_nV, scale_n1, value=-1)
            return -short_nV.clamp_(max=0).sum(-1).double()
        return self.excess_at(rows, weights_nV, scale_n).sum(-1).double()

    def _fits(self, weights_nV: Tensor) -> bool:
        dtypes = {self.probs.dtype, weights_nV.dtype}
        return self.ids is None and dtypes == {torch.float32} and self.probs.is_contiguous()

    def argmax(self) -> Int64[Tensor, " R"]:
        """The likeliest token of each row, the first of several."""
        first = likeliest(self.probs)
        return first if self.ids is None else self.ids.gather(1, first[:, None]).squeeze(1)

    def table(self, vocab_size: int) -> Float[Tensor, "R V"]:
        """The dense table."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self), vocab_size).scatter_add_(1, self.ids, self.probs)


def one_table(laws: Sequence[Law]) -> Law:
    """All laws' rows, one's behind the other's: on few tokens, padded, or dense where any are."""
    if len(laws) == 1:
        return laws[0]
    dense = [law for law in laws if law.ids is None]
    if dense:
        width = dense[0].probs.shape[1]
        return Law.dense(torch.cat([law.table(width) for law in laws]))
    most, pad = max(law.probs.shape[1] for law in laws), torch.nn.functional.pad
    more = [(0, most - law.probs.shape[1]) for law in laws]
    ids = [pad(law.ids, own) for law, own in zip(laws, more, strict=True) if law.ids is not None]
    probs = [pad(law.probs, own) for law, own in zip(laws, more, strict=True)]
    return Law.sparse(torch.cat(ids), torch.cat(probs))


def softmax(scores_RV: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """Softmax of float32 or float64 rows, which sum to one within rounding however wide they are.

    On a processor torch's own adds wide float32 rows up without care: at V = 150,000 its rows sum
    to one within 1e-5 only.
    """
    if not _by_hand(scores_RV):
        return torch.softmax(scores_RV, -1)
    weights_RV, sums_R1 = weighed(scores_RV)
    return weights_RV.div_(sums_R1)


def softmax_of(
    scores_RV: Float[Tensor, "R V"], tokens_R: Int64[Tensor, " R"]
) -> Float[Tensor, " R"]:
    """The entry of `softmax` at one token of each row."""
    if not _by_hand(scores_RV):
        return torch.softmax(scores_RV, -1).gather(1, tokens_R[:, None]).squeeze(1)
    weights_RV, sums_R1 = weighed(scores_RV)
    return (weights_RV.gather(1, tokens_R[:, None]) / sums_R1).squeeze(1)


def weighed(scores_RV: Float[Tensor, "R V"]) -> tuple[Tensor, Tensor]:
    """Float32 rows on a processor as new positive weights `[R, V]`, and their sums `[R, 1]`.

    Weights over sum are the `softmax`, to the bit. Rows whose weights have a moderate sum keep
    their scale, which saves passes over them; what a row becomes depends on no other row.
    """
    weights_RV = torch.exp(scores_RV)
    sums_R1 = weights_RV.sum(-1, keepdim=True)
    if host.reads_free(scores_RV.device):
        sums = sums_R1.numpy()
        if not ((sums >= _LEAST_SUM) & (sums <= _MOST_SUM)).all():
            far = (~_moderate(sums_R1)).squeeze(1).nonzero().squeeze(1)
            weights_RV[far], sums_R1[far] = _shifted(scores_RV[far])
        return weights_RV, sums_R1
    shifted_RV, shifted_R1 = _shifted(scores_RV)
    kept_R1 = _moderate(sums_R1)
    return torch.where(kept_R1, weights_RV, shifted_RV), torch.where(kept_R1, sums_R1, shifted_R1)


def weighed_row(scores_V: Float[Tensor, " V"]) -> tuple[Tensor, float]:
    """The same of one row where the host reads for free, but for how its sum is rounded."""
    weights_V = torch.exp(scores_V)
    total = float(weights_V.sum())
    if not _LEAST_SUM <= total <= _MOST_SUM:
        weights_1V, sums_11 = _shifted(scores_V[None])
        return weights_1V[0], float(sums_11)
    return weights_V, total


def _moderate(sums_R1: Tensor) -> Tensor:
    return (sums_R1 >= _LEAST_SUM) & (sums_R1 <= _MOST_SUM)


def _shifted(scores_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Weights with a largest one of 1, and their sums."""
    weights_RV = torch.exp(scores_RV - scores_RV.amax(-1, keepdim=True))
    return weights_RV, weights_RV.sum(-1, keepdim=True)


def _by_hand(scores_RV: Tensor) -> bool:
    return scores_RV.dtype == torch.float32 and scores_RV.device.type == "cpu"


def likeliest(scores_RV: Float[Tensor, "R V"]) -> Int64[Tensor, " R"]:
    """The first largest entry of each row; a NaN is larger than any.

    On a processor by NumPy: torch's argmax takes many times as long, most of all in bfloat16.
    """
    if not host.reads_free(scores_RV.device) or scores_RV.requires_grad:
        return scores_RV.argmax(-1)
    if scores_RV.dtype != torch.float64:
        scores_RV = scores_RV.float()
    return torch.from_numpy(scores_RV.numpy().argmax(-1))


def check_logits(logits_RV: Float[Tensor, "R V"]) -> Bool[Tensor, " R"]:
    """Which rows are laws: no NaN, no +inf, something finite."""
    return logits_RV.amax(-1).isfinite()


def all_laws(logits_RV: Float[Tensor, "R V"]) -> bool:
    """Whether all rows are laws, as `check_logits` says; the host waits for it."""
    return all(map(math.isfinite, logits_RV.amax(-1).tolist()))


def likeliest_of_laws(scores_RV: Float[Tensor, "R V"]) -> Int64[Tensor, " R"] | None:
    """`likeliest` of a few rows; None where one of them is no law, as `check_logits` says.

    Both in one pass, as a row's largest entry tells: on a processor, and without gradients.
    """
    scores = scores_RV if scores_RV.dtype == torch.float64 else scores_RV.float()
    rows = scores.numpy()
    best = rows.argmax(-1)
    # Number by number: of a few rows that takes less than calls on all of them.
    if not all(math.isfinite(row[token]) for row, token in zip(rows, best.tolist(), strict=True)):
        return None
    return torch.from_numpy(best)


def processed_probs(
    logits_RV: Float[Tensor, "R V"],
    temperature_R: Tensor | float,
    top_k_R: Tensor | int = 0,
    top_p_R: Tensor | float = 1.0,
    min_p_R: Tensor | float = 0.0,
    typical_p_R: Tensor | float = 1.0,
) -> Float[Tensor, "R V"]:
    """The laws of logits under temperature, top_k, top_p, min_p and typical_p, in this order.

    Temperature 0 is the one-hot law of the first largest logit, whatever the other controls. top_k
    0, top_p 1, min_p 0 and typical_p 1 are off and cost nothing. Ties are those of transformers'
    processors: top_k keeps all that equal the k-th largest, top_p keeps the highest ids among
    equals (an ascending stable sort is cut at `cumulative <= 1 - top_p`; the last is always kept),
    min_p keeps what is at least min_p times the largest, and typical_p keeps all that are as far
    from the entropy as the last one it needs.

    Args:
        logits_RV: any floating dtype, rows as `check_logits` wants them; -inf forbids a token.
        temperature_R: divides the logits; like the others one number, or one per row.
        top_k_R: how many of the largest stay.
        top_p_R: the mass the likeliest must reach to be all that stays.
        min_p_R: the least share of the largest probability that stays.
        typical_p_R: the mass that those nearest to the entropy must reach to be all that stays.

    Returns:
        float32, or float64 for float64 logits; rows sum to one.
    """
    given = temperature_R, top_k_R, top_p_R, min_p_R, typical_p_R
    controls = [_per_row(control, logits_RV) for control in given]
    few_R = _leaves_few(logits_RV, *controls[:2])
    if not few_R.any():
        return _of_any(logits_RV, controls)
    rows, width = few_R.nonzero().squeeze(1), logits_RV.shape[1]
    alone = len(rows) == len(logits_RV)
    own = logits_RV if alone else logits_RV[rows]
    law, whole_n = _of_few(own, controls if alone else [control[rows] for control in controls])
    if alone and not whole_n.any():
        return law.table(width)
    probs_RV = law.probs.new_empty(len(logits_RV), width)
    probs_RV[rows[~whole_n]] = law.select((~whole_n).nonzero().squeeze(1)).table(width)
    whole_R = (~few_R).index_fill(0, rows[whole_n], True)
    probs_RV[whole_R] = _of_any(logits_RV[whole_R], [control[whole_R] for control in controls])
    return probs_RV


def tempered(
    logits_RV: Float[Tensor, "R V"], temperature_R: Float[Tensor, " R"] | None = None
) -> Float[Tensor, "R V"]:
    """`processed_probs`, to the bit, under positive temperatures alone; None: all are 1."""
    scores_RV = _in_full(logits_RV)
    if temperature_R is not None:
        temperature_R = host.send(temperature_R, scores_RV.device)
        scores_RV = scores_RV / temperature_R.to(scores_RV.dtype)[:, None]
    return softmax(scores_RV)


def law_of_few(logits_RV: Float[Tensor, "R V"], controls: Sequence[Tensor]) -> Law | None:
    """The laws of `processed_probs` on few tokens; None unless top_k leaves few of each wide row.

    Args:
        logits_RV: any floating dtype, rows as `check_logits` wants them.
        controls: those of `processed_probs`, in its order, `[R]` each.

    Returns:
        Ids ascend; they are as many for each row as the largest top_k asks for, and some.
    """
    if len(logits_RV) == 0 or not _leaves_few(logits_RV, *controls[:2]).all():
        return None
    law, whole_R = _of_few(logits_RV, controls)
    return None if whole_R.any() else law


def _leaves_few(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor) -> Bool[Tensor, " R"]:
    """Rows of which top_k leaves so few tokens that only these are worked on; told on the host."""
    width = logits_RV.shape[1]
    if width < _WIDE or not host.reads_free(logits_RV.device):
        return torch.zeros(len(logits_RV), dtype=torch.bool)
    return (top_k_R > 0) & (2 * _BLOCK * top_k_R <= width) & (temperature_R > 0)


def _in_full(logits_RV: Tensor) -> Tensor:
    """In the dtype of laws."""
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


def _of_any(logits_RV: Tensor, controls: Sequence[Tensor]) -> Tensor:
    """The laws worked out of whole rows, of which some may be one-hot."""
    scores_RV, greedy_R = _in_full(logits_RV), controls[0] == 0
    if len(scores_RV) == 0:
        return scores_RV
    if not greedy_R.any():
        return _of_all(scores_RV, controls)
    probs_RV = torch.zeros_like(scores_RV).scatter_(1, scores_RV.argmax(-1, keepdim=True), 1.0)
    warm_R = ~greedy_R
    if warm_R.any():
        probs_RV[warm_R] = _of_all(scores_RV[warm_R], [control[warm_R] for control in controls])
    return probs_RV


def _of_all(scores_RV: Tensor, controls: Sequence[Tensor]) -> Tensor:
    """The laws of warm rows, worked out of whole rows."""
    temperature_R, top_k_R, top_p_R, min_p_R, typical_p_R = controls
    if (temperature_R != 1).any():
        scores_RV = scores_RV / temperature_R.to(scores_RV.dtype)[:, None]
    scores_RV = _on_rows(_top_k, scores_RV, (top_k_R > 0) & (top_k_R < scores_RV.shape[1]), top_k_R)
    scores_RV = _on_rows(_top_p, scores_RV, top_p_R < 1, top_p_R)
    scores_RV = _on_rows(_min_p, scores_RV, min_p_R > 0, min_p_R)
    scores_RV = _on_rows(typical, scores_RV, typical_p_R < 1, typical_p_R)
    return softmax(scores_RV)


def _per_row(control: Tensor | float, rows: Tensor) -> Tensor:
    if not isinstance(control, Tensor):
        control = torch.tensor(control, dtype=torch.float64)
    return host.send(control, rows.device).expand(len(rows))


def _of_few(logits_RV: Tensor, controls: Sequence[Tensor]) -> tuple[Law, Tensor]:
    """The laws of rows of which top_k leaves few tokens, worked out of these and a few more.

    What a row becomes depends on no other row: those of one top_k are worked on together.

    Returns:
        Laws whose ids ascend, and whether a row has to be worked out whole: where so many equal the
        last that stays that they were not all looked at.
    """
    top_k_R = controls[1]
    ks = top_k_R.tolist()
    if len(set(ks)) == 1:
        return _of_equally_few(logits_RV, int(ks[0]), controls)
    ids_RM = torch.zeros(len(ks), int(max(ks)) + _TIED, dtype=torch.int64)
    probs_RM = _in_full(logits_RV[:, :1]).new_zeros(ids_RM.shape)
    whole_R = torch.zeros(len(ks), dtype=torch.bool)
    for k in sorted(set(ks)):
        rows = (top_k_R == k).nonzero().squeeze(1)
        own = [control[rows] for control in controls]
        law, whole_R[rows] = _of_equally_few(logits_RV[rows], int(k), own)
        assert law.ids is not None
        ids_RM[rows, : law.ids.shape[1]], probs_RM[rows, : law.ids.shape[1]] = law.ids, law.probs
    return Law.sparse(ids_RM, probs_RM), whole_R


def _of_equally_few(logits_RV: Tensor, k: int, controls: Sequence[Tensor]) -> tuple[Law, Tensor]:
    """The same of rows that have one top_k."""
    temperature_R, top_k_R, *rest = controls
    largest_RK, ids_RK = _largest(logits_RV, k + _TIED)
    scores_RK = _in_full(largest_RK)
    scores_RK = scores_RK / temperature_R.to(scores_RK.dtype)[:, None]
    least_R1, last_R = scores_RK[:, k - 1, None], scores_RK[:, -1]
    whole_R = (last_R == least_R1[:, 0]) & (last_R > -torch.inf)
    # Ids ascend: the order of ties in what follows.
    ids_RK, order_RK = ids_RK.sort(-1)
    kept_RK = scores_RK.masked_fill_(scores_RK < least_R1, -torch.inf).gather(1, order_RK)
    off_R = torch.zeros(len(top_k_R), dtype=torch.float64)
    return Law.sparse(ids_RK, _of_all(kept_RK, (off_R + 1, off_R, *rest))), whole_R


def _largest(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest entries of wide rows, falling, and their ids, equals in any order.

    They stand in the blocks with the `num` largest maxima, or beside all blocks. A block is made of
    entries that lie far apart: whole runs of the row are compared at once.
    """
    blocks = logits_RV.shape[1] // _BLOCK
    tops_RC = logits_RV[:, : blocks * _BLOCK].unflatten(1, (_BLOCK, blocks)).amax(1)
    first_RK1 = tops_RC.topk(num, -1).indices[:, :, None]
    ids_RM = (first_RK1 + torch.arange(0, blocks * _BLOCK, blocks)).flatten(1)
    if blocks * _BLOCK < logits_RV.shape[1]:
        rest = torch.arange(blocks * _BLOCK, logits_RV.shape[1])
        ids_RM = torch.cat((ids_RM, rest.expand(len(ids_RM), -1)), 1)
    values_RK, places_RK = logits_RV.gather(1, ids_RM).topk(num, -1)
    return values_RK, ids_RM.gather(1, places_RK)


def _on_rows(
    step: Callable[[Tensor, Tensor], Tensor], scores_RV: Tensor, rows: Tensor, control_R: Tensor
) -> Tensor:
    """Applies one control where it is on; other rows are not touched."""
    if rows.all():
        return step(scores_RV, control_R)
    if not rows.any():
        return scores_RV
    out = scores_RV.clone()
    out[rows] = step(scores_RV[rows], control_R[rows])
    return out


def _top_k(scores_RV: Tensor, top_k_R: Tensor) -> Tensor:
    largest = scores_RV.topk(int(top_k_R.max()), -1).values
    least_R1 = largest.gather(1, top_k_R.long()[:, None] - 1)
    return scores_RV.masked_fill(scores_RV < least_R1, -torch.inf)


def _min_p(scores_RV: Tensor, min_p_R: Tensor) -> Tensor:
    probs_RV = torch.softmax(scores_RV, -1)
    least_R1 = min_p_R.to(scores_RV.dtype)[:, None] * probs_RV.amax(-1, keepdim=True)
    return scores_RV.masked_fill(probs_RV < least_R1, -torch.inf)


def _top_p(scores_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Cuts each row to its nucleus, sorting no more of it than may be in the nucleus.

    What lies below a head of the row goes together when its mass is within what may be cut; the
    cumulative sum over the head starts from that mass.
    """
    cut_R1 = (1 - top_p_R.double()).to(scores_RV.dtype)[:, None]
    probs_RV = torch.softmax(scores_RV, -1)
    head_RV, below_R1 = _head(scores_RV, probs_RV, cut_R1)
    counts_R = head_RV.sum(-1)
    rows, ids = head_RV.nonzero(as_tuple=True)  # ids ascend within a row: the order of ties
    places = torch.arange(len(ids), device=ids.device) - (counts_R.cumsum(0) - counts_R)[rows]
    # Padding at -inf sorts to the front with probability 0.
    padded_RM = scores_RV.new_full((len(scores_RV), int(counts_R.max())), -torch.inf)
    mass_RM = torch.zeros_like(padded_RM)
    padded_RM[rows, places] = scores_RV[rows, ids]
    mass_RM[rows, places] = probs_RV[rows, ids]
    order_RM = padded_RM.sort(dim=-1, stable=True).indices
    upto_RM = below_R1 + mass_RM.gather(1, order_RM).cumsum(-1, dtype=torch.float64)
    keep_RM = upto_RM.to(scores_RV.dtype) > cut_R1
    keep_RM[:, -1] = True
    kept = torch.zeros_like(keep_RM).scatter_(1, order_RM, keep_RM)[rows, places]
    out_RV = torch.full_like(scores_RV, -torch.inf)
    out_RV[rows[kept], ids[kept]] = scores_RV[rows[kept], ids[kept]]
    return out_RV


def _head(scores_RV: Tensor, probs_RV: Tensor, cut_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that may be in the nucleus `[R, V]`, ties included; the mass below them `[R, 1]`."""
    size, width = _NUCLEUS_GUESS, scores_RV.shape[1]
    while size < width:
        least_R1 = scores_RV.topk(size, -1).values[:, -1:]
        head_RV = (scores_RV >= least_R1) & (scores_RV > -torch.inf)
        below_R1 = probs_RV.masked_fill(head_RV, 0).sum(-1, keepdim=True, dtype=torch.float64)
        if (below_R1 < cut_R1).all():
            return head_RV, below_R1
        size *= 8
    return scores_RV > -torch.inf, torch.zeros_like(cut_R1, dtype=torch.float64)
