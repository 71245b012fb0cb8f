"""One text made and measured: its deltas, its metrics and its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from outrider.config import SamplingParams
from outrider.types import Delta, Source, SpeculativeMetrics

if TYPE_CHECKING:
    from outrider.llm import LLM

WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Run:
    """A text so far; complete unless it was interrupted."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    metrics: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)
    interrupted: bool = False

    @property
    def text(self) -> str:
        """All text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def sources(self) -> list[Source]:
        """Where each token came from."""
        return [source for delta in self.deltas for source in delta.sources]

    @property
    def provenance(self) -> list[dict[str, Any]]:
        """Who guessed each token, at which depth and in which round."""
        return [asdict(record) for delta in self.deltas for record in delta.provenance]

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's law."""
        return all(delta.lossless for delta in self.deltas)

    @property
    def logprobs(self) -> list[dict[str, Any]] | None:
        """One record per token; None where nobody asked."""
        told = [delta.logprobs for delta in self.deltas if delta.logprobs is not None]
        return [asdict(record) for records in told for record in records] if told else None

    def as_dict(self) -> dict[str, Any]:
        """The run, ready for JSON."""
        last = self.deltas[-1] if self.deltas else None
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "sources": self.sources,
            "provenance": self.provenance,
            "logprobs": self.logprobs,
            "finish_reason": last.finish_reason if last else None,
            "stop_reason": last.stop_reason if last else None,
            "interrupted": self.interrupted,
            "stats": self.metrics.as_dict(),
        }


def measure(
    llm: LLM,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    depth: int | None = None,
    drafter: str | None = None,
    show: Callable[[Delta], None] | None = None,
    trace: bool = False,
) -> Run:
    """Makes one text, shows its deltas as they come, and stops cleanly at Ctrl-C."""
    run = Run()
    before = deepcopy(llm.metrics)
    started = time.perf_counter()
    try:
        for delta in llm.stream(prompt, sampling, depth=depth, drafter=drafter, trace=trace):
            run.deltas.append(delta)
            if show is not None:
                show(delta)
    except KeyboardInterrupt:
        run.interrupted = True
    run.metrics = _since(before, llm.metrics)
    run.metrics.wall_s = time.perf_counter() - started
    return run


def warm_up(llm: LLM, prompt: list[int], sampling: SamplingParams) -> None:
    """A few tokens of each kind, so that what happens once is not measured."""
    few = replace(sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    for depth in (0, None):
        for _ in llm.stream(prompt, few, depth=depth):
            pass


def _since(before: SpeculativeMetrics, after: SpeculativeMetrics) -> SpeculativeMetrics:
    """The counts and seconds that came between two states of one metrics object."""
    gained: dict[str, Any] = {}
    for name in (entry.name for entry in fields(after)):
        old, new = getattr(before, name), getattr(after, name)
        if name == "cost_ratio":
            gained[name] = new
        elif isinstance(new, list):
            gained[name] = [n - o for n, o in zip_longest(new, old, fillvalue=0)]
        else:
            gained[name] = new - old
    # Positions are drafted in order: those that gained nothing stand at the end.
    reached = sum(gain > 0 for gain in gained["drafted_per_pos"])
    for name, value in gained.items():
        if isinstance(value, list):
            gained[name] = value[:reached]
    return SpeculativeMetrics(**gained)
