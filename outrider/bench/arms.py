"""Ways to decode a prompt greedily, timed: Outrider's LLM, and transformers' own `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from outrider.bench.paired import Arm, Run
from outrider.config import SamplingParams
from outrider.drafters import Drafter
from outrider.llm import LLM
from outrider.models.base import Target
from outrider.models.text import TextTokenizer
from outrider.types import SpeculativeMetrics


class Decoder:
    """An LLM as an arm: `max_tokens` greedy tokens a prompt, the end of text ignored so that all are equal work.

    `stats` holds the metrics of every text since `forget`.
    """

    def __init__(
        self, name: str, target: Target, tokenizer: TextTokenizer, drafter: Drafter, *, k: int, max_tokens: int
    ) -> None:
        self.arm = Arm(name, self._decode)
        self.max_tokens = max_tokens
        self.stats: list[SpeculativeMetrics] = []
        self._llm = LLM(target, tokenizer, drafter, k=k)  # pyright: ignore[reportArgumentType]

    def forget(self) -> None:
        """Drop the metrics so far."""
        self.stats.clear()

    def warm(self, prompt: Sequence[int], num_tokens: int = 8) -> None:
        """Decode a little, untimed: pools grow and first calls are paid."""
        self._llm.generate([list(prompt)], _greedy(num_tokens))

    def _decode(self, prompt: Sequence[int]) -> Run:
        start = time.perf_counter()
        deltas, first = [], 0.0
        for delta in self._llm.stream(list(prompt), _greedy(self.max_tokens)):
            first = first or time.perf_counter() - start
            deltas.append(delta)
        total = time.perf_counter() - start
        return Run(tuple(token for delta in deltas for token in delta.token_ids), first, total)

    def metrics(self, prompts: Sequence[Sequence[int]]) -> list[SpeculativeMetrics]:
        """The acceptance counts of each prompt's greedy text."""
        params = _greedy(self.max_tokens)
        return [self._llm.generate([list(prompt)], params)[0].stats for prompt in prompts]


class Generate:
    """A transformers model's own greedy `generate` as an arm: its cache, its attention, its plain layers."""

    def __init__(self, name: str, model: Any, *, max_tokens: int) -> None:
        self.arm = Arm(name, self._decode)
        self._model = model
        self._max_tokens = max_tokens
        # As with ignore_eos: every text has its full length.
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
