"""The contract between the engine and whoever guesses.

A drafter sees texts and hands back chains or trees; it draws nothing by itself. It asks the round's
draws for tokens of a law, so that the law reported is the law sampled. What it keeps between rounds
follows the texts' own tokens: after an exception it simply has more to read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from outrider.decoding import Draft
from outrider.drafters.stop import Stop
from outrider.models.base import Target
from outrider.models.protocol import Rng
from outrider.sequence import Sequence
from outrider.tree import TreeBudget
from outrider.types import StageTimes

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@dataclass(frozen=True, slots=True)
class Node:
    """A drafted token whose next law is asked for.

    Attributes:
        member: whose text it continues.
        token: its id.
        parent: the node it follows, by its number among those asked for in this text and round;
            0 is the text as it stands, the first node asked for is 1.
    """

    member: int
    token: int
    parent: int


ExpandNodes: TypeAlias = Callable[[Sequenced[Node]], Tensor]
"""Logits `[n, V]` after n nodes, a text's nodes one after another."""


class RoundDraws(Protocol):
    """What the engine offers a drafter for one round of B sequences.

    Attributes:
        trees: how large trees may be; None where chains are to be drafted.
        followed: whether other texts wait for the place of one that is done.
    """

    trees: TreeBudget | None
    followed: bool

    @property
    def may_wait(self) -> bool:
        """Whether tokens may be drawn without being read: nothing depends on what they are."""
        ...

    def draw_unread(self, logits_1V: Tensor, member: int, index: int) -> Tensor:
        """As `sample` of one sequence, but the token `[1]` stays where the logits are."""
        ...

    def read_drawn(self, member: int) -> list[int]:
        """Reads all that was drawn unread of one sequence; its verification may have begun."""
        ...

    @property
    def max_certain(self) -> int:
        """Nodes that a tree of certain tokens may have; 0 where only chains are verified."""
        ...

    def grown(
        self,
        roots_nV: Tensor,
        depths: Sequenced[int],
        expand: ExpandNodes,
        ids_V: Tensor | None = None,
    ) -> Draft:
        """Trees of up to `depths[b]` levels, drawn the way the round's rule wants them.

        `roots_nV` are the logits after each text whose depth is above 0; `expand` is called once
        for each further level. `ids_V` is as for `sample`.
        """
        ...

    def point_trees(
        self, tokens: Sequenced[Sequenced[int]], parents: Sequenced[Sequenced[int]]
    ) -> Draft:
        """Trees of certain tokens: per sequence the tokens and their parents' rows.

        Row 0 is the text as it stands and node j is row j + 1; parents stand before children.
        """
        ...

    def sample(
        self,
        logits_nV: Tensor,
        members: Sequenced[int],
        index: int,
        ids_V: Tensor | None = None,
    ) -> list[int]:
        """Draws drafted token `index` of the round's `members`-th sequences from rows of logits.

        The rows become laws under each request's own sampling controls and are kept for the
        verification rule. `ids_V` are the tokens that the columns stand for, ascending; None where
        column and token are one.
        """
        ...

    def drawn(self) -> Draft:
        """Everything sampled this round, with its laws."""
        ...

    def points(self, tokens: Sequenced[Sequenced[int]]) -> Draft:
        """A draft of certain tokens, one list per sequence, possibly empty."""
        ...

    def rng(self, member: int) -> Rng:
        """Chance for a foreign drafter that draws for itself."""
        ...

    def trusted(
        self, tokens: Sequenced[Sequenced[int]], logprobs: Sequenced[Sequenced[Tensor] | None]
    ) -> Draft:
        """A foreign drafter's tokens with the laws `[V]` it reports; None = point masses."""
        ...


