"""Verification rules for chains: which drafted tokens are kept, and which token the target adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import noise
from outrider.decoding.laws import Law, inverse_cdf

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """Where a round's noise is addressed: seeds, sample indices and anchors of B sequences, int64.

    The anchor is the number of tokens settled when the round starts.
    """

    seed_B: Int[Tensor, "B"]
    sample_B: Int[Tensor, "B"]
    anchor_B: Int[Tensor, "B"]

    def uniforms(self, stream: int, draw_BN: Int[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        """Uniforms of accept tests."""
        return noise.uniforms(*self._columns(stream), draw_BN)

    def uniforms53(self, stream: int, index_BN: Int[Tensor, "B N"]) -> Float[Tensor, "B N"]:
        """Uniforms that draw tokens."""
        return noise.uniforms53(*self._columns(stream), index_BN)

    def _columns(self, stream: int) -> tuple[Tensor, Tensor, int, Tensor]:
        return self.seed_B[:, None], self.sample_B[:, None], stream, self.anchor_B[:, None]

    def of(self, members_n: Int[Tensor, "n"]) -> RoundNoise:
        """The noise of some of the sequences."""
        return RoundNoise(
            self.seed_B[members_n], self.sample_B[members_n], self.anchor_B[members_n]
        )


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """Drafted chains: `tokens_BK` int64 padded with 0, `lengths_B` int64, and their laws.

    `law` has B*K rows (row b*K + i is the law of token i of sequence b); None = point masses.
    """

    tokens_BK: Int[Tensor, "B K"]
    lengths_B: Int[Tensor, "B"]
    law: Law | None = None

    @property
    def in_draft_BK(self) -> Tensor:
        """Which entries are tokens and not padding, bool."""
        depth = torch.arange(self.tokens_BK.shape[1])
        return depth < self.lengths_B[:, None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stays: `num_accepted_B` drafted tokens, and `token_B`, the one the target adds (int64)."""

    num_accepted_B: Int[Tensor, "B"]
    token_B: Int[Tensor, "B"]


class Rule(ABC):
    """Keeps a prefix of each chain so that the output has exactly the target's law."""

    name: str
    needs_draft_law: bool
    """Whether the draft's laws are read."""
    needs_probs: bool = True
    """Whether processed laws are read; otherwise anything of the same order will do, logits too."""
    seeded: bool
    """Exact per seed: the very tokens of plain decoding. Otherwise exact in law."""

    @abstractmethod
    def verify(
        self, draft: ChainDraft, target_BTV: Float[Tensor, "B T V"], noise: RoundNoise
    ) -> Verdict:
        """Row i of the target is its law after i drafted tokens; T is K + 1."""


def _leading(kept_BK: Tensor) -> Tensor:
    """How many entries are true before the first that is not."""
    return kept_BK.long().cumprod(1).sum(1)


def _rows(target_BTV: Tensor, index_B: Tensor) -> Tensor:
    return target_BTV[torch.arange(len(index_B)), index_B]


class _Matching(Rule):
    """Rules that compare the draft with tokens of the target's own: it always adds its own."""

    needs_draft_law = False

    def verify(
        self, draft: ChainDraft, target_BTV: Float[Tensor, "B T V"], noise: RoundNoise
    ) -> Verdict:
        """Keeps drafted tokens while they are the target's own."""
        own_BT = self._own(target_BTV, noise)
        depth = draft.tokens_BK.shape[1]
        same_BK = (draft.tokens_BK == own_BT[:, :depth]) & draft.in_draft_BK
        accepted_B = _leading(same_BK)
        return Verdict(accepted_B, own_BT.gather(1, accepted_B[:, None])[:, 0])

    @abstractmethod
    def _own(self, target_BTV: Tensor, noise: RoundNoise) -> Tensor:
        """The target's own token of every row, `[B, T]`."""


class Greedy(_Matching):
    """The largest entry of every row, the lowest id where several tie."""

    name = "greedy"
    needs_probs = False
    seeded = True

    def _own(self, target_BTV: Tensor, noise: RoundNoise) -> Tensor:
        return target_BTV.argmax(-1)


