"""The chain rules: which drafted tokens stay, and the one token the target adds.

`token` and `block` keep the target's law by rejection, `match` by drawing from the target alone;
`coupled` and `greedy` give the very tokens of plain decoding. Row i of the target is the law after
the first i drafted tokens. Laws come in float32 or float64 and rows keep their dtype; single
numbers are multiplied in float64, where products of float32 numbers are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider import noise
from outrider.decoding.chain import ChainDraft, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.sampling import gumbel_race, inverse_cdf

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


class Rule(ABC):
    """Decides how much of each drafted chain stays; exact for any drafter that reports its laws."""

    name: str
    needs_probs: bool = True
    """Whether target rows must be laws; where not, any scores of the same order will do."""
    needs_draft_law: bool = False
    """Whether the draft's laws enter the decision."""
    seeded: bool = False
    """Whether the text is a function of seed and target, the same as without speculation."""

    @abstractmethod
    def verify(
        self, draft: ChainDraft, target_BTV: Float[Tensor, "B T V"], noise: RoundNoise
    ) -> Verdict:
        """The decision on B chains; of the K + 1 rows those past a chain's end are not read.

        It stands on the target's device, wherever draft and noise are.
        """

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Int64[Tensor, " n"]:
        """Drafted token `index` of n sequences, drawn from `law` the way this rule wants drafts."""
        uniform = noise.uniforms53(
            noise_n.seed_B, noise_n.sample_B, noise.STREAM_DRAFT, noise_n.anchor_B, index
        )
        column = inverse_cdf(law.probs, uniform)
        return column if law.ids is None else law.ids.gather(1, column[:, None]).squeeze(1)


class _Rejection(Rule):
    """Rules that test drafted tokens with uniforms and draw what is left of the target's law."""

    needs_draft_law = True

    @abstractmethod
    def sift(
        self,
        draft: ChainDraft,
        target_BTV: Float[Tensor, "B T V"],
        tests_BK: Float[Tensor, "B K"],
    ) -> Sifted:
        """How many tokens stay under the uniforms `tests_BK`, and what the target adds."""

    def verify(self, draft: ChainDraft, target_BTV: Tensor, noise: RoundNoise) -> Verdict:
        """Tests on stream ACCEPT, draw i for token i; the added token on EXTRA, index 0."""
        draft = draft.to(target_BTV.device)
        tests_BK = _tests(noise, draft.tokens_BK.shape[1]).to(target_BTV.device)
        sifted = self.sift(draft, target_BTV, tests_BK)
        return Verdict(sifted.num_accepted_B, inverse_cdf(sifted.weights_BV, _extra(noise)))


@dataclass(frozen=True, slots=True)
class Sifted:
    """Tokens kept `[B]` and the unnormalised law `[B, V]` of the token to add."""

    num_accepted_B: Tensor
    weights_BV: Tensor


class TokenRule(_Rejection):
    """Keeps token x while `u * q(x) < p(x)`, then adds one from `max(0, p - q)`.

    Source: Leviathan, Kalman, Matias, ICML 2023; Chen et al., arXiv 2302.01318.
    """

    name = "token"

    def sift(self, draft: ChainDraft, target_BTV: Tensor, tests_BK: Tensor) -> Sifted:
        """`u = 0` never lets through what the target forbids; no division, no epsilon."""
        p_BK, q_BK = _chain_probs(draft, target_BTV)
        passed_BK = (tests_BK * q_BK < p_BK) & _within(draft)
        return _sifted(draft, target_BTV, _run_length(passed_BK), None)


