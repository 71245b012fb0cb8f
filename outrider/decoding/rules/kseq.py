"""`kseq`: K i.i.d. children of a row, each tested against the same share of the target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.draft import Draft, Kind, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, round_uniforms
from outrider.decoding.rules.walking import Walk
from outrider.decoding.sampling import inverse_cdf
from outrider.errors import InvalidConfig

HALVINGS = 24
"""Bisections of [1, K] in search of the least rho: 1e-7 of its width, from above."""
_PROBES = 12


class KseqRule(Rule):
    """Keeps the first of K i.i.d. children with `u * rho * q(x) < p(x)`; goes on from there.

    With beta = sum min(q, p / rho) one child is kept with chance beta, some child with chance
    1 - (1 - beta)^K, and the one kept is distributed as min(q, p / rho) / beta. So token x comes
    out of the tests with mass c min(q, p / rho), c = (1 - (1 - beta)^K) / beta, and the residual
    p - c min(q, p / rho) makes it p exactly if it is nowhere negative: since min(q, p / rho) is
    at most p / rho, c <= rho is enough. That is rho beta >= 1 - (1 - beta)^K; as rho grows its
    left side, sum min(rho q, p), does not fall and its right side does not rise, so it holds from
    some rho* on, and at rho = K by Bernoulli's inequality. Any rho >= rho* is lossless, the least
    keeps most; bisection returns its upper end. With one child rho* = 1: the rule is `token`.

    Children that bear the same token are drawn and tested separately: merged they would no longer
    be K draws. Source: SpecTr, Sun et al., NeurIPS 2023, arXiv 2310.15141.
    """

    name = "kseq"
    source = "Sun et al. (SpecTr), NeurIPS 2023, arXiv 2310.15141, k-sequential selection"
    trees = True
    kinds = frozenset({Kind.IID})
    reads = "path"
    needs_draft_law = True

    def check(self, draft: Draft) -> None:
        """Raises InvalidConfig for children that are no i.i.d. draws of one law."""
        check_siblings(self, draft)

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Tests on stream ACCEPT, index j for node j; the added token on EXTRA, index 0."""
        self.check(draft)
        draft = draft.to(target.device)
        tree, law, law_rows_BN = draft.tree, base_law(draft), draft.law_rows()
        tests_BN, extra_B = round_uniforms(noise, tree.num_nodes, target.device)
        token_B = torch.zeros_like(tree.counts_B)
        walk = Walk(tree, target)
        for level in range(tree.depth + 1):
            texts_n = walk.texts_n
            if len(texts_n) == 0:
                break
            p_nV = target.probs(walk.flat_n)
            kids_nW = walk.children()
            if level == tree.depth:
                # Texts that stopped above a child have their token.
                own_n = inverse_cdf(p_nV, extra_B[texts_n])
                token_B[texts_n] = torch.where(kids_nW[:, 0] > 0, token_B[texts_n], own_n)
                break
            nodes_nW = (kids_nW - 1).clamp(min=0)
            # A row without children may take any law: of K = 0 draws nothing is taken out.
            q = law.select(law_rows_BN[texts_n, nodes_nW[:, 0]])
            count_n = (kids_nW > 0).sum(1).double()
            p_nM = on_support(p_nV, q)
            # Few rows at a time: all bisections of a row find it in the processor's cache.
            parts = [
                least_rho(p_nM[span], q.probs[span], count_n[span])
                for span in target.parts(len(p_nM))
            ]
            rho_n = torch.cat(parts)
            at = texts_n[:, None], nodes_nW
            kept_nW = _tested(tests_BN[at], tree.tokens_BN[at], rho_n, p_nV, q) & (kids_nW > 0)
            first_n1 = kept_nW.byte().argmax(1, keepdim=True)
            next_n = (kids_nW * kept_nW).gather(1, first_n1).squeeze(1)
            here = host.some(next_n == 0)
            left_nV = residual(p_nV[here], q.select(here), rho_n[here], count_n[here])
            token_B[texts_n[here]] = inverse_cdf(left_nV, extra_B[texts_n[here]])
            walk.step(next_n)
        return walk.verdict(token_B, tree.depth)


def check_independent(rule: Rule, draft: Draft) -> None:
    """Raises InvalidConfig for nodes not drawn IID; a chain of certain tokens is as good.

    Each token of such a chain is one draw from the one-hot law it is.
    """
    if not (draft.law is None and draft.tree.is_chain):
        Rule.check(rule, draft)


def check_siblings(rule: Rule, draft: Draft) -> None:
    """Raises InvalidConfig for nodes not drawn IID, and for siblings of different laws."""
    check_independent(rule, draft)
    tree = draft.tree
    if tree.is_chain or not host.reads_free(tree.parents_BN.device):
        return
    rows_BT = torch.nn.functional.pad(draft.law_rows(), (1, 0))
    kids_BTW = tree.children()
    own_BTW = rows_BT[torch.arange(len(rows_BT))[:, None, None], kids_BTW]
    if ((own_BTW != own_BTW[:, :, :1]) & (kids_BTW > 0)).any():
        raise InvalidConfig(
            f"rule={rule.name!r} needs siblings drawn from one law, and some come from "
            "different rows; take rule='recursive' for children of several drafters"
        )


