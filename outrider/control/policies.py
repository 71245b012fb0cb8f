"""Who drafts, and how far: policies for replays, each seeing no more than it would have seen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from outrider.config import check_between, check_whole, nearest
from outrider.control.acceptance import Acceptance
from outrider.control.settings import ControlSettings
from outrider.drafters.specs import KINDS
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
class Policy:
    """What rounds draft.

    Attributes:
        name: what tables call it.
        drafter: who drafts; None where that is left open: to the one there is, or to the policy.
    """

    name: str
    drafter: str | None = field(default=None, kw_only=True)

    @property
    def oracle(self) -> bool:
        """Whether it looks into the future, so that no real policy can do as well for sure."""
        return False


@dataclass(frozen=True, slots=True)
class Controlled(Policy):
    """The controller itself, among the drafters there are and nobody."""

    settings: ControlSettings = field(default_factory=ControlSettings)


@dataclass(frozen=True, slots=True)
class Depths(Policy, ABC):
    """Decides how many levels a round drafts."""

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
class Fixed(Depths):
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
class Threshold(Depths):
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
class Expected(Depths):
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
class Oracle(Depths):
    """Drafts what will be kept and nothing else, or nothing where that is cheaper.

    Of all walks through the text it takes the quickest, which is found from the end; of several
    drafters whoever makes it quicker in each round.
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
    "auto": "what the controller chooses among the traced drafters",
    "oracle": "what will be kept, and nothing else",
    "DRAFTER:K": "K levels of one of several traced drafters; DRAFTER:POLICY is that policy with "
    "that drafter",
}
"""What a policy may be called, and what it does."""


OWN = ("depth", "tree", "threshold", "expected", "auto", "oracle")
"""Those that can be one drafter's."""


def policy_of(spec: str, drafters: Collection[str] = ()) -> Policy | None:
    """The policy of a name; None for `traced`.

    Args:
        spec: one of `FORMS`.
        drafters: names that some drafters go by beside the kinds there are.

    Raises:
        InvalidConfig: an unknown name, with the nearest known one, or numbers that make no policy.
    """
    if spec == "traced":
        return None
    if spec == "none":
        return Fixed(spec)
    try:
        found = _parsed(spec, spec)
        if found is not None:
            return found
        drafter, own = _of_drafter(spec, drafters)
        found = None if drafter is None else _parsed(spec, own, drafter)
    except ValueError as error:
        raise InvalidConfig(f"policy {spec!r}: {error}; policies are {', '.join(FORMS)}") from error
    if found is None:
        kind = spec.partition(":")[0]
        raise InvalidConfig(
            f"policy {spec!r} does not exist; policies are {', '.join(FORMS)}"
            + nearest(kind, [form.partition(":")[0] for form in FORMS])
        )
    return found


def _parsed(name: str, spec: str, drafter: str | None = None) -> Policy | None:
    """The policy of one of the names in `OWN`; None where it is another."""
    kind, _, rest = spec.partition(":")
    if kind == "depth":
        return Fixed(name, _whole("depth", rest), drafter=drafter)
    if kind == "tree":
        depth, _, nodes = rest.partition(",")
        return Fixed(name, _whole("depth", depth), _whole("nodes", nodes), drafter=drafter)
    if kind == "threshold":
        least = float(rest)
        check_between("threshold", least, 0.0, 1.0)
        return Threshold(name, least, drafter=drafter)
    plain = {"expected": Expected, "auto": Controlled, "oracle": Oracle}
    return plain[spec](name, drafter=drafter) if spec in plain else None


def _of_drafter(spec: str, drafters: Collection[str]) -> tuple[str | None, str]:
    """The drafter that a policy begins with, None where there is none, and the policy behind it.

    A drafter's name may have a colon of its own.
    """
    parts = spec.split(":")
    for end in range(1, len(parts)):
        name, own = ":".join(parts[:end]), ":".join(parts[end:])
        if own.isdecimal():
            own = f"depth:{own}"
        kinds = {part.partition(":")[0] for part in name.split("+")}
        known = name in drafters or kinds <= {*KINDS} - {"none", "auto"}
        if known and own.partition(":")[0] in OWN:
            return name, own
    return None, spec


def _whole(name: str, text: str) -> int:
    number = int(text)
    check_whole(name, number, 1)
    return number
