"""The speed benchmark: speculative against plain decoding, plain against transformers' generate.

A pair is measured as it is and inflated. Everything is measured here and now; nothing is printed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.bench.arms import Acceptance, Decoder, Generate
from outrider.bench.calibrate import (
    MAX_DEPTH,
    Probe,
    choose_depth,
    cost_ratio,
    draft_vocab,
    size_draft,
    verify_costs,
)
from outrider.bench.equality import differences
from outrider.bench.inflate import Faithfulness, Size, compare, inflate, size_of, weights_read
from outrider.bench.machine import Machine, Neighbours
from outrider.bench.paired import Interval, Runs, measure, median_rate, ratios
from outrider.bench.report import GenerateRow, Report, SpeedRow
from outrider.bench.settings import Progress, Settings
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.errors import InvalidConfig
from outrider.models.base import Target
from outrider.models.checkpoint import load_llama
from outrider.models.hf import HuggingFaceTarget, default_dtype
from outrider.models.text import TextTokenizer

PROBE_TOKENS = 96
"""Cached tokens under the forwards that measure costs: about the middle of a text."""


def run(
    settings: Settings, texts: Sequence[str], progress: Progress, command: str, others: float | None
) -> Iterator[Report]:
    """Measure everything the settings ask for; yields what is found so far after each pair.

    The last report is the whole one.

    Args:
        settings: what to measure.
        texts: held-out prompts: the first `num_prompts` are timed, the next ones choose k.
        progress: told what comes.
        command: how to get the same numbers again, for the report.
        others: share of the processors that others took before.

    Raises:
        InvalidConfig: too few prompts.
    """
    start, machine, neighbours = time.perf_counter(), Machine.here(), Neighbours()
    bench = _Bench(settings, texts, progress)
    for _ in bench.pairs():
        yield Report(
            command=command,
            dtype=str(bench.dtype).removeprefix("torch."),
            machine=machine,
            others_before=others,
            others_during=neighbours.share(),
            seconds=time.perf_counter() - start,
            mirrored=settings.mirrored,
            acceptance_per_pos=bench.acceptance_per_pos,
            faithful=dict(bench.faithful),
            speed=tuple(bench.speed),
            generate=tuple(bench.generate),
        )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft to be timed: the target it is, its size, the cost ratio wanted of it, and its k."""

    target: Target
    vocab: int
    weights: int
    wanted: float | None
    cost: float
    k: int
    expected: float

    def __str__(self) -> str:
        return f"c={self.cost:.3f} k={self.k}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A target timed with its drafts, and its weights."""

    name: str
    target: HuggingFaceTarget
    weights: int


