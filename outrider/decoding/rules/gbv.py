"""`gbv`: the best of K i.i.d. paths, verified as a block under the law that being the best gives.

How far K independent draws are better than one is written down exactly: at every row of the best
path the chance of each next token is known in closed form, so what remains is one chain drawn from
known laws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider import host
from outrider.decoding.draft import Draft, Kind, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetLaws, TargetRows
from outrider.decoding.rules.base import Rule, first_rows, round_uniforms
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.kseq import base_law, check_siblings, on_support
from outrider.decoding.rules.walking import children_of
from outrider.errors import InvalidConfig
from outrider.tree import TokenTree

AS_GOOD = 1e-9
"""Acceptances closer than this are equal, and the fewest paths are taken."""
_LEAST = 1e-300  # in place of a share or mass of 0, by which nothing could be divided


@dataclass(frozen=True, slots=True)
class Best:
    """The best path of each tree, as a chain.

    Attributes:
        path_BD: its rows below the root, 0 behind its end.
        chain: its tokens, and the law each has given that the path is the best.
        rows: the target's rows on the path, the root's first.
        paths_B: how many paths it is the best of.
    """

    path_BD: Tensor
    chain: Draft
    rows: TargetLaws
    paths_B: Tensor


class GbvRule(Rule):
    """Takes the best of the first k paths and verifies it like `block` does a chain.

    Order the tokens after a prefix z by p(x|z) / q(x|z), best first, the lowest id of equals (on
    a scale of 2^16 steps to the octave, so that rounding does not undo ties), and paths by their
    first difference. The order reads laws alone, so it is one strict order of all token strings,
    and with k i.i.d. paths the best one begins with z with chance
    cell(z) = (1 - B)^k - (1 - B - q(z))^k, B the mass of strings of its length better than z. So
    it is a chain drawn from cell(zx) / cell(z), and `block` is lossless on a chain drawn from
    known laws. With s = q(z) / (1 - B) the chance that a path no better than z begins with z,
    c(x) the mass of tokens better than x after z, and t(x) = s q(x|z) / (1 - s c(x)),

        cell(zx) / cell(z) = (1 - s c(x))^k (1 - (1 - t(x))^k) / (1 - (1 - s)^k),

    where nothing cancels; t(x) is the s of zx, so that one number per text is carried along.

    Of more paths the best leans further towards good tokens, at last beyond what the target gives
    them. So k is the first maximum over 1..K of the root's acceptance, sum_x min(p(x), cell(x)):
    a function of the root's laws, never of tokens, without which the order would not be given
    beforehand.

    Source: Thomas and Pal 2026, arXiv 2602.16961; the closed form of k is ours.
    """

    name = "gbv"
    source = "Thomas and Pal 2026, arXiv 2602.16961, greedy multi-path block verification"
    trees = True
    kinds = frozenset({Kind.IID})
    reads = "path"
    needs_draft_law = True

    def check(self, draft: Draft) -> None:
        """Raises InvalidConfig for anything but i.i.d. paths of one law and depth, set apart."""
        check_siblings(self, draft)
        tree = draft.tree
        if tree.is_chain or not host.reads_free(tree.parents_BN.device):
            return
        kids_BTW = tree.children()
        if (kids_BTW[:, 1:, 1:] > 0).any():
            raise InvalidConfig(
                f"rule={self.name!r} needs K whole paths from the root, and a drafted node has "
                "several children; draft with from_paths(paths, merge=False, drawn='iid'), or take "
                "rule='traversal' for a branching tree"
            )
        next_BT, at_BK = _paths(tree)
        paths_BK = at_BK > 0
        for _ in range(tree.depth):
            ends_BK = at_BK == 0
            if ((ends_BK != ends_BK[:, :1]) & paths_BK).any():
                raise InvalidConfig(
                    f"rule={self.name!r} needs paths of one depth within a tree; draft all of "
                    "them to the depth of the shortest"
                )
            at_BK = next_BT.gather(1, at_BK)

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Tests on stream ACCEPT, index j for node j; the added token on EXTRA, index 0."""
        self.check(draft)
        draft = draft.to(target.device)
        best = self.best(draft, target)
        tests_BN, extra_B = round_uniforms(noise, draft.tree.num_nodes, target.device)
        tests_BD = tests_BN.gather(1, (best.path_BD - 1).clamp(min=0))
        sifted = BlockRule().sift(best.chain, best.rows, tests_BD)
        token_B = sifted.added(extra_B)
        levels_D = torch.arange(tests_BD.shape[1], device=target.device)
        path_BD = torch.where(levels_D < sifted.num_accepted_B[:, None], best.path_BD, 0)
        return Verdict(sifted.num_accepted_B, token_B, path_BD)

    def best(self, draft: Draft, target: TargetRows) -> Best:
        """The best path of each tree; of the target only the rows it passes are read.

        Paths that agree so far share their row: that of the first of them is read.
        """
        tree, law, law_rows_BN = draft.tree, base_law(draft), draft.law_rows()
        texts_B = torch.arange(len(tree.counts_B), device=target.device)
        tokens_BT = torch.nn.functional.pad(tree.tokens_BN, (1, 0))
        next_BT, at_BK = _paths(tree)
        flat_B = first_rows(target)
        rows, laws, taken = [target.probs(flat_B)], list[Law](), list[Tensor]()
        paths_B = (at_BK > 0).sum(1)
        alive_BK, width = at_BK > 0, at_BK.shape[1]
        share_B = torch.ones(len(texts_B), dtype=torch.float64, device=target.device)
        for level in range(tree.depth):
            here_B1 = _first(alive_BK, at_BK)
            q = law.select(law_rows_BN[texts_B, (here_B1.squeeze(1) - 1).clamp(min=0)])
            ranked = Ranked.of(rows[-1], q)
            if level == 0:
                paths_B = ranked.best_count(paths_B, width)
                alive_BK &= torch.arange(width, device=target.device) < paths_B[:, None]
            laws.append(ranked.best_law(share_B, paths_B, width))
            place_BK = ranked.place_of(tokens_BT.gather(1, at_BK))
            alive_BK &= place_BK == torch.where(alive_BK, place_BK, q.probs.shape[1]).amin(1, True)
            here_B1 = _first(alive_BK, at_BK)
            chosen_B1 = alive_BK.byte().argmax(1, keepdim=True)
            share_B = ranked.share_of(share_B, place_BK.gather(1, chosen_B1))
            rows.append(target.probs(flat_B + here_B1.squeeze(1)))
            taken.append(at_BK)
            at_BK = next_BT.gather(1, at_BK)
        chosen_B1 = alive_BK.byte().argmax(1, keepdim=True)
        path_BD = _columns([at_BK.gather(1, chosen_B1) for at_BK in taken], tree.counts_B)
        lengths_B = (path_BD > 0).sum(1)
        chain = Draft.chain(tokens_BT.gather(1, path_BD), lengths_B, _interleaved(laws))
        return Best(path_BD, chain, TargetLaws(torch.stack(rows, 1)), paths_B)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Draft laws at n rows, tokens in the order of p / q, best first; float64, sum 1.

    Attributes:
        law: q as it was given.
        order_nM: the law's columns in that order; those it cannot draw stand last.
        p_nM, q_nM: the laws in that order.
        rest_nM: mass of a token and of all that are no better.
    """

    law: Law
    order_nM: Tensor
    p_nM: Tensor
    q_nM: Tensor
    rest_nM: Tensor

    @classmethod
    def of(cls, p_nV: Tensor, law: Law) -> Ranked:
        """Sorts what the law can draw; of equals the lowest id comes first."""
        p_nM, q_nM = on_support(p_nV, law).double(), law.probs.double()
        ratio_nM = torch.where(q_nM > 0, p_nM / q_nM, -1.0)
        if law.ids is None:
            order_nM = _falling(ratio_nM)
        else:
            by_id_nM = law.ids.sort(dim=1, stable=True).indices
            order_nM = by_id_nM.gather(1, _falling(ratio_nM.gather(1, by_id_nM)))
        p_nM, q_nM = p_nM.gather(1, order_nM), q_nM.gather(1, order_nM)
        # From the far end, so that no rest is less than the token it begins with.
        rest_nM = q_nM.flip(1).cumsum(1).flip(1)
        total_n1 = rest_nM[:, :1].clamp(min=_LEAST)
        return cls(law, order_nM, p_nM, q_nM / total_n1, rest_nM / total_n1)

    def split(self, share_n: Tensor) -> tuple[Tensor, Tensor]:
        """1 - s c and t of each token, in order."""
        s_n1 = share_n[:, None].clamp(min=_LEAST)
        room_nM = (1 - s_n1) + s_n1 * self.rest_nM
        return room_nM, s_n1 * self.q_nM / torch.where(room_nM > 0, room_nM, 1.0)

    def best_law(self, share_n: Tensor, paths_n: Tensor, width: int) -> Law:
        """The law of the next token of the best of `paths_n` paths, at most `width`."""
        s_n1, paths_n1 = share_n[:, None].clamp(min=_LEAST), paths_n[:, None]
        room_nM, t_nM = self.split(share_n)
        # 1 - (1 - t)^k = t (1 + (1 - t) + ... + (1 - t)^(k - 1)): positive terms alone.
        series_nM, series_n1 = torch.ones_like(t_nM), torch.ones_like(s_n1)
        power_nM = room_nM
        for count in range(2, width + 1):
            counts_n1 = paths_n1 >= count
            series_nM = torch.where(counts_n1, series_nM * (1 - t_nM) + 1, series_nM)
            series_n1 = torch.where(counts_n1, series_n1 * (1 - s_n1) + 1, series_n1)
            power_nM = torch.where(counts_n1, power_nM * room_nM, power_nM)
        cells_nM = power_nM * t_nM * series_nM / (s_n1 * series_n1)
        return Law(torch.zeros_like(cells_nM).scatter(1, self.order_nM, cells_nM), self.law.ids)

    def best_count(self, most_n: Tensor, width: int) -> Tensor:
        """How many of up to `most_n` paths to take the best of: the fewest that keep most."""
        room_nM, t_nM = self.rest_nM, self.split(torch.ones_like(self.p_nM[:, 0]))[1]
        cells_nM, series_nM = room_nM * t_nM, torch.ones_like(t_nM)
        kept: list[Tensor] = []
        for count in range(1, width + 1):
            kept_n = torch.minimum(self.p_nM, cells_nM * series_nM).sum(1)
            kept.append(torch.where(most_n >= count, kept_n, -1.0))
            if count < width:
                series_nM = series_nM * (1 - t_nM) + 1
                cells_nM = cells_nM * room_nM
        kept_nK = torch.stack(kept, 1)
        return (kept_nK >= kept_nK.amax(1, True) - AS_GOOD).byte().argmax(1) + 1

    def place_of(self, tokens_nK: Tensor) -> Tensor:
        """Where tokens stand in the order."""
        columns_nK = tokens_nK
        if self.law.ids is not None:
            ids_nM, q_nM = self.law.ids, self.law.probs
            bears = [(ids_nM == x[:, None]) & (q_nM > 0) for x in tokens_nK.unbind(1)]
            columns_nK = torch.stack([at_nM.byte().argmax(1) for at_nM in bears], 1)
        places_M = torch.arange(self.order_nM.shape[1], device=tokens_nK.device)
        places_nM = torch.empty_like(self.order_nM)
        places_nM.scatter_(1, self.order_nM, places_M.expand_as(self.order_nM))
        return places_nM.gather(1, columns_nK)

    def share_of(self, share_n: Tensor, place_n1: Tensor) -> Tensor:
        """The share s of the prefix that the token at a place makes."""
        return self.split(share_n)[1].gather(1, place_n1).squeeze(1)


def grain(ratio: Tensor) -> Tensor:
    """Positive numbers on a logarithmic scale of whole numbers, 2^16 to the octave.

    p / q of one law and its rounded copy are then equal, and so are ratios that ought to be.
    """
    mantissa, exponent = torch.frexp(ratio.clamp(min=_LEAST, max=1 / _LEAST))
    return exponent.long() * 2**16 + (mantissa * 2**17 + 0.5).floor().long() - 2**16


def _falling(ratio_nM: Tensor) -> Tensor:
    """Columns by falling grain, negative ratios last; of equals the first column comes first."""
    columns_M = torch.arange(ratio_nM.shape[1], device=ratio_nM.device)
    keys_nM = torch.where(ratio_nM < 0, 2**30, 2**28 - grain(ratio_nM)) << 32 | columns_M
    if host.reads_free(keys_nM.device):
        # numpy sorts whole numbers twenty times faster here than torch does.
        sorted_nM = torch.from_numpy(np.sort(keys_nM.numpy(), axis=1))
    else:
        sorted_nM = keys_nM.sort(dim=1).values
    return sorted_nM & 0xFFFFFFFF


def _paths(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """The row after each row, 0 at an end, and the first row of each path, `[B, K]`."""
    kids_BTW = children_of(tree)
    # From row 0, where a path stands that has ended, no step leads on.
    next_BT = torch.nn.functional.pad(kids_BTW[:, 1:, 0], (1, 0))
    return next_BT, kids_BTW[:, 0]


def _first(alive_BK: Tensor, at_BK: Tensor) -> Tensor:
    """The row that the first living path of each tree stands on, `[B, 1]`; 0 without one."""
    first_B1 = alive_BK.byte().argmax(1, keepdim=True)
    return (at_BK * alive_BK).gather(1, first_B1)


def _columns(columns: list[Tensor], like_B: Tensor) -> Tensor:
    """`[B, D]` of D columns `[B, 1]`."""
    return torch.cat(columns, 1) if columns else like_B.new_zeros(len(like_B), 0)


def _interleaved(laws: list[Law]) -> Law | None:
    """Laws of D levels of B texts as row `b * D + level`."""
    if not laws:
        return None
    probs = torch.stack([law.probs for law in laws], 1).flatten(0, 1)
    if laws[0].ids is None:
        return Law.dense(probs)
    ids = torch.stack([law.ids for law in laws if law.ids is not None], 1).flatten(0, 1)
    return Law.sparse(ids, probs)
