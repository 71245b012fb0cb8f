"""How far to draft: policies that a replay can try, each seeing no more than it would have seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from outrider.config import check_between, check_whole, nearest
from outrider.control.acceptance import Acceptance
from outrider.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class View:
    """What a policy may look at before a round drafts.

    Attributes:
        room: levels that may be drafted.
        draft_probs: of a chain each token's probability under the draft's law; empty where the
            trace has none. A policy may look at one after it has decided to draft it, and no
            further.
        round_s: seconds of a round that drafts so many levels.
        kept: levels that the round would keep, if so many were drafted. The future: for oracles.
    """

    room: int
    draft_probs: tuple[float, ...]
    round_s: Callable[[int], float]
    kept: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Policy(ABC):
    """Decides how many levels a round drafts.

    Attributes:
        name: what tables call it.
    """

    name: str

    @property
    def oracle(self) -> bool:
        """Whether it looks into the future, so that no real policy can do as well for sure."""
        return False

    @property
    def nodes(self) -> int | None:
        """Nodes of trees at most; None leaves trees as they were traced."""
        return None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Parent rows of the one shape of all trees; None leaves trees as they were traced."""
        return None

    @abstractmethod
    def levels(self, view: View, past: Acceptance) -> int:
        """Levels to draft, at most `view.room`."""


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """The same depth in every round, 0 being plain decoding, and one budget of nodes or shape."""

    depth: int = 0
    budget: int | None = None
    parents: tuple[int, ...] | None = None

    @property
    def nodes(self) -> int | None:
        """The budget."""
        return self.budget

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape."""
        return self.parents

    def levels(self, view: View, past: Acceptance) -> int:
        """The depth."""
        return min(self.depth, view.room)


@dataclass(frozen=True, slots=True)
class Threshold(Policy):
    """Drafts on until a token was less likely than that under the draft's own law; it stays."""

    least: float = 0.0

    def levels(self, view: View, past: Acceptance) -> int:
        """As far as the draft was sure."""
        if view.room and not view.draft_probs:
            return 0
        for level, prob in enumerate(view.draft_probs[: view.room], start=1):
            if prob < self.least:
                return level
        return min(view.room, len(view.draft_probs))


@dataclass(frozen=True, slots=True)
class Expected(Policy):
    """The depth of most expected tokens for its time, by what was kept in past rounds."""

    def levels(self, view: View, past: Acceptance) -> int:
        """The smallest of the best."""
        if past.weight == 0.0:
            return view.room
        rates = [
            past.expected_tokens(depth) / view.round_s(depth) for depth in range(view.room + 1)
        ]
        return rates.index(max(rates))


@dataclass(frozen=True, slots=True)
class Oracle(Policy):
    """Drafts what will be kept and nothing else, or nothing where that is cheaper.

    Of all walks through the text it takes the quickest, which is found from the end.
    """

    @property
    def oracle(self) -> bool:
        """It is one."""
        return True

    def levels(self, view: View, past: Acceptance) -> int:
        """The most tokens for their time in this round; `replay` looks further."""
        rates = [(1 + view.kept(depth)) / view.round_s(depth) for depth in range(view.room + 1)]
        return rates.index(max(rates))


FORMS = {
    "traced": "what was run, as it was timed",
    "none": "plain decoding",
    "depth:K": "K levels in every round",
    "tree:K,N": "trees of K levels and N nodes",
    "threshold:P": "until a token is less likely than P to the draft",
    "expected": "the depth that pays best by past rounds",
    "oracle": "what will be kept, and nothing else",
}
"""What a policy may be called, and what it does."""


def policy_of(spec: str) -> Policy | None:
    """The policy of a name; None for `traced`.

    Raises:
        InvalidConfig: an unknown name, with the nearest known one, or numbers that make no policy.
    """
    kind, _, rest = spec.partition(":")
    try:
        if kind == "traced" and not rest:
            return None
        if kind == "none" and not rest:
            return Fixed(spec)
        if kind == "depth":
            return Fixed(spec, _whole("depth", rest))
        if kind == "tree":
            depth, _, nodes = rest.partition(",")
            return Fixed(spec, _whole("depth", depth), _whole("nodes", nodes))
        if kind == "threshold":
            least = float(rest)
            check_between("threshold", least, 0.0, 1.0)
            return Threshold(spec, least)
        if kind == "expected" and not rest:
            return Expected(spec)
        if kind == "oracle" and not rest:
            return Oracle(spec)
    except ValueError as error:
        raise InvalidConfig(f"policy {spec!r}: {error}; policies are {', '.join(FORMS)}") from error
    raise InvalidConfig(
        f"policy {spec!r} does not exist; policies are {', '.join(FORMS)}"
        + nearest(kind, [form.partition(":")[0] for form in FORMS])
    )


def _whole(name: str, text: str) -> int:
    number = int(text)
    check_whole(name, number, 1)
    return number
