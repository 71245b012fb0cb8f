"""How likely drafted tokens are kept, by how likely the drafter itself thought each."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from itertools import pairwise

from outrider.drafters.stop import CLASSES, EDGES, Stop, class_of

DISCOUNT = 0.98
"""What a count is worth after one more of its class: some 50 are remembered."""
WEIGHT = 4.0
"""How many tokens what is thought of a class counts for before any is seen."""
SHARPNESS = 1 / 3
"""A token of probability p is taken to be kept with p to this power before any is seen: where law
and text are guessed well the likeliest token is likelier right than it was given."""
NEXT = 0.75
"""The share kept of tokens behind kept ones, before any is seen."""
ENOUGH = 8
"""Drafts after which what is counted is trusted to end drafts as deep as may be."""


class Confidence:
    """Counts of one drafter's tokens under one rule, by the class of their probability.

    Only tokens count of which all before were kept: the chances of a draft's tokens multiply. A
    drafter that is always sure and often wrong has one class, and its drafts end by their depth.

    Attributes:
        drafts: how many were counted.
    """

    def __init__(self) -> None:
        edges = (0.0, *EDGES, 1.0)
        centres = ((low + high) / 2 for low, high in pairwise(edges))
        self._kept = [WEIGHT * centre**SHARPNESS for centre in centres]
        self._seen = [WEIGHT] * CLASSES
        self._next_kept, self._next_seen = WEIGHT * NEXT, WEIGHT
        self.drafts = 0

    @property
    def settled(self) -> bool:
        """Whether enough was seen."""
        return self.drafts >= ENOUGH

    def saw(self, worths: Sequenced[float], kept: int) -> None:
        """Of a draft the first `kept` tokens were kept.

        `worths` are the probabilities, by the drafter, of all its tokens up to each.
        """
        self.drafts += 1
        before = 1.0
        for i, worth in enumerate(worths[: kept + 1]):
            own, before = class_of(worth / before if before else 0.0), worth
            self._kept[own] = DISCOUNT * self._kept[own] + (i < kept)
            self._seen[own] = DISCOUNT * self._seen[own] + 1.0
            if i:
                self._next_kept = DISCOUNT * self._next_kept + (i < kept)
                self._next_seen = DISCOUNT * self._next_seen + 1.0

    def stop(self, gain: float) -> Stop:
        """The end of drafts where a further token has to be kept with chance `gain` to pay."""
        chances = tuple(kept / seen for kept, seen in zip(self._kept, self._seen, strict=True))
        return Stop(gain * self._next_seen / max(self._next_kept, 1e-9), chances)
