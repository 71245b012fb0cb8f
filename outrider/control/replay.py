"""Replay: what another policy would have done with traced texts, and how long it would have taken.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import numpy as np

from outrider.control.acceptance import Acceptance
from outrider.control.costs import Costs
from outrider.control.policies import Oracle, Policy, Threshold, View
from outrider.control.trace import TracedRound, TracedText
from outrider.errors import InvalidConfig

IN_LAW = ("token", "block")
"""Rules under which a text and what is kept of a draft go together in law alone."""


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
    def _tokens(self) -> list[int]:
        return self.text.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self._tokens)

    def _kept(self, one: TracedRound) -> tuple[int, ...]:
        """Rows that the rule keeps of what a round drafted."""
        drawn = any(prob is not None for prob in one.trace.draft_probs)
        if one.would is None or drawn or self.text.settings.rule not in IN_LAW:
            return one.path
        made = one.trace.position - self.text.settings.prompt_tokens
        pairs = zip(one.trace.tokens, self._tokens[made:], strict=False)
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


@dataclass(frozen=True, slots=True)
class Step:
    """A round of a replayed text: tokens made before it, what it drafted and kept, its seconds."""

    made: int
    levels: int
    nodes: int
    kept: int
    seconds: float
    known: bool = True


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy would have done with some texts.

    Attributes:
        policy: its name.
        oracle: whether it looks into the future.
        steps: of each text.
        prompt_s: seconds of reading prompts.
    """

    policy: str
    oracle: bool
    steps: tuple[tuple[Step, ...], ...]
    prompt_s: float
    wall_s: float = field(default=0.0)

    @property
    def tokens(self) -> int:
        """Made in all."""
        return sum(step.kept + 1 for text in self.steps for step in text)

    @property
    def rounds(self) -> int:
        """Rounds of all texts."""
        return sum(map(len, self.steps))

    @property
    def drafted(self) -> int:
        """Drafted tokens."""
        return sum(step.nodes for text in self.steps for step in text)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were kept."""
        return sum(step.kept for text in self.steps for step in text)

    @property
    def unknown(self) -> int:
        """Rounds of which the trace does not say all that would have been kept."""
        return sum(not step.known for text in self.steps for step in text)

    @property
    def seconds(self) -> float:
        """All rounds, and prompts."""
        return self.wall_s + self.prompt_s

    @property
    def tokens_per_s(self) -> float:
        """Of all texts, prompts included."""
        return self.tokens / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a round that drafts, the target's own included."""
        own = [step.kept + 1 for text in self.steps for step in text if step.nodes]
        return sum(own) / len(own) if own else 1.0


def replay(
    texts: Sequence[TracedText],
    policy: Policy | None,
    costs: Costs,
    *,
    batch: int = 1,
    draw: int = 0,
) -> Replayed:
    """Walks through texts as a policy would, `batch` of them at a time.

    Args:
        texts: traced ones.
        policy: how far to draft; None takes what was run, and the time that it took.
        costs: what rounds take.
        batch: texts that share rounds.
        draw: which of the outcomes that have the same law, where what is kept has one.

    Raises:
        InvalidConfig: no text; what was run, of observed texts; an oracle for several texts; a
            threshold under `token` or `block`.
    """
    if not texts:
        raise InvalidConfig("no text to replay; trace one with `outrider generate --trace FILE`")
    if policy is None:
        return _as_run(texts)
    if isinstance(policy, Oracle) and batch > 1:
        raise InvalidConfig(f"an oracle walks through texts one by one, and batch={batch}; use 1")
    if isinstance(policy, Threshold) and any(text.settings.rule in IN_LAW for text in texts):
        raise InvalidConfig(
            f"policy {policy.name!r} goes by tokens as they were drawn, which under rules in law "
            f"({', '.join(IN_LAW)}) are not those of the text; replay depths, or trace under "
            "coupled"
        )
    guesses = [Guesses(text, draw * len(texts) + i) for i, text in enumerate(texts)]
    steps: list[tuple[Step, ...]] = []
    wall_s = 0.0
    for first in range(0, len(guesses), batch):
        group = [_Walk(one, policy, costs) for one in guesses[first : first + batch]]
        if isinstance(policy, Oracle):
            wall_s += sum(walk.quickest() for walk in group)
        else:
            while going := [walk for walk in group if walk.room >= 0]:
                wall_s += _together(going, costs)
        steps += [tuple(walk.steps) for walk in group]
    prompt_s = sum(_prompt_s(text, policy, costs) for text in texts)
    return Replayed(policy.name, policy.oracle, tuple(steps), prompt_s, wall_s)


