"""What a verification rule is, and what rules share.

Rules are objects without state. Chance comes from the round's noise addresses: node j is tested on
stream ACCEPT at index j, the added token is drawn on EXTRA. A node was drawn on stream DRAFT at its
index too, or, where the tree was pruned, at its number among the candidates. Single numbers are
multiplied in float64, where products of float32 numbers are exact; rows keep their dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from outrider import host, noise
from outrider.decoding.children import Drawing, WithReplacement
from outrider.decoding.draft import Draft, Kind, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.sampling import inverse_cdf
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

Guarantee = Literal["seed", "law", "surrogate"]
"""What the text is: that of plain decoding with the same seed (`seed`), distributed as the
target's (`law`), or distributed as a declared law near the target's (`surrogate`: lossy)."""

ALL_KINDS = frozenset(Kind)
FEW_TEXTS, FEW_TOKENS = 32, 128
"""Texts, and the target's tokens of all of them, up to which Python takes less time than calls on
tensors."""


class Rule(ABC):
    """Decides how much of each draft stays, and which one token the target adds.

    Attributes:
        name: what it is called in the registry.
        source: where it was published.
        guarantee: what holds of the text it lets through.
        trees: whether it verifies trees; where not, chains alone.
        kinds: how nodes may have been drawn.
        reads: whether it reads the target's rows along the path it walks, or all of them.
        needs_probs: whether target rows must be laws; where not, scores of the same order will do.
        needs_draft_law: whether the draft's laws enter the decision.
        drawing: how the children of a row are drawn where nobody asks for another way.
    """

    name: str
    source: str
    guarantee: Guarantee = "law"
    trees: bool = False
    kinds: frozenset[Kind] = ALL_KINDS
    reads: Literal["path", "all"] = "path"
    needs_probs: bool = True
    needs_draft_law: bool = False
    drawing: Drawing = WithReplacement()

    @property
    def seeded(self) -> bool:
        """Whether the text is a function of seed and target, the same as without speculation."""
        return self.guarantee == "seed"

    @abstractmethod
    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """The decision on B drafts; rows past a draft's last node are not read.

        It stands on the target's device, wherever draft and noise are.

        Raises:
            InvalidConfig: a draft this rule cannot verify.
        """

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Int64[Tensor, " n"]:
        """Drafted token `index` of n sequences, drawn from `law` the way this rule wants drafts."""
        uniform = noise.uniforms53(
            noise_n.seed_B, noise_n.sample_B, noise.STREAM_DRAFT, noise_n.anchor_B, index
        )
        column = inverse_cdf(law.probs, uniform)
        return column if law.ids is None else law.ids.gather(1, column[:, None]).squeeze(1)

    def check(self, draft: Draft) -> None:
        """Raises InvalidConfig for a draft this rule cannot verify."""
        if not self.trees and not draft.tree.is_chain:
            raise InvalidConfig(
                f"rule={self.name!r} verifies chains, and the draft is a tree; draft a chain, or "
                "take a rule for trees"
            )
        if not draft.kinds <= self.kinds:
            wrong = ", ".join(kind.name for kind in sorted(draft.kinds - self.kinds))
            raise InvalidConfig(
                f"rule={self.name!r} does not verify nodes drawn {wrong}; it takes "
                f"{', '.join(kind.name for kind in sorted(self.kinds))}"
            )


@dataclass(frozen=True, slots=True)
class Sifted:
    """Tokens kept `[B]` and the unnormalised law of the token to add.

    Its weights are `[B, V]`, or `[B, M]` of the tokens in `ids_BM`, which ascend.
    """

    num_accepted_B: Tensor
    weights_BV: Tensor
    ids_BM: Tensor | None = None

    def added(self, extra_B: Tensor) -> Tensor:
        """The token that each of these uniforms adds, `[B]`."""
        column_B = inverse_cdf(self.weights_BV, extra_B)
        return column_B if self.ids_BM is None else self.ids_BM.gather(1, column_B[:, None])[:, 0]


class ChainRejection(Rule):
    """Rules that test the tokens of chains with uniforms and draw what is left of the target."""

    needs_draft_law = True

    @abstractmethod
    def sift(self, draft: Draft, target: TargetRows, tests_BK: Float[Tensor, "B K"]) -> Sifted:
        """How many tokens stay under the uniforms `tests_BK`, and what the target adds."""

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Tests on stream ACCEPT, draw i for token i; the added token on EXTRA, index 0."""
        self.check(draft)
        draft = draft.to(target.device)
        depth = draft.tree.num_nodes
        tests_BK, extra_B = round_uniforms(noise, depth, target.device)
        sifted = self.sift(draft, target, tests_BK)
        return Verdict.of_chain(sifted.num_accepted_B, sifted.added(extra_B), depth)


