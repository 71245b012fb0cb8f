"""What a target's row leaves of itself where a chain's token was refused: `max(0, b P - Q)`."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.draft import Draft, Kind
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Sifted, all_certain, first_rows

# A draft's law times this leaves nothing of a row where it has any mass that float32 can tell.
MOST = 1e30


def left_over(
    draft: Draft, target: TargetRows, num_accepted_B: Tensor, b_BT: Tensor | None
) -> Sifted:
    """The target's row after the kept tokens, less the draft's law where a token was refused."""
    at_B = first_rows(target) + num_accepted_B
    depth = draft.tree.num_nodes
    if depth == 0 or len(at_B) == 0:
        return Sifted(num_accepted_B, target.probs(at_B))
    weights_BV: Tensor | None = None
    for part in target.parts(len(at_B)):
        texts_n = torch.arange(part.start, part.stop, device=at_B.device)
        kept_n = num_accepted_B[part]
        b_n = None if b_BT is None else b_BT[texts_n, kept_n]
        rows_nV, sums_n1 = target.weighed(at_B[part])
        if weights_BV is None:
            weights_BV = room_beside(draft, rows_nV, len(at_B))
        weights_BV[part] = rows_nV
        take_law(draft, target, texts_n, kept_n, weights_BV[part], sums_n1, b_n)
    assert weights_BV is not None
    return Sifted(num_accepted_B, weights_BV)


def room_beside(draft: Draft, rows_nV: Tensor, num_texts: int) -> Tensor:
    """A table for a row of each text, of the dtype in which target rows and draft laws meet."""
    dtype = rows_nV.dtype
    if draft.law is not None:
        dtype = torch.promote_types(dtype, draft.law.probs.dtype)
    return rows_nV.new_empty(num_texts, rows_nV.shape[1], dtype=dtype)


def take_law(
    draft: Draft,
    target: TargetRows,
    texts_n: Tensor,
    kept_n: Tensor,
    rows_nV: Tensor,
    sums_n1: Tensor | None,
    b_n: Tensor | None,
) -> None:
    """Takes the draft's law out of the rows behind the kept tokens, where one was refused.

    Args:
        draft: chains.
        target: its rows.
        texts_n: some texts.
        kept_n: how many tokens each of them kept.
        rows_nV: the target's law there, times `sums_n1`; becomes what is left, times any numbers.
        sums_n1: None = 1.
        b_n: how much of the target's law there is; None = 1.
    """
    refused_n = kept_n < draft.tree.counts_B[texts_n]
    # Where nothing was refused any place of the text will do.
    depth = draft.tree.num_nodes
    places_n = texts_n * depth + kept_n.clamp(max=depth - 1)
    own_nV = rows_nV if sums_n1 is None else rows_nV / sums_n1
    left_nV = excess(draft, places_n, own_nV, b_n)
    void_n = (left_nV.sum(-1) <= 0) & refused_n
    rows_nV.copy_(torch.where(refused_n[:, None], left_nV, rows_nV))
    # No mass is left only where rounding refused a token of equal laws.
    some = host.some(void_n)
    if len(some):
        own_nV = target.probs(first_rows(target)[texts_n[some]] + kept_n[some]).to(rows_nV.dtype)
        rows_nV[some] = torch.where(void_n[some, None], own_nV, rows_nV[some])


def excess_mass(
    draft: Draft, target: TargetRows, at_n: Tensor, places_n: Tensor, scale_n: Tensor
) -> Tensor:
    """`sum max(0, scale * p - q)` at flat rows and flat places of tokens of chains, float64."""
    if draft.law is not None and Kind.POINT not in draft.kinds:
        return target.excess_mass(at_n, scale_n, draft.law, _law_rows(draft, places_n))
    mass_n = scale_n.new_empty(len(at_n), dtype=torch.float64)
    for part in target.parts(len(at_n)):
        rows_mV = target.probs(at_n[part])
        mass_n[part] = excess(draft, places_n[part], rows_mV, scale_n[part]).sum(-1).double()
    return mass_n


def excess(
    draft: Draft, places_n: Tensor, weights_nV: Tensor, scale_n: Tensor | None = None
) -> Tensor:
    """`max(0, scale * weights - q)` at the flat places of tokens of chains."""
    certain = Law.point(draft.tree.tokens_BN.flatten()[places_n])
    everyone = torch.arange(len(places_n), device=places_n.device)
    if all_certain(draft):
        return certain.excess_at(everyone, weights_nV, scale_n)
    assert draft.law is not None
    left_nV = draft.law.excess_at(_law_rows(draft, places_n), weights_nV, scale_n)
    if Kind.POINT not in draft.kinds:
        return left_nV
    certain_n = draft.node_kinds().flatten()[places_n] == Kind.POINT
    certain_nV = certain.excess_at(everyone, weights_nV, scale_n)
    return torch.where(certain_n[:, None], certain_nV, left_nV)


def _law_rows(draft: Draft, places_n: Tensor) -> Tensor:
    return places_n if draft.law_rows_BN is None else draft.law_rows_BN.flatten()[places_n]
