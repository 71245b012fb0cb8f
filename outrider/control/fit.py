"""Costs from traced rounds: what really run rounds took is what others like them will take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.control.trace import TracedRound, TracedText
from outrider.errors import InvalidConfig

CONTEXT = 512
"""Tokens of text within which forwards count as alike."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A kind of round: who drafted, texts, levels of the one looked at, and nodes of all."""

    drafter: str
    texts: int
    levels: int
    nodes: int


def costs_of(texts: Iterable[TracedText]) -> Costs:
    """The costs that the rounds of some texts had.

    Those in which a prompt was read tell what reading one costs, and nothing else.

    Raises:
        InvalidConfig: no round but those.
    """
    texts = list(texts)
    rounds = [(text, one) for text in texts for one in text.rounds if one.trace.round > 0]
    if not rounds:
        raise InvalidConfig("no round but those that read prompts; trace longer texts")
    kinds: dict[_Seen, list[TracedRound]] = defaultdict(list)
    for text, one in rounds:
        size = one.trace.num_texts
        nodes = one.trace.num_rows - size
        kinds[_Seen(text.settings.drafter, size, levels_of(one), nodes)].append(one)
    other_s = median(text.settings.other_s for text in texts)
    text_s, row_s = _verification(kinds, other_s)
    costs = Costs(
        _forwards([one for _, one in rounds]),
        {name: _drafting(kinds, name) for name in {kind.drafter for kind in kinds}},
        verify_text_s=text_s,
        verify_row_s=row_s,
    )
    return _with_prompts(costs, texts)


def levels_of(one: TracedRound) -> int:
    """Levels that a round drafted."""
    depths = [0]
    for parent in one.trace.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def _forwards(rounds: list[TracedRound]) -> tuple[ForwardCost, ...]:
    """Medians by texts, rows and, where all kinds of forwards were seen at each, contexts."""
    found: dict[int, dict[tuple[int, int], list[TracedRound]]] = {}
    for one in rounds:
        size = one.trace.num_texts
        own = found.setdefault(one.trace.position // CONTEXT, {})
        own.setdefault((size, one.trace.num_rows), []).append(one)
    kinds = {kind for own in found.values() for kind in own}
    if any(own.keys() != kinds for own in found.values()):
        # Lines between contexts would lie between rows of different numbers.
        found = {0: {k: [r for own in found.values() for r in own.get(k, [])] for k in kinds}}
    return tuple(
        ForwardCost(
            size, rows, where * CONTEXT + CONTEXT // 2, median(r.trace.times.score_s for r in seen)
        )
        for where, own in sorted(found.items())
        for (size, rows), seen in sorted(own.items())
    )


def _drafting(kinds: dict[_Seen, list[TracedRound]], name: str) -> DraftCost:
    """A line through the medians: a round, its levels, and nodes beside one another."""
    own = {kind: seen for kind, seen in kinds.items() if kind.drafter == name and kind.levels}
    if not own:
        return DraftCost()
    rows = [[1.0, kind.levels, kind.nodes - kind.levels] for kind in own]
    times = [median(one.trace.times.draft_s for one in seen) for seen in own.values()]
    return DraftCost(*_line(rows, times, [len(seen) for seen in own.values()]))


def _verification(kinds: dict[_Seen, list[TracedRound]], other_s: float) -> tuple[float, float]:
    """What a text, and each of its drafted rows more, take beside drafting and scoring."""
    rows = [[float(kind.texts), float(kind.nodes)] for kind in kinds]
    times = [
        median(one.trace.times.verify_s + one.trace.times.commit_s for one in seen) + other_s
        for seen in kinds.values()
    ]
    text_s, row_s = _line(rows, times, [len(seen) for seen in kinds.values()])
    return text_s, row_s


def _line(rows: list[list[float]], heights: list[float], counts: list[int]) -> list[float]:
    """Least squares with no coefficient below 0; what cannot be told apart from others is 0."""
    table, heights_n = np.asarray(rows), np.asarray(heights)
    weights_n = np.sqrt(np.asarray(counts, dtype=np.float64))
    free = [i for i in range(table.shape[1]) if table[:, i].any()]
    while True:
        part: Any = table[:, free] * weights_n[:, None]
        found = np.linalg.lstsq(part, heights_n * weights_n, rcond=1e-9)[0]
        if not len(found) or found.min() >= 0:
            break
        free.pop(int(found.argmin()))
    whole = [0.0] * table.shape[1]
    for place, value in zip(free, found, strict=True):
        whole[place] = float(value)
    return whole


def _with_prompts(costs: Costs, texts: list[TracedText]) -> Costs:
    """The same with what reading a token of a prompt takes, by target and drafter."""
    target: list[float] = []
    drafts: dict[str, list[float]] = defaultdict(list)
    for text in texts:
        first, name = text.rounds[0], text.settings.drafter
        # Texts that began together share the time of reading all their prompts.
        tokens = text.settings.prompt_tokens * first.trace.num_texts
        if first.trace.round or tokens < 2:
            continue
        size, rows = first.trace.num_texts, first.trace.num_rows
        score_s = costs.score_s(rows, size, text.settings.prompt_tokens)
        draft_s = costs.draft_s(name, levels_of(first), rows - size)
        target.append(max(0.0, first.trace.times.score_s - score_s) / tokens)
        drafts[name].append(max(0.0, first.trace.times.draft_s - draft_s) / tokens)
    return Costs(
        costs.forwards,
        {
            name: DraftCost(one.round_s, one.level_s, one.node_s, median(drafts.get(name) or [0.0]))
            for name, one in costs.drafts.items()
        },
        prompt_token_s=median(target) if target else 0.0,
        verify_text_s=costs.verify_text_s,
        verify_row_s=costs.verify_row_s,
    )
