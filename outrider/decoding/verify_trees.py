"""Verification of token trees as a function of arrays: what stays, and the texts it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding.arrays import Array, check_seed, check_shapes, check_values, floats, integers
from outrider.decoding.draft import Draft, Kind, RoundNoise
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetLaws
from outrider.decoding.rules import rule_named
from outrider.decoding.rules.walking import children_of
from outrider.errors import DraftShapeMismatch, InvalidConfig
from outrider.noise import as_key
from outrider.tree import DRAWN, TokenTree

if TYPE_CHECKING:
    from jaxtyping import Int64

_KINDS: dict[str, Kind] = dict(zip(DRAWN, (Kind.POINT, Kind.IID, Kind.WITHOUT), strict=True))


@dataclass(frozen=True, slots=True)
class TreeVerification:
    """Decisions on B trees.

    Attributes:
        num_accepted: int64 `[B]`, drafted tokens kept.
        bonus_token: int64 `[B]`, the token the target adds, always there.
        accepted_tokens: the kept tokens of each tree, from the root down.
        paths: the nodes that bear them.
        updated_tokens: int64 `[B, L]`, each text with its kept tokens and its bonus token behind
            it, L the longest; padded with 0.
        lengths: int64 `[B]`, tokens of each updated text.
    """

    num_accepted: Int64[Tensor, " B"]
    bonus_token: Int64[Tensor, " B"]
    accepted_tokens: list[list[int]]
    paths: list[list[int]]
    updated_tokens: Int64[Tensor, "B L"]
    lengths: Int64[Tensor, " B"]

    def __len__(self) -> int:
        return len(self.accepted_tokens)


def verify_token_trees(
    texts: Sequence[Sequence[int]],
    draft_tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    target_probs: Array,
    *,
    seed: int,
    rule: str = "match",
    draft_probs: Array | None = None,
    drawn: str = "certain",
) -> TreeVerification:
    """Decides how much of B drafted trees stays, and appends it to the texts they continue.

    Args:
        texts: the token ids of each text as it stands.
        draft_tokens: the nodes of each tree.
        parents: the row each node hangs from: row 0 is the text, node j is row j + 1, and a parent
            stands before its children. Siblings stand in the order in which they were drawn.
        target_probs: `[B, N + 1, V]` for trees of up to N nodes, row t after the path to row t.
        seed: in [0, 2**64). Noise is that of text b's length in sample b: the same call gives the
            same decisions, and texts of other lengths have other noise.
        rule: a lossless rule that verifies trees.
        draft_probs: `[B, N, V]`, the law each node was drawn from before its siblings were taken
            out of it; siblings must have the same. None for `certain` nodes.
        drawn: how siblings were drawn: `certain` (the likeliest tokens, a look-up), `iid`, or
            `without` replacement.

    Raises:
        DraftShapeMismatch, TargetShapeMismatch, DistributionWidthMismatch: parts that disagree.
        TokenOutOfRange: a token outside 0..V-1.
        NonFinite: NaN or an infinity in a law.
        DegenerateDistribution: a row that is read and does not sum to one.
        InvalidConfig: an unknown or lossy rule, one that does not verify such trees, a seed.
    """
    decide, kind = rule_named(rule), _KINDS.get(drawn)
    if kind is None:
        raise InvalidConfig(f"drawn={drawn!r}: one of {', '.join(_KINDS)} is due")
    if (kind == Kind.POINT) != (draft_probs is None):
        raise InvalidConfig(
            f"drawn={drawn!r} with draft_probs {'missing' if draft_probs is None else 'given'}: "
            "certain nodes have no law of their own, drawn ones have theirs in draft_probs"
        )
    if not len(texts) == len(draft_tokens) == len(parents):
        raise DraftShapeMismatch(
            f"{len(texts)} texts, {len(draft_tokens)} trees and {len(parents)} lists of parents; "
            "give one of each per text"
        )
    rows = [integers("draft_tokens", row).tolist() for row in draft_tokens]
    tree = TokenTree.of(rows, [integers("parents", row).tolist() for row in parents])
    target_BTV = floats("target_probs", target_probs)
    draft_BNV = None if draft_probs is None else floats("draft_probs", draft_probs)
    check_shapes(draft_BNV, target_BTV, tree.tokens_BN)
    tree = tree.to(target_BTV.device)
    check_values(draft_BNV, target_BTV, tree.tokens_BN, tree.counts_B)
    law = None if draft_BNV is None else Law.dense(draft_BNV.flatten(0, 1))
    law_rows_BN = None if law is None else _first_siblings(tree)
    if law is not None and law_rows_BN is not None:
        _check_siblings(tree, law, law_rows_BN)
    draft = Draft(tree, law, law_rows_BN, None, frozenset({kind}))
    lengths_B = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    samples_B = torch.arange(len(texts))
    chance = RoundNoise(as_key([check_seed(seed)] * len(texts)), samples_B, lengths_B)
    verdict = decide.verify(draft, TargetLaws(target_BTV), chance)
    paths = [[row - 1 for row in path if row] for path in verdict.path_BD.tolist()]
    accepted = [[row[j] for j in path] for row, path in zip(rows, paths, strict=True)]
    grown = [
        [*integers("texts", text).tolist(), *kept, token]
        for text, kept, token in zip(texts, accepted, verdict.token_B.tolist(), strict=True)
    ]
    longest = max(map(len, grown), default=0)
    padded = [[*text, *[0] * (longest - len(text))] for text in grown]
    return TreeVerification(
        num_accepted=verdict.num_accepted_B,
        bonus_token=verdict.token_B,
        accepted_tokens=accepted,
        paths=paths,
        updated_tokens=torch.tensor(padded, dtype=torch.int64).view(len(grown), longest),
        lengths=torch.tensor([len(text) for text in grown], dtype=torch.int64),
    )


def _check_siblings(tree: TokenTree, law: Law, law_rows_BN: Tensor) -> None:
    """Raises InvalidConfig where a node's law is not that of its first sibling."""
    real_BN = tree.is_node()
    own, first = (law.probs.view(*real_BN.shape, -1)[real_BN], law.probs[law_rows_BN[real_BN]])
    other = (own != first).any(1).nonzero()
    if len(other):
        b, j = real_BN.nonzero()[int(other[0])].tolist()
        raise InvalidConfig(
            f"draft_probs of tree {b}, node {j} are not those of its first sibling; siblings are "
            "drawn from one law, that of the row they hang from"
        )


def _first_siblings(tree: TokenTree) -> Tensor:
    """The row of the first sibling's law for every node, `[B, N]`."""
    first_BT = children_of(tree)[:, :, 0]
    first_BN = (first_BT.gather(1, tree.parents_BN) - 1).clamp(min=0)
    texts_B1 = torch.arange(len(first_BN), device=first_BN.device)[:, None]
    return texts_B1 * tree.num_nodes + first_BN