class Match(_Matching):
    """Sample and match: the target's own draw of every row by inverse cdf."""

    name = "match"
    seeded = False

    def _own(self, target_BTV: Tensor, noise: RoundNoise) -> Tensor:
        num, rows, width = target_BTV.shape
        index = torch.arange(rows).expand(num, rows)
        points_BT = noise.uniforms53(STREAM_EXTRA, index)
        return inverse_cdf(target_BTV.reshape(-1, width), points_BT.flatten()).view(num, rows)


class Coupled(_Matching):
    """Shared Gumbel noise (Daliri, Musco, Suresh 2024, section 3): the tokens of plain sampling.

    The target's own token at a position is the argmax of log p + G, with G keyed by seed, position
    and token id; a drafter that adds the same G to its own law guesses it often.
    """

    name = "coupled"
    seeded = True

    def _own(self, target_BTV: Tensor, noise: RoundNoise) -> Tensor:
        num, rows, width = target_BTV.shape
        owner_R = torch.arange(num).repeat_interleave(rows)
        ahead_R = torch.arange(rows).repeat(num)
        return gumbel_argmax(target_BTV.reshape(-1, width), noise.of(owner_R), ahead_R).view(
            num, rows
        )


def gumbel_argmax(
    probs_RV: Float[Tensor, "R V"], noise_R: RoundNoise, ahead_R: Int[Tensor, "R"]
) -> Int[Tensor, "R"]:
    """Each row's token under the shared noise of position anchor + ahead; noise on the support only."""
    row_S, id_S = probs_RV.nonzero(as_tuple=True)
    keys_S = probs_RV[row_S, id_S].double().log() + noise.gumbels(
        noise_R.seed_B[row_S],
        noise_R.sample_B[row_S],
        (noise_R.anchor_B + ahead_R)[row_S],
        id_S,
    )
    keys_RV = torch.full(probs_RV.shape, -torch.inf, dtype=torch.float64)
    keys_RV[row_S, id_S] = keys_S
    return keys_RV.argmax(-1)


class Token(Rule):
    """Token-wise rejection (Leviathan et al. 2023, theorem 3.5; Chen et al. 2023, theorem 1).

    Drafted x is kept when u q(x) < p(x); the first that is not is replaced from max(0, p - q).
    Tests are decided in float64, where products of float32 are exact.
    """

    name = "token"
    needs_draft_law = True
    seeded = False

    def verify(
        self, draft: ChainDraft, target_BTV: Float[Tensor, "B T V"], noise: RoundNoise
    ) -> Verdict:
        """Tests every token at once and keeps those before the first failure."""
        p_BK, q_BK = _tested(draft, target_BTV)
        u_BK = noise.uniforms(STREAM_ACCEPT, _draws(draft))
        accepted_B = _leading((u_BK * q_BK < p_BK) & draft.in_draft_BK)
        scale_B = torch.ones(len(accepted_B), dtype=torch.float64)
        return Verdict(accepted_B, _extra(draft, target_BTV, accepted_B, scale_B, noise))


class Block(Rule):
    """Block verification (Sun et al. 2025, algorithm 2): the most accepted tokens of any rule in law.

    With b_0 = 1, b_i = min(1, b_(i-1) p/q) and s_i the mass of max(0, b_i p - q), prefix i is a
    candidate when u_i < s_i / (s_i + 1 - b_i), and the last when u < b; the longest candidate stays.
    """

    name = "block"
    needs_draft_law = True
    seeded = False

    def verify(
        self, draft: ChainDraft, target_BTV: Float[Tensor, "B T V"], noise: RoundNoise
    ) -> Verdict:
        """Tests every prefix at once and keeps the longest that passes."""
        num, depth = draft.tokens_BK.shape
        ones_B1 = torch.ones(num, 1, dtype=torch.float64)
        if depth == 0:
            accepted_B = torch.zeros(num, dtype=torch.int64)
            return Verdict(
                accepted_B, _extra(draft, target_BTV, accepted_B, ones_B1[:, 0], noise)
            )
        p_BK, q_BK = _tested(draft, target_BTV)
        b_BT = torch.cat((ones_B1, reflected_walk(p_BK, q_BK)), 1)
        s_BK = _residual_mass(draft, target_BTV, b_BT)
        length_B1 = draft.lengths_B[:, None]
        prefix_K = torch.arange(1, depth + 1)
        # Column i tests the prefix of length i + 1; the whole chain's test has no residual to weigh.
        weight_BK = torch.cat((s_BK[:, 1:], torch.zeros(num, 1, dtype=torch.float64)), 1)
        whole_BK = prefix_K == length_B1
        u_BK = noise.uniforms(STREAM_ACCEPT, _draws(draft))
        rest_BK = torch.where(whole_BK, 0.0, weight_BK)
        b_BK = b_BT[:, 1:]
        bar_BK = torch.where(whole_BK, b_BK, rest_BK)
        scale_BK = torch.where(whole_BK, 1.0, rest_BK + 1.0 - b_BK)
        passed_BK = (u_BK * scale_BK < bar_BK) & draft.in_draft_BK
        # 0/0: b is 1 and nothing is left over, so the prefix is certain to stay.
        passed_BK |= (scale_BK == 0) & draft.in_draft_BK
        accepted_B = torch.where(passed_BK, prefix_K, 0).amax(1)
        scale_B = b_BT.gather(1, accepted_B[:, None])[:, 0]
        return Verdict(accepted_B, _extra(draft, target_BTV, accepted_B, scale_B, noise))


