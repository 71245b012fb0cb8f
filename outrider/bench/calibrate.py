"""Cost ratio, draft size and draft length: measured here, chosen before anything is compared.

The cost ratio c is one draft forward of one row over one target forward of one row. Both go through
the path the engine uses, on a sequence of cached tokens, and one target forward is followed by
several draft forwards, as in a round: a draft that stays in the processor's cache between them is
meant to profit from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from outrider.bench.inflate import Size, inflate, size_of, weights_read
from outrider.errors import InvalidConfig
from outrider.models.base import Rows, Target

DRAFTS_PER_ROUND = 4
TOLERANCE = 0.06
MAX_DEPTH = 8
WIDTH_STEP = 64


class Probe:
    """A sequence of cached tokens in a target, to time forwards of a few more rows on."""

    def __init__(self, target: Target, prompt: Sequence[int]) -> None:
        self._target = target
        self._token = prompt[-1]
        self._seq = target.open(len(prompt) + 64)
        target.score(self._rows(prompt))
        target.commit(self._seq, len(prompt))

    def time(self, num_rows: int) -> float:
        """Seconds of one forward of `num_rows` rows with all their logits; nothing of it stays."""
        rows = self._rows([self._token] * num_rows)
        start = time.perf_counter()
        self._target.score(rows)
        seconds = time.perf_counter() - start
        self._target.discard(self._seq)
        return seconds

    def close(self) -> None:
        """Give the sequence back."""
        self._target.close(self._seq)

    def _rows(self, tokens: Sequence[int]) -> Rows:
        return Rows((self._seq,), (len(tokens),), torch.tensor(list(tokens)))


def cost_ratio(draft: Probe, target: Probe, rounds: int) -> float:
    """The median over rounds of the mean draft forward over the target forward of the round."""
    for probe in (draft, target):
        probe.time(1)
    found: list[float] = []
    for _ in range(rounds):
        whole = target.time(1)
        parts = [draft.time(1) for _ in range(DRAFTS_PER_ROUND)]
        found.append(sum(parts) / len(parts) / whole)
    return float(np.median(found))


def verify_costs(target: Probe, rounds: int, depth: int = MAX_DEPTH) -> list[float]:
    """What a forward of 1..depth+1 rows costs in forwards of one row: medians over pairs."""
    found: list[list[float]] = [[] for _ in range(depth + 1)]
    target.time(depth + 1)
    for _ in range(rounds):
        for index in range(depth + 1):
            one = target.time(1)
            found[index].append(target.time(index + 1) / one)
    return [1.0] + [float(np.median(costs)) for costs in found[1:]]


def choose_depth(
    acceptance_per_pos: Sequence[float], cost: float, verify: Sequence[float]
) -> tuple[int, float]:
    """The k of the largest expected speed-up, and that speed-up.

    A round of k drafted tokens yields 1 + sum of P(position i accepted), i = 1..k, and costs k c
    plus a forward of k + 1 rows (Leviathan et al. 2023, section 3.4, with measured acceptance and
    verify costs).
    """
    best = (1, 0.0)
    most = min(len(acceptance_per_pos), len(verify) - 1)
    for k in range(1, most + 1):
        gain = (1 + sum(acceptance_per_pos[:k])) / (k * cost + verify[k])
        if gain > best[1]:
            best = (k, gain)
    if best[1] == 0.0:
        raise InvalidConfig(
            "no draft position was measured; give prompts that leave room for drafts"
        )
    return best


@dataclass(frozen=True, slots=True)
class SizedDraft:
    """An inflated draft as a target, and what it was measured to cost."""

    target: Target
    size: Size
    weights_read: int
    cost: float


def size_draft(
    small: nn.Module,
    wanted: float,
    *,
    vocab: int,
    target: Probe,
    target_layers: int,
    target_weights: int,
    wrap: Callable[[nn.Module], Target],
    prompt: Sequence[int],
    seed: int,
    rounds: int,
) -> SizedDraft:
    """Inflate the draft until its measured cost ratio is within 6 % of `wanted`, or five times.

    The first width follows from the weights read; the next ones from the measured costs, which are
    close to linear in the width. A draft that costs too much at its own width stays there.
    """
    own = size_of(small)
    num_layers = max(own.num_layers, round(wanted * target_layers))
    width = _width_of(small, num_layers, vocab, wanted * target_weights)
    tried: list[SizedDraft] = []
    for _ in range(5):
        size = Size(num_layers, max(own.feed_forward, width), vocab)
        model = inflate(small, size, seed)
        weights, draft = weights_read(model), wrap(model)
        probe = Probe(draft, prompt)
        cost = cost_ratio(probe, target, rounds)
        probe.close()
        tried.append(SizedDraft(draft, size, weights, cost))
        tried.sort(key=lambda sized: abs(sized.cost - wanted))
        del tried[2:]
        if abs(tried[0].cost - wanted) <= TOLERANCE * wanted:
            break
        width = _next_width(tried, wanted)
        if max(own.feed_forward, width) in [sized.size.feed_forward for sized in tried]:
            break
    return tried[0]


def draft_vocab(small: nn.Module, vocab: int, weights: float) -> int:
    """The target's vocabulary, or the draft's own where that output layer alone passes `weights`.

    Drafts for large vocabularies are often made so: what they cannot say, they never propose.
    """
    hidden = cast(Any, small.config).hidden_size
    return vocab if vocab * hidden < weights else size_of(small).vocab


def _width_of(small: nn.Module, num_layers: int, vocab: int, weights: float) -> int:
    """The feed-forward width at which a copy of the small model reads `weights` weights."""
    own, config = size_of(small), cast(Any, small.config)
    body = weights_read(small) - own.vocab * config.hidden_size
    attention = body / own.num_layers - 3 * config.hidden_size * own.feed_forward
    left = weights - vocab * config.hidden_size - num_layers * attention
    return _step(left / (num_layers * 3 * config.hidden_size))


def _next_width(tried: Sequence[SizedDraft], wanted: float) -> int:
    nearest = tried[0]
    if len(tried) == 1 or tried[1].cost == nearest.cost:
        return _step(nearest.size.feed_forward * wanted / nearest.cost)
    other = tried[1]
    slope = (nearest.size.feed_forward - other.size.feed_forward) / (nearest.cost - other.cost)
    if slope <= 0:
        # Noise beat the difference in width.
        return _step(nearest.size.feed_forward * wanted / nearest.cost)
    return _step(nearest.size.feed_forward + slope * (wanted - nearest.cost))


def _step(width: float) -> int:
    return max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)
