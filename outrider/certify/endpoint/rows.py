"""The law of one token, as far as the likeliest tokens and their log-probabilities tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.config import SamplingParams

FloatArray = NDArray[np.float64]
REST = 0
"""The token that stands for all that were not told."""
ROUNDED = 1e-9
"""Mass that is left over by rounding alone."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was told before one token, and the token.

    Attributes:
        tokens: the likeliest ones, likeliest first.
        logprobs: theirs, of the model's own row.
        came: the token, `REST` where it is none of them.
        own: what was told of the token that came.
    """

    tokens: NDArray[np.int64]
    logprobs: FloatArray
    came: int
    own: float = -math.inf

    @property
    def left(self) -> float:
        """The mass of all other tokens."""
        return max(0.0, 1.0 - float(np.exp(self.logprobs).sum()))


@dataclass(frozen=True, slots=True)
class Known:
    """A law over told tokens, and over `REST` where its mass is known.

    Attributes:
        tokens, probs: the law; where it is not whole, the law given that one of `ranked` comes,
            and none of those at the edge of a cut-off.
        scores: what greedy decoding takes the largest of.
        rest_score: the largest that a token which was not told may have beside them.
        whole: whether any other token is forbidden.
        ranked: tokens of which it is known whether they are cut off.
        unsure: told tokens at the edge of a cut-off, on either side of it.
        edge: the score from which on a token that was not told may be among those kept.
    """

    tokens: NDArray[np.int64]
    probs: FloatArray
    scores: FloatArray
    rest_score: float
    whole: bool
    ranked: NDArray[np.int64]
    unsure: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    edge: float = math.inf

    def judges(self, row: Row) -> bool:
        """Whether this law says something about the token that came."""
        if (row.came == REST and row.own >= self.edge) or (self.unsure == row.came).any():
            return False
        return self.whole or bool((self.ranked == row.came).any())


def known(row: Row, params: SamplingParams, counts: Mapping[int, int], near: float = 0.0) -> Known:
    """The law under temperature, presence and frequency penalty, logit bias, top_k, top_p, min_p.

    Tokens that were not told are each at most as likely as the last one that was. Where that says
    which tokens the cut-offs keep, or no cut-off is set and the mass of the others is known, the
    law is whole. Else it is the law given that one of the tokens comes whose rank is known, which
    is as good a null, bet on when one of them came. So it is of tokens as likely as the last one
    that a cut-off keeps: in 16 bits several often are, and which of them stay is an engine's own
    affair.

    Args:
        row: what was told.
        params: the controls; of logit_bias the tokens are those of the row.
        counts: how often a token stands in the output.
        near: scores closer than this may change places by rounding.
    """
    if not len(row.tokens):
        nothing = np.zeros(0)
        return Known(row.tokens, nothing, nothing, 0.0, False, row.tokens)
    bias = dict(params.bias_pairs)
    often = np.array([counts.get(int(x), 0) for x in row.tokens], dtype=np.float64)
    shift = np.array([bias.get(int(x), 0.0) for x in row.tokens])
    shift -= params.frequency_penalty * often + params.presence_penalty * (often > 0)
    scores = row.logprobs + shift
    order = np.argsort(-scores, kind="stable")
    tokens, scores = row.tokens[order], scores[order]
    moved = bool(bias or params.frequency_penalty or params.presence_penalty)
    lifts = max((0.0, *bias.values())) or min(params.frequency_penalty, params.presence_penalty) < 0
    bound = math.inf if lifts else float(row.logprobs[-1])
    rest_score = min(bound, float(scores[0]))
    heat = params.temperature or 1.0
    weights = np.exp((scores - scores[0]) / heat)
    least, most = _mass_left(row, heat, float(scores[0]), bound, moved)
    cut = bool(params.top_k or params.top_p < 1 or params.min_p)
    if not cut and least == most:
        whole = np.append(weights, least)
        named = np.append(tokens, REST)
        return Known(named, whole / whole.sum(), scores, rest_score, True, tokens)
    ranked = int((scores >= bound).sum()) if cut else len(scores)
    beyond = float(weights[ranked:].sum())
    some = weights[:ranked]
    (count, closed), (other, also) = (
        _kept(some, rest, params) for rest in (least + beyond, most + beyond)
    )
    shut = closed and also and count == other
    edge = _edge(scores, count, ranked, row, near) if cut and 0 < count == other else math.inf
    unsure_V = np.abs(scores - (edge + near)) <= near
    kept_V = (np.arange(len(scores)) < count) & ~unsure_V
    law = weights[kept_V] / weights[kept_V].sum() if kept_V.any() else weights[:0]
    sure = tokens[:ranked][~unsure_V[:ranked]] if count == other else tokens[:0]
    return Known(tokens[kept_V], law, scores, rest_score, shut, sure, tokens[unsure_V], edge)


def _edge(scores: FloatArray, count: int, ranked: int, row: Row, near: float) -> float:
    """The lowest score that may be kept; infinite where the last one kept is clear of the next."""
    last = float(scores[count - 1])
    if count < ranked:
        following = float(scores[count])
    else:
        following = float(row.logprobs[-1]) if row.left > ROUNDED else -math.inf
    return last - near if following >= last - near else math.inf


def _mass_left(row: Row, heat: float, top: float, bound: float, moved: bool) -> tuple[float, float]:
    """Between what the weights of the tokens that were not told lie, in units of the likeliest's.

    Each of them is at most the last one that was told, so at a temperature below 1 they weigh
    most where they all weigh as much as that one.
    """
    left = row.left
    if left <= ROUNDED:
        return 0.0, 0.0
    if heat == 1 and not moved:
        whole = left * math.exp(-top)
        return whole, whole
    if heat > 1 or math.isinf(bound):
        return 0.0, math.inf
    return 0.0, left * math.exp(bound * (1 / heat - 1) - top / heat)


def _kept(weights: FloatArray, rest: float, params: SamplingParams) -> tuple[int, bool]:
    """How many of the likeliest tokens the cut-offs keep, and whether they keep no other.

    Args:
        weights: of tokens that are likelier than all others, likeliest first.
        rest: what the others weigh together.
        params: the controls.
    """
    count, closed = len(weights), False
    if not count:
        return 0, False
    if 0 < params.top_k <= count:
        count = int((weights >= weights[params.top_k - 1]).sum())
        closed, rest = True, 0.0
    if params.top_p < 1:
        reached = weights[:count].cumsum() >= params.top_p * (weights[:count].sum() + rest)
        if reached.any():
            count, closed = int(reached.argmax()) + 1, True
    if params.min_p:
        above = int((weights >= params.min_p * weights[0]).sum())
        if above < count:
            count, closed = above, True
    return count, closed
