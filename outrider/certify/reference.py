"""Every rule as a few lines one can read, for any arithmetic: the reference production is held to.

A Round holds what a rule may look at. Laws are sequences of numbers (Fractions, or floats), and a
uniform is anything that answers `u * a < b`: a number, or an enumerator's undecided choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

from outrider.decoding.theory import LawRow, Number

Uniform: TypeAlias = Any
"""A number in [0, 1) or an object with `*`, `<` and `<=` that stands for one."""


Race: TypeAlias = Callable[[int, LawRow, int], tuple[int, ...]]
"""The first so many tokens by log law + G, G the noise of the round's i-th position."""


def _no_race(position: int, law: LawRow, count: int) -> tuple[int, ...]:
    raise AssertionError(f"a race at position {position}: this round has none")


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one round: uniforms of streams ACCEPT, EXTRA and DRAFT by index, and races."""

    test: Callable[[int], Uniform]
    extra: Callable[[int], Uniform]
    draft: Callable[[int], Uniform]
    race: Race = field(default=_no_race, kw_only=True)


@dataclass(frozen=True, slots=True)
class Round:
    """K drafted tokens, K + 1 laws of the target, K laws of the draft, and the noise."""

    tokens: Sequence[int]
    target: Sequence[LawRow]
    draft: Sequence[LawRow]
    noise: Noise


@dataclass(frozen=True, slots=True)
class Outcome:
    """Drafted tokens kept and the token added."""

    kept: int
    token: int


ReferenceRule: TypeAlias = Callable[[Round], Outcome]


def inverse_cdf(weights: LawRow, uniform: Uniform) -> int:
    """The first index whose cumulative weight exceeds `u * sum`, or the last with weight."""
    scaled, upto = uniform * sum(weights[1:], start=weights[0]), 0 * weights[0]
    for token, weight in enumerate(weights):
        if weight > 0:
            upto += weight
            if scaled < upto:
                return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def excess(p: LawRow, q: LawRow, scale: Number = 1) -> list[Number]:
    """max(0, scale p - q), or p where nothing is left of it."""
    left = [max(0 * a, scale * a - b) for a, b in zip(p, q, strict=True)]
    return left if sum(left) > 0 else list(p)


def token(round: Round) -> Outcome:
    """Leviathan et al. 2023: x stays while u q(x) < p(x); then one of norm(max(0, p - q))."""
    for i, x in enumerate(round.tokens):
        if not round.noise.test(i) * round.draft[i][x] < round.target[i][x]:
            left = excess(round.target[i], round.draft[i])
            return Outcome(i, inverse_cdf(left, round.noise.extra(0)))
    return _all_kept(round)


def block_weights(round: Round) -> list[Number]:
    """b[0..K]: b[i+1] = min(1, b[i] p(x_i) / q(x_i)); q = 0 counts as an endless ratio."""
    b: list[Number] = [Fraction(1)]
    for x, p, q in zip(round.tokens, round.target, round.draft, strict=False):
        rises = p[x] > 0 and b[-1] > 0
        b.append(min(Fraction(1), b[-1] * p[x] / q[x]) if q[x] > 0 else Fraction(int(rises)))
    return b


@dataclass(frozen=True, slots=True)
class Share:
    """The fraction `part / whole`, kept apart so that a test needs no division."""

    part: Number
    whole: Number


def block_share(round: Round, b: Sequence[Number], length: int) -> Share:
    """h of the prefix of `length` >= 1 tokens: b at the end, else S / (S + 1 - b)."""
    if length == len(round.tokens):
        return Share(b[length], Fraction(1))
    p, q = round.target[length], round.draft[length]
    mass = sum(max(0 * x, b[length] * x - y) for x, y in zip(p, q, strict=True))
    room = mass + 1 - b[length]
    return Share(mass, room) if room > 0 else Share(Fraction(1), Fraction(1))


def block(round: Round) -> Outcome:
    """Sun et al. 2025: the longest prefix with u[i-1] < h[i]; then max(0, b P - Q)."""
    b = block_weights(round)
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        if round.noise.test(length - 1) * h.whole < h.part:
            return _after_block(round, b, length)
    return _after_block(round, b, 0)


def _after_block(round: Round, b: Sequence[Number], kept: int) -> Outcome:
    if kept == len(round.tokens):
        return _all_kept(round)
    left = excess(round.target[kept], round.draft[kept], b[kept])
    return Outcome(kept, inverse_cdf(left, round.noise.extra(0)))


def match(round: Round) -> Outcome:
    """The target draws at every row; x stays while it is what the target drew."""
    for i, p in enumerate(round.target):
        y = inverse_cdf(p, round.noise.extra(i))
        if i == len(round.tokens) or round.tokens[i] != y:
            return Outcome(i, y)
    raise AssertionError("the target has one row more than drafted tokens")


def race(p: LawRow, log_p: Callable[[Number], float], gumbels: Sequence[float]) -> int:
    """argmax of log p + G over tokens with p > 0, the first of equals."""
    support = [token for token, mass in enumerate(p) if mass > 0]
    return max(support, key=lambda token: log_p(p[token]) + gumbels[token])


def argmax(scores: Sequence[Number]) -> int:
    """The first of the largest."""
    return max(range(len(scores)), key=lambda token: scores[token])


def while_equal(drafted: Sequence[int], own: Sequence[int]) -> Outcome:
    """Greedy and coupled: drafted tokens stay while they are the target's own."""
    kept = 0
    while kept < len(drafted) and drafted[kept] == own[kept]:
        kept += 1
    return Outcome(kept, own[kept])


def _all_kept(round: Round) -> Outcome:
    last = len(round.tokens)
    return Outcome(last, inverse_cdf(round.target[last], round.noise.extra(0)))


IN_LAW: dict[str, ReferenceRule] = {"match": match, "token": token, "block": block}
