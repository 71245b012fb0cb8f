"""How far predictions of the planner and of replays are from what is then run.

    python benchmarks/planner.py --json docs/planner.json

For each workload everything is planned and the best three are run in turn with plain decoding. A
prediction holds if its speed-up is within 10 percent of the measured one, or inside its interval.
Then depths of each drafter, and the controller, are replayed on observed traces and run; there 5
percent are allowed.

The advice is judged on prompts that the planner never saw, in runs of their own: plain decoding,
the best foretold, and four tokens of each drafter as one would choose by hand. To speculate was
right if it is surely faster there than plain decoding, and no other is more than 5 percent faster
still; not to was right if nothing is more than 5 percent faster than plain decoding.

`--clock cpu` counts the seconds that this process had a processor, of one thread: on a machine of
one's own they are those of the wall, on a shared one they are what is left of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.script import command_of, exit_code, others_at_work, parser_of, save
from outrider.control.fit import costs_of
from outrider.control.plan import Candidate, Plan, Search, Verified, arm_of, plan
from outrider.control.policies import policy_of
from outrider.control.record import (
    Asked,
    alternatives_of,
    depths_to_time,
    observed_by,
    timed,
)
from outrider.control.replay import replay
from outrider.control.runs import Spread, compared, measured
from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path, eval_prompts

POLICIES = (1, 3, 6)
NEAR = 0.05
"""How much faster than what is advised something else may be."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, a law, drafters, and texts at a time, on the bundled target."""

    prompts: str
    drafters: tuple[str, ...]
    temperature: float = 0.0
    batch: int = 1
    widths: tuple[int, ...] = ()


WORKLOADS = {
    "code": Workload("code", ("draft", "ngram"), widths=(3,)),
    "prose": Workload("prose", ("draft", "ngram")),
    "code, temperature 1": Workload("code", ("draft", "ngram"), 1.0),
    "code, 4 at a time": Workload("code", ("draft", "ngram"), batch=4),
    "random identifiers, look-up alone, temperature 1.5": Workload("foreign", ("ngram",), 1.5),
    "code, drafter as slow as the target": Workload("code", ("slow",)),
}


def loaded(workload: Workload) -> LLM:
    """The bundled target with the drafters; `slow` is the target itself as a draft model."""
    slow = f"draft:{bundled_path('target')}"
    specs = [slow if name == "slow" else name for name in workload.drafters]
    return LLM.load("bundled", ",".join(specs), share_prefixes=False)


def drafters_of(workload: Workload) -> tuple[str, ...]:
    """What requests call its drafters."""
    return tuple("draft" if name == "slow" else name for name in workload.drafters)


def planned(llm: LLM, workload: Workload, options: Any) -> tuple[Plan, Asked, Search]:
    """A plan of one workload."""
    texts = eval_prompts(workload.prompts)[: options.prompts]
    sampling = SamplingParams(
        max_tokens=options.tokens, temperature=workload.temperature, ignore_eos=True
    )
    asked = Asked([llm.tokenizer.encode(text) for text in texts], sampling, options.depth)
    search = Search(drafters_of(workload), options.depth, workload.widths, (workload.batch,))
    return plan(llm.requests, asked, search), asked, search


def replayed(llm: LLM, asked: Asked, search: Search) -> list[dict[str, Any]]:
    """Three depths of the first drafter, one of each other, the controller: replayed and run."""
    requests, (first, *others), (batch, *_) = llm.requests, search.drafters, search.batches
    requests.engine.trees = None
    own = replace(asked, batch=batch)
    texts = observed_by(requests, replace(own, batch=None), search.drafters)
    few = replace(own, prompts=asked.prompts[: max(2, batch)])
    costs = costs_of(
        text
        for name in search.drafters
        for way in timed(requests, replace(few, drafter=name), depths_to_time(asked.depth))
        for text in way
    )
    *depths, deepest = (min(depth, asked.depth) for depth in POLICIES)
    arms = {f"{first}:{depth}": replace(own, drafter=first, depth=depth) for depth in depths}
    for name in (first, *others):
        arms[f"{name}:{deepest}"] = replace(own, drafter=name, depth=deepest)
    if alternatives_of(requests):
        arms["auto"] = own
    found: list[dict[str, Any]] = []
    for (name, _), rate in zip(arms.items(), measured(requests, list(arms.values())), strict=True):
        told = replay(texts, policy_of(name), costs, batch=batch).tokens_per_s
        found.append(
            {
                "policy": name,
                "predicted_tok_s": told,
                "measured_tok_s": asdict(rate),
                "error": told / rate.mean - 1,
                "holds": abs(told / rate.mean - 1) <= 0.05 or rate.low <= told <= rate.high,
            }
        )
    return found


