"""Verification as functions of arrays: for users who run their own models and loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider import noise
from outrider.decoding.arrays import (
    Array,
    chain_lengths,
    check_probs,
    check_seed,
    check_shapes,
    check_values,
    exp_row,
    float_row,
    floats,
    integers,
)
from outrider.decoding.draft import Draft, RoundNoise
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetLaws
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.greedy import GreedyRule
from outrider.decoding.rules.token import TokenRule
from outrider.decoding.sampling import inverse_cdf
from outrider.errors import (
    DegenerateDistribution,
    DistributionWidthMismatch,
    DraftShapeMismatch,
    InvalidConfig,
    NonFinite,
    TargetShapeMismatch,
)

if TYPE_CHECKING:
    from jaxtyping import Float


class Uniforms(Protocol):
    """A source of uniforms."""

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True)
class VerificationRow:
    """The decision on one chain; the fields are those of Verification."""

    num_accepted: int
    bonus_token: int
    accepted_tokens: list[int]
    first_rejection_pos: int | None


@dataclass(frozen=True, slots=True)
class Verification:
    """Decisions on B chains; `len(v)` is B and `v[b]` one of them.

    Attributes:
        num_accepted: int64 `[B]`, drafted tokens kept.
        bonus_token: int64 `[B]`, the token the target adds, always there.
        accepted_tokens: the kept tokens of each chain.
        first_rejection_pos: `num_accepted` where a drafted token was refused, else None.
    """

    num_accepted: Tensor
    bonus_token: Tensor
    accepted_tokens: list[list[int]]
    first_rejection_pos: list[int | None]

    def __len__(self) -> int:
        return len(self.accepted_tokens)

    def __getitem__(self, row: int) -> VerificationRow:
        return VerificationRow(
            int(self.num_accepted[row]),
            int(self.bonus_token[row]),
            self.accepted_tokens[row],
            self.first_rejection_pos[row],
        )


def verify_speculative_tokens(
    draft_probs: Array | None,
    target_probs: Array,
    draft_tokens: Array,
    *,
    seed: int,
    rule: str = "token",
    draft_lengths: Array | None = None,
) -> Verification:
    """Decides how much of B drafted chains stays and draws the token that follows each.

    Arithmetic is in float32, for float64 arrays in float64; a token with q = 0 is kept exactly
    where p > 0; where p - q leaves nothing, p is drawn from; a token without target mass never
    comes out.

    Args:
        draft_probs: `[B, K, V]`, the laws of the drafted tokens; None = they are certain.
        target_probs: `[B, K + 1, V]`, row i after the first i drafted tokens.
        draft_tokens: `[B, K]` integers.
        seed: in [0, 2**64). Uniform `b * (K + 1) + i` of its flat Philox stream (counter = index
            div 4, word = index mod 4) tests token i; column K draws the added token. The same
            seed gives the same uniforms: give every call its own.
        rule: `token`, `block` (column i - 1 tests the prefix of length i) or `greedy`.
        draft_lengths: `[B]`, drafted tokens of each chain, 0 to K; what lies behind is not read.
            None = K.

    Raises:
        DraftShapeMismatch, TargetShapeMismatch, DistributionWidthMismatch: shapes that disagree.
        TokenOutOfRange: a drafted token outside 0..V-1.
        NonFinite: NaN or an infinity in a law.
        DegenerateDistribution: a row that is read and does not sum to one.
        InvalidConfig: an unknown rule, a seed, dtype or negative probability that cannot be meant.
    """
    sifter = _SIFTERS.get(rule) if isinstance(rule, str) else None
    if sifter is None:
        raise InvalidConfig(f"rule={rule!r}: one of {', '.join(_SIFTERS)} is due")
    target_BTV = floats("target_probs", target_probs)
    tokens_BK = integers("draft_tokens", draft_tokens)
    draft_BKV = None if draft_probs is None else floats("draft_probs", draft_probs)
    check_shapes(draft_BKV, target_BTV, tokens_BK)
    lengths_B = chain_lengths(draft_lengths, tokens_BK)
    tokens_BK = check_values(draft_BKV, target_BTV, tokens_BK, lengths_B)
    num_texts, depth = tokens_BK.shape
    index = torch.arange(num_texts * (depth + 1)).view(num_texts, depth + 1)
    # Seven billion uniforms in, the block number would reach the counter's second word.
    address = check_seed(seed), index >> 34, noise.STREAM_VERIFY, 0
    uniform_BT = noise.uniforms(*address, index & (2**34 - 1)).to(target_BTV.device)
    law = None if draft_BKV is None else Law.dense(draft_BKV.reshape(-1, target_BTV.shape[2]))
    draft = Draft.chain(tokens_BK, lengths_B, law)
    if isinstance(sifter, GreedyRule):
        nowhere = RoundNoise(lengths_B, lengths_B, lengths_B)
        verdict = sifter.verify(draft, TargetLaws(target_BTV), nowhere)
        return _verification(draft, verdict.num_accepted_B, verdict.token_B)
    sifted = sifter.sift(draft, TargetLaws(target_BTV), uniform_BT[:, :depth])
    return _verification(draft, sifted.num_accepted_B, sifted.added(uniform_BT[:, depth]))


_SIFTERS = {"token": TokenRule(), "block": BlockRule(), "greedy": GreedyRule()}


def compute_acceptance_probs(
    draft_probs: Array, target_probs: Array
) -> tuple[Float[Tensor, "B K V"], Float[Tensor, "B K V"]]:
    """`min(1, p/q)` and `max(0, p - q)`, both `[B, K, V]`.

    Where q = 0 the acceptance is 1 if p > 0 and 0 if p = 0. The residual is not normalised.

    Raises:
        DraftShapeMismatch, TargetShapeMismatch: arrays that are not both `[B, K, V]`.
        NonFinite: NaN or an infinity.
        InvalidConfig: a dtype that is not floating, a negative probability.
    """
    q = floats("draft_probs", draft_probs)
    p = floats("target_probs", target_probs)
    if q.ndim != 3:
        raise DraftShapeMismatch(f"draft_probs has shape {tuple(q.shape)}; [B, K, V] is due")
    if p.shape != q.shape:
        raise TargetShapeMismatch(
            f"target_probs has shape {tuple(p.shape)}, draft_probs {tuple(q.shape)}; they must "
            "agree: leave out the target's last row"
        )
    check_probs("draft_probs", q)
    check_probs("target_probs", p)
    certain = (p > 0).to(p.dtype)
    acceptance = torch.where(q > 0, (p / q).clamp(max=1), certain)
    return acceptance, (p - q).clamp(min=0)


def compute_expected_tokens(acceptance_rates: Array) -> Float[Tensor, " B"]:
    """`1 + sum_i prod_{j<=i} rate_j` of each row: tokens a round is expected to give.

    Rates `[B, K]` are conditional: token j stays given that the ones before it stayed. K = 0 gives
    1. Source: Leviathan et al. 2023, equation 1, for rates that differ by position.

    Raises:
        InvalidConfig: not `[B, K]`, or a rate outside [0, 1].
        NonFinite: a NaN rate.
    """
    rates_BK = floats("acceptance_rates", acceptance_rates)
    if rates_BK.ndim != 2:
        raise InvalidConfig(f"acceptance_rates has shape {tuple(rates_BK.shape)}; [B, K] is due")
    check_probs("acceptance_rates", rates_BK)
    if (rates_BK > 1).any():
        raise InvalidConfig(f"acceptance_rates reach {float(rates_BK.max())}; at most 1 is due")
    return 1 + rates_BK.cumprod(1).sum(1)


def accept(draft_logprob: float, target_logprob: float, rng: Uniforms) -> bool:
    """Whether a drafted token stays: `u < p/q`, with one draw of `rng` whatever the outcome.

    A token the target forbids never stays; one the draft could not have drawn does.

    Raises:
        NonFinite: NaN or +inf.
    """
    for name, value in (("draft_logprob", draft_logprob), ("target_logprob", target_logprob)):
        if math.isnan(value) or value == math.inf:
            raise NonFinite(f"{name}={value}: a natural log-probability or -inf is due")
    uniform = rng.uniform()
    if target_logprob == -math.inf:
        return False
    if draft_logprob == -math.inf:
        return True
    return uniform < math.exp(min(0.0, target_logprob - draft_logprob))


def adjusted_distribution(target_logprobs: Array, draft_logprobs: Array) -> Float[Tensor, " V"]:
    """`norm(max(0, p - q))` in float64; p itself where nothing of it is left.

    Raises:
        DistributionWidthMismatch: rows of different width.
        NonFinite: NaN or +inf.
        DegenerateDistribution: a target without mass.
    """
    p = exp_row("target_logprobs", target_logprobs)
    q = exp_row("draft_logprobs", draft_logprobs)
    if len(p) != len(q):
        raise DistributionWidthMismatch(
            f"target_logprobs has {len(p)} entries, draft_logprobs {len(q)}: not one vocabulary"
        )
    if not p.sum() > 0:
        raise DegenerateDistribution("target_logprobs has no mass: every entry is -inf")
    left = (p - q).clamp(min=0)
    kept = left if left.sum() > 0 else p
    return kept / kept.sum()


def resample_from_adjusted_target(
    target_logprobs: Array, draft_logprobs: Array, rng: Uniforms
) -> int:
    """One token of `adjusted_distribution`, with one draw of `rng`; raises what it raises."""
    return sample_index(adjusted_distribution(target_logprobs, draft_logprobs), rng)


def sample_from_logprobs(logprobs: Array, rng: Uniforms) -> int:
    """One token of a row `[V]` of log-probabilities, normalised here, with one draw of `rng`.

    Raises:
        NonFinite: NaN or +inf.
        DegenerateDistribution: an empty row, or nothing but -inf.
    """
    row = float_row("logprobs", logprobs)
    if row.isnan().any() or (row == torch.inf).any():
        raise NonFinite("logprobs holds NaN or +inf; natural log-probabilities or -inf are due")
    if len(row) == 0 or row.max() == -torch.inf:
        raise DegenerateDistribution("logprobs has no mass: it is empty or every entry is -inf")
    return sample_index((row - row.max()).exp(), rng)


def sample_index(probs: Array, rng: Uniforms) -> int:
    """The first index whose cumulative probability exceeds `u * sum`, with one draw of `rng`.

    Where rounding leaves none it is the last index with mass.

    Raises:
        NonFinite: NaN or an infinity.
        InvalidConfig: a negative probability.
        DegenerateDistribution: an empty row, or one without mass.
    """
    row = float_row("probs", probs)
    check_probs("probs", row)
    if not row.sum() > 0:
        raise DegenerateDistribution("probs has no mass: it is empty or every entry is 0")
    uniform = torch.tensor([rng.uniform()], dtype=torch.float64, device=row.device)
    return int(inverse_cdf(row[None], uniform))


def _verification(draft: Draft, num_accepted_B: Tensor, token_B: Tensor) -> Verification:
    chains, counts = draft.tree.tokens_BN.tolist(), num_accepted_B.tolist()
    lengths = draft.tree.counts_B.tolist()
    return Verification(
        num_accepted=num_accepted_B,
        bonus_token=token_B,
        accepted_tokens=[row[:n] for row, n in zip(chains, counts, strict=True)],
        first_rejection_pos=[
            n if n < length else None for n, length in zip(counts, lengths, strict=True)
        ],
    )
