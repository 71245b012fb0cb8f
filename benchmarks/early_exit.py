"""Time early exit on the bundled pair: every exit against plain decoding, greedy and sampled.

    python benchmarks/early_exit.py --json docs/early_exit.json

One text at a time, held-out code of the evaluation prompts, 64 tokens each. Figures are processor
time of one thread, which others on the machine disturb less than the clock: an idle machine with
several threads gives other figures. Ratios are taken prompt by prompt, arms one after another in
an order that turns round, and their intervals are bootstraps over the prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from outrider import LLM, SamplingParams
from outrider.bench.machine import Machine
from outrider.bench.paired import Interval
from outrider.models.bundled import eval_prompts
from outrider.types import SpeculativeMetrics

TOKENS, CHARACTERS = 64, 240
SAMPLING = {
    "greedy": SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=TOKENS, seed=5, ignore_eos=True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One arm: what was accepted, tokens a round, and tokens per second over plain decoding's."""

    drafter: str
    law: str
    k: int
    acceptance_rate: float
    tokens_per_round: float
    rate_tok_s: float
    speedup: Interval


def timed(drafters: Sequence[str], law: str, k: int, prompts: Sequence[str]) -> list[Case]:
    """Plain decoding first, then each drafter."""
    arms = [LLM.load("bundled", name, dtype="float32", k=k) for name in ("none", *drafters)]
    for arm in arms:
        arm.generate(prompts[0], SAMPLING[law])
    made = [SpeculativeMetrics() for _ in arms]
    seconds: list[list[float]] = [[] for _ in arms]
    for i, prompt in enumerate(prompts):
        turn = range(len(arms)) if i % 2 == 0 else reversed(range(len(arms)))
        for number in turn:
            start = time.process_time()
            (done,) = arms[number].generate(prompt, SAMPLING[law])
            seconds[number].append(time.process_time() - start)
            assert len(done.token_ids) == TOKENS
            for name in ("rounds", "drafted", "accepted"):
                count = getattr(made[number], name) + getattr(done.stats, name)
                setattr(made[number], name, count)
    return [
        Case(
            name,
            law,
            k,
            counts.acceptance_rate,
            counts.mean_acceptance_length,
            TOKENS * len(prompts) / sum(own_s),
            Interval.of([plain / own for plain, own in zip(seconds[0], own_s, strict=True)]),
        )
        for name, counts, own_s in zip(("none", *drafters), made, seconds, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-k", type=int, nargs="+", default=[3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine.here()
    prompts = [prompt[:CHARACTERS] for prompt in eval_prompts("code")[: given.prompts]]
    drafters = [*(f"early-exit:{layers}" for layers in range(1, 6)), "draft"]
    cases = [case for law in SAMPLING for k in given.k for case in timed(drafters, law, k, prompts)]
    print("law      drafter       k  accepted  tokens/round  tok/s  speed-up")
    for case in cases:
        times = case.speedup
        print(
            f"{case.law:8} {case.drafter:13} {case.k}  {case.acceptance_rate:8.2f}  "
            f"{case.tokens_per_round:12.2f}  {case.rate_tok_s:5.0f}  "
            f"{times.mean:.2f} ({times.low:.2f} to {times.high:.2f})"
        )
    if given.json:
        report = {"machine": asdict(machine), "cases": [asdict(case) for case in cases]}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
