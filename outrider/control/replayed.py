"""What a policy would have done with traced texts, round by round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """A round of a replayed text: tokens made before it, what it drafted and kept, its seconds.

    `known`: whether the trace says all that would have been kept; `drafter` is None where nobody
    drafted anything.
    """

    made: int
    levels: int
    nodes: int
    kept: int
    seconds: float
    known: bool = True
    drafter: str | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy would have done with some texts.

    Attributes:
        policy: its name.
        oracle: whether it looks into the future.
        steps: of each text.
        prompt_s: seconds of reading prompts, by drafters too.
        wall_s: of all rounds, which texts may share.
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
    def rounds_by_drafter(self) -> dict[str, int]:
        """Rounds by who drafted in them; `none` where nobody drafted anything."""
        counts = Counter(step.drafter or "none" for text in self.steps for step in text)
        return dict(counts.most_common())

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
