"""Recording: texts made with a trace, as they are or observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.config import SamplingParams
from outrider.control.observe import NAME, Observed, observing
from outrider.control.trace import TextSettings, TracedRound, TracedText
from outrider.engine import Requests
from outrider.engine.settings import resolve_rule
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
        batch: texts at a time; None makes all together.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    depth: int
    rule: str | None = None
    batch: int | None = None


def recorded(requests: Requests, asked: Asked) -> list[TracedText]:
    """Texts made and traced as they are, `asked.batch` at a time."""
    return _made(requests, asked, resolved(requests, asked), None)


def observed(requests: Requests, asked: Asked) -> list[TracedText]:
    """The same texts with a guess behind every token; see `outrider.control.observe`."""
    rule = resolved(requests, asked)
    with observing(rule, lossless=requests.lossless) as watched:
        return _made(requests, asked, NAME, watched)


def timed(requests: Requests, asked: Asked, depths: Sequence[int]) -> list[TracedText]:
    """A few rounds of each depth as they run, to tell their costs; the first text is not counted.

    Two times through the depths, there and back, so that a machine that changes its pace meanwhile
    does not favour some of them.
    """
    few = replace(asked, sampling=replace(asked.sampling, max_tokens=TIMED_TOKENS, min_tokens=0))
    recorded(requests, replace(few, depth=max(depths)))
    return [
        text
        for depth in (*depths, *reversed(depths))
        for text in recorded(requests, replace(few, depth=depth))
    ]


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
    seed = fresh_seed() >> 1 if asked.sampling.seed is None else asked.sampling.seed
    wanted = [
        Request(
            tuple(prompt),
            # Texts of one seed and position would share an address, and what was noted there.
            replace(asked.sampling, seed=(seed + i) % 2**64),
            rule=rule,
            depth=asked.depth,
            trace=True,
        )
        for i, prompt in enumerate(asked.prompts)
    ]
    texts: list[TracedText] = []
    size = asked.batch or len(wanted)
    for first in range(0, len(wanted), size):
        part = wanted[first : first + size]
        metrics = requests.engine.metrics
        before, steps = metrics.other_s, metrics.rounds + metrics.plain_rounds
        done = requests.complete(part)
        steps = metrics.rounds + metrics.plain_rounds - steps
        other_s = max(0.0, metrics.other_s - before) * len(part) / max(1, steps)
        texts += [
            _text(requests, asked, one, other_s, watched) for one in zip(part, done, strict=True)
        ]
    return texts


def settings_of(
    requests: Requests,
    asked: Asked,
    prompt: Sequence[int],
    *,
    observed: bool,
    other_s: float = 0.0,
) -> TextSettings:
    """How a text of these requests is made, for its trace."""
    trees = requests.engine.trees
    limit = asked.sampling.max_tokens
    return TextSettings(
        drafter=requests.engine.drafter.name,
        rule=resolved(requests, asked),
        depth=asked.depth,
        temperature=asked.sampling.temperature,
        prompt_tokens=len(prompt),
        max_tokens=limit,
        observed=observed,
        width=None if trees is None else trees.width,
        nodes=None if trees is None else trees.nodes,
        other_s=other_s,
    )


def _text(
    requests: Requests,
    asked: Asked,
    made: tuple[Request, Completion],
    other_s: float,
    watched: Observed | None,
) -> TracedText:
    request, done = made
    rounds = [
        TracedRound(one, None if watched is None else watched.would(done.seed, one.position))
        for one in done.trace or ()
    ]
    settings = settings_of(
        requests, asked, request.prompt, observed=watched is not None, other_s=other_s
    )
    return TracedText(settings, tuple(rounds))
