"""Tabular pairs of target and draft whose laws depend on the whole prefix, in small fractions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from outrider.decoding.theory import LawRow, Model


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft over `vocab_size` tokens, with the depth and length to run them at."""

    name: str
    vocab_size: int
    depth: int
    length: int
    target: Model
    draft: Model


@dataclass(slots=True)
class _Written:
    """Laws written down when first asked for."""

    write: Callable[[tuple[int, ...]], LawRow]
    known: dict[tuple[int, ...], LawRow] = field(
        default_factory=lambda: dict[tuple[int, ...], LawRow]()
    )

    def __call__(self, prefix: tuple[int, ...]) -> LawRow:
        if prefix not in self.known:
            self.known[prefix] = self.write(prefix)
        return self.known[prefix]


def fractions_of(weights: list[int]) -> LawRow:
    """The law of whole-number weights."""
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def toy() -> Pair:
    """Sun et al.'s pair p = (1/3, 2/3), q = (2/3, 1/3) at depth 2."""
    return fixed("sun", [1, 2], [2, 1], depth=2, length=4)


def fixed(name: str, p: list[int], q: list[int], depth: int, length: int) -> Pair:
    """The same two laws after every prefix."""
    p_law, q_law = fractions_of(p), fractions_of(q)
    return Pair(name, len(p), depth, length, lambda _: p_law, lambda _: q_law)


def small() -> Pair:
    """Three tokens, both laws after the token before; broken rules show on it."""
    p = [fractions_of(weights) for weights in ([1, 2, 3], [3, 1, 0], [2, 2, 1], [0, 1, 4])]
    q = [fractions_of(weights) for weights in ([2, 2, 1], [1, 1, 1], [0, 1, 2], [3, 1, 1])]

    def after(laws: list[LawRow]) -> Model:
        return lambda prefix: laws[prefix[-1] + 1 if prefix else 0]

    return Pair("three tokens", 3, 2, 3, after(p), after(q))


def random_pair(seed: int) -> Pair:
    """A pair of 2 to 6 tokens at depth 1 to 3; its laws have zeros, ties, equals, certainties."""
    chance = random.Random(f"pair {seed}")
    vocab_size = chance.choice((2, 2, 3, 4, 5, 6))
    depth = chance.choice((1, 2, 3))
    length = 4 if vocab_size < 4 else depth + 1
    top = chance.choice((2, 3, 5))
    holes = 0.2 if vocab_size < 4 else 0.55
    return _random(f"{seed}", vocab_size, depth, length, top, holes)


def tree_pair(seed: int, size: int, depth: int, length: int) -> Pair:
    """A pair of 2 to 4 tokens for cases of some size; large ones have fewer tokens, more zeros."""
    chance = random.Random(f"tree pair {seed}")
    vocab_size = chance.choice((2, 3, 3, 4) if size < 5 else (2, 2, 3, 3))
    top = chance.choice((2, 3, 5))
    holes = {2: 0.1, 3: 0.2, 4: 0.4}[vocab_size] if size < 5 else {2: 0.15, 3: 0.5}[vocab_size]
    return _random(f"tree {seed}", vocab_size, depth, length, top, holes)


def _random(name: str, vocab_size: int, depth: int, length: int, top: int, holes: float) -> Pair:
    def weights(chance: random.Random) -> list[int]:
        drawn = [
            0 if chance.random() < holes else chance.randint(1, top) for _ in range(vocab_size)
        ]
        drawn[chance.randrange(vocab_size)] += 1
        return drawn

    def target(prefix: tuple[int, ...]) -> LawRow:
        return fractions_of(weights(random.Random(f"target {name} {prefix}")))

    def draft(prefix: tuple[int, ...]) -> LawRow:
        chance = random.Random(f"draft {name} {prefix}")
        return target(prefix) if chance.random() < 0.1 else fractions_of(weights(chance))

    return Pair(f"random {name}", vocab_size, depth, length, _Written(target), _Written(draft))
