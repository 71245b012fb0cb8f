"""The controller's records: what is kept of texts, how a round stands, what it came to."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field

from torch import Tensor

from outrider.control.guard import Guard
from outrider.control.plans import Plan, Times
from outrider.control.sizes import Grown
from outrider.drafters.stop import Stop
from outrider.sequence import Sequence
from outrider.tree import TreeBudget

FEW = 32
"""Rows of prompts that a round may read and still tell what rounds take."""


# Records of which every round makes some are not frozen: these take three times as long to make.


@dataclass(slots=True)
class Offer:
    """A certain draft of a text.

    Attributes:
        arm: who made it.
        tokens: what it says.
        parts: who of a combination said each; None where one said all.
        start: where in the text it would stand.
        survival: the chance of each that it and all before it are kept.
        cell: its class in the book.
    """

    arm: int
    tokens: list[int]
    parts: list[int] | None
    start: int
    survival: list[float]
    cell: int


@dataclass(slots=True)
class State:
    """What is kept of a text.

    Attributes:
        rounds: how many it went through.
        read: by drafter, how many of its tokens that has read.
        pending: by drafter, an offer that is still to be compared with what came.
        guards: the text's own ledgers: of certain drafters together (None), and of each that draws,
            drafting trees or not.
    """

    rounds: int = 0
    read: dict[int, int] = field(default_factory=dict[int, int])
    pending: dict[int, Offer] = field(default_factory=dict[int, Offer])
    guards: dict[tuple[int | None, bool], Guard] = field(
        default_factory=dict[tuple[int | None, bool], Guard]
    )

    def allows(self, now: int, arm: int | None, *, trees: bool = False) -> bool:
        """Whether the text's own ledger of a choice lets it through."""
        found = self.guards.get((arm, trees))
        return found is None or found.allows(now)


@dataclass(slots=True)
class View:
    """A round before anything is drawn.

    Attributes:
        texts, states, caps: the texts, what is kept of them, and how deep they may be drafted for;
            of the round at hand, where one view serves several.
        rule: that verifies all of them.
        context: the class of their length in the mean.
        trees: how large trees may be; None where chains are drafted.
        max_certain: nodes that a tree of certain tokens may have.
        prompt_rows: rows of prompts that are read in this round, beside the last of each.
        times: what rounds take; None before any was timed.
        offers: each text's best certain draft, likewise.
        uneven: the share of a round that only the text that ends last can save.
        lefts: tokens that each text has to make, where there is such a share.
    """

    texts: Sequenced[Sequence]
    states: Sequenced[State]
    caps: Sequenced[int]
    rule: str
    context: int
    trees: TreeBudget | None
    max_certain: int
    prompt_rows: int
    times: Times | None
    offers: Sequenced[Offer | None]
    uneven: float = 0.0
    lefts: Sequenced[float] = ()

    @property
    def clean(self) -> bool:
        """Whether so little of prompts is read that it counts as so many rows more."""
        return self.prompt_rows <= FEW

    @property
    def part(self) -> float:
        """Each text's of the round."""
        return 1 / len(self.texts)

    def able(self) -> list[int]:
        """The texts for which a drafter that draws may be asked.

        In a text's first round none is: it would read the prompt before the first token comes.
        """
        both = enumerate(zip(self.caps, self.states, strict=True))
        return [b for b, (cap, state) in both if cap > 0 and state.rounds > 0]

    def unread(self, arm: int, b: int) -> int:
        """Tokens of a text that a drafter has not read."""
        return len(self.texts[b].tokens) - self.states[b].read.get(arm, 0)


@dataclass(slots=True)
class Stake:
    """What a sample may lose: seconds that are expected, and what the best plan promised."""

    lost_s: float
    rate_tok_s: float


@dataclass(slots=True)
class Choice:
    """A plan, and why it was chosen; a sample has a stake, and is to know what would come of it.

    `stop` tells a drafter when to end its chains before their depth; None = never. What came of one
    that does not last is noted at once: it was chosen for this round alone.
    """

    plan: Plan
    why: str
    stake: Stake | None = None
    stop: Stop | None = None
    lasts: bool = True


@dataclass(slots=True)
class Round:
    """The round under way.

    Attributes:
        served: who drafts for each text.
        taken: whether that is a certain draft that was at hand.
        asked: tokens, or levels of a tree, that were asked for.
        cells: the text's class in the drafter's book.
        offered: tokens drafted.
        kept: by text, tokens kept.
        levels: of what was drawn.
        branches: whether trees were drawn.
        grown: the trees that were drawn, where their nodes have a worth.
        worth_BN: of what was drawn, where its drafter told: of chains how likely it thought each
            token and all before it.
        unread: tokens that the drafter had to read first.
        drawn_s: seconds that it took.
        waiting: whether a text's drafter has to read it first, in rounds of its own.
        felt: whether the texts' luck was counted already.
    """

    view: View
    choice: Choice
    served: list[int | None]
    taken: list[bool]
    asked: list[int]
    cells: list[int]
    offered: list[int]
    kept: dict[int, int]
    levels: int = 0
    branches: bool = False
    grown: Grown | None = None
    worth_BN: Tensor | None = None
    unread: int = 0
    drawn_s: float = 0.0
    waiting: bool = False
    felt: bool = False

    @classmethod
    def of(cls, view: View, choice: Choice) -> Round:
        """A round in which nobody has drafted yet."""
        num = len(view.texts)
        return cls(view, choice, [None] * num, [False] * num, [0] * num, [0] * num, [], {})

    @property
    def plan(self) -> Plan:
        """What was chosen."""
        return self.choice.plan

    def drawn(self, b: int) -> int:
        """Levels that were drawn for a text."""
        if not self.offered[b]:
            return 0
        return min(self.asked[b], self.offered[b] if self.plan.trees is None else self.levels)


@dataclass(slots=True)
class Tally:
    """Rounds, those with trees, what was drafted, tokens and seconds of one choice, and why it was.

    Levels and nodes are those of the deepest and of the largest draft of each round.
    """

    rounds: int = 0
    trees: int = 0
    levels: int = 0
    nodes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict[str, int])
