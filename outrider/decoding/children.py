"""Drawing the children of a row: K tokens of one law at once, and the law each was drawn from.

A child is drawn on stream DRAFT at the number it is given: its index in the tree or, where trees
are pruned afterwards, among all candidates; no number of a round serves twice. Certain children use
no noise, raced ones the target's own. Where a law's support is used up there are fewer children,
and how many never depends on what came out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import host, noise
from outrider.decoding.draft import Kind, RoundNoise
from outrider.decoding.laws import Law
from outrider.decoding.sampling import DENSE_SHARE, inverse_cdf

# About how far a draft's log-probabilities are from its target's, in nats.
_ERROR = 0.7
# Less than this left of a row is summed by itself.
_SHARP = 1e-6
_LEAST = 1e-200  # in place of a square of 0, by which nothing could be divided
# About what the laws of target and draft share where both are flat.
_SHARED = 0.4

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64


@dataclass(frozen=True, slots=True)
class Children:
    """Up to K children of each of n rows, those that there are in front.

    Attributes:
        tokens_nK: int64 in drawing order; behind the last child any token.
        kinds_nK: the Kind of each.
        counts_n: how many there are.
        worth_nK: float64 in [0, 1], about the chance that the target keeps each, read from nothing
            that may not decide which of them are drafted; None where no such number exists. A tail
            child is worth less than each of its certain siblings, so that it goes before them.
    """

    tokens_nK: Int64[Tensor, "n K"]
    kinds_nK: Int64[Tensor, "n K"]
    counts_n: Int64[Tensor, " n"]
    worth_nK: Float64[Tensor, "n K"] | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where n rows stand in their rounds.

    Attributes:
        noise_n: the round's noise of each row's text.
        index_nK: the node number of each child; of those that are not there any other number.
        depth: drafted tokens on the path to the rows; 0 for the root.
    """

    noise_n: RoundNoise
    index_nK: Int64[Tensor, "n K"]
    depth: int

    def uniforms(self, k: int) -> Tensor:
        """The uniforms that draw child k of each row."""
        at = self.noise_n
        return noise.uniforms53(
            at.seed_B, at.sample_B, noise.STREAM_DRAFT, at.anchor_B, self.index_nK[:, k]
        )

    def all_uniforms(self, num: int) -> Sequence[Tensor]:
        """Those of the first `num` children, one after another."""
        at = self.noise_n
        seed_n1, sample_n1, anchor_n1 = (
            part[:, None] for part in (at.seed_B, at.sample_B, at.anchor_B)
        )
        made_nK = noise.uniforms53(
            seed_n1, sample_n1, noise.STREAM_DRAFT, anchor_n1, self.index_nK[:, :num]
        )
        return made_nK.unbind(1)


class Drawing(ABC):
    """A way to draw children; objects without state.

    Attributes:
        kinds: the kinds its children may be of.
        ranked: whether children come with what they are worth, so that a tree may be shaped by it.
    """

    kinds: frozenset[Kind]
    ranked: bool = False

    def counts(self, law: Law, num: int) -> Int64[Tensor, " n"]:
        """How many of `num` children each law has."""
        return (law.probs > 0).sum(1).clamp(max=num)

    @abstractmethod
    def children(self, law: Law, num: int, places: Places) -> Children:
        """`num` children from each row of `law`, or as many as there are."""


class WithReplacement(Drawing):
    """Every child from the whole law: the same token may come twice."""

    kinds = frozenset({Kind.IID})

    def counts(self, law: Law, num: int) -> Tensor:
        """All of them."""
        return torch.full((len(law),), num, device=law.probs.device)

    def children(self, law: Law, num: int, places: Places) -> Children:
        """By inverse cdf."""
        ladder = _Ladder(law.probs)
        columns = [ladder.draw(u_n, _no_columns(law)) for u_n in places.all_uniforms(num)]
        return _of_one_kind(_tokens(law, columns), Kind.IID, self.counts(law, num))