def reflected_walk(
    p_BK: Float[Tensor, "B K"], q_BK: Float[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    """b_i = min(1, b_(i-1) p_i / q_i) with b_0 = 1, for all i at once, float64.

    In logarithms it is a walk reflected at 0: its value is the sum so far less the largest sum so
    far. A token with p = 0 ends the walk at 0; one with q = 0 < p lifts it to 1.
    """
    steps_BK = p_BK.double().log() - q_BK.double().log()
    steps_BK = torch.where(p_BK <= 0, -torch.inf, steps_BK).clamp(max=1e6)
    sums_BK = steps_BK.cumsum(1)
    return (sums_BK - sums_BK.cummax(1).values.clamp_min(0.0)).exp()


def _residual_mass(draft: ChainDraft, target_BTV: Tensor, b_BT: Tensor) -> Tensor:
    """The mass of max(0, b_i p_i - q_i) for i below K, `[B, K]` float64."""
    num, depth = draft.tokens_BK.shape
    rows = target_BTV[:, :depth].reshape(num * depth, -1)
    rest = _law(draft).excess(rows, b_BT[:, :depth].flatten())
    return rest.sum(-1).view(num, depth)


def _law(draft: ChainDraft) -> Law:
    return Law.point(draft.tokens_BK.flatten()) if draft.law is None else draft.law


def _tested(draft: ChainDraft, target_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the drafted tokens, `[B, K]` float64."""
    tokens_BK = draft.tokens_BK
    depth = tokens_BK.shape[1]
    p_BK = target_BTV[:, :depth].gather(2, tokens_BK[:, :, None])[:, :, 0].double()
    return p_BK, _law(draft).prob_of(tokens_BK.flatten()).view(tokens_BK.shape)


def _draws(draft: ChainDraft) -> Tensor:
    num, depth = draft.tokens_BK.shape
    return torch.arange(depth).expand(num, depth)


def _extra(
    draft: ChainDraft,
    target_BTV: Tensor,
    accepted_B: Tensor,
    scale_B: Tensor,
    noise: RoundNoise,
) -> Tensor:
    """The token the target adds: from max(0, scale p - q) after a rejection, else from p itself.

    A residual without mass is left to rounding alone; the target's row then stands in for it.
    """
    rows_BV = _rows(target_BTV, accepted_B)
    weights_BV = rows_BV.double()
    rejected_n = (accepted_B < draft.lengths_B).nonzero()[:, 0]
    if len(rejected_n):
        at_n = rejected_n * draft.tokens_BK.shape[1] + accepted_B[rejected_n]
        rest_nV = _law(draft).rows(at_n).excess(rows_BV[rejected_n], scale_B[rejected_n])
        empty_n = rest_nV.sum(-1) <= 0
        weights_BV[rejected_n] = torch.where(empty_n[:, None], weights_BV[rejected_n], rest_nV)
    zeros_B1 = torch.zeros(len(accepted_B), 1, dtype=torch.int64)
    return inverse_cdf(weights_BV, noise.uniforms53(STREAM_EXTRA, zeros_B1)[:, 0])


STREAM_ACCEPT, STREAM_EXTRA = noise.STREAM_ACCEPT, noise.STREAM_EXTRA

RULES: dict[str, Rule] = {
    rule.name: rule for rule in (Greedy(), Match(), Token(), Block(), Coupled())
}