def base_law(draft: Draft) -> Law:
    """The draft's base laws; those of certain tokens written out."""
    return Law.point(draft.tree.tokens_BN.flatten()) if draft.law is None else draft.law


def on_support(p_nV: Tensor, q: Law) -> Tensor:
    """p at the tokens that q lists, `[n, M]`."""
    return p_nV if q.ids is None else p_nV.gather(1, q.ids)


def least_rho(p_nM: Tensor, q_nM: Tensor, count_n: Tensor) -> Tensor:
    """The least rho that is lossless for `count_n` children, from above, `[n]` float64.

    It is the one that bisection of [1, K] ends on, wherever it is looked for.
    """
    most_n = _mass(p_nM)
    if host.reads_free(p_nM.device):
        rows = zip(p_nM, q_nM, count_n.tolist(), most_n.tolist(), strict=True)
        return torch.tensor([_least_of(*row) for row in rows], dtype=torch.float64)
    low_n, high_n = torch.ones_like(count_n), count_n.clamp(min=1)
    high_n = torch.where(_room(p_nM, q_nM, low_n, count_n, most_n) >= 0, low_n, high_n)
    for _ in range(HALVINGS):
        middle_n = (low_n + high_n) / 2
        enough_n = _room(p_nM, q_nM, middle_n, count_n, most_n) >= 0
        low_n = torch.where(enough_n, low_n, middle_n)
        high_n = torch.where(enough_n, middle_n, high_n)
    return high_n


def _least_of(p_M: Tensor, q_M: Tensor, count: float, most: float) -> float:
    """The same of one row, by false position among the numbers that bisection can end on."""
    low, high = 0, 1 << HALVINGS

    def room(step: int) -> float:
        rho = 1 + (count - 1) * step / (1 << HALVINGS)
        mass = most - float(torch.sub(p_M, q_M, alpha=rho).clamp_(min=0).sum())
        share = min(1.0, mass / rho)
        return mass + (math.expm1(count * math.log1p(-share)) if share < 1 else -1.0)

    low_room = room(low) if count > 1 else 0.0
    if low_room >= 0:
        return 1.0
    high_room, probes, end = room(high), 0, 0
    while high - low > 1:
        # Roundings may keep the secant at one end: after a few probes halves are taken.
        span = high_room - low_room
        far = probes > _PROBES or not span > 0
        step = (low + high) // 2 if far else low + math.ceil((high - low) * -low_room / span)
        step = min(max(step, low + 1), high - 1)
        here, probes = room(step), probes + 1
        # An end that stays again counts half, or it would stay for good.
        if here >= 0:
            high, high_room, low_room = step, here, low_room / (2 if end > 0 else 1)
        else:
            low, low_room, high_room = step, here, high_room / (2 if end < 0 else 1)
        end = 1 if here >= 0 else -1
    return 1 + (count - 1) * high / (1 << HALVINGS)


def _mass(p_nM: Tensor) -> Tensor:
    """The mass of p at the tokens of q's support; one within rounding is one.

    Near p = q rho is 1 plus about the K-th root of what is missing: 1.004 for a last bit.
    """
    mass_n = p_nM.sum(-1, dtype=torch.float64)
    return torch.where(mass_n < 1 - 4 * torch.finfo(p_nM.dtype).eps, mass_n, 1.0)


def _room(p_nM: Tensor, q_nM: Tensor, rho_n: Tensor, count_n: Tensor, most_n: Tensor) -> Tensor:
    """How far rho beta = sum min(rho q, p) exceeds 1 - (1 - beta)^K; rho is enough from 0 on."""
    beyond_nM = (p_nM - q_nM * rho_n.to(q_nM.dtype)[:, None]).clamp(min=0)
    mass_n = most_n - beyond_nM.sum(-1, dtype=torch.float64)
    return mass_n - any_of(mass_n / rho_n, count_n)


def any_of(share: Tensor, count: Tensor) -> Tensor:
    """1 - (1 - share)^count, exact for small shares too."""
    return -torch.expm1(count * torch.log1p(-share.clamp(max=1)))


def _tested(tests_nW: Tensor, tokens_nW: Tensor, rho_n: Tensor, p_nV: Tensor, q: Law) -> Tensor:
    """Which children pass u * rho * q < p."""
    q_nW = torch.stack([q.prob_of(tokens_n) for tokens_n in tokens_nW.unbind(1)], 1).double()
    return tests_nW * (rho_n[:, None] * q_nW) < p_nV.gather(1, tokens_nW).double()


def residual(p_nV: Tensor, q: Law, rho_n: Tensor, count_n: Tensor) -> Tensor:
    """p - min(q, p / rho) (1 - (1 - beta)^K) / beta, not normalised."""
    p_nM = on_support(p_nV, q)
    kept_nM = torch.minimum(q.probs, p_nM / rho_n.to(p_nM.dtype)[:, None])
    beta_n = kept_nM.sum(-1, dtype=torch.float64)
    share_n = torch.where(beta_n > 0, any_of(beta_n, count_n) / beta_n, 0.0)
    left_nV = Law(kept_nM * share_n.to(kept_nM.dtype)[:, None], q.ids).excess(p_nV)
    # Nothing is left only where rounding refused a token of equal laws.
    return torch.where(left_nV.sum(-1, keepdim=True) > 0, left_nV, p_nV.to(left_nV.dtype))
