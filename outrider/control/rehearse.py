"""The controller on traced texts: the real one, among drafters that say what they said then.

Texts grow as the traced ones did, a clock goes on by what drafters and target cost, and that is all
the controller is told. So it chooses as it would have chosen, where rounds take what the costs say;
the time of choosing itself is left out. Drafts are chains.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field, replace

import torch

from outrider.config import SamplingParams
from outrider.control.controller import Controller
from outrider.control.costs import Costs
from outrider.control.guesses import Guesses, Watched
from outrider.control.policies import Controlled
from outrider.control.replayed import Replayed, Step
from outrider.decoding import Draft, rule_named
from outrider.drafters.base import Drafter, RoundDraws
from outrider.engine.draws import GroupDraws
from outrider.engine.group import Group
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence
from outrider.types import Request, StageTimes

CHUNK = 512
"""Tokens that a drafter reads ahead at a time, as engines have it read."""
_KEYS = itertools.count()


class Clock:
    """Seconds that pass when somebody says so; `reading_s` are those that drafters read in."""

    def __init__(self) -> None:
        self.now_s = self.reading_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


class Traced(Drafter):
    """Says of each text what a drafter said when it was traced, and takes as long.

    Args:
        name: the drafter's.
        certain: whether it looks things up.
        costs: what it takes.
        clock: goes on meanwhile.
    """

    def __init__(self, name: str, *, certain: bool, costs: Costs, clock: Clock) -> None:
        self.name, self.certain = name, certain
        self._costs, self._clock = costs, clock
        known = costs.drafts.get(name)
        self._token_s = 0.0 if known is None else known.prompt_token_s
        self._guesses: dict[int, Guesses] = {}
        self._read: dict[int, int] = {}
        self._asked: set[int] = set()

    def knows(self, text: Sequence, guesses: Guesses) -> None:
        """What it said of a text that begins."""
        self._guesses[text.key], self._read[text.key] = guesses, 0

    def unread(self, text: Sequence) -> int:
        """Tokens of the text that it did not read; of who looks things up none."""
        return 0 if self.certain else len(text.tokens) - self._read[text.key]

    def read(self, text: Sequence, rows: int) -> None:
        """Reads ahead."""
        seconds = rows * self._token_s
        self._read[text.key] += rows
        self._clock.now_s += seconds
        self._clock.reading_s += seconds

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """What it said there; nothing reaches beyond the end of the traced text."""
        chains: list[tuple[int, ...]] = []
        worths: list[tuple[float, ...]] = []
        for text, depth in zip(texts, depths, strict=True):
            guesses, made = self._guesses[text.key], text.num_output
            levels = min(depth, guesses.num_tokens - made - 1)
            chains.append(guesses.chain(made, levels, self.stop) if levels > 0 else ())
            worths.append(guesses.worths(made, len(chains[-1])) if chains[-1] else ())
            if depth > 0:
                # The last token is read with the first level.
                self.read(text, len(text.tokens) - self._read[text.key] - 1)
                self._asked.add(text.key)
        levels, nodes = max(map(len, chains)), sum(map(len, chains))
        self._clock.now_s += self._costs.draft_s(self.name, levels, nodes)
        draft = draws.points(chains)
        if self.stop is None or any(map(operator.ne, map(len, worths), map(len, chains))):
            return draft
        full = [[*own, *[0.0] * (levels - len(own))] for own in worths]
        worth_BN = torch.tensor(full, dtype=torch.float64).reshape(len(full), levels)
        return replace(draft, worth_BN=worth_BN)

    def commit(self, text: Sequence, accepted: int) -> None:
        """What was kept of a draft is read already."""
        if text.key in self._asked:
            self._asked.remove(text.key)
            self._read[text.key] = len(text.tokens) - 1

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        self._guesses.pop(text.key, None)
        self._read.pop(text.key, None)


@dataclass(slots=True, eq=False)
class _Text:
    """A text under way, as the controller sees it."""

    watched: Watched
    guesses: Guesses
    text: Sequence
    steps: list[Step] = field(default_factory=list[Step])

    @classmethod
    def of(cls, watched: Watched) -> _Text:
        """None of it is made; of its prompt nothing is known but how long it was."""
        guesses = next(iter(watched.values()))
        settings = guesses.text.settings
        most = max(guesses.num_tokens, settings.max_tokens or 0)
        prompt = (0,) * settings.prompt_tokens
        text = Sequence(
            key=next(_KEYS),
            request=Request(prompt, SamplingParams(temperature=settings.temperature)),
            seed=0,
            rule=settings.rule,
            depth=settings.depth,
            max_tokens=most,
            end_tokens=frozenset(),
            tokens=list(prompt),
        )
        return cls(watched, guesses, text)

    @property
    def over(self) -> bool:
        return self.text.num_output >= self.guesses.num_tokens

    @property
    def alone(self) -> bool:
        """Whether there is room for the target's own token alone, so that nobody is asked."""
        return min(self.text.depth, self.text.remaining - 1) < 1

    def take(self, drafter: str | None, levels: int, seconds: float) -> int:
        """A round is over; how many drafted tokens it kept."""
        made, kept, known = self.text.num_output, 0, True
        if drafter is not None:
            found = self.watched[drafter].draft(made, levels)
            kept, known = found.kept, found.known
        self.steps.append(Step(made, levels, levels, kept, seconds, known, drafter))
        self.text.tokens += self.guesses.tokens[made : made + kept + 1]
        return kept


