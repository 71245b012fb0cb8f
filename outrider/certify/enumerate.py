"""The exact law of whole multi-round runs: drafter, stopping rule, tree, rule and noise plan.

`replay` visits every path the noise can take; here a scheme says how a round is played, and the
texts it writes are weighed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from outrider.certify import reference
from outrider.certify.growth import Drafting, Grow, Text
from outrider.certify.reference import Noise, ReferenceRule, Round
from outrider.certify.reference_trees import DraftedTree, TreeRound, TreeRule
from outrider.certify.replay import Address, Replay, every_path
from outrider.decoding.theory import LawRow, Model
from outrider.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_EXTRA, STREAM_TARGET

MAX_LEAVES = 20_000
Place: TypeAlias = Callable[[int, int], Address]
"""Where a uniform is found, given the round's anchor and the index asked for."""


class TooManyLeaves(Exception):
    """The case has more leaves than it was allowed."""


def identity(law: LawRow) -> LawRow:
    """The law as it is."""
    return law


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a round's noise is found; the defaults are the right places."""

    test: Place = lambda anchor, i: (STREAM_ACCEPT, anchor, i)
    extra: Place = lambda anchor, i: (STREAM_EXTRA, anchor, i)
    draft: Place = lambda anchor, i: (STREAM_DRAFT, anchor, i)
    race: Place = lambda anchor, i: (STREAM_TARGET, anchor + i, 0)

    def noise(self, replay: Replay, anchor: int) -> Noise:
        """The noise of the round that begins with `anchor` tokens."""
        return Noise(
            test=lambda i: replay.uniform(*self.test(anchor, i)),
            extra=lambda i: replay.uniform(*self.extra(anchor, i)),
            draft=lambda i: replay.uniform(*self.draft(anchor, i)),
            race=lambda i, law, count: replay.race(self.race(anchor, i), law, count),
        )


RIGHT = Addresses()


@dataclass(frozen=True, slots=True)
class Played:
    """What a round wrote, and how many of its tokens were drafted ones."""

    tokens: Text
    kept: int


class Speculation(ABC):
    """A way to play rounds: how tokens are drafted, what the rule is told, where noise is found.

    Attributes:
        grid: number of values a uniform can take; None = the continuum.
    """

    name: str
    grid: int | None

    @abstractmethod
    def play(self, replay: Replay, p: Model, q: Model, text: Text, room: int) -> Played:
        """One round after `text` that drafts at most `room` levels."""


@dataclass(frozen=True, slots=True)
class Scheme(Speculation):
    """A chain rule and how a round feeds it; the defaults are the right way.

    Attributes:
        rule: the decision on a round.
        reported: the draft law told to the rule, given the law sampled from.
        sampled: the law drafted from, given the draft model's.
        at: where noise is found.
        dropped: whether the last drafted token is taken back, given its law and value.
        stopped: whether drafting stops behind a token, which is kept.
        rows: the target's law told to the rule: model, text of the round's start, drafted tokens.
        draw: how a token is drawn: noise, index, law.
    """

    name: str
    rule: ReferenceRule
    reported: Callable[[LawRow], LawRow] = identity
    sampled: Callable[[LawRow], LawRow] = identity
    at: Addresses = RIGHT
    dropped: Callable[[LawRow, int], bool] = lambda law, token: False
    stopped: Callable[[LawRow, int], bool] = lambda law, token: False
    rows: Callable[[Model, Text, Text], LawRow] = lambda p, text, drafted: p(text + drafted)
    draw: Callable[[Noise, int, LawRow], int] = lambda noise, i, law: reference.inverse_cdf(
        law, noise.draft(i)
    )
    grid: int | None = None

    def play(self, replay: Replay, p: Model, q: Model, text: Text, room: int) -> Played:
        """Drafts a chain and decides on it."""
        noise = self.at.noise(replay, len(text))
        drafted: Text = ()
        for i in range(room):
            law = self.sampled(q(text + drafted))
            token = self.draw(noise, i, law)
            if self.dropped(law, token):
                break
            drafted += (token,)
            if self.stopped(law, token):
                break
        before = [drafted[:i] for i in range(len(drafted) + 1)]
        outcome = self.rule(
            Round(
                drafted,
                [self.rows(p, text, prefix) for prefix in before],
                [self.reported(q(text + prefix)) for prefix in before[:-1]],
                noise,
            )
        )
        return Played((*drafted[: outcome.kept], outcome.token), outcome.kept)