def row(one: Verified) -> dict[str, Any]:
    """A verified prediction, for JSON."""
    return {
        "candidate": str(one.prediction.candidate),
        "rule": one.prediction.candidate.rule,
        "predicted_tok_s": one.prediction.tokens_per_s.mean,
        "measured_tok_s": one.tokens_per_s,
        "error": one.error,
        "predicted_speedup": asdict(one.prediction.speedup),
        "speedup": asdict(one.speedup),
        "holds": one.holds,
    }


def judged(llm: LLM, workload: Workload, found: Plan, asked: Asked, options: Any) -> dict[str, Any]:
    """Speed-ups over plain decoding on prompts that the plan did not see, and the verdict."""
    best = found.best(workload.batch).candidate
    plain = replace(best, drafter="none", depth=0, width=None, nodes=None, shape=None)
    texts = eval_prompts(workload.prompts)[options.prompts : 2 * options.prompts]
    fresh = replace(asked, prompts=[llm.tokenizer.encode(text) for text in texts])
    hands = [Candidate(name, best.rule, workload.batch, 4) for name in drafters_of(workload)]
    told = [one.prediction.candidate for one in found.verified]
    arms = list(dict.fromkeys([plain, best, *told, *hands]))
    runs = compared(llm.requests, [arm_of(one, fresh) for one in arms])
    speedups = {str(one): gain for one, (_, gain) in zip(arms, runs, strict=True)}
    return {
        "right": right(str(best), speedups),
        "speedups": {name: asdict(gain) for name, gain in speedups.items()},
    }


def right(best: str, speedups: dict[str, Spread]) -> bool:
    """Whether the advice holds where it was run again; `none` is among the speed-ups."""
    others = all(one.mean <= (1 + NEAR) * speedups[best].mean for one in speedups.values())
    return others and (best == "none" or speedups[best].low > 1)


def run(options: Any, arguments: Sequence[str] | None) -> None:
    """Everything asked for; written after each workload."""
    if options.clock == "cpu" and options.threads != 1:
        raise InvalidConfig(f"clock=cpu counts all {options.threads} threads; use --threads 1")
    others = others_at_work(options)
    torch.set_num_threads(options.threads)
    if options.clock == "cpu":
        time.perf_counter = time.process_time
    report: dict[str, Any] = {
        "clock": options.clock,
        "others_before": others,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "depth": options.depth,
        "workloads": {},
    }
    for name in options.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        llm = loaded(workload)
        found, asked, search = planned(llm, workload, options)
        best = found.best(workload.batch)
        report["workloads"][name] = {
            "best": str(best.candidate),
            "advice": judged(llm, workload, found, asked, options),
            "verified": [row(one) for one in found.verified],
            "break_even": [asdict(one) for one in found.break_even],
            "replayed": replayed(llm, asked, search),
        }
        show(name, report["workloads"][name])
        save(options.json, command_of("planner", arguments), report)


def show(name: str, found: dict[str, Any]) -> None:
    """One workload, as rows of a table."""
    verdict = "right" if found["advice"]["right"] else "wrong"
    print(f"\n{name}: run {found['best']}; the advice is {verdict}")
    print("| what | predicted | measured | holds |\n|---|---|---|---|")
    for one in found["verified"]:
        told, ran = (Spread(**one[key]) for key in ("predicted_speedup", "speedup"))
        print(f"| {one['candidate']} | {told} | {ran} | {'yes' if one['holds'] else 'no'} |")
    for told, ran in found["advice"]["speedups"].items():
        print(f"| on other prompts, {told} | | {Spread(**ran)} | |")
    for one in found["replayed"]:
        ran = Spread(**one["measured_tok_s"])
        told = one["predicted_tok_s"]
        holds = "yes" if one["holds"] else "no"
        print(f"| replay, {one['policy']} | {told:.1f} tok/s | {ran} | {holds} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The script."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--workloads", type=lambda text: tuple(text.split(";")), help="names set apart by ;")
    add("--prompts", type=int, default=12)
    add("--tokens", type=int, default=64)
    add("--depth", type=int, default=6)
    add("--threads", type=int, default=1)
    add("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens, options.depth = 2, 8, 2
        options.workloads = options.workloads or ("prose",)
    return exit_code(lambda: run(options, arguments))


if __name__ == "__main__":
    sys.exit(main())
