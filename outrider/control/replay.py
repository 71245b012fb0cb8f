"""Replay: what another policy would have done with traced texts, and how long that takes.

What is known of the guesses stands in `guesses`, policies in `policies`, the controller's turn in
`rehearse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from outrider.control.acceptance import Acceptance
from outrider.control.costs import Costs
from outrider.control.fit import levels_of
from outrider.control.guesses import IN_LAW, Drafted, Guesses, Watched, together
from outrider.control.policies import Controlled, Depths, Fixed, Oracle, Policy, Threshold, View
from outrider.control.rehearse import rehearse
from outrider.control.replayed import Replayed, Step
from outrider.control.trace import TracedText
from outrider.errors import InvalidConfig


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
        texts: traced ones; of one that several drafters were observed at, each with its own.
        policy: what to draft; None takes what was run, and the time that it took.
        costs: what rounds take.
        batch: texts that share rounds.
        draw: which of the outcomes that have the same law, where what is kept has one.

    Raises:
        InvalidConfig: no text; what was run, of observed texts; an oracle for several texts; a
            threshold under `token` or `block`; a drafter that was not traced, or none named where
            there are several; more levels or nodes than were traced; and what `rehearse` refuses.
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
    watched = [_of_policy(one, policy) for one in together(texts, draw)]
    if isinstance(policy, Controlled):
        return rehearse(watched, policy, costs, batch=batch)
    assert isinstance(policy, Depths)
    if isinstance(policy, Fixed):
        _check_reach(watched, policy)
    steps: list[tuple[Step, ...]] = []
    wall_s = prompt_s = 0.0
    for first in range(0, len(watched), batch):
        if isinstance(policy, Oracle):
            found, read_s = _quickest(watched[first], costs)
            steps.append(tuple(found))
            wall_s, prompt_s = wall_s + sum(step.seconds for step in found), prompt_s + read_s
            continue
        group = [_Walk(one, policy, costs) for one in watched[first : first + batch]]
        while going := [walk for walk in group if walk.room >= 0]:
            wall_s += _together(going, costs)
        steps += [tuple(walk.steps) for walk in group]
        prompt_s += sum(walk.prompt_s for walk in group)
    return Replayed(policy.name, policy.oracle, tuple(steps), prompt_s, wall_s)


def _of_policy(watched: Watched, policy: Policy) -> Watched:
    """The guesses of those whom a policy may ask."""
    if policy.drafter is not None:
        if policy.drafter not in watched:
            raise InvalidConfig(
                f"policy {policy.name!r}: behind a text stands no guess of {policy.drafter!r}, but "
                f"of {', '.join(watched)}; trace with --observe --drafter "
                f"{','.join((*watched, policy.drafter))}"
            )
        return {policy.drafter: watched[policy.drafter]}
    open_to_all = _is_plain(policy) or isinstance(policy, Oracle | Controlled)
    if len(watched) > 1 and not open_to_all:
        raise InvalidConfig(
            f"policy {policy.name!r} names no drafter, and {', '.join(watched)} were traced; "
            f"say {next(iter(watched))}:{policy.name}"
        )
    return watched


def _check_reach(texts: Sequence[Watched], policy: Fixed) -> None:
    """Refuses a draft larger than the smallest bound that a text was traced under."""
    settings = [guesses.text.settings for watched in texts for guesses in watched.values()]
    deepest = min(one.depth for one in settings)
    largest = min(one.depth if one.nodes is None else one.nodes for one in settings)
    for what, asked, most, options in (
        ("levels", policy.depth, deepest, "--depth"),
        ("nodes", policy.nodes or 0, largest, "--width and --nodes"),
    ):
        if asked > most:
            raise InvalidConfig(
                f"policy {policy.name!r} asks for {asked} {what}, and drafts of the trace have "
                f"{most} at most; ask for at most {most}, or trace anew with {options} {asked}"
            )


def _is_plain(policy: Policy) -> bool:
    return isinstance(policy, Fixed) and policy.depth == 0


class _Walk:
    """One text under way, with one drafter."""

    def __init__(self, watched: Watched, policy: Depths, costs: Costs) -> None:
        self.guesses, self.policy, self.costs = next(iter(watched.values())), policy, costs
        self.settings = self.guesses.text.settings
        self.made = 0
        self.past = Acceptance()
        self.steps: list[Step] = []

    @property
    def room(self) -> int:
        """Levels that may be drafted: one less than there are tokens to make, -1 at the end."""
        left = self.guesses.num_tokens - self.made - 1
        return min(left, self.settings.depth)

    @property
    def context(self) -> int:
        """Tokens of the text as it stands."""
        return self.settings.prompt_tokens + self.made

    @property
    def prompt_s(self) -> float:
        """Reading the prompt, by the drafter too where the policy drafts at all."""
        read_s = _prompt_s(self.guesses, self.costs)
        return read_s if _is_plain(self.policy) else read_s + _reading_s(self.guesses, self.costs)

    def drafted(self, levels: int) -> Drafted:
        """What would be drafted now."""
        return self.guesses.draft(self.made, levels, self.policy.nodes, self.policy.shape)

    def next(self) -> Drafted:
        """What the policy drafts now."""
        view = View(
            self.room,
            self.guesses.draft_probs(self.made),
            lambda levels: _round_s(self.guesses, self.costs, self.made, self.drafted(levels)),
            lambda levels: self.drafted(levels).kept,
        )
        asked = self.policy.levels(view, self.past)
        found = self.drafted(asked)
        if asked:
            self.past = self.past.saw(found.kept, asked)
        return found

    def take(self, drafted: Drafted, seconds: float) -> None:
        """A round is over."""
        self.steps.append(_step(self.made, drafted, seconds, self.guesses.drafter))
        self.made += drafted.kept + 1


def _together(walks: list[_Walk], costs: Costs) -> float:
    """One round of several texts; its seconds."""
    drafts = [walk.next() for walk in walks]
    levels = max(one.levels for one in drafts)
    nodes = sum(one.nodes for one in drafts)
    context = sum(walk.context for walk in walks) // len(walks)
    size = len(walks)
    drafted_s = costs.draft_s(walks[0].guesses.drafter, levels, nodes) if levels else 0.0
    seconds = (
        drafted_s
        + costs.score_s(size + nodes, size, context)
        + size * costs.verify_text_s
        + nodes * costs.verify_row_s
    )
    for walk, one in zip(walks, drafts, strict=True):
        walk.take(one, seconds / size)
    return seconds


def _quickest(watched: Watched, costs: Costs) -> tuple[list[Step], float]:
    """The walk of the least time through a text, whoever guesses; and what reading prompts takes.

    Who has to read the prompt first reads it once, or is never asked.
    """
    own = list(watched.values())
    dear = [one for one in own if _reading_s(one, costs)]
    free = [one for one in own if not _reading_s(one, costs)]
    ways = [
        (_quickest_of(own[0], [*free, *some], costs), sum(_reading_s(one, costs) for one in some))
        for num in range(len(dear) + 1)
        for some in combinations(dear, num)
    ]
    steps, reading_s = min(ways, key=lambda way: sum(step.seconds for step in way[0]) + way[1])
    return steps, _prompt_s(own[0], costs) + reading_s


def _quickest_of(text: Guesses, asked: Sequence[Guesses], costs: Costs) -> list[Step]:
    """The same with some of the drafters, from the end to the beginning."""
    end = text.num_tokens
    best: list[tuple[float, Step | None]] = [(0.0, None)] * (end + 1)
    for made in reversed(range(end)):
        room = min(end - made - 1, text.text.settings.depth)
        drafts = [(text, Drafted(0, 0, 0))]
        drafts += [(one, one.draft(made, levels)) for one in asked for levels in range(1, room + 1)]
        ways: list[tuple[float, Step]] = []
        for one, found in drafts:
            step = _step(made, found, _round_s(one, costs, made, found), one.drafter)
            ways.append((step.seconds + best[made + step.kept + 1][0], step))
        best[made] = min(ways, key=lambda way: way[0])
    steps: list[Step] = []
    while (step := best[steps[-1].made + steps[-1].kept + 1 if steps else 0][1]) is not None:
        steps.append(step)
    return steps


def _round_s(guesses: Guesses, costs: Costs, made: int, drafted: Drafted) -> float:
    """Seconds of a round of one text by itself."""
    return costs.round_s(
        guesses.drafter if drafted.nodes else None,
        levels=drafted.levels,
        nodes=drafted.nodes,
        context=guesses.text.settings.prompt_tokens + made,
    )


def _step(made: int, drafted: Drafted, seconds: float, drafter: str) -> Step:
    return Step(
        made,
        drafted.levels,
        drafted.nodes,
        drafted.kept,
        seconds,
        drafted.known,
        drafter if drafted.nodes else None,
    )


def _prompt_s(guesses: Guesses, costs: Costs) -> float:
    """The target's reading of the prompt."""
    return guesses.text.settings.prompt_tokens * costs.prompt_token_s


def _reading_s(guesses: Guesses, costs: Costs) -> float:
    """The drafter's."""
    known = costs.drafts.get(guesses.drafter)
    return 0.0 if known is None else guesses.text.settings.prompt_tokens * known.prompt_token_s


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
            seconds = (one.seconds + text.settings.other_s) / one.trace.num_texts
            nodes, kept = len(one.trace.tokens), one.trace.kept - 1
            drafter = one.trace.drafters[0] if nodes else None
            own.append(Step(made, levels_of(one), nodes, kept, seconds, drafter=drafter))
        steps.append(tuple(own))
    wall_s = sum(step.seconds for text in steps for step in text)
    return Replayed("traced", False, tuple(steps), 0.0, wall_s)
