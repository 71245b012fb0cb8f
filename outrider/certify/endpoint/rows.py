"""The law of one token, as far as the likeliest tokens and their log-probabilities tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    tokens: NDArray[np.int64]
    logprobs: FloatArray
    came: int

    @property
    def left(self) -> float:
        """The mass of all other tokens."""
        return max(0.0, 1.0 - float(np.exp(self.logprobs).sum()))


@dataclass(frozen=True, slots=True)
class Known:
    """A law over told tokens, and over `REST`.

    Attributes:
        tokens, probs: the law; it lacks nothing.
        scores: what greedy decoding takes the largest of.
        rest_score: the largest that a token which was not told may have beside them.
        sure: False where it is the law of told tokens alone, which a token that was not told says
            nothing about, or where it cannot be known which tokens are cut off.
    """

    tokens: NDArray[np.int64]
    probs: FloatArray
    scores: FloatArray
    rest_score: float
    sure: bool


def known(row: Row, params: SamplingParams, counts: Mapping[int, int]) -> Known:
    """The law under temperature, presence and frequency penalty, logit bias, top_k, top_p, min_p.

    Where a cut-off keeps told tokens alone, or nothing but the mass of the others matters, it is
    the whole law. Else it is the law given that one of the told tokens comes, which is as good a
    null as long as it is bet on when one of them came.

    Args:
        row: what was told.
        params: the controls; of logit_bias the tokens are those of the row.
        counts: how often a token stands in the output.
    """
    if not len(row.tokens):
        nothing = np.zeros(0)
        return Known(row.tokens, nothing, nothing, 0.0, False)
    bias = dict(params.bias_pairs)
    often = np.array([counts.get(int(x), 0) for x in row.tokens], dtype=np.float64)
    shift = np.array([bias.get(int(x), 0.0) for x in row.tokens])
    shift -= params.frequency_penalty * often + params.presence_penalty * (often > 0)
    scores = row.logprobs + shift
    order = np.argsort(-scores, kind="stable")
    tokens, scores = row.tokens[order], scores[order]
    moved = bool(bias or params.frequency_penalty or params.presence_penalty)
    # Tokens that were not told are below this one, unless something lifts them.
    lifts = max((0.0, *bias.values())) or min(params.frequency_penalty, params.presence_penalty) < 0
    bound = math.inf if lifts else float(row.logprobs[-1])
    rest_score = min(bound, float(scores[0]))
    heat = params.temperature or 1.0
    weights = np.exp((scores - scores[0]) / heat)
    least, most = _mass_left(row, heat, float(scores[0]), bound, moved)
    found = [_kept(scores, weights, rest, bound, params) for rest in (least, most)]
    (count, closed), (other, _) = found
    if closed and count == other and math.isfinite(bound):
        kept = weights[:count]
        return Known(tokens[:count], kept / kept.sum(), scores[:count], rest_score, True)
    cut = bool(params.top_k or params.top_p < 1 or params.min_p)
    if not cut and least == most:
        whole = np.append(weights, least)
        return Known(np.append(tokens, REST), whole / whole.sum(), scores, rest_score, True)
    return Known(tokens, weights / weights.sum(), scores, rest_score, False)


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


def _kept(
    scores: FloatArray, weights: FloatArray, rest: float, bound: float, params: SamplingParams
) -> tuple[int, bool]:
    """How many told tokens the cut-offs keep, and whether they surely keep no other."""
    count, closed = len(scores), False
    if 0 < params.top_k <= count and scores[params.top_k - 1] >= bound:
        count = int((scores >= scores[params.top_k - 1]).sum())
        closed, rest = True, 0.0
    elif params.top_k:
        return count, False
    if params.top_p < 1:
        upto = weights[:count].cumsum() / (weights[:count].sum() + rest)
        reached = upto >= params.top_p
        if reached.any():
            count = int(reached.argmax()) + 1
            closed = closed or bool(scores[count - 1] >= bound)
        elif not closed:
            return count, False
    if params.min_p:
        count = min(count, int((weights >= params.min_p * weights[0]).sum()))
        heat = params.temperature or 1.0
        closed = closed or (bound - scores[0]) / heat < math.log(params.min_p)
    return count, closed