def round_uniforms(
    round_noise: RoundNoise, num_nodes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uniforms of the accept tests `[B, N]` and of the added token `[B]`, on a device."""
    at = round_noise
    tests_BN, extra_B = noise.round_uniforms(at.seed_B, at.sample_B, at.anchor_B, num_nodes)
    tests_BN, extra_B = host.sent((tests_BN, extra_B), device)
    return tests_BN, extra_B


def extra_uniforms(round_noise: RoundNoise, index_T: Tensor) -> Tensor:
    """Uniforms of the added token, one for each index: `[B, T]`."""
    parts = round_noise.seed_B, round_noise.sample_B, round_noise.anchor_B
    seed, sample, anchor = (part[:, None] for part in parts)
    return noise.uniforms53(seed, sample, noise.STREAM_EXTRA, anchor, index_T)


def first_rows(target: TargetRows) -> Tensor:
    """Flat rows of the roots, `[B]`."""
    num_texts, num_rows, _ = target.shape
    return torch.arange(num_texts, device=target.device) * num_rows


def all_rows(target: TargetRows) -> Tensor:
    """Every flat row, `[B, T]`."""
    num_texts, num_rows, _ = target.shape
    return torch.arange(num_texts * num_rows, device=target.device).view(num_texts, num_rows)


def run_length(passed_BK: Tensor) -> Tensor:
    """Number of leading True entries per row."""
    return passed_BK.to(torch.int64).cumprod(1).sum(1)


def chain_probs(draft: Draft, target: TargetRows) -> tuple[Tensor, Tensor]:
    """p and q of every drafted token of chains, `[B, K]` float64; padding has any numbers."""
    tokens_BK = draft.tree.tokens_BN
    at_n, tokens_n = all_rows(target)[:, : tokens_BK.shape[1]].flatten(), tokens_BK.flatten()
    if target.on_host:
        real_n = draft.tree.is_node().flatten().nonzero().squeeze(1)
        p_n = tokens_n.new_zeros(len(tokens_n), dtype=torch.float64)
        p_n[real_n] = target.prob_of(at_n[real_n], tokens_n[real_n])
    else:
        p_n = target.prob_of(at_n, tokens_n)
    return p_n.view_as(tokens_BK), chain_draft_probs(draft)


def chain_draft_probs(draft: Draft) -> Tensor:
    """q of every drafted token of chains, `[B, K]` float64; padding has any numbers."""
    tokens_BK = draft.tree.tokens_BN
    if all_certain(draft):
        return torch.ones_like(tokens_BK, dtype=torch.float64)
    assert draft.law is not None
    law = draft.law if draft.law_rows_BN is None else draft.law.select(draft.law_rows().flatten())
    q_BK = law.prob_of(tokens_BK.flatten()).view_as(tokens_BK).double()
    if Kind.POINT in draft.kinds:
        return q_BK.masked_fill(draft.node_kinds() == Kind.POINT, 1.0)
    return q_BK


def while_equal(draft: Draft, target_tokens_BT: Tensor) -> Verdict:
    """Keeps the tokens of chains while they are the target's own, and adds the target's next."""
    few = len(target_tokens_BT) <= FEW_TEXTS and target_tokens_BT.numel() <= FEW_TOKENS
    if few and host.reads_free(target_tokens_BT.device):
        return _few_while_equal(draft, target_tokens_BT)
    draft = draft.to(target_tokens_BT.device)
    depth = draft.tree.num_nodes
    equal_BK = target_tokens_BT[:, :depth] == draft.tree.tokens_BN
    num_accepted_B = run_length(equal_BK & draft.tree.is_node())
    token_B = target_tokens_BT.gather(1, num_accepted_B[:, None]).squeeze(1)
    return Verdict.of_chain(num_accepted_B, token_B, depth)


def _few_while_equal(draft: Draft, target_tokens_BT: Tensor) -> Verdict:
    """The same in Python."""
    tree, kept, added = draft.tree, list[int](), list[int]()
    drafted = zip(tree.tokens_BN.tolist(), tree.counts_B.tolist(), strict=True)
    for own, (tokens, count) in zip(target_tokens_BT.tolist(), drafted, strict=True):
        length = 0
        while length < count and tokens[length] == own[length]:
            length += 1
        kept.append(length)
        added.append(own[length])
    rows = range(1, tree.num_nodes + 1)
    paths = [[row if row <= n else 0 for row in rows] for n in kept]
    kept_B, added_B, path_BD = (
        torch.tensor(one, dtype=torch.int64, device=target_tokens_BT.device)
        for one in (kept, added, paths)
    )
    return Verdict(kept_B, added_B, path_BD.view(len(kept), tree.num_nodes))


def all_certain(draft: Draft) -> bool:
    """Whether every node is a point mass."""
    return draft.law is None or draft.kinds == {Kind.POINT}
