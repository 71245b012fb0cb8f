"""Lossy rules, each as an exact rule towards a law it declares, with a bound on how far that is.

A rule that keeps x with chance k(x) and otherwise draws from r has, per row, the law
pi = q k + (1 - sum q k) r. Where pi >= q wherever r > 0 or k = 1, an exact rule towards pi keeps
and draws just the same: so every loss is in pi, which can be written down.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from outrider.certify.reference import Outcome, ReferenceRule, Round
from outrider.certify.reference_trees import TreeOutcome, TreeRound, TreeRule, normalised
from outrider.decoding import theory
from outrider.decoding.theory import LawRow, Number

Surrogate: TypeAlias = Callable[[LawRow, LawRow], LawRow]
"""pi of p and q."""


@dataclass(frozen=True, slots=True)
class Lenience:
    """Keeps x with chance min(1, p / (l q)), 0 < l <= 1: Leviathan et al. 2023, appendix A.5.

    pi = min(p / l, q) + (1 - sum min(p / l, q)) norm(max(0, p - q)); no token has more than p / l,
    and TV(pi, p) <= 1 - l.
    """

    l: Number  # noqa: E741 the paper's letter

    def __call__(self, p: LawRow, q: LawRow) -> LawRow:
        """Pi of p and q."""
        return theory.lenience_law(p, q, self.l)

    def bound(self, p: LawRow) -> Number:
        """What TV(pi, p) never exceeds."""
        return 1 - self.l


class KeptSet(ABC):
    """Keeps the tokens of a set A that p alone decides, whatever the draft thought of them.

    pi = q on A + q(not A) norm(p on A): after a refusal the token comes from p on the set. Every
    law on A overlaps p by the least p in A or more, so TV(pi, p) <= 1 - min p(A).
    """

    @abstractmethod
    def kept(self, p: LawRow) -> Sequence[bool]:
        """Which tokens are in A."""

    def __call__(self, p: LawRow, q: LawRow) -> LawRow:
        """Pi of p and q."""
        kept = self.kept(p)
        q_kept = [b if k else 0 * b for b, k in zip(q, kept, strict=True)]
        p_kept = normalised([a if k else 0 * a for a, k in zip(p, kept, strict=True)])
        rest = 1 - sum(q_kept)
        return [b + rest * a for a, b in zip(p_kept, q_kept, strict=True)]

    def bound(self, p: LawRow) -> Number:
        """What TV(pi, p) never exceeds."""
        return 1 - min(x for x, kept in zip(p, self.kept(p), strict=True) if kept)


@dataclass(frozen=True)
class Threshold(KeptSet):
    """Keeps what the target gives at least `least`, and its likeliest token."""

    least: Number

    def kept(self, p: LawRow) -> Sequence[bool]:
        """Likely enough, or the likeliest."""
        return [x >= self.least or x == max(p) for x in p]


@dataclass(frozen=True)
class TypicalAcceptance(KeptSet):
    """Keeps x where p(x) > min(epsilon, delta exp(-H(p))), delta < 1: Medusa, Cai et al. 2024.

    exp(-H) is no more than the largest p, so the likeliest token is always kept.
    """

    epsilon: Number
    delta: Number

    def kept(self, p: LawRow) -> Sequence[bool]:
        """Above what the entropy asks for."""
        entropy = -sum(float(x) * math.log(x) for x in p if x > 0)
        least = min(float(self.epsilon), float(self.delta) * math.exp(-entropy))
        return [float(x) > least for x in p]


@dataclass(frozen=True, slots=True)
class Mixture:
    """pi = p + min(1, epsilon / TV) (q - p), as near q as epsilon from p allows: Yin et al. 2024.

    Drafted tokens are refused with chance TV(p, q) - epsilon, and TV(pi, p) <= epsilon.
    """

    epsilon: Number

    def __call__(self, p: LawRow, q: LawRow) -> LawRow:
        """Pi of p and q."""
        return theory.mixture_law(p, q, self.epsilon)

    def bound(self, p: LawRow) -> Number:
        """What TV(pi, p) never exceeds."""
        return self.epsilon


SURROGATES: dict[str, Lenience | KeptSet | Mixture] = {
    "lenience": Lenience(Fraction(4, 5)),
    "typical-acceptance": TypicalAcceptance(Fraction(3, 10), Fraction(3, 5)),
    "threshold": Threshold(Fraction(1, 4)),
    "mixture": Mixture(Fraction(1, 10)),
}
"""The lossy rules at the settings they are certified with."""


def towards(surrogate: Surrogate, rule: ReferenceRule) -> ReferenceRule:
    """The chain rule with pi for p wherever a token was drafted; the last row stays p."""

    def lossy(round: Round) -> Outcome:
        rows = [surrogate(p, q) for p, q in zip(round.target, round.draft, strict=False)]
        return rule(
            Round(round.tokens, [*rows, *round.target[len(rows) :]], round.draft, round.noise)
        )

    return lossy


def trees_towards(surrogate: Surrogate, rule: TreeRule) -> TreeRule:
    """The tree rule with pi for p at every row that has children; the leaves stay p."""

    def lossy(round: TreeRound) -> TreeOutcome:
        rows = list(round.target)
        for row, p in enumerate(round.target):
            children = round.tree.children(row)
            if children:
                rows[row] = surrogate(p, round.tree.base[children[0]])
        return rule(replace(round, target=rows))

    return lossy
