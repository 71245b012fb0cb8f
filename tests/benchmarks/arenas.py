"""Contenders that need no engine, and a record of what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.arena.contest import Job, Outcome, Refused


@dataclass
class Toy:
    """Makes `seconds` per token by decree; `log` hears of every call of every toy."""

    name: str
    log: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.01
    refuses: bool = False
    dies_at: int | None = None
    short: bool = False

    def run(self, job: Job) -> Outcome:
        self.log.append((self.name, "run"))
        if self.refuses:
            raise Refused("one text at a time")
        if self.dies_at == job.seed:
            raise KeyboardInterrupt
        texts = tuple(tuple(range(job.tokens - self.short)) for _ in job.prompts)
        total = job.tokens * len(job.prompts)
        return Outcome(texts, self.seconds * total, self.seconds, None, 4, total // 2)

    def rest(self) -> None:
        self.log.append((self.name, "rest"))

    def wake(self) -> None:
        self.log.append((self.name, "wake"))


def job(seed: int = 0, tokens: int = 6) -> Job:
    return Job(((1, 2, 3),), tokens, 0.0, 40, seed)


def others(*shares: float | None) -> Callable[[], Callable[[], float | None]]:
    """Others who take these shares in turn, and nothing afterwards."""
    rest: Iterable[float | None] = iter(shares)
    return lambda: lambda: next(rest, 0.0)  # type: ignore[call-overload]
