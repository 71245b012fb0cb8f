"""Outrider over a Hugging Face folder: one target, and every drafter on it."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import wire

import outrider
from benchmarks.arena.oracle import OracleDrafter
from outrider import LLM, SamplingParams
from outrider.bench.calibrate import Probe, cost_ratio
from outrider.control import Controller
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    RecycleDrafter,
    SuffixDrafter,
)
from outrider.llm.load import Placement
from outrider.models.quantised import quantised
from outrider.models.text import TextTokenizer

PROBED = 96
"""Cached tokens under the forwards that the cost ratio is measured with."""


class Outrider:
    """The target in memory once; an `LLM` for each arm."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(task["threads"])
        self._task = task
        self._oracle: OracleDrafter | None = None
        # Every run reads its prompts. Others compile too, and keep it on disk as this does.
        self._place = self._placement(task)
        self._target = self._load(task["target"])
        self._tokenizer = TextTokenizer(Path(task["target"]))
        self._cost: float | None = None
        self._llms = {arm: self._llm(arm) for arm in task["arms"]}

    def about(self) -> dict[str, Any]:
        """Its version, and the cost ratio of the draft model."""
        return {
            "version": f"outrider {outrider.__version__}, torch {torch.__version__}",
            "cost_ratio": self._cost,
        }

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        if self._oracle is not None and job["arm"] == "draft":
            self._teach(self._oracle, job)
        return answered(self._llms[job["arm"]], job)

    def _teach(self, oracle: OracleDrafter, job: dict[str, Any]) -> None:
        """Tells the oracle what the target says itself, before the clock starts."""
        params = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True)
        unknown = [prompt for prompt in job["prompts"] if not oracle.knows(prompt, job["tokens"])]
        if unknown:
            for prompt, one in zip(
                unknown, self._llm("none").generate(unknown, params), strict=True
            ):
                oracle.learn(prompt, list(one.token_ids))

    def _llm(self, arm: str) -> LLM:
        return LLM(self._target, self._tokenizer, self._drafter(arm), k=self._task["k"])

    def _drafter(self, arm: str) -> Drafter:
        parts = arm.split("+")
        if arm == "auto":
            # The default: whichever of them pays, or nobody.
            return Controller([ModelDrafter(self._draft_model), NgramDrafter()], name=arm)
        if len(parts) > 1:
            return CombinedDrafter([self._drafter(part) for part in parts])
        if arm == "draft":
            return self._draft()
        if arm.startswith("early-exit:"):
            return EarlyExitDrafter(int(arm.partition(":")[2]))
        if arm == "int8":
            return ModelDrafter(self._place.compiled(quantised(self._target)), name="int8")
        return SIMPLE[arm]()

    def _draft(self) -> Drafter:
        draft = self._draft_model
        tokens = list(range(1, PROBED + 1))
        probes = Probe(draft, tokens), Probe(self._target, tokens)
        self._cost = cost_ratio(*probes, 5)
        for probe in probes:
            probe.close()
        alpha = self._task.get("alpha")
        if alpha is None:
            return ModelDrafter(draft)
        self._oracle = OracleDrafter(ModelDrafter(draft), alpha)
        return self._oracle

    @cached_property
    def _draft_model(self) -> Any:
        return self._load(self._task["draft"])

    def _placement(self, task: dict[str, Any]) -> Placement:
        dtype = getattr(torch, task["dtype"])
        return Placement(dtype=dtype, share_prefixes=False, compile=True)

    def _load(self, folder: str) -> Any:
        return self._place.load(Path(folder))


def answered(llm: LLM, job: dict[str, Any]) -> dict[str, Any]:
    """What a job comes to."""
    params = [
        SamplingParams(
            temperature=job["temperature"],
            top_k=job["top_k"] if job["temperature"] else 0,
            max_tokens=job["tokens"],
            ignore_eos=True,
            seed=job["seed"] + row,
        )
        for row in range(len(job["prompts"]))
    ]
    # The default rule of a chain; a seed by itself would ask for equal texts instead.
    rule = "block" if job["temperature"] else None
    before, start = counts(llm), time.perf_counter()
    texts, first = made(llm, job["prompts"], params, rule)
    seconds = time.perf_counter() - start
    rounds, drafted, accepted = (now - then for now, then in zip(counts(llm), before, strict=True))
    return {
        "texts": texts,
        "seconds": seconds,
        "first_s": None if first is None else first - start,
        "rounds": rounds if drafted else None,
        "drafted": drafted or None,
        "accepted": accepted if drafted else None,
    }


def counts(llm: LLM) -> tuple[int, int, int]:
    """Rounds with a draft, drafted and accepted tokens so far."""
    metrics = llm.metrics
    return metrics.rounds, metrics.drafted, metrics.accepted


def made(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rule: str | None
) -> tuple[list[list[int]], float | None]:
    """The texts, and when the first token of a single one came; of several nobody asks."""
    if len(prompts) > 1:
        done = llm.generate(prompts, params, rule=rule)
        return [list(one.token_ids) for one in done], None
    tokens: list[int] = []
    first = None
    for delta in llm.stream(prompts[0], params[0], rule=rule):
        first = first or time.perf_counter()
        tokens += delta.token_ids
    return [tokens], first


SIMPLE = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
}

if __name__ == "__main__":
    wire.serve(Outrider)
