"""What trees still owe the target: every row's residual and share, as its children are refused.

Of a row with law P and children refused in turn, child j with law `q_j / z_j` off some tokens, the
residual is `max(0, P - sum c_j q_j)` for numbers c_j >= 0: taking twice from what is cut at zero is
taking the sum once. Only at the children's own tokens is it not, and there it is kept as a number.
So a row's state is a handful of numbers; its V entries are made where a mass or a draw needs them.

Here all rows in hand go at once and the host reads nothing; `rowwise` does the same where it may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.draft import Draft, Kind
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import first_rows
from outrider.decoding.sampling import inverse_cdf

Rank: TypeAlias = int | Tensor
"""One rank for all rows in hand, or one per row `[n]`."""

MOST_LEFT = 0.5
"""While more of a law is left than this, one minus what was taken is as good as the sum."""
# A c beyond the first is multiplied in two steps, for float32's sake; one beyond the second is met
# with a chance below its inverse.
STEEP, MOST = 1e30, 1e60


@dataclass(frozen=True, slots=True)
class Refused:
    """Which rows of a family refused their child, and where mass and share matter afterwards.

    Where they do not, the share stays as it was: it never grows.
    """

    refused_n: Tensor
    wanted_n: Tensor


class Residuals:
    """The state of B trees' rows, by flat row `b * T + t`, as numbers in float64.

    Of a row, R is `residual / mass` and `share` the chance that it is kept once it is reached;
    rules that go down never change it from 1.

    Attributes:
        width: the most children of any row.
        rows_RW: each row's children in drawing order, 0 where there are no more.
        share_R: the share of each row.
    """

    def __init__(self, draft: Draft, target: TargetRows) -> None:
        children_BTW = draft.tree.children()
        self.width = children_BTW.shape[2]
        self.rows_RW = children_BTW.reshape(-1, self.width)
        self.target, self.law = target, draft.law
        self.kinds = draft.kinds
        self.all_certain = not draft.law or draft.kinds <= {Kind.POINT}
        self.never_short = draft.kinds <= {Kind.POINT, Kind.IID}
        ones_WW = torch.ones(self.width, self.width, dtype=torch.bool, device=target.device)
        self.earlier_WW = ones_WW.tril(-1)
        self.tokens_RW = _of_children(draft.tree.tokens_BN, children_BTW)
        self.kinds_RW = _of_children(draft.node_kinds(), children_BTW)
        self.laws_RW = _of_children(draft.law_rows(), children_BTW) * (self.rows_RW > 0)
        zeros_RW = torch.zeros(self.rows_RW.shape, dtype=torch.float64, device=target.device)
        # P and its residual at the children's tokens; c_j at the first sibling of one base law.
        self.p_RW, self.owed_RW, self.taken_RW = zeros_RW, zeros_RW.clone(), zeros_RW.clone()
        self.mass_R = torch.ones_like(zeros_RW[:, 0])
        self.share_R = self.mass_R.clone()

    def family(self, at_n: Tensor) -> Family:
        """Some rows, each once, with their children, as they stand."""
        state = self.p_RW[at_n], self.owed_RW[at_n], self.taken_RW[at_n], self.mass_R[at_n]
        return Family(self, at_n, *state)

    def fresh_family(self, at_n: Tensor, probs_nV: Tensor) -> Family:
        """Some rows with no child refused, given their laws."""
        p_nW = probs_nV.gather(1, self.tokens_RW[at_n]).double()
        return Family(self, at_n, p_nW, p_nW, torch.zeros_like(p_nW), torch.ones_like(p_nW[:, 0]))

    def draw(self, at_B: Tensor, uniform_B: Tensor) -> Tensor:
        """One token from the residual of each of B rows."""
        probs_BV = self.target.probs(at_B)
        weights_BV = self.family(at_B).spread(probs_BV)
        drawn_B = inverse_cdf(weights_BV, uniform_B)
        # Only rounding refuses a sure token: what is added then follows the target.
        void_B = ~(weights_BV.gather(1, drawn_B[:, None]).squeeze(1) > 0)
        return torch.where(void_B, inverse_cdf(probs_BV, uniform_B), drawn_B)


class Family:
    """n rows in hand with their children, who are named by their rank k."""

    def __init__(
        self,
        whole: Residuals,
        at_n: Tensor,
        p_nW: Tensor,
        owed_nW: Tensor,
        taken_nW: Tensor,
        mass_n: Tensor,
    ) -> None:
        self._whole, self._at_n = whole, at_n
        self._p_nW, self._owed_nW, self._taken_nW, self._mass_n = p_nW, owed_nW, taken_nW, mass_n
        self.share_n = whole.share_R[at_n]
        self.rows_nW = whole.rows_RW[at_n]
        self._tokens_nW = whole.tokens_RW[at_n]
        if not whole.all_certain:
            self._kinds_nW, self._laws_nW = whole.kinds_RW[at_n], whole.laws_RW[at_n]

    def save(self) -> None:
        """Writes the rows' state back."""
        whole, at_n = self._whole, self._at_n
        whole.p_RW[at_n], whole.owed_RW[at_n] = self._p_nW, self._owed_nW
        whole.mass_R[at_n], whole.share_R[at_n] = self._mass_n, self.share_n
        if not whole.all_certain:
            whole.taken_RW[at_n] = self._taken_nW

    def enter_some(self, fresh_n: Tensor, probs_nV: Tensor) -> None:
        """Takes up, for the first time, those rows that are fresh."""
        self._p_nW = probs_nV.gather(1, self._tokens_nW).double()
        self._owed_nW = torch.where(fresh_n[:, None], self._p_nW, self._owed_nW)

    def ratio(self, k: Rank) -> tuple[Tensor, Tensor]:
        """`share * R(x)` and `law(x)` of child k and its token x, both times the same number."""
        self._own_nW, self._left_n = self._child_law(k)
        owed_n, own_n = _column(self._owed_nW, k), _column(self._own_nW, k)
        return self.share_n * owed_n * self._left_n, self._mass_n * own_n

    def refuse(self, k: Rank, which: Refused, probs_nV: Tensor) -> None:
        """Takes the law of child k, whose ratio was asked last, out of what its row owes.

        Args:
            k: the rank.
            which: where it was refused indeed, and where what follows must be known.
            probs_nV: the target's laws.
        """
        mass_n, share_n, owed_nW, refused_n = (
            self._mass_n,
            self.share_n,
            self._owed_nW,
            which.refused_n,
        )
        less_n = mass_n - _column(owed_nW, k)
        left_nW = owed_nW.masked_fill(self._tokens_nW == _column(self._tokens_nW, k)[:, None], 0)
        if not self._whole.all_certain:
            sampled_n = refused_n & (_column(self._kinds_nW, k) != Kind.POINT)
            room_n = share_n * self._left_n
            # Nothing is taken where nothing is left: R stays.
            step_n = torch.where(sampled_n & (room_n > 0), mass_n / room_n, 0).clamp(max=MOST)
            cut_nW = (owed_nW - step_n[:, None] * self._own_nW).clamp(min=0)
            left_nW = torch.where(sampled_n[:, None], cut_nW, left_nW)
            slot_n1 = self._slots(k)
            self._taken_nW = self._taken_nW.scatter_add(1, slot_n1, step_n[:, None])
            summed_n = which.wanted_n & sampled_n
            less_n = torch.where(summed_n, self._mass(left_nW, probs_nV), less_n)
        less_n = less_n.clamp(min=0)
        rest_n = torch.where(mass_n > 0, share_n * less_n / mass_n, 0)
        room_n = rest_n + (1 - share_n)
        # 0 / 0 happens only where share is 1 and the laws agree: the row is sure to be kept.
        after_n = torch.where(room_n > 0, rest_n / room_n, 1.0)
        self.share_n = torch.where(which.wanted_n, after_n, share_n)
        self._mass_n = torch.where(refused_n, less_n, mass_n)
        self._owed_nW = torch.where(refused_n[:, None], left_nW, owed_nW)

    def spread(self, probs_nV: Tensor) -> Tensor:
        """The residuals written out, not normalised."""
        return self._with_tokens(self._beyond(probs_nV))

    def _child_law(self, k: Rank) -> tuple[Tensor, Tensor]:
        """Child k's law at its siblings' tokens `[n, W]`, times the number beside it `[n]`."""
        tokens_nW, law = self._tokens_nW, self._whole.law
        point_nW = (tokens_nW == _column(tokens_nW, k)[:, None]).double()
        one_n = torch.ones_like(self._mass_n)
        if law is None or self._whole.all_certain:
            return point_nW, one_n
        kind_n, base_n = _column(self._kinds_nW, k), _column(self._laws_nW, k)
        own_nW, left_n = _at(law, base_n, tokens_nW), one_n
        if not self._whole.never_short:
            hit_nWW, first_nW, gone_nW = self._taken_before(k, kind_n)
            left_n = one_n - (own_nW * first_nW).sum(1)
            own_nW = own_nW.masked_fill(hit_nWW.any(2), 0)
            rest_n = _rest(law, base_n, tokens_nW, own_nW, gone_nW)
            left_n = torch.where(left_n < MOST_LEFT, rest_n, left_n)
        if Kind.POINT not in self._whole.kinds:
            return own_nW, left_n
        point_n = kind_n == Kind.POINT
        own_nW = torch.where(point_n[:, None], point_nW, own_nW)
        return own_nW, torch.where(point_n, one_n, left_n)

    def _taken_before(self, k: Rank, kind_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is out of child k's law: siblings by the tokens they hit, the first of each, all."""
        ranks_W = torch.arange(self._whole.width, device=kind_n.device)
        before_nW = ranks_W < (k if isinstance(k, int) else k[:, None])
        gone_nW = (kind_n == Kind.WITHOUT)[:, None] & before_nW
        if Kind.TAIL in self._whole.kinds:
            gone_nW |= (kind_n == Kind.TAIL)[:, None] & (self._kinds_nW == Kind.POINT)
        gone_nW = gone_nW & (self.rows_nW > 0)
        hit_nWW = self._same() & gone_nW[:, None, :]
        return hit_nWW, gone_nW & ~(hit_nWW & self._whole.earlier_WW).any(2), gone_nW

    def _same(self) -> Tensor:
        """Which siblings bear the same token."""
        return self._tokens_nW[:, :, None] == self._tokens_nW[:, None, :]

    def _slots(self, k: Rank) -> Tensor:
        """The first sibling drawn from the same base law as child k, `[n, 1]`."""
        like_nW = (self._laws_nW == _column(self._laws_nW, k)[:, None]) & (self.rows_nW > 0)
        return like_nW.byte().argmax(1, keepdim=True)

    def _mass(self, owed_nW: Tensor, probs_nV: Tensor) -> Tensor:
        """The mass of the residuals, what is owed at the children's tokens set right."""
        law, whole = self._whole.law, self._whole
        assert law is not None
        summed_n = torch.empty_like(self._mass_n)
        for part in whole.target.parts(len(summed_n)):
            summed_n[part] = self._beyond(probs_nV[part], part).sum(1).double()
        real_nW = self.rows_nW > 0
        first_nW = real_nW & ~(self._same() & real_nW[:, None, :] & whole.earlier_WW).any(2)
        plain_nW = self._p_nW
        for j in range(whole.width):
            taken_n1 = self._taken_nW[:, j, None]
            at_nW = _at(law, self._laws_nW[:, j], self._tokens_nW)
            plain_nW = plain_nW - torch.where(taken_n1 > 0, taken_n1 * at_nW, 0)
        return summed_n + (first_nW * (owed_nW - plain_nW.clamp(min=0))).sum(1)

    def _beyond(self, probs_mV: Tensor, part: slice = slice(None)) -> Tensor:
        """`max(0, P - sum c_j q_j)`, the residual but for the children's tokens; a new tensor.

        Args:
            probs_mV: the target's laws at some of the rows.
            part: which of them.
        """
        law, out_mV = self._whole.law, probs_mV
        for j in () if self._whole.all_certain else range(self._whole.width):
            assert law is not None
            rows_m, taken_m1 = self._laws_nW[part, j], self._taken_nW[part, j][:, None]
            dtype = torch.promote_types(out_mV.dtype, law.probs.dtype)
            # A law nobody drew from may hold anything; a large c is multiplied in two steps.
            base = torch.where(taken_m1 > 0, law.probs.index_select(0, rows_m).to(dtype), 0)
            root_m1 = taken_m1.sqrt().to(dtype)
            if law.ids is None:
                out_mV = torch.addcmul(out_mV.to(dtype), base * root_m1, root_m1, value=-1)
            else:
                less_mM = -root_m1 * (base * root_m1)
                out_mV = out_mV.to(dtype).scatter_add(1, law.ids[rows_m], less_mM)
        return out_mV.clamp(min=0)

    def _with_tokens(self, weights_nV: Tensor) -> Tensor:
        """Writes what is owed at the children's tokens."""
        real_nW, tokens_nW, owed_nW = self.rows_nW > 0, self._tokens_nW, self._owed_nW
        # A place without a child repeats the first child; without any, what stands is written.
        tokens_nW = torch.where(real_nW, tokens_nW, tokens_nW[:, :1])
        owed_nW = torch.where(real_nW, owed_nW, owed_nW[:, :1]).to(weights_nV.dtype)
        owed_nW = torch.where(real_nW[:, :1], owed_nW, weights_nV.gather(1, tokens_nW))
        return weights_nV.scatter_(1, tokens_nW, owed_nW)


def first_kept(residuals: Residuals, tests_R: Tensor, at_n: Tensor) -> Tensor:
    """Takes up rows and tests their children one after another with `u * law(x) < R(x)`.

    Args:
        residuals: the state of all rows.
        tests_R: uniforms by flat row.
        at_n: flat rows.

    Returns:
        The row, in its tree, of the first child kept; 0 where none is.
    """
    target = residuals.target
    probs_nV = target.probs(at_n)
    family = residuals.fresh_family(at_n, probs_nV)
    rows_nW, num_rows = family.rows_nW, target.shape[1]
    tests_nW = tests_R[(at_n // num_rows * num_rows)[:, None] + rows_nW]
    kept_n = torch.zeros_like(at_n)
    for k in range(residuals.width):
        open_n = (kept_n == 0) & (rows_nW[:, k] > 0)
        owed_n, own_n = family.ratio(k)
        passed_n = open_n & (tests_nW[:, k] * own_n < owed_n)
        kept_n = torch.where(passed_n, rows_nW[:, k], kept_n)
        refused_n = open_n & ~passed_n
        more_n = rows_nW[:, k + 1] > 0 if k + 1 < residuals.width else torch.zeros_like(open_n)
        family.refuse(k, Refused(refused_n, refused_n & more_n), probs_nV)
    family.save()
    return kept_n


def _column(part_nW: Tensor, k: Rank) -> Tensor:
    """Column k, one for all rows or one per row."""
    return part_nW[:, k] if isinstance(k, int) else part_nW.gather(1, k[:, None]).squeeze(1)


def by_row(tests_BN: Tensor, target: TargetRows) -> Tensor:
    """The accept tests' uniforms by flat row, 0 for the roots, which are not tested."""
    first_B1, (num_texts, num_rows, _) = first_rows(target)[:, None], target.shape
    tests_R = torch.zeros(num_texts * num_rows, dtype=torch.float64, device=target.device)
    places_BN = first_B1 + torch.arange(1, num_rows, device=target.device)
    tests_R[places_BN] = host.send(tests_BN, target.device)
    return tests_R


def _of_children(part_BN: Tensor, children_BTW: Tensor) -> Tensor:
    """A number per node, laid out by row and rank `[R, W]`; 0 where there is no child."""
    part_BT = torch.nn.functional.pad(part_BN, (1, 0))
    return part_BT.gather(1, children_BTW.flatten(1)).reshape(-1, children_BTW.shape[2])


def _at(law: Law, rows_n: Tensor, tokens_nW: Tensor) -> Tensor:
    """Probabilities of several tokens of each of some laws, float64."""
    if law.ids is None:
        return law.probs[rows_n[:, None], tokens_nW].double()
    same_nWM = tokens_nW[:, :, None] == law.ids[rows_n][:, None, :]
    return torch.where(same_nWM, law.probs[rows_n][:, None, :], 0).sum(2).double()


def _rest(law: Law, rows_n: Tensor, tokens_nW: Tensor, own_nW: Tensor, gone_nW: Tensor) -> Tensor:
    """The mass of laws some tokens were taken from, summed: small remainders keep their digits."""
    probs = law.probs[rows_n]
    if law.ids is None:
        return probs.scatter(1, tokens_nW, own_nW.to(probs.dtype)).sum(1).double()
    same_nWM = tokens_nW[:, :, None] == law.ids[rows_n][:, None, :]
    return probs.masked_fill((same_nWM & gone_nW[:, :, None]).any(1), 0).sum(1).double()