class _Walk:
    """One text under way."""

    def __init__(self, guesses: Guesses, policy: Policy, costs: Costs) -> None:
        self.guesses, self.policy, self.costs = guesses, policy, costs
        self.settings = guesses.text.settings
        self.made = 0
        self.past = Acceptance()
        self.steps: list[Step] = []

    @property
    def room(self) -> int:
        """Levels that may be drafted: one less than there are tokens to make, -1 at the end."""
        left = self.guesses.num_tokens - self.made - 1
        return min(left, self.settings.depth)

    def context(self, made: int) -> int:
        return self.settings.prompt_tokens + made

    def round_s(self, made: int, drafted: Drafted) -> float:
        """Seconds of a round by itself."""
        name = self.settings.drafter if drafted.nodes else None
        return self.costs.round_s(
            name, levels=drafted.levels, nodes=drafted.nodes, context=self.context(made)
        )

    def drafted(self, made: int, levels: int) -> Drafted:
        return self.guesses.draft(made, levels, self.policy.nodes, self.policy.shape)

    def next(self) -> Drafted:
        """What the policy drafts now."""
        at = self.made
        view = View(
            self.room,
            self.guesses.draft_probs(at),
            lambda levels: self.round_s(at, self.drafted(at, levels)),
            lambda levels: self.drafted(at, levels).kept,
        )
        asked = self.policy.levels(view, self.past)
        found = self.drafted(at, asked)
        if asked:
            self.past = self.past.saw(found.kept, asked)
        return found

    def take(self, drafted: Drafted, seconds: float) -> None:
        """A round is over."""
        step = Step(self.made, drafted.levels, drafted.nodes, drafted.kept, seconds, drafted.known)
        self.steps.append(step)
        self.made += drafted.kept + 1

    def quickest(self) -> float:
        """Takes the walk of the least time through the whole text; its seconds."""
        end = self.guesses.num_tokens
        best: list[tuple[float, Drafted]] = [(0.0, Drafted(0, 0, 0))] * (end + 1)
        for made in reversed(range(end)):
            room = min(end - made - 1, self.settings.depth)
            ways: list[tuple[float, Drafted]] = []
            for levels in range(room + 1):
                found = self.drafted(made, levels)
                after = best[made + found.kept + 1][0]
                ways.append((self.round_s(made, found) + after, found))
            best[made] = min(ways, key=lambda way: way[0])
        while self.made < end:
            found = best[self.made][1]
            self.take(found, self.round_s(self.made, found))
        return best[0][0]


def _together(walks: list[_Walk], costs: Costs) -> float:
    """One round of several texts; its seconds."""
    drafts = [walk.next() for walk in walks]
    levels = max(one.levels for one in drafts)
    nodes = sum(one.nodes for one in drafts)
    context = sum(walk.context(walk.made) for walk in walks) // len(walks)
    name = walks[0].settings.drafter
    size = len(walks)
    drafted_s = costs.draft_s(name, levels, nodes) if levels else 0.0
    seconds = (
        drafted_s
        + costs.score_s(size + nodes, size, context)
        + size * costs.verify_text_s
        + nodes * costs.verify_row_s
    )
    for walk, one in zip(walks, drafts, strict=True):
        walk.take(one, seconds / size)
    return seconds


def _prompt_s(text: TracedText, policy: Policy, costs: Costs) -> float:
    """Reading the prompt, by the drafter too where the policy drafts at all."""
    settings = text.settings
    seconds = settings.prompt_tokens * costs.prompt_token_s
    drafts = not (policy.name == "none" or policy.nodes == 0)
    known = costs.drafts.get(settings.drafter)
    if drafts and known is not None:
        seconds += settings.prompt_tokens * known.prompt_token_s
    return seconds


def _as_run(texts: Sequence[TracedText]) -> Replayed:
    """What was run: its own rounds and laps."""
    steps: list[tuple[Step, ...]] = []
    for text in texts:
        if text.settings.observed:
            raise InvalidConfig(
                "policy 'traced' of an observed text, in which nothing was kept; replay another "
                "policy, or trace without --observe"
            )
        own: list[Step] = []
        for one in text.rounds:
            made = one.trace.position - text.settings.prompt_tokens
            levels = max(_depths(one.trace.parents))
            seconds = (one.seconds + text.settings.other_s) / one.trace.num_texts
            own.append(Step(made, levels, len(one.trace.tokens), one.trace.kept - 1, seconds))
        steps.append(tuple(own))
    wall_s = sum(step.seconds for text in steps for step in text)
    return Replayed("traced", False, tuple(steps), 0.0, wall_s)


def _ranks(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Of each node its parent's row and its place among the children there."""
    return [(parent, list(parents[:j]).count(parent)) for j, parent in enumerate(parents)]


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