class Without(Drawing):
    """Every child from the law without the tokens before it."""

    kinds = frozenset({Kind.WITHOUT})
    ranked = True

    def children(self, law: Law, num: int, places: Places) -> Children:
        """By inverse cdf with the earlier siblings' weight at zero, the rest not normalised.

        A child is worth what its law is expected to share with what its earlier siblings leave of
        the target's, whatever token came out of it.
        """
        ladder = _Ladder(law.probs)
        gone_RK = _no_columns(law)
        for uniform_n in places.all_uniforms(num):
            column = ladder.draw(uniform_n, gone_RK)
            gone_RK = torch.cat((gone_RK, column[:, None]), 1)
        counts_R = self.counts(law, num)
        made = _of_one_kind(_tokens(law, gone_RK.unbind(1)), Kind.WITHOUT, counts_R)
        return replace(made, worth_nK=self._worth(law.probs, gone_RK))

    def _worth(self, probs_RM: Tensor, drawn_RK: Tensor) -> Tensor:
        """The chance that the earlier siblings are refused, times what law and residual share.

        Two draws from a child's law agree with chance `sum law(x)^2`: so often it is sharp, and
        what it says is what happens. Otherwise it shares `_SHARED` with the target, and with the
        residual that k refused siblings leave a (k + 1)-th of that.
        """
        # Of the earlier siblings alone: rounding must not know a child's own token either.
        gone_RK = torch.nn.functional.pad(probs_RM.gather(1, drawn_RK[:, :-1]).double(), (1, 0))
        left_RK = probs_RM.sum(1, keepdim=True, dtype=torch.float64) - gone_RK.cumsum(1)
        squares_R1 = probs_RM.square().sum(1, keepdim=True, dtype=torch.float64)
        squares_RK = squares_R1 - gone_RK.square().cumsum(1)
        agree_RK = (squares_RK / left_RK.square().clamp(min=_LEAST)).clamp(0, 1)
        places_K = torch.arange(1, left_RK.shape[1] + 1, device=left_RK.device)
        flat_K = _SHARED / places_K.double()
        chances_RK = flat_K + (1 - flat_K) * agree_RK
        refused_R, worths = torch.ones_like(left_RK[:, 0]), list[Tensor]()
        for chance_R in chances_RK.unbind(1):
            worth_R = refused_R * chance_R
            worths.append(torch.minimum(worth_R, worths[-1]) if worths else worth_R)
            refused_R = refused_R - worths[-1]
        return torch.stack(worths, 1)


class Top(Drawing):
    """The likeliest tokens, the lowest id of equals; no chance is in it."""

    kinds = frozenset({Kind.POINT})
    ranked = True

    def children(self, law: Law, num: int, places: Places) -> Children:
        """Nothing of `places` is read; a child is worth its probability."""
        law = _ascending(law)
        columns = _top(law.probs, num)
        made = _of_one_kind(_tokens(law, columns), Kind.POINT, self.counts(law, num))
        return replace(made, worth_nK=law.probs.gather(1, torch.stack(columns, 1)).double())


