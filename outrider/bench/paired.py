"""Paired timing: several ways to decode one prompt, in an order that cancels drift; intervals.

A noisy machine moves by tens of percent between runs; ratios of neighbouring runs on the same
prompt move far less, so a ratio is taken per prompt and the interval over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Run:
    """One decoded text: its tokens, and seconds until the first and until the last of them."""

    tokens: tuple[int, ...]
    first_s: float
    total_s: float

    @property
    def rate_tok_s(self) -> float:
        """New tokens per second, prompt reading included."""
        return len(self.tokens) / self.total_s

    @property
    def decode_rate_tok_s(self) -> float:
        """New tokens per second after the first one."""
        return (len(self.tokens) - 1) / (self.total_s - self.first_s)


Runs = Sequence[Sequence[Run]]
"""The runs of one arm: `[prompt][repetition]`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode: a name, and what turns a prompt into a Run."""

    name: str
    decode: Callable[[Sequence[int]], Run]


@dataclass(frozen=True, slots=True)
class Interval:
    """Ratios over prompts: median, geometric mean and its bootstrap interval of 95 percent."""

    num: int
    median: float
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float], seed: int = 0) -> Interval:
        """Percentile bootstrap of the geometric mean, deterministic in `seed`."""
        logs = np.log(np.asarray(ratios, dtype=np.float64))
        chosen = np.random.default_rng(seed).integers(0, len(logs), (RESAMPLES, len(logs)))
        low, high = np.quantile(logs[chosen].mean(1), (0.025, 0.975))
        figures = np.exp([np.median(logs), logs.mean(), low, high])
        return cls(len(logs), *(float(figure) for figure in figures))


def order(num_arms: int, prompt: int, mirrored: bool) -> list[int]:
    """The arms on a prompt: A B C C B A when mirrored, else A B C on even, C B A on odd prompts."""
    arms = list(range(num_arms))
    if mirrored:
        return arms + arms[::-1]
    return arms if prompt % 2 == 0 else arms[::-1]


def measure(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    mirrored: bool,
    tick: Callable[[str], None],
) -> list[list[list[Run]]]:
    """Decode every prompt with every arm; returns the runs as `[arm][prompt][repetition]`."""
    runs: list[list[list[Run]]] = [[[] for _ in prompts] for _ in arms]
    for number, prompt in enumerate(prompts):
        for which in order(len(arms), number, mirrored):
            tick(f"prompt {number + 1}/{len(prompts)}, {arms[which].name}")
            runs[which][number].append(arms[which].decode(prompt))
    return runs


def ratios(base: Runs, other: Runs, *, decode_only: bool = False) -> list[float]:
    """Per prompt, how many times faster `other` is than `base`, in tokens per second."""
    return [_rate(b, decode_only) / _rate(a, decode_only) for a, b in zip(base, other, strict=True)]


def median_rate(runs: Runs, *, decode_only: bool = False) -> float:
    """Median over prompts of tokens per second."""
    return float(np.median([_rate(prompt, decode_only) for prompt in runs]))


def _rate(runs: Sequence[Run], decode_only: bool) -> float:
    tokens = sum(len(run.tokens) - decode_only for run in runs)
    return tokens / sum(run.total_s - run.first_s * decode_only for run in runs)
