"""Every drafter on the bundled target: how much of its drafts is kept, and how fast that is.

    python benchmarks/drafters.py --json docs/drafters.json

Three sets of held-out prompts, chains and trees, temperature 0 and 1. Needs an otherwise idle
machine and some 20 minutes on two cores; `--smoke` needs half a minute. See docs/drafters.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.progress import Progress

from outrider import LLM, SamplingParams
from outrider.bench.machine import Neighbours
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
from outrider.models.bundled import EVAL_SETS, eval_prompts

PLAIN = "none"
ALONE = ("draft", "int8", "early-exit:2", "early-exit:4", "ngram", "suffix", "recycle")
TOGETHER = ("draft+ngram", "draft+suffix", "draft+recycle", "suffix+recycle", "ngram+recycle")
RULES = {"chain": "block", "tree": "hybrid-traversal"}
"""Rules at temperature 1; at 0 every rule keeps the same."""


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


@dataclass(slots=True)
class Tally:
    """Sums over prompts."""

    accepted: int = 0
    drafted: int = 0
    drafted_rounds: int = 0
    rounds: int = 0
    seconds: tuple[float, ...] = ()


def settings(options: argparse.Namespace) -> list[Setting]:
    """Plain decoding first, then every drafter as chain and as tree."""
    # Prompts are read anew by everybody.
    common = {"compile": options.compile, "share_prefixes": False}
    found = [Setting(PLAIN, "chain", LLM.load("bundled", PLAIN, **common))]
    for spec in options.drafters:
        for shape in options.shapes:
            trees = {} if shape == "chain" else {"width": options.width, "nodes": options.nodes}
            depth = options.long if spec in ("ngram", "suffix") else options.k
            found.append(
                Setting(spec, shape, LLM.load("bundled", spec, k=depth, **common, **trees))
            )
    return found


def timed(setting: Setting, prompt: str, params: SamplingParams, tally: Tally) -> None:
    """Decodes one prompt."""
    rule = RULES[setting.shape] if params.temperature and setting.drafter != PLAIN else None
    start = time.perf_counter()
    (done,) = setting.llm.generate(prompt, params, rule=rule)
    tally.seconds = (*tally.seconds, time.perf_counter() - start)
    stats = done.stats
    assert len(done.token_ids) == params.max_tokens
    tally.accepted += stats.accepted
    tally.drafted += stats.drafted
    tally.drafted_rounds += stats.rounds
    tally.rounds += len(done.token_ids) - stats.accepted


def run(options: argparse.Namespace) -> list[Cell]:
    """Every prompt by everybody before the next, every other time backwards."""
    everyone = settings(options)
    cells: list[Cell] = []
    total = len(options.sets) * len(options.temperatures) * options.prompts * len(everyone)
    with Progress(transient=True) as bar:
        task = bar.add_task("texts", total=total)
        for name in options.sets:
            prompts = eval_prompts(name)[: options.prompts]
            for temperature in options.temperatures:
                tallies = [Tally() for _ in everyone]
                warm = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
                for setting in everyone:
                    setting.llm.generate(prompts[0], warm)
                for i, prompt in enumerate(prompts):
                    params = SamplingParams(
                        temperature=temperature, max_tokens=options.tokens, ignore_eos=True, seed=i
                    )
                    for which in order(len(everyone), i, False):
                        bar.update(task, description=f"{name}, {everyone[which].drafter}")
                        timed(everyone[which], prompt, params, tallies[which])
                        bar.advance(task)
                cells += summed(everyone, tallies, name, temperature, options.tokens)
    return cells


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
    lines = list(dict.fromkeys((cell.drafter, cell.shape) for cell in cells))
    found = {(c.drafter, c.shape, c.prompts): c for c in cells if c.temperature == temperature}
    rows = [["drafter", "shape", *(f"{name}: kept | tok/s | speed-up" for name in sets)]]
    rows.append(["---"] * (2 + 3 * len(sets)))
    for drafter, shape in lines:
        own = [found[drafter, shape, name] for name in sets]
        rows.append([f"`{drafter}`", "" if drafter == PLAIN else shape, *map(figures, own)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figures(cell: Cell) -> str:
    """Three figures as three columns."""
    ratio = cell.speedup
    interval = "" if cell.drafter == PLAIN else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{cell.kept:.2f} | {cell.tok_s:.0f} | {ratio.mean:.2f}{interval}"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens, options.sets = 1, 8, ("code",)
        options.drafters = ("draft", "suffix+recycle")
    return exit_code(lambda: measured(options, command_of("drafters", arguments)))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures, prints, and saves."""
    others, neighbours = others_at_work(options), Neighbours()
    cells = run(options)
    for temperature in options.temperatures:
        print(f"Temperature {temperature:g}:\n\n{table(cells, temperature)}\n")
    found = {
        "others_before": others,
        "others_during": neighbours.share(),
        "cells": [asdict(cell) for cell in cells],
    }
    save(options.json, command, found)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--drafters", type=names, default=ALONE + TOGETHER, help="spec strings, by commas")
    add("--shapes", type=names, default=tuple(RULES), help="chain,tree")
    add("--sets", type=names, default=EVAL_SETS, help=f"prompts: {','.join(EVAL_SETS)}")
    add("--temperatures", type=floats, default=(0.0, 1.0), help="0,1")
    add("--prompts", type=int, default=8, help="prompts of each set")
    add("--tokens", type=int, default=64, help="new tokens a prompt")
    add("--k", type=int, default=4, help="depth of drafts")
    add("--long", type=int, default=16, help="depth of drafts by ngram and suffix alone")
    add("--width", type=int, default=3, help="children in trees")
    add("--nodes", type=int, default=12, help="nodes of trees")
    add("--compile", action="store_true", help="compiled forwards")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