class TailThenTop(Drawing):
    """One child from the law without its K - 1 likeliest tokens, then those.

    Source: Hu et al., ICLR 2025, arXiv 2502.18779.
    """

    kinds = frozenset({Kind.TAIL, Kind.POINT})
    ranked = True

    def children(self, law: Law, num: int, places: Places) -> Children:
        """A law on fewer than K tokens has no tail: its children are all certain.

        The tail child is worth the mass of its tail, whatever token came out of it.
        """
        ordered = _ascending(law)
        tops = _top(ordered.probs, num - 1)
        gone_RK = torch.stack(tops, 1) if tops else _no_columns(law)
        drawn = _Ladder(ordered.probs).draw(places.uniforms(0), gone_RK)
        tokens_nK = _tokens(ordered, [drawn, *tops])
        counts_n = self.counts(law, num)
        tail_n1 = (counts_n == num)[:, None]
        # Without a tail the certain ones move to the front.
        tokens_nK = torch.where(tail_n1, tokens_nK, tokens_nK.roll(-1, 1))
        kinds_nK = torch.full_like(tokens_nK, int(Kind.POINT))
        kinds_nK[:, :1] = torch.where(tail_n1, int(Kind.TAIL), int(Kind.POINT))
        worth_nK = self._worth(ordered.probs, gone_RK)
        worth_nK = torch.where(tail_n1, worth_nK, worth_nK.roll(-1, 1))
        return Children(tokens_nK, kinds_nK, counts_n, worth_nK)

    def _worth(self, probs_RM: Tensor, tops_RK: Tensor) -> Tensor:
        """The tail's mass, below the least of the certain ones, and theirs."""
        own_RK = probs_RM.gather(1, tops_RK).double()
        tail_R1 = (1 - own_RK.sum(1, keepdim=True)).clamp_(min=0)
        if own_RK.shape[1]:
            least_R1 = own_RK[:, -1:]
            tail_R1 = torch.where(tail_R1 < least_R1, tail_R1, least_R1 * (1 - 1e-9))
        return torch.cat((tail_R1, own_RK), 1)


class Unranked(Drawing):
    """Another drawing's children without what they are worth, so that trees have one shape."""

    def __init__(self, drawing: Drawing) -> None:
        self.kinds, self.drawing = drawing.kinds, drawing

    def counts(self, law: Law, num: int) -> Tensor:
        """As of the other."""
        return self.drawing.counts(law, num)

    def children(self, law: Law, num: int, places: Places) -> Children:
        """The other's."""
        return replace(self.drawing.children(law, num, places), worth_nK=None)


class Raced(Drawing):
    """The first K in the race on the noise that the target will draw its own token with.

    They are distributed as children without replacement, and the target's token is among them
    whenever it is in the first K of the draft's race. Source: for one child Daliri, Musco, Suresh,
    arXiv 2408.07978; top K: Kool, van Hoof, Welling, ICML 2019, arXiv 1903.06059.
    """

    kinds = frozenset({Kind.WITHOUT})
    ranked = True

    def children(self, law: Law, num: int, places: Places) -> Children:
        """`log q + G` of position anchor + depth, over the support.

        What a child is worth follows its lead: the target's keys are the draft's and an error. Only
        `coupled` may look at it, whose target draws for itself.
        """
        at = places.noise_n
        keys_nM, tokens_nM = _keys(law, at, at.anchor_B + places.depth)
        columns = _top(keys_nM, num)
        made = _of_one_kind(
            _tokens(Law(keys_nM, tokens_nM), columns), Kind.WITHOUT, self.counts(law, num)
        )
        leads_nK = keys_nM.gather(1, torch.stack(columns, 1)) / _ERROR
        total_n1 = torch.logsumexp(keys_nM / _ERROR, 1, keepdim=True)
        return replace(made, worth_nK=(leads_nK - total_n1).exp())


