"""Recording: texts made with a trace, as they are or observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.config import SamplingParams
from outrider.control.controller import Controller
from outrider.control.observe import Observed, observing
from outrider.control.trace import TextSettings, TracedRound, TracedText
from outrider.engine import Requests
from outrider.engine.settings import resolve_rule
from outrider.errors import InvalidConfig
from outrider.noise import fresh_seed
from outrider.types import Completion, Request

TIMED_TOKENS = 24
"""New tokens of a text that is made to time its rounds."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What texts are to be made: with whom, how far, and under which law.

    Attributes:
        prompts: token ids.
        sampling: of all of them; without a seed each gets one of its own, which chooses no rule.
        depth: levels drafted at most; 0 is plain decoding.
        rule: None chooses by `sampling`.
        drafter: who guesses, a part of the engine's; None is the engine's own.
        batch: texts at a time; None makes all together.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    depth: int
    rule: str | None = None
    batch: int | None = None
    drafter: str | None = None


def completed(requests: Requests, asked: Asked) -> list[Completion]:
    """Texts made without a trace."""
    return _complete(requests, asked, resolved(requests, asked), trace=False)[1]


def recorded(requests: Requests, asked: Asked) -> list[TracedText]:
    """Texts made and traced as they are, `asked.batch` at a time."""
    return _made(requests, asked, resolved(requests, asked), None)


def observed(requests: Requests, asked: Asked) -> list[TracedText]:
    """Texts with a guess behind every token; see `outrider.control.observe`.

    Raises:
        InvalidConfig: a controller drafts.
    """
    drafter = requests.engine.choice.of(asked.drafter)
    if isinstance(drafter, Controller):
        raise InvalidConfig(
            f"drafter={drafter.name!r} chooses by what was kept, and of an observed text nothing "
            "is: name one drafter, such as draft or ngram, or observe several (`observed_by`)"
        )
    rule = resolved(requests, asked)
    with observing(rule, drafter, lossless=requests.lossless) as watched:
        return _made(requests, asked, watched.name, watched)


def observed_by(requests: Requests, asked: Asked, drafters: Sequence[str]) -> list[TracedText]:
    """The same texts with a guess of each drafter behind every token, one drafter after another.

    Raises:
        InvalidConfig: one of them is a controller, or not loaded.
    """
    rule, seed = resolved(requests, asked), asked.sampling.seed
    own = replace(asked.sampling, seed=fresh_seed() >> 1 if seed is None else seed)
    return [
        text
        for name in drafters
        for text in observed(requests, replace(asked, sampling=own, rule=rule, drafter=name))
    ]


def alternatives_of(requests: Requests) -> list[str]:
    """Names of the drafters that the engine's controller chooses among; none where there is none.

    Raises:
        InvalidConfig: two of them go by one name.
    """
    drafter = requests.engine.drafter
    if not isinstance(drafter, Controller):
        return []
    names = [one.name for one in drafter.drafters]
    if len(set(names)) < len(names):
        raise InvalidConfig(
            f"drafter={drafter.name!r} has two drafters of one name among {', '.join(names)}; "
            "observe one at a time"
        )
    return names


def timed(
    requests: Requests, asked: Asked, depths: Sequence[int]
) -> tuple[list[TracedText], list[TracedText]]:
    """A few rounds of each depth as they run, to tell their costs.

    Two times through the depths, there and back, so that a machine that changes its pace meanwhile
    does not favour some of them, and may be seen to. What no stage of a round holds is measured
    before, without a trace, which takes time of its own.
    """
    sampling = replace(asked.sampling, max_tokens=TIMED_TOKENS, min_tokens=0, ignore_eos=True)
    few = replace(asked, sampling=sampling)
    metrics = requests.engine.metrics
    completed(requests, replace(few, depth=max(depths)))
    before, rounds = metrics.other_s, metrics.rounds + metrics.plain_rounds
    completed(requests, replace(few, depth=max(depths)))
    rounds = metrics.rounds + metrics.plain_rounds - rounds
    # A round of several texts counts once for each of them.
    other_s = (metrics.other_s - before) * (asked.batch or len(asked.prompts)) / max(1, rounds)

    def through(depths: Sequence[int]) -> list[TracedText]:
        return [
            replace(text, settings=replace(text.settings, other_s=max(0.0, other_s)))
            for depth in depths
            for text in recorded(requests, replace(few, depth=depth))
        ]

    return through(depths), through(depths[::-1])


def depths_to_time(depth: int) -> tuple[int, ...]:
    """0, 1, 2, 4, ... and the depth itself: between them costs are near to a line."""
    found = [0]
    step = 1
    while step < depth:
        found.append(step)
        step *= 2
    return (*found, depth) if depth else (0,)


def resolved(requests: Requests, asked: Asked) -> str:
    """The verification rule of what is asked for."""
    trees = requests.engine.trees
    return resolve_rule(asked.rule, asked.sampling, trees=trees, lossless=requests.lossless)


def _made(
    requests: Requests, asked: Asked, rule: str, watched: Observed | None
) -> list[TracedText]:
    made, done = _complete(requests, asked, rule, trace=True)
    texts: list[TracedText] = []
    for request, one in zip(made, done, strict=True):
        rounds = [
            TracedRound(own, None if watched is None else watched.would(one.seed, own.position))
            for own in one.trace or ()
        ]
        settings = settings_of(requests, asked, request.prompt, observed=watched is not None)
        texts.append(TracedText(settings, tuple(rounds)))
    return texts


def _complete(
    requests: Requests, asked: Asked, rule: str, *, trace: bool
) -> tuple[list[Request], list[Completion]]:
    seed = fresh_seed() >> 1 if asked.sampling.seed is None else asked.sampling.seed
    wanted = [
        Request(
            tuple(prompt),
            # Texts of one seed and position would share an address, and what was noted there.
            replace(asked.sampling, seed=(seed + i) % 2**64),
            rule=rule,
            depth=asked.depth,
            drafter=asked.drafter if asked.depth else None,
            trace=trace,
        )
        for i, prompt in enumerate(asked.prompts)
    ]
    size = asked.batch or max(1, len(wanted))
    parts = [wanted[first : first + size] for first in range(0, len(wanted), size)]
    return wanted, [one for part in parts for one in requests.complete(part)]


def settings_of(
    requests: Requests,
    asked: Asked,
    prompt: Sequence[int],
    *,
    observed: bool,
) -> TextSettings:
    """How a text of these requests is made, for its trace."""
    trees = requests.engine.trees
    limit = asked.sampling.max_tokens
    drafter = requests.engine.choice.of(asked.drafter)
    return TextSettings(
        drafter=drafter.name,
        rule=resolved(requests, asked),
        depth=asked.depth,
        temperature=asked.sampling.temperature,
        prompt_tokens=len(prompt),
        max_tokens=limit,
        observed=observed,
        width=None if trees is None else trees.width,
        nodes=None if trees is None else trees.nodes,
        certain=drafter.certain,
    )
