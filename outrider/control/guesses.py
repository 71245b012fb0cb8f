"""What is known of the guesses behind each token of a traced text, and what was kept of them.

Behind every token of an observed text stands a guess, so any depth up to the traced one walks
through it exactly as it would have run, under `greedy`, `match` and `coupled`. Under `token` and
`block` it is known of each token of the text how likely target and draft thought it, and with that
the law of what is kept, given the text: `token` keeps i tokens or more with the product of
min(1, q / p), `block` with the least of 1 and q / p of all paths up to there. That takes each
level's law to be the one of a round begun there, as a draft model's is; a head feeds on its own
features from the second level on, and is promised too much. Of what is certain (look-ups) that part
is kept which the text has too: a point mass that was rejected never stands there. Trees under rules
in law keep what the rule would have kept of those that were drawn, which is near.

Of a text that was traced as it ran guesses are known where rounds began and, of chains, inside of
what was kept; where a walk comes to stand elsewhere nothing counts as kept, and such rounds are
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TypeAlias

import numpy as np

from outrider.control.trace import TracedRound, TracedText
from outrider.drafters.stop import Stop, class_of

IN_LAW = ("token", "block")
"""Rules under which a text and what is kept of a draft go together in law alone."""

Watched: TypeAlias = Mapping[str, "Guesses"]
"""A text by who guessed behind its tokens."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft of so many levels at one place: its nodes, how many levels it has and would keep."""

    levels: int
    nodes: int
    kept: int
    known: bool = True


