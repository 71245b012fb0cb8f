"""Costs measured on really drafted rows: short texts by the engine itself, its stages timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from outrider.config import SamplingParams
from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.decoding import Draft
from outrider.drafters import NoDrafter
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.combined import SeveralDrafters
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.base import Target
from outrider.sequence import Sequence
from outrider.types import Request, StageTimes

CLASS = 64
"""Contexts are rounded to so many tokens."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A round that was timed; `unread` are the tokens of prompts that were read in it."""

    drafter: str | None
    texts: int
    context: int
    unread: int
    levels: int
    drafted: int
    times: StageTimes


class _Watch(SeveralDrafters):
    """One drafter at one depth, whose rounds are noted. The target has it already."""

    def __init__(self, drafter: Drafter, depth: int) -> None:
        super().__init__([drafter])
        self.name = drafter.name
        self._depth = depth
        self._seen: set[int] = set()
        self._last = (0, 0, 0)
        self.rounds: list[Timed] = []

    def attach(self, target: Target) -> Target:
        """The target as it is."""
        return target

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The drafter's draft."""
        unread = sum(text.num_prompt for text in texts if text.key not in self._seen)
        self._seen.update(text.key for text in texts)
        depths = [min(depth, self._depth) for depth in depths]
        draft = self.drafters[0].propose(texts, depths, draws)
        self._last = (unread, draft.tree.depth, int(draft.tree.counts_B.sum()))
        return draft

    def timed(self, texts: Sequenced[Sequence], times: StageTimes) -> None:
        """Notes the round."""
        context = sum(len(text.tokens) for text in texts) // len(texts) // CLASS * CLASS
        name = None if isinstance(self.drafters[0], NoDrafter) else self.name
        self.rounds.append(Timed(name, len(texts), context, *self._last, times))


def measure_costs(
    target: Target,
    drafters: Sequenced[Drafter],
    prompts: Sequenced[Sequenced[int]],
    *,
    depths: Sequenced[int] = (1, 4, 8),
    batches: Sequenced[int] = (1, 4),
    tokens: int = 24,
    limit_s: float = 25.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """What rounds cost on this machine: plain ones first, then each drafter's at some depths.

    Args:
        target: as an engine of these drafters has it.
        drafters: those whose costs are wanted.
        prompts: of the lengths that matter; texts that are decoded together take the next ones.
        depths: tokens drafted a round.
        batches: texts decoded together.
        tokens: new tokens of each text.
        limit_s: seconds after which nothing new is begun.
        clock: of that limit.

    Raises:
        InvalidConfig: no prompt.
    """
    if not prompts:
        raise InvalidConfig("no prompts to measure costs with; give at least one")
    started, rounds = clock(), list[Timed]()
    wanted = [(NoDrafter(), 1), *((one, depth) for depth in depths for one in drafters)]
    for num in batches:
        for drafter, depth in wanted:
            if rounds and clock() - started > limit_s:
                break
            watch = _Watch(drafter, depth)
            requests = Requests(
                Engine(target, watch, Emitter(None)), depth=depth, end_tokens=frozenset()
            )
            params = SamplingParams(max_tokens=tokens, temperature=0.0)
            requests.complete(
                [Request(tuple(prompts[i % len(prompts)]), params) for i in range(num)]
            )
            rounds += watch.rounds
    return costs_of(rounds)


def costs_of(rounds: Iterable[Timed]) -> Costs:
    """The costs that timed rounds come to, by medians."""
    rounds = list(rounds)
    clean = [one for one in rounds if not one.unread] or rounds
    forwards: dict[tuple[int, int, int], list[float]] = {}
    for one in clean:
        place = (one.texts, one.texts + one.drafted, one.context)
        forwards.setdefault(place, []).append(one.times.score_s)
    names = dict.fromkeys(one.drafter for one in rounds if one.drafter is not None)
    plain = [one for one in clean if not one.drafted]
    text_s = _median([_rest(one) / one.texts for one in plain])
    row_s = _median(
        [
            (_rest(one) / one.texts - text_s) * one.texts / one.drafted
            for one in clean
            if one.drafted
        ]
    )
    return Costs(
        tuple(ForwardCost(*place, median(found)) for place, found in forwards.items()),
        {name: _draft_cost([one for one in rounds if one.drafter == name]) for name in names},
        _median([one.times.score_s / one.unread for one in rounds if one.unread]),
        text_s,
        row_s,
    )


def _draft_cost(rounds: Sequenced[Timed]) -> DraftCost:
    clean = [one for one in rounds if one.levels and not one.unread]
    alone = [one.times.draft_s / one.levels for one in clean if one.texts == 1]
    level_s = _median(alone or [one.times.draft_s / one.levels / one.texts for one in clean])
    more = [
        (one.times.draft_s / one.levels - level_s) / (one.texts - 1)
        for one in clean
        if one.texts > 1
    ]
    reading = [
        (one.times.draft_s - one.levels * level_s) / one.unread for one in rounds if one.unread
    ]
    return DraftCost(0.0, level_s, _median(more), _median(reading))


def _rest(one: Timed) -> float:
    return one.times.verify_s + one.times.commit_s


def _median(found: Sequenced[float]) -> float:
    """Of differences, which noise may have made negative; 0 of nothing."""
    return max(0.0, median(found)) if found else 0.0


def facts_of(model: str, info: Mapping[str, Any], drafters: Iterable[Drafter]) -> Mapping[str, Any]:
    """What costs belong to, beside torch and the processor: a folder, how it runs, who drafts."""
    known = {name: value for name, value in info.items() if name != "cache"}
    names = [drafter.name for drafter in drafters]
    return {**known, "model": model, "drafters": names, "threads": torch.get_num_threads()}
