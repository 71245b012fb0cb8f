"""Every drafter on the bundled target: how much of its drafts is kept, and how fast that is.

    python benchmarks/drafters.py --json docs/drafters.json

Three sets of held-out prompts, chains and trees, temperature 0 and 1. What the JSON has of a set at
a temperature is left as it is, so that a run that was broken off goes on and drafters can be added;
these are timed beside plain decoding anew. Six prompts of each set continued by 48 tokens are some
60,000 tokens by everybody: on two cores, otherwise idle, 20 minutes at most; `--smoke` needs half a
minute. Prints the part of docs/drafters.md with the tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import Progress

from outrider import LLM, SamplingParams
from outrider.bench.machine import Machine, Neighbours
from outrider.bench.paired import Interval, order
from outrider.bench.script import (
    command_of,
    exit_code,
    floats,
    names,
    others_at_work,
    parser_of,
    save,
)
from outrider.errors import InvalidConfig
from outrider.models.bundled import EVAL_SETS, eval_prompts
from outrider.models.hf import default_dtype

PLAIN = "none"
ALONE = ("draft", "int8", "early-exit:2", "early-exit:4", "ngram", "suffix", "recycle")
TOGETHER = ("draft+ngram", "draft+suffix", "draft+recycle", "suffix+recycle", "ngram+recycle")
HEADS = (
    "eagle:bundled",
    "mtp:bundled",
    "early-exit:bundled",
    "eagle:bundled+ngram",
    "early-exit:bundled+suffix",
)
RULES = {"chain": "block", "tree": "traversal"}
"""Rules at temperature 1; at 0 every rule keeps the same."""
SIZES = ("prompts", "tokens", "k", "long", "deep", "width", "nodes", "compile")
"""Options that all figures of a record have in common."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table."""

    drafter: str
    shape: str
    llm: LLM


@dataclass(frozen=True, slots=True)
class Cell:
    """What one drafter did on one set of prompts at one temperature.

    Attributes:
        kept: mean accepted length: 1 + accepted tokens over rounds with a draft.
        rounds: all rounds, those without a draft too.
        tok_s: new tokens over seconds, all prompts together, their reading included.
        speedup: tokens per second over plain decoding's, per prompt.
    """

    drafter: str
    shape: str
    prompts: str
    temperature: float
    kept: float
    acceptance: float
    rounds: int
    tok_s: float
    speedup: Interval


@dataclass(frozen=True, slots=True)
class Drafted:
    """One text: tokens accepted, rounds with a draft, and seconds of drafting."""

    accepted: int
    rounds: int
    draft_s: float


@dataclass(slots=True)
class Tally:
    """Sums over prompts; `draft_s` are a drafter's seconds, its reading of prompts too."""

    draft_s: float = 0.0
    accepted: int = 0
    drafted: int = 0
    drafted_rounds: int = 0
    rounds: int = 0
    seconds: tuple[float, ...] = ()
    texts: tuple[Drafted, ...] = ()


