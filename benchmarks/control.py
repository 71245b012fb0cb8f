"""`drafter="auto"` beside plain decoding, and beside the best fixed drafter and depth.

    python -m benchmarks.control --json docs/control.json

Every workload of benchmarks/workloads.py, each in its own pair of models; every group of prompts by
every way before the next. Then one controller through changes of the workload, and what choosing
itself costs. Workloads that the JSON has are left as they are, so that a run that was broken off
goes on. Needs an otherwise idle machine, half an hour on two cores and 4 GB of memory; `--smoke`
needs a minute. See docs/control.md.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from benchmarks.workloads import CHANGES, WORKLOADS, Workload
from outrider import LLM, SamplingParams
from outrider.bench.inflate import Size, inflate, size_of
from outrider.bench.machine import Neighbours
from outrider.bench.paired import Interval, order
from outrider.bench.script import command_of, exit_code, ints, others_at_work, parser_of, save
from outrider.control import Controller
from outrider.control.knowledge import RESTING
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from outrider.engine.draws import GroupDraws
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.checkpoint import load_llama
from outrider.models.hf import HuggingFaceTarget, default_dtype
from outrider.models.text import TextTokenizer
from outrider.train.bigram import bigram_factors

AUTO, PLAIN = "auto", "none"
LOOK_UP_DEPTH = 8
SMALL, TOGETHER = 8, 2
"""Times as many groups of prompts of the small target, and of many texts: noise is much of a short
round, and what several texts may gain or lose is little beside it."""
SETTLED = 50
"""Rounds after a change within which it is to be followed."""
FOLLOWERS = 4
"""Controllers that go through the changes, one after another: at temperature 1.5 everybody's texts
are others."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one workload came to.

    Attributes:
        over_plain: tokens a second of auto over plain decoding's, per group of prompts.
        over_best: the same over the best fixed drafter and depth, found by trying all of them on
            these very prompts.
        rates: tokens a second of everybody.
        chosen: rounds of each choice of auto's.
        first_s: seconds to the first token, auto's over plain's, in the median.
        load: the load average when it began.
    """

    name: str
    over_plain: Interval
    over_best: Interval | None
    best: str
    rates: dict[str, float]
    chosen: dict[str, int]
    first: float
    load: float


class Pair:
    """A target and its draft model."""

    def __init__(self, load: Workload, options: argparse.Namespace) -> None:
        self._dtype = default_dtype(torch.device("cpu"))
        target, draft = (load_llama(bundled_path(part)) for part in ("target", "draft"))
        if load.num_prompt is not None:
            for model in (target, draft):
                model.config.max_position_embeddings = 2 * load.num_prompt
        draft = spoilt(draft, load)
        if load.target == "inflated":
            big = Size(options.layers, options.feed_forward, size_of(target).vocab)
            target = inflate(target, big, 0)
        if load.draft == "slow":
            draft = copy.deepcopy(target)
        self.target, self.draft = (
            HuggingFaceTarget(model.to(self._dtype), share_prefixes=False)
            for model in (target, draft)
        )
        for model in (self.target, self.draft) if options.compile else ():
            model.compile()
        self.tokenizer = TextTokenizer(bundled_path("target"))

    def llm(self, drafter: Drafter, k: int, batch: int) -> LLM:
        """Everything but the models is its own."""
        return LLM(self.target, self.tokenizer, drafter, k=k, max_texts=batch)

    def auto(self, batch: int) -> LLM:
        """With a controller that has seen nothing."""
        return self.llm(Controller([ModelDrafter(self.draft), NgramDrafter()]), 16, batch)

    def fixed(self, load: Workload, depths: Sequence[int]) -> dict[str, LLM]:
        """Everything a user could have chosen by hand."""
        found = {PLAIN: self.llm(NoDrafter(), 1, load.batch)}
        for k in depths:
            found[f"draft, k={k}"] = self.llm(ModelDrafter(self.draft), k, load.batch)
        found[f"ngram, k={LOOK_UP_DEPTH}"] = self.llm(NgramDrafter(), LOOK_UP_DEPTH, load.batch)
        return found


def spoilt(draft: Any, load: Workload) -> nn.Module:
    """The draft model that the workload wants, of the same size and cost."""
    with torch.no_grad():
        if load.draft == "wrong":
            draft.lm_head.weight.copy_(draft.lm_head.weight.roll(1, 0))
        if load.draft == "other-text":
            tokenizer = TextTokenizer(bundled_path("draft"))
            texts = [tokenizer.encode(text) for text in eval_prompts("prose")]
            vocab, width = draft.lm_head.weight.shape
            embeddings_VD, head_VD = bigram_factors(texts, 0, vocab, width, 0)
            for layer in draft.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            draft.model.norm.weight.fill_(1.0)
            draft.model.embed_tokens.weight.copy_(embeddings_VD)
            draft.lm_head.weight.copy_(head_VD)
    return draft


def prompts_of(load: Workload, tokenizer: TextTokenizer, groups: int) -> list[list[list[int]]]:
    """Groups of `batch` prompts."""
    known = [
        tokenizer.encode(t)
        for t in eval_prompts("code" if load.prompts == "copy" else load.prompts)
    ]
    if load.num_prompt is not None:
        joined = [token for ids in known for token in ids]
        known = [joined[i * 97 :][: load.num_prompt] for i in range(groups)]
    if load.prompts == "copy":
        known = [ids[-48:] * 4 for ids in known]
    return [
        [known[(i * load.batch + b) % len(known)] for b in range(load.batch)] for i in range(groups)
    ]


def params_of(load: Workload, group: int, tokens: int) -> list[SamplingParams]:
    """One law each; the texts of a draining batch end one after another."""
    share = [(b + 1) / load.batch if load.draining else 1.0 for b in range(load.batch)]
    return [
        SamplingParams(
            temperature=load.temperature,
            max_tokens=max(1, round(part * tokens)),
            ignore_eos=True,
            seed=group if load.temperature else None,
        )
        for part in share
    ]


def timed(llm: LLM, group: list[list[int]], params: list[SamplingParams]) -> tuple[float, int]:
    """Seconds, and tokens made."""
    start = time.perf_counter()
    done = llm.generate(group, params, rule=None if params[0].temperature == 0 else "block")
    return time.perf_counter() - start, sum(len(one.token_ids) for one in done)


def first_s(llm: LLM, prompt: list[int], params: SamplingParams) -> float:
    """Seconds to the first token."""
    start = time.perf_counter()
    stream = llm.stream(prompt, params)
    next(stream)
    seconds = time.perf_counter() - start
    for _ in stream:
        pass
    return seconds


def compared(load: Workload, options: argparse.Namespace, tick: Callable[[str], None]) -> Row:
    """Everybody on one load, after a text of warm-up each."""
    pair = Pair(load, options)
    everyone = {AUTO: pair.auto(load.batch), **pair.fixed(load, options.k)}
    times = SMALL if load.target == "bundled" else TOGETHER if load.batch > 1 else 1
    num = options.groups * (1 if options.smoke else times)
    groups = prompts_of(load, pair.tokenizer, num + 1)
    warm = params_of(load, 0, min(options.tokens or load.num_tokens, options.warm))
    for llm in everyone.values():
        timed(llm, groups[-1], warm)
    fresh = (lambda: pair.auto(load.batch)) if load.cold else None
    with swept():
        runs = Runs(load, list(everyone))
        runs.add(options, everyone, groups[:-1], tick, fresh)
        return runs.row()


@contextmanager
def swept() -> Iterator[None]:
    """A time in which what is there by now is not looked at again for garbage.

    A collection of all of it takes as long as a hundred rounds, and may fall into any call.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Runs:
    """What everybody took and made on one load, group of prompts by group.

    Args:
        load: what is measured.
        ways: everybody, by name.
    """

    def __init__(self, load: Workload, ways: Sequence[str]) -> None:
        self._load, self._start_load = load, os.getloadavg()[0]
        self._seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._made = dict.fromkeys(ways, 0)
        self._first: list[float] = []
        self._chosen: Counter[str] = Counter()

    def add(
        self,
        options: argparse.Namespace,
        everyone: dict[str, LLM],
        groups: Sequence[list[list[int]]],
        tick: Callable[[str], None],
        fresh: Callable[[], LLM] | None = None,
    ) -> None:
        """Every group of prompts by everybody before the next, every other time backwards.

        `fresh` makes the controller that each group begins with, where it is to have seen nothing.
        """
        load, ways = self._load, list(everyone)
        for group in groups:
            i = len(self._seconds[PLAIN])
            params = params_of(load, i, options.tokens or load.num_tokens)
            for which in order(len(ways), i, False):
                name = ways[which]
                tick(f"{load.name}: {name}")
                if name == AUTO and fresh is not None:
                    everyone[AUTO] = fresh()
                before = rounds_of(everyone[AUTO])
                gc.collect()
                spent, new = timed(everyone[name], group, params)
                self._seconds[name].append(spent)
                self._made[name] += new
                self._chosen += rounds_of(everyone[AUTO]) - before
            if load.batch == 1 and i < 3:
                few = SamplingParams(max_tokens=4, temperature=load.temperature, ignore_eos=True)
                slow = first_s(everyone[PLAIN], group[0], few)
                self._first.append(first_s(everyone[AUTO], group[0], few) / slow)

    def row(self) -> Row:
        """What it came to."""
        seconds, first = self._seconds, self._first
        best = min((name for name in seconds if name != AUTO), key=lambda name: sum(seconds[name]))
        return Row(
            self._load.name,
            over(seconds[PLAIN], seconds[AUTO]),
            over(seconds[best], seconds[AUTO]),
            best,
            {name: made / sum(seconds[name]) for name, made in self._made.items()},
            dict(self._chosen),
            sorted(first)[len(first) // 2] if first else 1.0,
            self._start_load,
        )


def followed(options: argparse.Namespace, tick: Callable[[str], None]) -> list[Row]:
    """Controllers that go through `CHANGES`; each load is measured from its 50th round on."""
    pair = Pair(CHANGES[0], options)
    fixed = pair.fixed(CHANGES[0], options.k)
    few = min(SETTLED // 3, options.warm)
    groups = [prompts_of(load, pair.tokenizer, 2 * options.groups) for load in CHANGES]
    for llm in fixed.values():
        timed(llm, groups[0][-1], params_of(CHANGES[0], 0, few))
    runs = [Runs(load, [AUTO, *fixed]) for load in CHANGES]
    for _ in range(1 if options.smoke else FOLLOWERS):
        auto = pair.auto(1)
        for load, own, run in zip(CHANGES, groups, runs, strict=True):
            began = rounds_of(auto).total()
            for group in own[options.groups :] * SETTLED:
                if rounds_of(auto).total() - began + few > SETTLED:
                    break
                tick(f"{load.name}: the first rounds")
                timed(auto, group, params_of(load, 0, few))
            run.add(options, {AUTO: auto, **fixed}, own[: options.groups], tick)
    return [run.row() for run in runs]


def rounds_of(llm: LLM) -> Counter[str]:
    """The rounds of a controller's choices so far."""
    return Counter({name: one["rounds"] for name, one in llm.info()["control"].items()})


def over(base: Sequence[float], other: Sequence[float]) -> Interval:
    """How many times faster the other is, per group."""
    return Interval.of([a / b for a, b in zip(base, other, strict=True)])


def overhead(options: argparse.Namespace) -> list[dict[str, float]]:
    """Microseconds a step of the controller's own work, what its drafters do left out.

    Of these is a draft that is made of what a look-up said, too: it makes it when it is by itself.
    """
    found: list[dict[str, float]] = []
    pair = Pair(WORKLOADS[-4], options)
    for batch in (1, 8, 32):
        llm = pair.auto(batch)
        controller = llm.drafter
        assert isinstance(controller, Controller)
        load = Workload("", "bundled", "own", "code", batch=batch)
        params = SamplingParams(temperature=0.0, max_tokens=options.warm)
        first, *groups = prompts_of(load, pair.tokenizer, 3 if options.smoke else 24)
        llm.generate(first, params)
        seen_s, beside_s = clock_s()
        spent, inside, rounds = watched(controller)
        before, rested = rows_of(llm), rests_of(controller)
        with swept(), drafts_clocked(inside):
            for group in groups:
                llm.generate(group, params)
        rows, rested = rows_of(llm) - before, rests_of(controller) - rested
        own = sum(spent) - len(spent) * seen_s - sum(inside) - len(inside) * beside_s
        found.append(
            {
                "batch": batch,
                "rows_per_step": rows / rounds[0],
                "us_per_step": 1e6 * own / rounds[0],
                "us_per_step_asked": 1e6 * own / (rounds[0] - rested),
                "rested": rested / rounds[0],
                "allowed_us": 50 + 2 * rows / rounds[0],
            }
        )
    return found


@contextmanager
def drafts_clocked(into: list[float]) -> Iterator[None]:
    """A time in which the making of drafts of certain tokens is timed, where there are any."""
    points = GroupDraws.points
    timed = SimpleNamespace(points=points)
    clocked(timed, "points", into)
    GroupDraws.points = lambda draws, said: (timed.points if any(said) else points)(draws, said)
    try:
        yield
    finally:
        GroupDraws.points = points


def rests_of(controller: Controller) -> int:
    """Rounds in which nobody was asked."""
    return sum(one["reasons"].get(RESTING, 0) for one in controller.report().values())


def rows_of(llm: LLM) -> int:
    """Rows that the target has scored of drafts and texts."""
    return llm.metrics.drafted + llm.metrics.committed - llm.metrics.accepted


def clocked(owner: Any, name: str, into: list[float], rounds: list[int] | None = None) -> None:
    """Has a method's calls timed, and counted in `rounds`."""
    known = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        if rounds is not None:
            rounds[0] += 1
        start = time.thread_time()
        try:
            return known(*given, **named)
        finally:
            into.append(time.thread_time() - start)

    setattr(owner, name, call)


def clock_s() -> tuple[float, float]:
    """What timing a call takes: as it sees itself, and beside that."""
    idle, times, calls = SimpleNamespace(call=lambda: None), list[float](), 10_000
    clocked(idle, "call", times)
    start = time.thread_time()
    for _ in range(calls):
        idle.call()
    seen_s = sum(times) / calls
    return seen_s, (time.thread_time() - start) / calls - seen_s


def watched(controller: Controller) -> tuple[list[float], list[float], list[int]]:
    """Times of what the engine calls, and of the drafters inside of that; rounds in the last."""
    spent: list[float] = []
    inside: list[float] = []
    rounds = [0]
    for name in ("propose", "commit", "timed", "close"):
        clocked(controller, name, spent, rounds if name == "propose" else None)
    for drafter in controller.drafters:
        for name in ("propose", "chains", "commit", "close"):
            clocked(drafter, name, inside)
    return spent, inside, rounds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a workload."""
    lines = [
        "| workload | over plain | best fixed | over the best | first token | chosen | load |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        chosen = ", ".join(f"{name} {num}" for name, num in row["chosen"].items())
        lines.append(
            f"| {row['name']} | {shown(row['over_plain'])} | {row['best']} | "
            f"{shown(row['over_best'])} | {row['first']:.2f} | {chosen} | {row['load']:.1f} |"
        )
    return "\n".join(lines)


def costs_of(runs: Sequence[Sequence[dict[str, float]]]) -> str:
    """What the controller took beside what it may, all rounds told, run by run."""
    lines = ["| texts | rows | rounds left out | microseconds a round | goal |", "|" + " --- |" * 5]
    for of in zip(*runs, strict=True):
        each = ", ".join(f"{one['us_per_step']:.0f}" for one in of)
        rows, rested, goal = (
            sum(one[name] for one in of) / len(of)
            for name in ("rows_per_step", "rested", "allowed_us")
        )
        lines.append(f"| {of[0]['batch']} | {rows:.1f} | {rested:.0%} | {each} | {goal:.0f} |")
    return "\n".join(lines)


def shown(ratio: dict[str, float]) -> str:
    """Mean and interval."""
    return f"{ratio['mean']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.only, options.groups, options.tokens, options.k = (16,), 1, 8, (2,)
        options.warm = 4
    what = costs if options.costs else measured
    return exit_code(lambda: what(options, command_of("control", arguments)))


def costs(options: argparse.Namespace, command: str) -> None:
    """Measures what the controller takes alone, run by run, prints and saves."""
    others, neighbours = others_at_work(options), Neighbours()
    runs = [overhead(options) for _ in range(options.costs)]
    found = {"others_before": others, "others_during": neighbours.share(), "overheads": runs}
    save(options.json, command, found)
    print(costs_of(runs))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures workload by workload, prints, and saves after each."""
    others, neighbours = others_at_work(options), Neighbours()
    before: dict[str, Any] = {"rows": [], "changes": []}
    if options.json is not None and options.json.is_file():
        before |= json.loads(options.json.read_text("utf-8"))
    known, changes = before["rows"], before["changes"]
    wanted = [WORKLOADS[i] for i in options.only] if options.only else list(WORKLOADS)
    found = {"others_before": others, "overhead": overhead(options)}
    with Progress(transient=True) as bar:
        task = bar.add_task("workloads")
        for load in wanted:
            if load.name in [row["name"] for row in known]:
                continue
            row = compared(load, options, lambda label: bar.update(task, description=label))
            known.append(asdict(row))
            found |= {"others_during": neighbours.share(), "rows": known, "changes": changes}
            save(options.json, command, found)
        if not changes:
            changed = followed(options, lambda label: bar.update(task, description=label))
            changes += [asdict(row) for row in changed]
        found |= {"others_during": neighbours.share(), "rows": known, "changes": changes}
        save(options.json, command, found)
    print(table(known))
    print(table(changes))
    print(costs_of([found["overhead"]]))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add_option = parser.add_argument
    add_option("--only", type=ints, default=(), help="numbers of workloads, from 0")
    add_option("--groups", type=int, default=8, help="groups of prompts a workload")
    add_option("--tokens", type=int, help="new tokens a text; a workload's own by default")
    add_option("--k", type=ints, default=(1, 2, 4, 8), help="depths of the fixed draft model")
    add_option("--compile", action="store_true", help="compiled forwards")
    add_option("--costs", type=int, default=0, help="only what the controller takes, so many times")
    add_option("--warm", type=int, default=64, help="tokens of a text made before anything counts")
    add_option("--layers", type=int, default=12, help="blocks of the inflated target")
    add_option("--feed-forward", type=int, default=4096, help="width of its feed-forwards")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
