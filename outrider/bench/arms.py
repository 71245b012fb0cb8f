"""Ways to decode a prompt greedily, timed: Outrider's LLM, and transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.bench.paired import Arm, Run
from outrider.config import SamplingParams
from outrider.drafters import Drafter
from outrider.llm import LLM
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer
from outrider.types import SpeculativeMetrics


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of speculation: rounds with a draft, tokens drafted, tokens accepted."""

    rounds: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """The share accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """1 + accepted / rounds: tokens per round, the target's own included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0


class Decoder:
    """An LLM as an arm: `max_tokens` greedy tokens a prompt, ends of text ignored: equal work."""

    def __init__(
        self,
        name: str,
        target: HuggingFaceTarget,
        tokenizer: TextTokenizer,
        drafter: Drafter,
        *,
        k: int,
        max_tokens: int,
    ) -> None:
        self.arm = Arm(name, self.decode)
        self.max_tokens = max_tokens
        self._llm = LLM(target, tokenizer, drafter, k=k)
        self._before = self._counts()

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Everything decoded so far, warming up included."""
        return self._llm.metrics

    def warm(self, prompt: Sequence[int], num_tokens: int = 8) -> None:
        """Decode a little, untimed and uncounted: pools grow and first calls are paid."""
        self._llm.generate([list(prompt)], _greedy(num_tokens))
        self._before = self._counts()

    def decode(self, prompt: Sequence[int]) -> Run:
        """Decode one prompt and time it."""
        start = time.perf_counter()
        tokens: list[int] = []
        first = 0.0
        for delta in self._llm.stream(list(prompt), _greedy(self.max_tokens)):
            first = first or time.perf_counter() - start
            tokens += delta.token_ids
        return Run(tuple(tokens), first, time.perf_counter() - start)

    def acceptance(self) -> Acceptance:
        """The counts since warming up."""
        now, before = self._counts(), self._before
        return Acceptance(
            now.rounds - before.rounds, now.drafted - before.drafted, now.accepted - before.accepted
        )

    def _counts(self) -> Acceptance:
        metrics = self._llm.metrics
        return Acceptance(metrics.rounds, metrics.drafted, metrics.accepted)


class Generate:
    """A transformers model's own greedy `generate` as an arm: its cache, attention and layers."""

    def __init__(self, name: str, model: Any, *, max_tokens: int) -> None:
        self.arm = Arm(name, self._decode)
        self._model = model
        self._max_tokens = max_tokens
        # As ignore_eos does: every text has its full length.
        model.generation_config.eos_token_id = None

    def warm(self, prompt: Sequence[int], num_tokens: int = 8) -> None:
        """Decode a little, untimed."""
        self._generate(prompt, num_tokens, _Clock())

    def _decode(self, prompt: Sequence[int]) -> Run:
        clock = _Clock()
        start = time.perf_counter()
        tokens = self._generate(prompt, self._max_tokens, clock)
        total = time.perf_counter() - start
        return Run(tuple(tokens[len(prompt) :]), clock.first - start, total)

    def _generate(self, prompt: Sequence[int], num_tokens: int, clock: _Clock) -> list[int]:
        tokens = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                streamer=clock,
            )
        return out[0].tolist()


class _Clock:
    """A streamer that notes when the first new token comes; the prompt itself comes before it."""

    def __init__(self) -> None:
        self._calls = 0
        self.first = 0.0

    def put(self, value: object) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