class Drafter(ABC):
    """Guesses the next tokens of texts."""

    name: str
    """What metrics and reports call it."""
    trusted: bool = False
    """Whether it draws for itself, so that its laws are taken on trust."""
    vocab_size: int | None = None
    """Width of its laws; None where it only repeats tokens it has seen."""

    certain: bool = False
    """Whether it draws nothing: its tokens are point masses and cost next to nothing."""
    by_clock: bool = False
    """Whether it drafts by measured times: then a rule in law gives no text twice."""
    max_depth: int | None = None
    """Tokens of a text that it was told to draft in a round at most; a request for more is refused.
    None where nobody said."""
    stop: Stop | None = None
    """Where chains are to end, if it can tell how likely tokens are. While it is set drafts have a
    `worth_BN`: how likely it thought each token and all before it."""
    wants_rows: bool = False
    """Whether `observe` is to be called."""
    taps: tuple[int, ...] = ()
    """Behind how many layers hidden states of the target's are wanted, for `notice`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What a drafter below it says in plain numbers is not what this one proposes.
        if "propose" in cls.__dict__ and "chains" not in cls.__dict__:
            cls.chains = Drafter.chains

    def attach(self, target: Target) -> Target:
        """The target that an engine is to score with: the given one, or that with an exit.

        Called once, by the engine, before any text.

        Raises:
            UnsupportedModel: a target that cannot be drafted for.
        """
        return target

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a draft's parts count through: of a combination those of its parts."""
        return (self.name,)

    @property
    def draws_unread(self) -> bool:
        """Whether one text's chain has no token read before the next, as long as `stop` is None."""
        return False

    def unread(self, text: Sequence) -> int:
        """Tokens of the text that `propose` would read first; 0 for who has no cache."""
        return 0

    def read(self, text: Sequence, rows: int) -> None:
        """Reads the next `rows` unread tokens, at most all but the last, ahead of `propose`.

        The engine asks for it where a prompt is longer than one chunk, so that other texts' rounds
        come in between.
        """

    def expect(self, num_prompt: int) -> None:
        """A text with so long a prompt is to be made: warns, once, where it cannot be drafted for.

        Called before any work, in the thread of whoever asks for the text.
        """

    def never_asked(self) -> tuple[str, ...]:
        """Names of the models loaded for it that have drafted nothing yet, and nobody knows why."""
        return ()

    def pauses(self, texts: Sequenced[Sequence]) -> bool:
        """Whether it is known already that it proposes nothing in the next round of these texts.

        A hint: who says so falsely costs a forward that is for nothing.
        """
        return False

    def foresee(
        self, text: Sequence, accepted_1: Int64[Tensor, " 1"], token_1: Int64[Tensor, " 1"]
    ) -> None:
        """A hint: how many drafted tokens a text, alone in its round, will keep, and what follows.

        Both are where the target is, and the host has not read them. What it has run by then of the
        next round changes nothing that the drafter says.
        """

    @abstractmethod
    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """At most `depths[b]` tokens after each text."""

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]] | None:
        """What it would propose as chains, in plain numbers; None where only `propose` can tell.

        Of a drafter whose tokens are certain: who asks in most rounds, and seldom takes what is
        said, needs no draft made of it. A class that overrides `propose` and not this has None.
        """
        return None

    def observe(
        self, text: Sequence, tokens: Sequenced[int], logits_nV: Float[Tensor, "n V"]
    ) -> None:
        """The target's logits after the text's last token and after each kept drafted one.

        `tokens` are those n tokens. Called once a round and text, before `commit`, where
        `wants_rows` asks for it; the rows are the target's and must not be changed.
        """

    def notice(self, text: Sequence, first: int, hidden_nF: Float[Tensor, "n F"]) -> None:
        """The target's hidden states of the text's tokens `first..first+n-1`, now settled.

        The states of one token stand side by side in the order of `taps`. Called before `commit`,
        and for each chunk of a prompt, once a token; tokens whose states the target never had
        (a beginning that it holds of an earlier text) are left out.
        """

    def commit(self, text: Sequence, accepted: int) -> None:
        """The text kept its first `accepted` drafted tokens and gained one of the target's.

        Not called, as `timed` is not, for rounds in which a controller asks nobody.
        """

    def timed(self, texts: Sequenced[Sequence], times: StageTimes) -> None:
        """The round it proposed for is over, committed and handed out, and took so long."""

    def discard(self, text: Sequence) -> None:
        """The round came to nothing: forget what it staged."""

    def close(self, text: Sequence) -> None:
        """The text is over: give back what was kept for it."""

    def target_changed(self) -> None:
        """The target has new weights: make anew what was made from the old ones.

        No text holds anything of the drafter at this time. A model of its own is left as it is.
        """
