"""Rules broken on purpose, each as a real implementation was: certification must catch them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from outrider.certify.enumerate import Scheme
from outrider.certify.pairs import Pair, fixed, fractions_of
from outrider.certify.reference import (
    IN_LAW,
    Outcome,
    ReferenceRule,
    Round,
    block_share,
    block_weights,
    excess,
    inverse_cdf,
)
from outrider.decoding.theory import LawRow, Model, Number
from outrider.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_EXTRA


@dataclass(frozen=True, slots=True)
class Wrong:
    """A broken scheme, the rule it was made from, and a pair on which it shows."""

    rule: str
    scheme: Scheme
    pair: Pair

    @property
    def name(self) -> str:
        """Rule and defect."""
        return f"{self.rule}: {self.scheme.name}"


def wrong_schemes() -> list[Wrong]:
    """At least three broken variants of every rule in law."""
    pair, sun = _small_pair(), fixed("sun", [1, 2], [2, 1], depth=2, length=4)
    forbidden = fixed("a token the target forbids", [0, 1], [1, 1], depth=2, length=3)
    token, block, match = IN_LAW["token"], IN_LAW["block"], IN_LAW["match"]
    broken = [
        ("token", Scheme("residual replaced by p", _added_from(token, "target")), pair),
        ("token", Scheme("added token drawn from q", _added_from(token, "draft")), pair),
        ("block", Scheme("residual replaced by p", _added_from(block, "target")), pair),
        ("block", Scheme("added token drawn from q", _added_from(block, "draft")), pair),
        ("match", Scheme("redrawn from p after a miss", _added_from(match, "target")), pair),
        ("match", Scheme("residual after a miss", _residual_after_miss), pair),
        ("match", Scheme("one address for every row", match, extra_address=_one_extra), pair),
        ("token", Scheme("non-strict test", _token_not_strict, grid=2**24), forbidden),
        ("block", Scheme("non-strict test", _block_not_strict, grid=2**24), forbidden),
        ("block", Scheme("last test uncapped", _block_uncapped), sun),
        ("block", Scheme("residual of the token rule", _block_unscaled), pair),
        ("block", Scheme("keyed by token position", block, test_address=_by_position), sun),
    ]
    for name in ("token", "block"):
        rule = IN_LAW[name]
        broken += [
            (name, Scheme("draft law not the one sampled", rule, reported=_flattened), pair),
            (name, Scheme("draft noise used again to test", rule, test_address=_as_draft), pair),
            (name, Scheme("test noise used again to add", rule, extra_address=_as_test), sun),
            (name, Scheme("last draft dropped for its value", rule, dropped=_unlikely), pair),
        ]
    return [Wrong(*entry) for entry in broken]


def _small_pair() -> Pair:
    """Both laws depend on the token before; every defect shows."""
    p = [fractions_of(weights) for weights in ([1, 2, 3], [3, 1, 0], [2, 2, 1], [0, 1, 4])]
    q = [fractions_of(weights) for weights in ([2, 2, 1], [1, 1, 1], [0, 1, 2], [3, 1, 1])]

    def after(laws: list[LawRow]) -> Model:
        return lambda prefix: laws[prefix[-1] + 1 if prefix else 0]

    return Pair("three tokens", 3, 2, 3, after(p), after(q))


def _added_from(rule: ReferenceRule, side: str) -> ReferenceRule:
    """The rule with the token after a refusal drawn from the whole law of one side."""

    def broken(round: Round) -> Outcome:
        outcome = rule(round)
        if outcome.kept == len(round.tokens):
            return outcome
        laws = round.target if side == "target" else round.draft
        # Fresh noise: the defect is the law alone.
        return Outcome(outcome.kept, inverse_cdf(laws[outcome.kept], round.noise.extra(7)))

    return broken


def _residual_after_miss(round: Round) -> Outcome:
    outcome = IN_LAW["match"](round)
    if outcome.kept == len(round.tokens):
        return outcome
    left = excess(round.target[outcome.kept], round.draft[outcome.kept])
    return Outcome(outcome.kept, inverse_cdf(left, round.noise.extra(7)))


def _token_not_strict(round: Round) -> Outcome:
    for i, x in enumerate(round.tokens):
        if not round.noise.test(i) * round.draft[i][x] <= round.target[i][x]:
            left = excess(round.target[i], round.draft[i])
            return Outcome(i, inverse_cdf(left, round.noise.extra(0)))
    return _add(round, [], len(round.tokens))


def _block_not_strict(round: Round) -> Outcome:
    b = block_weights(round)
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        if round.noise.test(length - 1) * h.whole <= h.part:
            return _add(round, b, length)
    return _add(round, b, 0)


def _block_uncapped(round: Round) -> Outcome:
    """The last test against min(1, prod p/q), as in a released hierarchical rule."""
    b = block_weights(round)
    product: Number = Fraction(1)
    for x, p, q in zip(round.tokens, round.target, round.draft, strict=False):
        product *= p[x] / q[x]
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        part = product if length == len(round.tokens) else h.part
        if round.noise.test(length - 1) * h.whole < part:
            return _add(round, b, length)
    return _add(round, b, 0)


def _block_unscaled(round: Round) -> Outcome:
    b = block_weights(round)
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        if round.noise.test(length - 1) * h.whole < h.part:
            return _add(round, [Fraction(1)] * len(b), length)
    return _add(round, [Fraction(1)] * len(b), 0)


def _add(round: Round, scales: list[Number], kept: int) -> Outcome:
    """Keeps `kept` tokens and draws from what `scales` leave of the target's law there."""
    weights = round.target[kept]
    if kept < len(round.tokens):
        weights = excess(weights, round.draft[kept], scales[kept])
    return Outcome(kept, inverse_cdf(weights, round.noise.extra(0)))


def _flattened(law: LawRow) -> LawRow:
    """Half way to uniform."""
    return tuple((x + Fraction(1, len(law))) / 2 for x in law)


def _unlikely(law: LawRow, drawn: int) -> bool:
    return law[drawn] < max(law)


def _by_position(anchor: int, i: int) -> tuple[int, int, int]:
    return STREAM_ACCEPT, anchor + i, 0


def _as_draft(anchor: int, i: int) -> tuple[int, int, int]:
    return STREAM_DRAFT, anchor, i


def _as_test(anchor: int, i: int) -> tuple[int, int, int]:
    return STREAM_ACCEPT, anchor, i


def _one_extra(anchor: int, i: int) -> tuple[int, int, int]:
    return STREAM_EXTRA, anchor, 0
