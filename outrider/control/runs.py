"""Ways to make the same texts, run in turn, and what their speeds are worth as evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from outrider.control.record import Asked, completed
from outrider.engine import Requests
from outrider.tree import TreeBudget

RESAMPLES = 2_000
MIN_GROUPS = 3
"""Batches that are run at least: of fewer nothing is known of how much they differ."""
_Z = 1.96
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure and its interval of 95 percent.

    Attributes:
        mean: of all groups of texts together.
        low, high: a bootstrap over the groups, as much wider as Student's t is for so few.
        num_groups: batches, or groups of them, that were drawn again.
    """

    mean: float
    low: float
    high: float
    num_groups: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


Arm = tuple[Asked, TreeBudget | None]
"""A way to make texts, and how large its trees may be."""
Run = tuple[int, float]
"""Tokens and seconds."""


def whole(items: Sequence[_T], batch: int) -> list[_T]:
    """The items again and again, until they fill whole batches, MIN_GROUPS of them at least."""
    times = MIN_GROUPS * batch
    size = times if len(items) < times else -(-len(items) // batch) * batch
    return [items[i % len(items)] for i in range(size)]


def measured(requests: Requests, arms: Sequence[Asked]) -> list[Spread]:
    """Tokens per second of some ways to make the same texts, run in turn, there and back."""
    trees = requests.engine.trees
    return [one for one, _ in compared(requests, [(arm, trees) for arm in arms])]


def compared(requests: Requests, arms: Sequence[Arm]) -> list[tuple[Spread, Spread]]:
    """Of each arm the tokens per second, and how many times those of the first arm.

    All make texts of the first arm's prompts, as many at a time: A B C C B A on one group of
    prompts after another.
    """
    first = arms[0][0]
    batch = first.batch or len(first.prompts)
    prompts = whole(first.prompts, batch)
    for asked, trees in arms:
        few = replace(asked.sampling, max_tokens=8, min_tokens=0)
        _rate(requests, replace(asked, sampling=few, prompts=prompts[:batch]), trees)
    # About six groups, of whole batches.
    size = batch * max(1, round(len(prompts) / batch / 6))
    runs: list[list[Run]] = [[] for _ in arms]
    for start in range(0, len(prompts), size):
        for which in (*range(len(arms)), *reversed(range(len(arms)))):
            asked, trees = arms[which]
            group = replace(asked, prompts=prompts[start : start + size])
            runs[which].append(_rate(requests, group, trees))
    own = [_pairs(one) for one in runs]
    return [bootstrapped(one, own[0]) for one in own]


def bootstrapped(own: Sequence[Run], plain: Sequence[Run]) -> tuple[Spread, Spread]:
    """Tokens per second, and how many times those of plain decoding, over groups drawn again."""
    size = len(own)
    assert size >= MIN_GROUPS
    chosen = np.random.default_rng(0).integers(0, size, (RESAMPLES, size))
    rates: list[np.ndarray] = []
    means: list[float] = []
    for runs in (own, plain):
        tokens, seconds = np.array(runs, dtype=np.float64).T
        rates.append(tokens[chosen].sum(1) / seconds[chosen].sum(1))
        means.append(float(tokens.sum() / seconds.sum()))
    return _spread(means[0], rates[0], size), _spread(
        means[0] / means[1], rates[0] / rates[1], size
    )


def _spread(mean: float, found: np.ndarray, size: int) -> Spread:
    low, high = (float(one) for one in np.quantile(found, (0.025, 0.975)))
    # A bootstrap of few is too narrow (Hesterberg 2015, section 4.3).
    wider = (size / (size - 1)) ** 0.5 * _student(size - 1) / _Z
    low, high = mean - wider * max(0.0, mean - low), mean + wider * max(0.0, high - mean)
    return Spread(mean, max(0.0, low), high, size)


def _student(freedom: int) -> float:
    """Student's t at 97.5 percent, by its series around the normal law's; 4 percent off at 2."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**i for i, term in enumerate(terms, start=1))


def _rate(requests: Requests, asked: Asked, trees: TreeBudget | None) -> Run:
    """Tokens and seconds of some texts, made without a trace."""
    engine = requests.engine
    engine.trees = trees
    before = engine.metrics.committed, engine.metrics.wall_s
    completed(requests, asked)
    return engine.metrics.committed - before[0], engine.metrics.wall_s - before[1]


def _pairs(runs: Sequence[Run]) -> list[Run]:
    """Two runs of each group as one."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
