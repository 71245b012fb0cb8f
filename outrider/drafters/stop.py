"""When a drafted chain ends before its depth: where it is not likely enough to be kept whole."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.98)
"""Probabilities of tokens under the draft's law are told apart by these."""
CLASSES = len(EDGES) + 1


def class_of(prob: float) -> int:
    """The class of a drafted token that had this probability under the draft's law, from 0."""
    return bisect_right(EDGES, prob)


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a chain behind the first token up to which it is kept with too little chance.

    Attributes:
        least: that chance; 0 ends none, and has the drafter tell what it thought.
        chances: by a token's class, that it is kept where all before it are.
    """

    least: float = 0.0
    chances: tuple[float, ...] = (1.0,) * CLASSES
