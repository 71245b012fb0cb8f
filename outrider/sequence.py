"""Sequence: one text being made, from its prompt to its last delta."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.types import Delta, FinishReason, Guide, Request, Source, SpeculativeMetrics

HEADROOM = 512
"""New tokens a text's cache makes room for at once; a whole context would be mostly idle."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A worker's record: the engine alone writes it; drafters read `tokens` and `key`.

    `tokens` is the truth. Caches follow it: what a cache does not hold yet is *pending* and is read
    by the next forward, be it a prompt or one token.
    """

    key: int
    request: Request
    seed: int
    rule: str
    depth: int
    max_tokens: int
    end_tokens: frozenset[int]
    tokens: list[int]
    handle: int | None = None
    sources: list[Source] = field(default_factory=list[Source])
    outbox: list[Delta] = field(default_factory=list[Delta])
    stats: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)
    started_s: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None
    guide: Guide | None = field(default=None, repr=False)
    """What the request's grammar lets come next; the engine and drafters make it follow."""
    steps: tuple[Any, ...] | None = field(default=None, repr=False)
    """What the engine's sampling controls keep of this text; None until they are asked."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be made."""
        return self.max_tokens - self.num_output

    @property
    def expected(self) -> int:
        """Tokens a cache should make room for: more is found when it is needed."""
        return len(self.tokens) + min(self.remaining, HEADROOM)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come, be it by an end, an error or a cancelled client."""
        return self.finish_reason is not None or self.error is not None