@dataclass(frozen=True)
class Guesses:
    """What is known of the guesses behind each token of a text.

    `draw` is which of the outcomes that have the same law.
    """

    text: TracedText
    draw: int = 0

    @cached_property
    def tokens(self) -> list[int]:
        """The text."""
        return self.text.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    @property
    def drafter(self) -> str:
        """Who guessed."""
        return self.text.settings.drafter

    def _kept(self, one: TracedRound) -> tuple[int, ...]:
        """Rows that the rule keeps of what a round drafted."""
        drawn = any(prob is not None for prob in one.trace.draft_probs)
        if one.would is None or drawn or self.text.settings.rule not in IN_LAW:
            return one.path
        made = one.trace.position - self.text.settings.prompt_tokens
        pairs = zip(one.trace.tokens, self.tokens[made:], strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return tuple(range(1, alike + 1))

    @cached_property
    def _at(self) -> dict[int, tuple[TracedRound, int]]:
        """By tokens made so far: the round that drafted there, and how many levels before."""
        found: dict[int, tuple[TracedRound, int]] = {}
        for one in self.text.rounds:
            made = one.trace.position - self.text.settings.prompt_tokens
            chain = list(one.trace.parents) == list(range(len(one.trace.parents)))
            inside = len(one.path) if chain and one.would is None else 0
            for above in range(inside + 1):
                found.setdefault(made + above, (one, above))
            # A round knows best what it drafted itself.
            found[made] = one, 0
        return found

    @cached_property
    def _uniforms(self) -> list[float]:
        """What decides, for each number of tokens made."""
        return np.random.default_rng(self.draw).random(self.num_tokens + 1).tolist()

    @cached_property
    def _ratios(self) -> list[float | None] | None:
        """q / p of each token of the text, None where q is unknown; None under other rules."""
        if self.text.settings.rule not in IN_LAW:
            return None
        ratios: list[float | None] = []
        for one in self.text.rounds:
            trace = one.trace
            pairs = [
                *((trace.draft_probs[row - 1], trace.target_probs[row - 1]) for row in trace.path),
                (trace.added_draft_prob, trace.added_prob),
            ][: trace.kept]
            ratios += [None if q is None else q / p for q, p in pairs]
        drawn = any(ratio is not None for ratio in ratios)
        return ratios if drawn else None

    def _by_law(self, made: int, levels: int) -> Drafted:
        """A chain under `token` or `block`: what is kept of it, by the law of that."""
        assert self._ratios is not None
        one = self._at.get(made, (None, 0))[0]
        if one is not None and one.would is not None:
            levels = min(levels, len(one.trace.tokens))
        product, chance, kept = 1.0, 1.0, 0
        for ratio in self._ratios[made : made + levels]:
            if ratio is None:
                return Drafted(levels, levels, kept, known=False)
            if self.text.settings.rule == "token":
                chance *= min(1.0, ratio)
            else:
                product *= ratio
                chance = min(chance, product)
            if self._uniforms[made] >= chance:
                break
            kept += 1
        return Drafted(levels, levels, kept)

    def _shaped(self, made: int, levels: int, shape: tuple[int, ...]) -> Drafted:
        """A draft of one shape: of each row it has as many children as the shape has there."""
        one, _ = self._at[made]
        places = {0: 0}
        ranks = _ranks(shape)
        inside = [depth for depth in _depths(shape)[1:] if depth <= levels]
        for row, (parent, rank) in enumerate(_ranks(one.trace.parents), start=1):
            if parent in places and (places[parent], rank) in ranks:
                places[row] = ranks.index((places[parent], rank)) + 1
        kept = 0
        for row in one.path[:levels]:
            if row not in places:
                break
            kept += 1
        return Drafted(max(inside, default=0), len(inside), kept)

    def draft(
        self,
        made: int,
        levels: int,
        nodes: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Drafted:
        """A draft behind `made` tokens, of so many levels and nodes at most, or of a shape."""
        if levels == 0:
            return Drafted(0, 0, 0)
        if shape is not None and made in self._at:
            return self._shaped(made, levels, shape)
        if self._ratios is not None:
            return self._by_law(made, levels)
        if made not in self._at:
            return Drafted(levels, levels if nodes is None else nodes, 0, known=False)
        one, above = self._at[made]
        depths = _depths(one.trace.parents)
        inside = [
            row for row, depth in enumerate(depths[1:], start=1) if above < depth <= above + levels
        ]
        worths = one.trace.worths
        if nodes is not None and worths is not None:
            inside = sorted(sorted(inside, key=lambda row: (-worths[row - 1], row))[:nodes])
        own = set(inside)
        kept = 0
        for row in self._kept(one)[above:]:
            if row not in own:
                break
            kept += 1
        deepest = max((depths[row] for row in inside), default=above) - above
        # Past the end of what was drafted there, nobody knows.
        cut = above > 0 and deepest < levels and kept == deepest
        return Drafted(deepest, len(inside), kept, known=not cut)

    def path(self, made: int) -> tuple[int, ...]:
        """Rows that the rule keeps of the draft behind `made` tokens."""
        return self._at[made][0].path if made in self._at else ()

    def by_worth(self, made: int, levels: int) -> list[int]:
        """Rows of the first levels of a tree, the most promising first; as drawn where none is."""
        if made not in self._at:
            return []
        trace = self._at[made][0].trace
        depths, worths = _depths(trace.parents), trace.worths
        rows = [row for row in range(1, len(depths)) if depths[row] <= levels]
        return rows if worths is None else sorted(rows, key=lambda row: (-worths[row - 1], row))

    def chain(self, made: int, levels: int, stop: Stop | None = None) -> tuple[int, ...]:
        """Tokens of a chain behind `made` tokens, which ends where `stop` says.

        Where the trace does not say how likely the drafter thought it it goes on.
        """
        if made not in self._at:
            return ()
        one, above = self._at[made]
        ends = levels
        if stop is not None:
            before = chance = 1.0
            for i, worth in enumerate(self.worths(made, levels), start=1):
                chance *= stop.chances[class_of(worth / before if before else 0.0)]
                before = worth
                if chance < stop.least:
                    ends = i
                    break
        return one.trace.tokens[above : above + ends]

    def worths(self, made: int, levels: int) -> tuple[float, ...]:
        """How likely the drafter thought such a chain up to each token; empty where it told not."""
        one, above = self._at[made]
        worths = one.trace.worths
        if worths is None:
            return ()
        before = worths[above - 1] if above else 1.0
        return tuple(worth / max(before, 1e-300) for worth in worths[above : above + levels])

    def draft_probs(self, made: int) -> tuple[float, ...]:
        """Of a chain the tokens' probabilities under the draft's law; empty where it is certain."""
        if made not in self._at:
            return ()
        one, above = self._at[made]
        probs: list[float] = []
        for prob in one.trace.draft_probs[above:]:
            if prob is None:
                return ()
            probs.append(prob)
        return tuple(probs)


def together(texts: Sequence[TracedText], draw: int = 0) -> list[Watched]:
    """The guesses behind each text; observed texts of the same tokens are one, by who guessed.

    `draw` is which of the outcomes that have the same law.
    """
    found: list[Watched] = []
    alike: dict[tuple[object, ...], list[dict[str, Guesses]]] = {}
    for i, text in enumerate(texts):
        guesses, of = Guesses(text, draw * len(texts) + i), text.settings
        key = of.rule, of.temperature, of.depth, of.prompt_tokens, tuple(text.tokens)
        own = alike.setdefault(key, []) if of.observed else []
        known = next((one for one in own if of.drafter not in one), None)
        if known is None:
            known = dict[str, Guesses]()
            own.append(known)
            found.append(known)
        known[of.drafter] = guesses
    return found


def _ranks(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Of each node its parent's row and its place among the children there."""
    return [(parent, list(parents[:j]).count(parent)) for j, parent in enumerate(parents)]


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