class _Bench:
    """The pair, its prompts, and the rows measured so far."""

    def __init__(self, settings: Settings, texts: Sequence[str], progress: Progress) -> None:
        self.settings = settings
        self.dtype = settings.dtype or default_dtype(torch.device("cpu"))
        self.speed: list[SpeedRow] = []
        self.generate: list[GenerateRow] = []
        self.faithful: dict[int, Faithfulness] = {}
        self._progress = progress
        self._tokenizer = TextTokenizer(settings.target)
        self._small = load_llama(settings.target)
        self._small_draft = load_llama(settings.draft)
        ids = [self._tokenizer.encode(text) for text in texts]
        self._prompts = ids[: settings.num_prompts]
        self._others = ids[settings.num_prompts :][: settings.num_calibration]
        if len(self._prompts) < settings.num_prompts or not self._others:
            raise InvalidConfig(
                f"{len(ids)} prompts were found and {settings.num_prompts} are to be timed, with "
                "others left to choose k by; ask for fewer"
            )
        self._stream = [token for prompt in ids for token in prompt]
        progress.note("acceptance on other prompts")
        self._small_texts, self.acceptance_per_pos = self._of_small_pair()

    def pairs(self) -> Iterator[None]:
        """Measures pair after pair."""
        if "bundled" in self.settings.rows:
            yield self._bundled()
        for vocab in self.settings.vocabs if "inflated" in self.settings.rows else ():
            yield self._inflated(vocab)
            # Half a billion weights each: the last pair goes before the next one comes.
            gc.collect()

    def _bundled(self) -> None:
        """The pair as it is."""
        target = self._wrap(load_llama(self.settings.target))
        draft = self._wrap(load_llama(self.settings.draft))
        probes = Probe(draft, self._probe), Probe(target, self._probe)
        cost = cost_ratio(*probes, 4 * self.settings.rounds)
        verify = verify_costs(probes[1], self.settings.rounds)
        for probe in probes:
            probe.close()
        k, expected = choose_depth(self.acceptance_per_pos, cost, verify)
        vocab = size_of(self._small_draft).vocab
        one = _Draft(draft, vocab, weights_read(self._small_draft), None, cost, k, expected)
        self._compare(_Pair("bundled", target, weights_read(self._small)), [one])
        settings = self.settings
        if settings.generate_prompts:
            twin = self._plain(load_llama(settings.target))
            self._against_generate(
                "bundled", target, twin, settings.num_prompts, settings.num_tokens
            )

    def _inflated(self, vocab: int) -> None:
        """Inflated copies of both models; against generate with the first vocabulary only."""
        self._progress.note(f"inflating to a vocabulary of {vocab}")
        settings = self.settings
        size = Size(settings.num_layers, settings.feed_forward, vocab)
        big = inflate(self._small, size, settings.seed)
        self.faithful[vocab] = compare(self._small, big, [self._prompts[0], self._others[0]])
        weights, target = weights_read(big), self._wrap(big)
        drafts = self._drafts(target, weights, vocab)
        self._compare(_Pair("inflated", target, weights), drafts)
        if vocab == settings.vocabs[0] and settings.generate_prompts:
            twin = self._plain(inflate(self._small, size, settings.seed))
            self._against_generate(
                "inflated", target, twin, settings.generate_prompts, settings.generate_tokens
            )

    @property
    def _probe(self) -> list[int]:
        return self._stream[:PROBE_TOKENS]

    def _wrap(self, model: nn.Module) -> HuggingFaceTarget:
        plain: Any = self._plain(model)
        # Every run reads its prompt: the tokens/s count that in.
        wrapped = HuggingFaceTarget(plain, share_prefixes=False)
        if self.settings.compiled:
            wrapped.compile()
        return wrapped

    def _plain(self, model: nn.Module) -> nn.Module:
        return model.to(self.dtype)

    def _decoder(
        self, name: str, target: HuggingFaceTarget, draft: Target | None, k: int
    ) -> Decoder:
        drafter = NoDrafter() if draft is None else ModelDrafter(draft)
        return Decoder(
            name, target, self._tokenizer, drafter, k=k, max_tokens=self.settings.num_tokens
        )

    def _of_small_pair(self) -> tuple[list[tuple[int, ...]], tuple[float, ...]]:
        """The small target's greedy texts, and P(position i accepted) on prompts not timed."""
        target = self._wrap(load_llama(self.settings.target))
        draft = self._wrap(load_llama(self.settings.draft))
        decoder = self._decoder("draft", target, draft, MAX_DEPTH)
        for prompt in self._others:
            decoder.decode(prompt)
        plain = self._decoder("none", target, None, 1)
        texts = [plain.decode(prompt).tokens for prompt in self._prompts]
        return texts, tuple(decoder.metrics.acceptance_per_pos)

    def _drafts(self, target: Target, weights: int, vocab: int) -> list[_Draft]:
        probe = Probe(target, self._probe)
        verify = verify_costs(probe, max(2, self.settings.rounds // 4))
        drafts: list[_Draft] = []
        for index, wanted in enumerate(self.settings.costs):
            self._progress.note(f"sizing a draft for c = {wanted}")
            sized = size_draft(
                self._small_draft,
                wanted,
                vocab=draft_vocab(self._small_draft, vocab, wanted * weights),
                target=probe,
                target_layers=self.settings.num_layers,
                target_weights=weights,
                wrap=self._wrap,
                prompt=self._probe,
                seed=self.settings.seed + 1 + index,
                rounds=self.settings.rounds,
            )
            k, expected = choose_depth(self.acceptance_per_pos, sized.cost, verify)
            if self.settings.depths is not None:
                k = self.settings.depths[index]
            drafts.append(
                _Draft(
                    sized.target,
                    sized.size.vocab,
                    sized.weights_read,
                    wanted,
                    sized.cost,
                    k,
                    expected,
                )
            )
        probe.close()
        return drafts

    def _compare(self, pair: _Pair, drafts: Sequence[_Draft]) -> None:
        """Plain decoding and every draft on the timed prompts, interleaved."""
        plain = self._decoder(f"{pair.name}, drafter=none", pair.target, None, 1)
        others = [
            self._decoder(
                f"{pair.name}, drafter=draft, {draft}", pair.target, draft.target, draft.k
            )
            for draft in drafts
        ]
        longest = max(self._prompts, key=len)
        for decoder in (plain, *others):
            decoder.warm(longest)
        arms = [decoder.arm for decoder in (plain, *others)]
        mirrored = self.settings.mirrored
        runs = measure(arms, self._prompts, mirrored=mirrored, tick=self._progress.step)
        for draft, decoder, found in zip(drafts, others, runs[1:], strict=True):
            row = self._row(pair, draft, decoder.acceptance(), runs[0], found)
            self.speed.append(row)
            self._progress.note(f"{decoder.arm.name}: {row.speedup.mean:.2f} times as fast")

    def _row(
        self, pair: _Pair, draft: _Draft, counts: Acceptance, plain: Runs, found: Runs
    ) -> SpeedRow:
        speedups = ratios(plain, found)
        same, gap = differences(pair.target, self._prompts, plain, found)
        texts = zip(plain, self._small_texts, strict=True)
        return SpeedRow(
            pair=pair.name,
            vocab=pair.target.vocab_size,
            draft_vocab=draft.vocab,
            target_weights=pair.weights,
            draft_weights=draft.weights,
            cost_wanted=draft.wanted,
            cost=draft.cost,
            cost_after=self._cost(draft.target, pair.target),
            k=draft.k,
            expected=draft.expected,
            plain_tok_s=median_rate(plain),
            speculative_tok_s=median_rate(found),
            speedup=Interval.of(speedups),
            speedups=tuple(speedups),
            acceptance_rate=counts.rate,
            mean_acceptance_length=counts.mean_length,
            num_prompts=len(self._prompts),
            num_tokens=self.settings.num_tokens,
            same_tokens=same,
            widest_gap=gap,
            as_small=sum(runs[0].tokens == small for runs, small in texts),
        )

    def _cost(self, draft: Target, target: Target) -> float:
        probes = Probe(draft, self._probe), Probe(target, self._probe)
        cost = cost_ratio(*probes, self.settings.rounds)
        for probe in probes:
            probe.close()
        return cost

    def _against_generate(
        self,
        name: str,
        target: HuggingFaceTarget,
        model: nn.Module,
        num_prompts: int,
        num_tokens: int,
    ) -> None:
        """drafter=none against transformers' generate, on short and on long prompts."""
        for length in (self.settings.short, self.settings.long):
            prompts = self._cut(num_prompts, length)
            theirs = Generate(
                f"{name}, transformers generate, prompt {length}", model, max_tokens=num_tokens
            )
            drafter = NoDrafter()
            label = f"{name}, drafter=none, prompt {length}"
            ours = Decoder(label, target, self._tokenizer, drafter, k=1, max_tokens=num_tokens)
            theirs.warm(prompts[0], 4)
            ours.warm(prompts[0], 4)
            runs = measure(
                [theirs.arm, ours.arm], prompts, mirrored=False, tick=self._progress.step
            )
            same, gap = differences(target, prompts, runs[1], runs[0])
            self.generate.append(
                GenerateRow(
                    target=name,
                    vocab=target.vocab_size,
                    prompt_tokens=length,
                    num_tokens=num_tokens,
                    num_prompts=num_prompts,
                    transformers_tok_s=median_rate(runs[0]),
                    outrider_tok_s=median_rate(runs[1]),
                    speedup=Interval.of(ratios(*runs)),
                    decode_transformers_tok_s=median_rate(runs[0], decode_only=True),
                    decode_outrider_tok_s=median_rate(runs[1], decode_only=True),
                    decode_speedup=Interval.of(ratios(*runs, decode_only=True)),
                    same_tokens=same,
                    widest_gap=gap,
                )
            )

    def _cut(self, num: int, length: int) -> list[list[int]]:
        """Prompts of an exact length, cut from the held-out prompts one after another."""
        size = len(self._stream)
        starts = [i * size // num for i in range(num)]
        return [[self._stream[(start + i) % size] for i in range(length)] for start in starts]