class BlockRule(_Rejection):
    """Tests prefixes of the chain, longest first; keeps the most any rule can keep of a chain.

    With b[0] = 1 and b[i+1] = min(1, b[i] p(x_i)/q(x_i)), the prefix of length i passes when
    `u[i-1] < h[i]`, where h at the chain's end is b and before it S / (S + 1 - b) for
    S = sum max(0, b[i] P[i] - Q[i]). Source: Sun et al., ICLR 2025, arXiv 2403.10444.
    """

    name = "block"

    def sift(self, draft: ChainDraft, target_BTV: Tensor, tests_BK: Tensor) -> Sifted:
        """The longest prefix that passes stays; `max(0, b P - Q)` adds the token after it."""
        log_b_BT = _log_block(draft, target_BTV)
        passed_BK = (tests_BK < self._thresholds(draft, target_BTV, log_b_BT)) & _within(draft)
        lengths_K = torch.arange(1, passed_BK.shape[1] + 1, device=passed_BK.device)
        ends_BT = torch.nn.functional.pad(torch.where(passed_BK, lengths_K, 0), (1, 0))
        return _sifted(draft, target_BTV, ends_BT.amax(1), log_b_BT.exp())

    @staticmethod
    def _thresholds(draft: ChainDraft, target_BTV: Tensor, log_b_BT: Tensor) -> Tensor:
        """h of prefix lengths 1..K, `[B, K]`."""
        depth = draft.tokens_BK.shape[1]
        h_BK = log_b_BT[:, 1:].exp()
        inner_BK = torch.arange(1, depth + 1, device=h_BK.device) < draft.lengths_B[:, None]
        # Rows whose b is 0 are settled: nothing of the target is left at or behind them.
        rows, ends = (inner_BK & (h_BK > 0)).nonzero(as_tuple=True)
        if len(rows) == 0:
            return h_BK
        # Wide rows stay in their own dtype: float32 rounds S by less than the grain of u.
        b_n = h_BK[rows, ends].to(target_BTV.dtype)
        left_n = _excess(draft, rows * depth + ends + 1, b_n[:, None] * target_BTV[rows, ends + 1])
        mass_n = left_n.sum(-1, dtype=torch.float64)
        short_n = -torch.expm1(log_b_BT[rows, ends + 1])
        # 0 / 0 happens only where the laws agree and everything before was kept: h is 1.
        open_n = mass_n + short_n
        h_BK[rows, ends] = torch.where(open_n > 0, mass_n / open_n, 1.0)
        return h_BK


class MatchRule(Rule):
    """The target draws its own token at every row; drafted tokens stay while they are the same.

    Source: the baseline of Miao et al. (SpecInfer), ASPLOS 2024.
    """

    name = "match"

    def verify(self, draft: ChainDraft, target_BTV: Tensor, noise: RoundNoise) -> Verdict:
        """Row i is drawn by inverse cdf on stream EXTRA, index i."""
        num_texts, num_rows, width = target_BTV.shape
        uniform_BT = _extra(noise, torch.arange(num_rows, device=noise.seed_B.device))
        drawn = inverse_cdf(target_BTV.reshape(-1, width), uniform_BT.flatten())
        return while_equal(draft, drawn.view(num_texts, num_rows))


class GreedyRule(Rule):
    """Drafted tokens stay while they are the target's argmax, the lowest id of several."""

    name = "greedy"
    needs_probs = False
    seeded = True

    def verify(self, draft: ChainDraft, target_BTV: Tensor, noise: RoundNoise) -> Verdict:
        """No noise is read."""
        return while_equal(draft, target_BTV.argmax(-1))

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """The law's likeliest token."""
        return law.argmax()


class CoupledRule(Rule):
    """Target and draft race on the same Gumbel noise; drafted tokens stay while both agree.

    The text is that of plain sampling with the same seed, whatever was drafted.
    Source: Daliri, Musco, Suresh, arXiv 2408.07978.
    """

    name = "coupled"
    seeded = True

    def verify(self, draft: ChainDraft, target_BTV: Tensor, noise: RoundNoise) -> Verdict:
        """Row i races with the noise of position anchor + i on stream TARGET."""
        num_texts, num_rows, width = target_BTV.shape
        ahead = torch.arange(num_rows, device=noise.seed_B.device).repeat(num_texts)
        wide = noise.select(
            torch.arange(num_texts, device=ahead.device).repeat_interleave(num_rows)
        )
        # Rows past a chain's end are padding: an empty support costs no noise.
        real = ahead.view(num_texts, num_rows) <= draft.lengths_B.to(ahead.device)[:, None]
        rows = target_BTV.reshape(-1, width)
        if not real.all():
            rows = rows.masked_fill(~real.reshape(-1, 1).to(rows.device), 0)
        drawn = gumbel_race(rows, None, wide.seed_B, wide.sample_B, wide.anchor_B + ahead)
        return while_equal(draft, drawn.view(num_texts, num_rows))

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """The race at position anchor + index with the draft's law."""
        return gumbel_race(
            law.probs, law.ids, noise_n.seed_B, noise_n.sample_B, noise_n.anchor_B + index
        )


RULES: dict[str, Rule] = {
    "greedy": GreedyRule(),
    "match": MatchRule(),
    "token": TokenRule(),
    "block": BlockRule(),
    "coupled": CoupledRule(),
}