class _Ladder:
    """Inverse cdf of rows summed once, from which columns can be taken out."""

    def __init__(self, probs_RM: Tensor) -> None:
        self.probs_RM = probs_RM
        self._upto_RM = probs_RM.cumsum(1, dtype=torch.float64)

    def draw(self, uniform_R: Tensor, gone_RK: Tensor) -> Tensor:
        """The first column whose cumulative weight exceeds `u * total`, the gone ones at zero."""
        upto_RM, probs_RM = self._upto_RM, self.probs_RM
        gone_RK = gone_RK.sort(1).values
        cut_RK = probs_RM.gather(1, gone_RK).cumsum(1, dtype=torch.float64)
        total_R1 = upto_RM[:, -1:]
        if gone_RK.shape[1]:
            total_R1 = total_R1 - cut_RK[:, -1:]
        point_R1 = host.send(uniform_R, probs_RM.device).double()[:, None] * total_R1
        # The sum without the gone ones, up to each of them: those it passes are added back.
        passed_RK = upto_RM.gather(1, gone_RK) - cut_RK <= point_R1
        back_R1 = probs_RM.gather(1, gone_RK).double().mul(passed_RK).sum(1, keepdim=True)
        column_R1 = torch.searchsorted(upto_RM, point_R1 + back_R1, right=True)
        column_R1 = column_R1.clamp_(max=upto_RM.shape[1] - 1)
        off_R = (probs_RM.gather(1, column_R1) <= 0).squeeze(1) | (column_R1 == gone_RK).any(1)
        # What the gone ones leave of a sharp row is below the grain of its sums.
        off_R |= (total_R1 < _SHARP * upto_RM[:, -1:]).squeeze(1)
        column_R = column_R1.squeeze(1)
        if off_R.any():
            # There the sums say little; so they do at the row's end and beside a gone column.
            left = probs_RM[off_R].scatter(1, gone_RK[off_R], 0)
            column_R[off_R] = inverse_cdf(left, host.send(uniform_R, probs_RM.device)[off_R])
        return column_R


def _top(scores_RM: Tensor, num: int) -> list[Tensor]:
    """Columns of the `num` largest, the first of equals; scores are probabilities or keys."""
    left_RM, columns = scores_RM.clone() if num > 1 else scores_RM, list[Tensor]()
    for k in range(num):
        columns.append(left_RM.argmax(1))
        if k + 1 < num:
            left_RM.scatter_(1, columns[-1][:, None], -torch.inf)
    return columns


def _keys(law: Law, at: RoundNoise, position_n: Tensor) -> tuple[Tensor, Tensor | None]:
    """`log q + G` over whole rows, or over the support beside its tokens; -inf where q is 0."""
    probs, device = law.probs, law.probs.device
    seed, sample, position = host.sent((at.seed_B, at.sample_B, position_n), device)
    if law.ids is None:
        support = probs > 0
        if support.sum() > DENSE_SHARE * probs.numel():
            gumbels_nV = noise.gumbel_rows(seed, sample, position, probs.shape[1])
            return gumbels_nV.add_(probs.double().log()), None
        # The support in front: columns ascend, so that the first of equals stays the first.
        width = max(1, int(support.sum(1).max())) if len(probs) else 1
        ids = support.byte().sort(dim=1, descending=True, stable=True).indices[:, :width]
        law = Law.sparse(ids, probs.gather(1, ids))
    assert law.ids is not None
    rows, columns = (law.probs > 0).nonzero(as_tuple=True)
    made = noise.gumbels(seed[rows], sample[rows], position[rows], law.ids[rows, columns])
    keys = torch.full_like(law.probs, -torch.inf, dtype=torch.float64)
    keys[rows, columns] = made.add_(law.probs[rows, columns].double().log())
    return keys, law.ids


def _ascending(law: Law) -> Law:
    """The law with its tokens in the order of their ids."""
    if law.ids is None:
        return law
    ids, order = law.ids.sort(dim=1, stable=True)
    return Law.sparse(ids, law.probs.gather(1, order))


def _tokens(law: Law, columns: Sequence[Tensor]) -> Tensor:
    """Tokens `[n, K]` of columns."""
    columns_nK = torch.stack(tuple(columns), 1)
    return columns_nK if law.ids is None else law.ids.gather(1, columns_nK)


def _no_columns(law: Law) -> Tensor:
    return torch.zeros(len(law), 0, dtype=torch.int64, device=law.probs.device)


def _of_one_kind(tokens_nK: Tensor, kind: Kind, counts_n: Tensor) -> Children:
    return Children(tokens_nK, torch.full_like(tokens_nK, int(kind)), counts_n)