def rehearse(
    texts: Sequenced[Watched], policy: Controlled, costs: Costs, *, batch: int = 1
) -> Replayed:
    """Has the controller go through texts, `batch` of them at a time and one after another.

    It begins with no measured costs, and what it learns of one text it knows in the next.

    Raises:
        InvalidConfig: texts in which not every place has a guess of each of the same drafters,
            chains all of them.
    """
    _check(texts, policy)
    stage = _Stage(texts[0], policy, costs)
    steps: list[tuple[Step, ...]] = []
    wall_s = 0.0
    for first in range(0, len(texts), batch):
        group = [stage.enter(one) for one in texts[first : first + batch]]
        while going := [one for one in group if not one.over]:
            wall_s += stage.round(going)
        steps += [tuple(one.steps) for one in group]
    tokens = sum(next(iter(one.values())).text.settings.prompt_tokens for one in texts)
    prompt_s = tokens * costs.prompt_token_s + stage.reading_s
    return Replayed(policy.name, policy.oracle, tuple(steps), prompt_s, wall_s)


class _Stage:
    """The controller, its drafters, and how long things take."""

    def __init__(self, watched: Watched, policy: Controlled, costs: Costs) -> None:
        self._costs, self._clock = costs, Clock()
        self._drafters = {
            name: Traced(
                name,
                certain=guesses.text.settings.certain,
                costs=costs,
                clock=self._clock,
            )
            for name, guesses in watched.items()
        }
        self._controller = Controller(
            list(self._drafters.values()), policy.settings, clock=self._clock
        )
        self._lists: dict[tuple[int, ...], list[Sequence]] = {}

    @property
    def reading_s(self) -> float:
        """Seconds in which drafters read what they had not read yet."""
        return self._clock.reading_s

    def enter(self, watched: Watched) -> _Text:
        """A text that begins."""
        one = _Text.of(watched)
        for name, guesses in watched.items():
            self._drafters[name].knows(one.text, guesses)
        return one

    def round(self, texts: list[_Text]) -> float:
        """A round of all texts, those together that an engine has together; reading left out."""
        groups: dict[tuple[bool, str], list[_Text]] = {}
        drafted_for = {one.text.rule for one in texts if not one.alone}
        for one in texts:
            # A last token comes with the others' round.
            last = one.text.depth > 0 and one.text.num_output > 0 and one.text.rule in drafted_for
            groups.setdefault((one.alone and not last, one.text.rule), []).append(one)
        return sum(
            self._plain(own) if alone else self._chosen(own) for (alone, _), own in groups.items()
        )

    def _plain(self, texts: list[_Text]) -> float:
        """Nobody is asked."""
        seconds = self._costs.round_s(texts=len(texts), context=_context(texts))
        for one in texts:
            one.take(None, 0, seconds / len(texts))
            self._leave(one)
        return seconds

    def _chosen(self, texts: list[_Text]) -> float:
        """The controller is asked, and told what became of it."""
        for one in texts:
            # Between rounds, which is where engines have it done.
            while self._controller.unread(one.text) > CHUNK:
                self._controller.read(one.text, CHUNK)
        controller, costs, size = self._controller, self._costs, len(texts)
        # An engine's list stays the same while its members do.
        own = [one.text for one in texts]
        own = self._lists.setdefault(tuple(text.key for text in own), own)
        group = Group(own, controller, rule_named(texts[0].text.rule, lossless=False))
        started, read_s = self._clock.now_s, self._clock.reading_s
        # No law is asked for, so none has a width.
        draft = controller.propose(own, group.depths(), GroupDraws(group, group.noise(), 1))
        draft_s = self._clock.now_s - started
        counts = draft.tree.counts_B.tolist()
        score_s = costs.score_s(size + sum(counts), size, _context(texts))
        rest_s = size * costs.verify_text_s + sum(counts) * costs.verify_row_s
        prompts_s = costs.prompt_token_s * sum(
            one.text.num_prompt for one in texts if not one.steps
        )
        seconds = draft_s - (self._clock.reading_s - read_s) + score_s + rest_s
        for b, (one, levels) in enumerate(zip(texts, counts, strict=True)):
            drafter = controller.names[int(draft.parts()[b, 0])] if levels else None
            controller.commit(one.text, one.take(drafter, levels, seconds / size))
        controller.timed(own, StageTimes(draft_s, score_s + prompts_s, rest_s))
        for one in texts:
            self._leave(one)
        return seconds

    def _leave(self, one: _Text) -> None:
        """Forgets a text that is over."""
        if one.over:
            one.text.finish_reason = "length"
            self._controller.close(one.text)


def _context(texts: list[_Text]) -> int:
    return sum(len(one.text.tokens) for one in texts) // len(texts)


def _check(texts: Sequenced[Watched], policy: Controlled) -> None:
    """Refuses what the controller cannot be taken through."""
    for watched in texts:
        if watched.keys() != texts[0].keys():
            raise InvalidConfig(
                f"policy {policy.name!r}: some texts have guesses of {', '.join(texts[0])}, others "
                f"of {', '.join(watched)}; trace all of them, or replay one file at a time"
            )
        for guesses in watched.values():
            settings = guesses.text.settings
            if not settings.observed:
                raise InvalidConfig(
                    f"policy {policy.name!r} needs a guess of each drafter behind every token; "
                    "trace with --observe"
                )
            if settings.width is not None:
                raise InvalidConfig(
                    f"policy {policy.name!r} replays chains, and the trace has trees, "
                    f"{settings.width} wide; trace without --width"
                )