def _tests(round_noise: RoundNoise, depth: int) -> Tensor:
    """Uniforms `[B, K]` of the accept tests."""
    return noise.uniforms(
        round_noise.seed_B[:, None],
        round_noise.sample_B[:, None],
        noise.STREAM_ACCEPT,
        round_noise.anchor_B[:, None],
        torch.arange(depth, device=round_noise.seed_B.device),
    )


def _extra(round_noise: RoundNoise, index: Tensor | int = 0) -> Tensor:
    """Uniforms of the added token: `[B]`, or `[B, T]` for a tensor of T indices."""
    parts = round_noise.seed_B, round_noise.sample_B, round_noise.anchor_B
    seed, sample, anchor = (p[:, None] for p in parts) if isinstance(index, Tensor) else parts
    return noise.uniforms53(seed, sample, noise.STREAM_EXTRA, anchor, index)


def _within(draft: ChainDraft) -> Tensor:
    """Which entries of `tokens_BK` were drafted."""
    depth = draft.tokens_BK.shape[1]
    return torch.arange(depth, device=draft.tokens_BK.device) < draft.lengths_B[:, None]


def _run_length(passed_BK: Tensor) -> Tensor:
    """Number of leading True entries per row."""
    return passed_BK.to(torch.int64).cumprod(1).sum(1)


def while_equal(draft: ChainDraft, target_tokens_BT: Tensor) -> Verdict:
    """Keeps drafted tokens while they equal the target's, and adds the target's next."""
    draft = draft.to(target_tokens_BT.device)
    depth = draft.tokens_BK.shape[1]
    equal_BK = (target_tokens_BT[:, :depth] == draft.tokens_BK) & _within(draft)
    num_accepted_B = _run_length(equal_BK)
    token_B = target_tokens_BT.gather(1, num_accepted_B[:, None]).squeeze(1)
    return Verdict(num_accepted_B, token_B)


def _chain_probs(draft: ChainDraft, target_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of every drafted token, `[B, K]` float64."""
    tokens_BK = draft.tokens_BK
    rows_BKV = target_BTV[:, : tokens_BK.shape[1]]
    p_BK = rows_BKV.gather(2, tokens_BK[:, :, None]).squeeze(2).double()
    if draft.law is None:
        return p_BK, torch.ones_like(p_BK)
    return p_BK, draft.law.prob_of(tokens_BK.flatten()).view_as(tokens_BK).double()


def _log_block(draft: ChainDraft, target_BTV: Tensor) -> Tensor:
    """log b of prefix lengths 0..K, `[B, K + 1]`: the walk of log p - log q, reflected at 0.

    b = exp(S - max(0, running maximum of S)). Where p = 0 the walk is at -inf for good, where only
    q = 0 (a drafter's rounding) it is carried far above 0.
    """
    p_BK, q_BK = _chain_probs(draft, target_BTV)
    steps_BK = p_BK.log() - torch.where(q_BK > 0, q_BK, 1e-300).log()
    walk_BT = torch.nn.functional.pad(steps_BK.cumsum(1), (1, 0))
    return walk_BT - walk_BT.cummax(1).values


def _sifted(
    draft: ChainDraft, target_BTV: Tensor, num_accepted_B: Tensor, b_BT: Tensor | None
) -> Sifted:
    """The target's row after the kept tokens, less the draft's law where a token was refused."""
    texts = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    weights_BV = target_BTV[texts, num_accepted_B]
    refused = (num_accepted_B < draft.lengths_B).nonzero().squeeze(1)
    if len(refused) == 0:
        return Sifted(num_accepted_B, weights_BV)
    at = num_accepted_B[refused]
    rows = weights_BV[refused]
    scaled = rows if b_BT is None else b_BT[refused, at].to(rows.dtype)[:, None] * rows
    left = _excess(draft, refused * draft.tokens_BK.shape[1] + at, scaled)
    # No mass is left only where rounding refused a token of equal laws.
    weights_BV = weights_BV.to(left.dtype)
    weights_BV[refused] = torch.where(left.sum(-1, keepdim=True) > 0, left, rows.to(left.dtype))
    return Sifted(num_accepted_B, weights_BV)


def _excess(draft: ChainDraft, places: Tensor, weights_nV: Tensor) -> Tensor:
    """`max(0, weights - q)` at the flat places of drafted tokens."""
    law = draft.law
    drawn_from = Law.point(draft.tokens_BK.flatten()[places]) if law is None else law.select(places)
    return drawn_from.excess(weights_nV)