def lines(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Plain decoding first, then every drafter as chain and as tree."""
    return [(PLAIN, "chain"), *((d, shape) for d in options.drafters for shape in options.shapes)]


def loaded(drafter: str, shape: str, options: argparse.Namespace) -> Setting:
    """A line of the table, ready to decode."""
    # Prompts are read anew by everybody.
    given: dict[str, Any] = {"compile": options.compile, "share_prefixes": False}
    if drafter != PLAIN:
        given["k"] = options.long if drafter in ("ngram", "suffix") else options.k
    if shape == "tree":
        given |= {"width": options.width, "nodes": options.nodes}
        if drafter in HEADS:
            given["k"] = options.deep
    return Setting(drafter, shape, LLM.load("bundled", drafter, **given))


def timed(setting: Setting, prompt: str, params: SamplingParams, tally: Tally) -> None:
    """Decodes one prompt."""
    rule = RULES[setting.shape] if params.temperature and setting.drafter != PLAIN else None
    before, start = setting.llm.metrics.draft_s, time.perf_counter()
    (done,) = setting.llm.generate(prompt, params, rule=rule)
    tally.seconds = (*tally.seconds, time.perf_counter() - start)
    stats, draft_s = done.stats, setting.llm.metrics.draft_s - before
    tally.texts = (*tally.texts, Drafted(stats.accepted, stats.rounds, draft_s))
    tally.draft_s += draft_s
    assert len(done.token_ids) == params.max_tokens
    tally.accepted += stats.accepted
    tally.drafted += stats.drafted
    tally.drafted_rounds += stats.rounds
    tally.rounds += len(done.token_ids) - stats.accepted


def tallied(
    everyone: Sequence[Setting],
    name: str,
    temperature: float,
    options: argparse.Namespace,
    tick: Callable[[str], None],
    enough: Callable[[int], bool] = lambda done: False,
) -> list[Tally]:
    """Every prompt of a set by everybody before the next, every other time backwards.

    `enough` says whether so many prompts are all.
    """
    prompts = eval_prompts(name)[: options.prompts]
    tallies = [Tally() for _ in everyone]
    warm = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    for setting in everyone:
        setting.llm.generate(prompts[0], warm)
    for i, prompt in enumerate(prompts):
        if enough(i):
            break
        params = SamplingParams(
            temperature=temperature, max_tokens=options.tokens, ignore_eos=True, seed=i
        )
        for which in order(len(everyone), i, False):
            tick(f"{name}, {everyone[which].drafter}")
            timed(everyone[which], prompt, params, tallies[which])
    return tallies


def summed(
    everyone: Sequence[Setting],
    tallies: Sequence[Tally],
    name: str,
    temperature: float,
    tokens: int,
) -> list[Cell]:
    """The cells of one set of prompts at one temperature."""
    plain = tallies[0].seconds
    return [
        Cell(
            setting.drafter,
            setting.shape,
            name,
            temperature,
            1 + tally.accepted / max(1, tally.drafted_rounds),
            tally.accepted / max(1, tally.drafted),
            tally.rounds,
            tokens * len(tally.seconds) / sum(tally.seconds),
            Interval.of([a / b for a, b in zip(plain, tally.seconds, strict=True)]),
        )
        for setting, tally in zip(everyone, tallies, strict=True)
    ]


def table(cells: Sequence[Cell], temperature: float) -> str:
    """One line per drafter and shape, three columns per set of prompts."""
    sets = list(dict.fromkeys(cell.prompts for cell in cells))
    found = {(c.drafter, c.shape, c.prompts): c for c in cells if c.temperature == temperature}
    rows = [["drafter", "shape", *(f"{name}: kept | tok/s | speed-up" for name in sets)]]
    rows.append(["---"] * (2 + 3 * len(sets)))
    for drafter, shape in dict.fromkeys((cell.drafter, cell.shape) for cell in cells):
        own = [found.get((drafter, shape, name)) for name in sets]
        rows.append([f"`{drafter}`", "" if drafter == PLAIN else shape, *map(figures, own)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figures(cell: Cell | None) -> str:
    """Three figures as three columns; None: not measured."""
    if cell is None:
        return " | | "
    ratio = cell.speedup
    interval = "" if cell.drafter == PLAIN else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{cell.kept:.2f} | {cell.tok_s:.0f} | {ratio.mean:.2f}{interval}"


def page(record: Mapping[str, Any]) -> str:
    """What docs/drafters.md says of a record, by its own command, machine and sizes."""
    machine, sizes = record["machine"], record["settings"]
    cells = [Cell(**{**cell, "speedup": Interval(**cell["speedup"])}) for cell in record["cells"]]
    said = [
        f"The bundled target, {sizes['prompts']} held-out prompts of each set continued by "
        f"{sizes['tokens']} tokens, {sizes['dtype']} on {machine['num_cpus']} cores of "
        f"{machine['processor']}\n(`{record['command']}`, [drafters.json](drafters.json)). *kept* "
        "is the mean\naccepted length: 1 + accepted tokens a round, over rounds with a draft. "
        "*speed-up* is the geometric mean over prompts of plain decoding's\nseconds over the "
        "drafter's, with its bootstrap interval of 95 %. "
        f"Chains are {sizes['k']} tokens, of `ngram` and `suffix` alone {sizes['long']}; trees "
        f"have {sizes['nodes']} nodes,\n{sizes['width']} children and {sizes['k']} levels, those "
        f"of heads {sizes['deep']}. At temperature 1 chains are verified by `{RULES['chain']}` and "
        f"trees by `{sizes['tree_rule']}`."
    ]
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        said += [f"Temperature {temperature:g}:", table(cells, temperature)]
    return "\n\n".join(said)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens, options.sets = 1, 8, ("code",)
        options.drafters = ("draft", "suffix+recycle", "eagle:bundled")
    return exit_code(lambda: measured(options, command_of("drafters", arguments)))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures what the JSON lacks, set by set, saves after each, and prints."""
    record = earlier(options)
    known = {(c["drafter"], c["shape"], c["prompts"], c["temperature"]) for c in record["cells"]}
    due = {
        (name, temperature): lacking
        for name in options.sets
        for temperature in options.temperatures
        if (lacking := [one for one in lines(options) if (*one, name, temperature) not in known])
    }
    if due:
        record["others_before"] = max(record["others_before"], others_at_work(options))
        if command not in record["command"].split("; "):
            record["command"] = "; ".join(filter(None, (record["command"], command)))
        add_to(record, due, options)
    print(page(record))


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """What the JSON holds, or the beginning of a record.

    Raises:
        InvalidConfig: it was measured otherwise, so that its figures cannot stand beside new ones.
    """
    record: dict[str, Any] = {
        "command": "",
        "machine": asdict(Machine.here()),
        "others_before": 0.0,
        "others_during": 0.0,
        "settings": {name: getattr(options, name) for name in SIZES},
        "cells": [],
    }
    record["settings"]["tree_rule"] = RULES["tree"]
    record["settings"]["dtype"] = str(default_dtype(torch.device("cpu"))).removeprefix("torch.")
    if options.json is None or not options.json.is_file():
        return record
    held = json.loads(options.json.read_text("utf-8"))
    own = {**record["settings"], "processor": record["machine"]["processor"]}
    its = {**held["settings"], "processor": held["machine"]["processor"]}
    for name, value in own.items():
        if its.get(name, value) != value:
            raise InvalidConfig(
                f"{options.json} was measured with {name}={its[name]!r}, this would be with "
                f"{value!r}; measure alike, or give --json another file"
            )
    return {**record, **held, "settings": {**record["settings"], **held["settings"]}}


def add_to(
    record: dict[str, Any],
    due: Mapping[tuple[str, float], Sequence[tuple[str, str]]],
    options: argparse.Namespace,
) -> None:
    """Measures the lines that are due of each set at a temperature beside plain decoding."""
    neighbours = Neighbours()
    plain = (PLAIN, "chain")
    wanted = dict.fromkeys([plain, *(line for lacking in due.values() for line in lacking)])
    ready = {line: loaded(*line, options) for line in wanted}
    with Progress(transient=True) as bar:
        total = sum(len({plain, *lacking}) for lacking in due.values()) * options.prompts
        task = bar.add_task("texts", total=total)
        for (name, temperature), lacking in due.items():
            everyone = [ready[line] for line in dict.fromkeys([plain, *lacking])]
            tallies = tallied(
                everyone,
                name,
                temperature,
                options,
                lambda label: bar.update(task, advance=1, description=label),
            )
            cells = summed(everyone, tallies, name, temperature, options.tokens)
            record["cells"] += [
                asdict(cell) for cell in cells if (cell.drafter, cell.shape) in lacking
            ]
            record["others_during"] = max(record["others_during"], neighbours.share() or 0.0)
            save(options.json, record["command"], record)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--drafters", type=names, default=ALONE + TOGETHER + HEADS, help="spec strings, by commas")
    add("--shapes", type=names, default=tuple(RULES), help="chain,tree")
    add("--sets", type=names, default=EVAL_SETS, help=f"prompts: {','.join(EVAL_SETS)}")
    add("--temperatures", type=floats, default=(0.0, 1.0), help="0,1")
    add("--prompts", type=int, default=6, help="prompts of each set")
    add("--tokens", type=int, default=48, help="new tokens a prompt")
    add("--k", type=int, default=4, help="depth of drafts")
    add("--long", type=int, default=16, help="depth of drafts by ngram and suffix alone")
    add("--deep", type=int, default=5, help="depth of trees that heads grow")
    add("--width", type=int, default=3, help="children in trees")
    add("--nodes", type=int, default=12, help="nodes of trees")
    add("--compile", action="store_true", help="compiled forwards")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
