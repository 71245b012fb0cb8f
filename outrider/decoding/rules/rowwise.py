"""What trees still owe the target, a row at a time in plain numbers: `residual` on a host.

Where the host reads for free, a row's few numbers cost less in Python than in calls on small
tensors, and each row is worked on where it is, from its first child to its last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.draft import Draft, Kind, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules import residual
from outrider.decoding.rules.leftover import room_beside
from outrider.decoding.sampling import inverse_cdf
from outrider.errors import TargetShapeMismatch


class Trees:
    """B trees as lists by flat row `b * T + t`.

    Attributes:
        roots: their roots.
        target: the target's rows.
        law: the draft's base laws.
        tokens, kinds, laws: of the node at a row; of roots any numbers.
        tests: the uniform that a row is tested with.
    """

    def __init__(self, draft: Draft, target: TargetRows, tests_BN: Tensor) -> None:
        self._draft, tree = draft, draft.tree
        self.target, self.law = target, draft.law
        self.tokens, self.kinds, self.laws, self.tests = (
            _by_row(part_BN).ravel().tolist()
            for part_BN in (tree.tokens_BN, draft.node_kinds(), draft.law_rows(), tests_BN)
        )
        num_rows = tree.num_nodes + 1
        if target.shape[1] != num_rows:
            # Rows are found by their number: others would be taken for them.
            raise TargetShapeMismatch(
                f"the target has {target.shape[1]} rows a text; {num_rows} are due for trees of "
                f"{tree.num_nodes} nodes, padding included"
            )
        self.roots = range(0, len(self.tokens), num_rows)
        self._roots_B1 = np.arange(len(self.roots))[:, None] * num_rows
        parents_BT = _by_row(tree.parents_BN) + self._roots_B1
        # Roots and padding are nobody's children: they stand behind all rows.
        parents_BT[:, :1] = len(self.tokens)
        parents_BT[np.arange(num_rows) > tree.counts_B.numpy()[:, None]] = len(self.tokens)
        parents_R = parents_BT.ravel()
        self._in_order = parents_R.argsort(kind="stable")
        self._first = parents_R[self._in_order].searchsorted(np.arange(len(parents_R) + 1)).tolist()

    def kids(self, at: int) -> list[int]:
        """The children of a row in drawing order, flat rows."""
        return self._in_order[self._first[at] : self._first[at + 1]].tolist()

    def verdict(self, found: Iterable[tuple[list[int], Row]], extra_B: Tensor) -> Verdict:
        """Each tree's path from below the root to the row it stops at, and a token it owes there.

        Args:
            found: flat rows of the path, and its last row, or the root, in hand; tree by tree.
            extra_B: the uniform of each added token.
        """
        num_texts, _, width = self.target.shape
        path_BD = np.zeros((num_texts, self._draft.tree.depth), dtype=np.int64)
        kept_B, weights_BV = np.zeros(num_texts, dtype=np.int64), torch.empty(0, width)
        for b, (path, row) in enumerate(found):
            if b == 0:
                weights_BV = room_beside(self._draft, row.weights_V[None], num_texts)
            row.write(weights_BV[b])
            kept_B[b], path_BD[b, : len(path)] = len(path), path
        at_B = np.maximum(path_BD.max(1, initial=0), self._roots_B1[:, 0])
        path_BD -= np.where(path_BD > 0, self._roots_B1, 0)
        token_B = inverse_cdf(weights_BV, extra_B)
        void_B = ~(weights_BV.gather(1, token_B[:, None]).squeeze(1) > 0)
        if void_B.any():
            # Only rounding refuses a sure token: what is added then follows the target.
            own_nV = self.target.probs(torch.from_numpy(at_B)[void_B])
            token_B[void_B] = inverse_cdf(own_nV, extra_B[void_B])
        return Verdict(torch.from_numpy(kept_B), token_B, torch.from_numpy(path_BD))


@dataclass(frozen=True, slots=True)
class Child:
    """One child of a row.

    Attributes:
        row: its flat row.
        kind: how it was drawn.
        own: its law at its own token and its siblings', times `left`.
        left: what the tokens taken from its base law left of that.
    """

    row: int
    kind: int
    own: list[float]
    left: float


class Row:
    """One row in hand.

    Attributes:
        kids: its children in drawing order, flat rows.
        share: the chance that it is kept once it is reached.
        weights_V: its law times some number; not to be written to.
    """

    def __init__(self, trees: Trees, at: int, share: float = 1.0) -> None:
        self._trees, self.kids, self.share = trees, trees.kids(at), share
        self.weights_V, self._total = trees.target.row(at)
        self._mass = 1.0
        self._tokens = [trees.tokens[kid] for kid in self.kids]
        p_W = self.weights_V.numpy()[self._tokens]
        self._owed: list[float] = (p_W / p_W.dtype.type(self._total)).tolist()
        # c of each base law, its numbers at the children's tokens, and the residual written out.
        self._taken: dict[int, float] = {}
        self._bases: dict[int, list[float]] = {}
        self._left_V: Tensor | None = None

    def child(self, k: int) -> Child:
        """The child of rank k."""
        row, tokens = self.kids[k], self._tokens
        kind, law_row = self._trees.kinds[row], self._trees.laws[row]
        if kind == Kind.POINT:
            return Child(row, kind, [float(x == tokens[k]) for x in tokens], 1.0)
        if law_row not in self._bases:
            self._bases[law_row] = self._law.at(law_row, np.array(tokens)).tolist()
        base = self._bases[law_row]
        if kind == Kind.IID:
            return Child(row, kind, base, 1.0)
        gone = set(tokens[:k]) if kind == Kind.WITHOUT else self._certain()
        mass = dict(zip(tokens, base, strict=True))
        left = 1.0 - sum(mass[x] for x in gone)
        if left < residual.MOST_LEFT:
            left = _rest(self._law, law_row, gone)
        return Child(row, kind, [0.0 if x in gone else mass[x] for x in tokens], left)

    def ratio(self, k: int, child: Child) -> tuple[float, float]:
        """`share * R(x)` and `law(x)` of child k and its token x, both times the same number."""
        return self.share * self._owed[k] * child.left, self._mass * child.own[k]

    def refuse(self, k: int, child: Child, wanted: bool) -> None:
        """Takes the law of child k out of what is owed; mass and share must follow where wanted.

        Where they need not, the share stays as it was: it never grows.
        """
        mass, share, owed, own = self._mass, self.share, self._owed, child.own
        less, self._left_V = mass - owed[k], None
        if child.kind == Kind.POINT:
            self._owed = [0.0 if q else due for due, q in zip(owed, own, strict=True)]
        else:
            room = share * child.left
            # Nothing is taken where nothing is left: R stays.
            step = min(mass / room, residual.MOST) if room > 0 else 0.0
            self._owed = [max(0.0, due - step * q) for due, q in zip(owed, own, strict=True)]
            law_row = self._trees.laws[child.row]
            self._taken[law_row] = self._taken.get(law_row, 0.0) + step
            if wanted:
                self._left_V, scale = self._written_out()
                less = float(self._left_V.sum()) / scale
        self._mass = max(0.0, less)
        if wanted:
            rest = share * self._mass / mass if mass > 0 else 0.0
            # 0 / 0 happens only where share is 1 and the laws agree: the row is sure to be kept.
            self.share = rest / (rest + (1 - share)) if rest + (1 - share) > 0 else 1.0

    def write(self, out_V: Tensor) -> None:
        """Writes the residual out, times some number."""
        if self._left_V is None and self.kids:
            self._left_V = self._written_out()[0]
        out_V.copy_(self.weights_V if self._left_V is None else self._left_V)

    @property
    def _law(self) -> Law:
        assert self._trees.law is not None
        return self._trees.law

    def _certain(self) -> set[int]:
        """The tokens of certain children."""
        kinds = self._trees.kinds
        return {
            x for x, kid in zip(self._tokens, self.kids, strict=True) if kinds[kid] == Kind.POINT
        }

    def _written_out(self) -> tuple[Tensor, float]:
        """The residual times a number, as a new tensor, and the number."""
        left_V, scale = self.weights_V, self._total
        if any(c * max(1.0, scale) > residual.STEEP for c in self._taken.values()):
            left_V, scale = left_V / scale, 1.0
        for law_row, c in self._taken.items():
            if c > 0:
                left_V = _less(left_V, self._law, law_row, c * scale)
        left_V = left_V.clone() if left_V is self.weights_V else left_V.clamp_(min=0)
        left_V.numpy()[self._tokens] = [due * scale for due in self._owed]
        return left_V, scale


def first_kept(trees: Trees, row: Row) -> int | None:
    """The first child with `u * law(x) < R(x)`, a flat row; those before it are refused."""
    for k, kid in enumerate(row.kids):
        child = row.child(k)
        owed, own = row.ratio(k, child)
        if trees.tests[kid] * own < owed:
            return kid
        row.refuse(k, child, k + 1 < len(row.kids))
    return None


def _by_row(part_BN: Tensor) -> NDArray[Any]:
    """A number per node, by row `[B, T]`; 0 for roots."""
    part = part_BN.numpy()
    by_row = np.zeros((len(part), part.shape[1] + 1), dtype=part.dtype)
    by_row[:, 1:] = part
    return by_row


def _rest(law: Law, law_row: int, gone: set[int]) -> float:
    """The mass of a law some tokens were taken from, summed: small remainders keep their digits."""
    probs_M, tokens = law.probs[law_row].clone(), list(gone)
    columns = tokens if law.ids is None else np.isin(law.ids[law_row].numpy(), tokens)
    probs_M.numpy()[columns] = 0
    return float(probs_M.sum())


def _less(weights_V: Tensor, law: Law, law_row: int, share: float) -> Tensor:
    """The weights without so much of one law, a new tensor."""
    probs_M = law.probs[law_row]
    if share > residual.STEEP:
        share = math.sqrt(share)
        probs_M = probs_M * share
    if law.ids is None:
        return torch.sub(weights_V, probs_M, alpha=share)
    dtype = torch.promote_types(weights_V.dtype, probs_M.dtype)
    return weights_V.to(dtype).scatter_add(0, law.ids[law_row], probs_M.to(dtype) * -share)