@dataclass(frozen=True, slots=True)
class TreeScheme(Speculation):
    """A tree rule and how a round feeds it.

    Attributes:
        grow: the drafter's tree.
        rule: the decision on a round.
        at: where noise is found.
    """

    name: str
    grow: Grow
    rule: TreeRule
    at: Addresses = RIGHT
    grid: int | None = None

    def play(self, replay: Replay, p: Model, q: Model, text: Text, room: int) -> Played:
        """Grows a tree and decides on it."""
        noise = self.at.noise(replay, len(text))
        tree = self.grow(Drafting(text, q, room, noise))
        prefixes = [text + tree.path_tokens(row) for row in range(len(tree.tokens) + 1)]
        outcome = self.rule(TreeRound(tree, [p(prefix) for prefix in prefixes], noise))
        kept = tree.path_tokens(outcome.path[-1]) if outcome.path else ()
        return Played((*kept, outcome.token), len(kept))


@dataclass(frozen=True, slots=True)
class OutputLaw:
    """The exact law of a scheme's texts.

    Attributes:
        probs: text to probability.
        leaves: paths enumerated.
        first_kept: expected drafted tokens kept in the first round.
        most_rounds: rounds of the longest path.
        other: probability that the text is not the one plain decoding writes with the same noise.
    """

    probs: dict[Text, Fraction]
    leaves: int
    first_kept: Fraction
    most_rounds: int
    other: Fraction


Plain: TypeAlias = Callable[[Replay, Model, int], Text]
"""Plain decoding with the path's noise."""


def output_law(
    scheme: Speculation,
    p: Model,
    q: Model,
    depth: int,
    length: int,
    max_leaves: int = MAX_LEAVES,
    plain: Plain | None = None,
) -> OutputLaw:
    """The law of the first `length` tokens written in rounds of up to `depth` drafted levels.

    As in the engine, with n tokens left at most n - 1 levels are drafted.

    Raises:
        TooManyLeaves: the case is larger than `max_leaves`.
    """

    def run(replay: Replay) -> tuple[list[Played], bool]:
        text: Text = ()
        rounds: list[Played] = []
        while len(text) < length:
            rounds.append(scheme.play(replay, p, q, text, min(depth, length - len(text) - 1)))
            text += rounds[-1].tokens
        return rounds, plain is not None and plain(replay, p, length) != text

    probs: dict[Text, Fraction] = {}
    leaves, most_rounds, first_kept, other = 0, 0, Fraction(0), Fraction(0)
    for replay, (rounds, differs) in every_path(run, scheme.grid):
        leaves += 1
        if leaves > max_leaves:
            raise TooManyLeaves(f"{scheme.name}: depth {depth}, {length} tokens")
        text = sum((played.tokens for played in rounds), start=())
        probs[text] = probs.get(text, Fraction(0)) + replay.weight
        first_kept += replay.weight * rounds[0].kept
        most_rounds = max(most_rounds, len(rounds))
        other += replay.weight * differs
    return OutputLaw(probs, leaves, first_kept, most_rounds, other)


def first_kept(scheme: Speculation, p: Model, q: Model, depth: int) -> Fraction:
    """The expected number of drafted tokens kept in one round."""
    rounds = every_path(lambda replay: scheme.play(replay, p, q, (), depth).kept, scheme.grid)
    return sum((replay.weight * kept for replay, kept in rounds), start=Fraction(0))


TreeLaw: TypeAlias = dict[tuple[Text, Text], Fraction]
"""Tokens and parent rows of a tree, to its probability."""


def tree_law(grow: Grow, q: Model, depth: int) -> TreeLaw:
    """The law of the trees a drafter grows in one round from the empty text."""

    def run(replay: Replay) -> DraftedTree:
        return grow(Drafting((), q, depth, RIGHT.noise(replay, 0)))

    law: TreeLaw = {}
    for replay, tree in every_path(run):
        key = tuple(tree.tokens), tuple(tree.parents)
        law[key] = law.get(key, Fraction(0)) + replay.weight
    return law


def plain_seeded(replay: Replay, p: Model, length: int) -> Text:
    """Plain seeded sampling: the race of each position, at its own address."""
    text: Text = ()
    for position in range(length):
        text += replay.race((STREAM_TARGET, position, 0), p(text), 1)
    return text


def plain_greedy(replay: Replay, p: Model, length: int) -> Text:
    """Plain greedy decoding: no noise at all."""
    text: Text = ()
    for _ in range(length):
        text += (reference.argmax(p(text)),)
    return text


def target_law(p: Model, length: int) -> dict[Text, Fraction]:
    """The target's own law of texts of `length` tokens."""
    probs: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(length):
        probs = {
            (*text, x): mass * Fraction(p_x)
            for text, mass in probs.items()
            for x, p_x in enumerate(p(text))
            if p_x > 0
        }
    return probs


def distance(left: dict[Text, Fraction], right: dict[Text, Fraction]) -> Fraction:
    """Total variation between two laws of texts."""
    texts = left.keys() | right.keys()
    zero = Fraction(0)
    return sum((abs(left.get(t, zero) - right.get(t, zero)) for t in texts), start=zero) / 2
