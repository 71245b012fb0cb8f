"""How likely drafted tokens are kept: discounted counts per position, from past rounds alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from outrider.config import check_between
from outrider.errors import InvalidConfig

DISCOUNT = 0.95
"""What a count is worth after one more round: some 20 rounds are remembered."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is thought of a drafter before anything is seen.

    Attributes:
        rate: conditional acceptance of every position.
        weight: how many observations of the first position that counts for; a later position
            begins with the rate of the one before it.
    """

    rate: float = 0.6
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Discounted counts of one drafter, an immutable record.

    `kept[i]` counts rounds whose drafted token i was kept, `reached[i]` those whose tokens before
    it were kept, and that were to draft so far: a drafter that had nothing to offer there failed.

    Attributes:
        kept: for each position.
        reached: for each position, as long as `kept`.
        discount: what a count is worth after one more observation of its position.
        prior: of the first position.
    """

    kept: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    discount: float = DISCOUNT
    prior: Prior = Prior()

    def __post_init__(self) -> None:
        check_between("discount", self.discount, 0.0, 1.0)
        if len(self.kept) != len(self.reached):
            raise InvalidConfig(
                f"{len(self.kept)} counts of kept tokens and {len(self.reached)} of reached "
                "positions; give one each"
            )

    def saw(self, kept: int, asked: int) -> Acceptance:
        """With one more round: its first `kept` tokens of up to `asked` were kept."""
        counts = Counts(self)
        counts.saw(kept, asked)
        return counts.record()

    def conditional(self, depth: int) -> list[float]:
        """P(position i kept | those before it kept) for `depth` positions."""
        return Counts(self).conditional(depth)

    def survival(self, depth: int) -> list[float]:
        """P(the first i tokens kept), i from 1 to `depth`."""
        return Counts(self).survival(depth)[:depth]

    def expected_tokens(self, depth: int) -> float:
        """Tokens of a round that drafts `depth`, the target's own included."""
        return 1.0 + sum(self.survival(depth))

    @property
    def weight(self) -> float:
        """How many rounds the first position's rate rests on."""
        return self.reached[0] if self.reached else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Acceptance:
        """The counts of `as_dict`.

        Raises:
            InvalidConfig: something else.
        """
        try:
            return cls(
                tuple(map(float, found["kept"])),
                tuple(map(float, found["reached"])),
                float(found["discount"]),
                Prior(**found["prior"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidConfig):
                raise
            raise InvalidConfig(f"no acceptance counts: {error!r}") from error


class Counts:
    """The same counts while they are counted: one record after another would cost too much.

    Args:
        start: what is counted already.
        like: the counts of drafts that keep no more: what is thought of a position before anything
            is seen of it here.

    Attributes:
        count: rounds that were counted here.
    """

    def __init__(self, start: Acceptance, like: Counts | None = None) -> None:
        self._kept, self._reached = list(start.kept), list(start.reached)
        self._discount, self._prior = start.discount, start.prior
        self._like = like
        self.count = 0
        # Until more is counted.
        self._survival: list[float] = []
        self._first: dict[int, list[float]] = {}
        self._survival_of = 0

    def saw(self, kept: int, asked: int, part: float = 1.0) -> None:
        """One more round: its first `kept` tokens of up to `asked` were kept.

        Of one of many texts of a round, `part` of all, so much less is forgotten.
        """
        self.count += 1
        self._forget()
        have, discount = len(self._kept), 1.0 - (1.0 - self._discount) * part
        for i in range(min(kept + 1, asked)):
            if i == have:
                self._kept.append(0.0)
                self._reached.append(0.0)
                have += 1
            self._kept[i] = self._kept[i] * discount + (i < kept)
            self._reached[i] = self._reached[i] * discount + 1.0

    def conditional(self, depth: int) -> list[float]:
        """P(position i kept | those before it kept)."""
        rates: list[float] = []
        before, weight = self._prior.rate, self._prior.weight
        others = None if self._like is None else self._like.conditional(depth)
        seen = zip(range(depth), self._kept, self._reached, strict=False)
        for i, kept, reached in seen:
            before = before if others is None else others[i]
            before = (kept + weight * before) / (reached + weight)
            rates.append(before)
        return rates + ([before] * (depth - len(rates)) if others is None else others[len(rates) :])

    def survival(self, depth: int) -> list[float]:
        """P(the first i tokens kept), i from 1 to at least `depth`; kept until the next round."""
        if self._like is not None and self._survival_of != self.stamp:
            self._survival_of = self.stamp
            self._forget()
        if len(self._survival) < depth:
            self._survival = list(accumulate(self.conditional(depth), mul))
        return self._survival

    def first(self, depth: int) -> list[float]:
        """The same of exactly `depth` tokens; one list for all who ask until more is counted."""
        along = self.survival(depth)
        found = self._first.get(depth)
        if found is None:
            found = self._first[depth] = along[:depth]
        return found

    def _forget(self) -> None:
        """What was told is not so any longer; who was told keeps it."""
        self._survival = []
        self._first.clear()

    @property
    def stamp(self) -> int:
        """Another number whenever something was counted, here or of what these counts are like."""
        return self.count + (0 if self._like is None else self._like.stamp)

    def record(self) -> Acceptance:
        """The counts as they stand."""
        return Acceptance(tuple(self._kept), tuple(self._reached), self._discount, self._prior)
