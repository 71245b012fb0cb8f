"""What trees keep that are grown to a budget, by the rule that grows them.

    python benchmarks/grown.py --json docs/grown.json

Held-out prompts of each set, continued by the bundled target with trees of its EAGLE-3 head; what
they keep is held against the draft model's chain of four. Every prompt has the same seed for every
draft; temperature 0 has but one rule. Nothing is timed, and a busy machine changes no figure.
`--smoke` half a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.progress import track

from benchmarks.drafters import Drafted
from benchmarks.heads import kept, kept_ratio
from outrider import LLM, SamplingParams
from outrider.bench.paired import Interval
from outrider.bench.script import command_of, exit_code, names, parser_of, save
from outrider.models.bundled import EVAL_SETS, eval_prompts

CHAIN = {"k": 4}
"""What all others are compared with, of the draft model."""
BUDGETS: tuple[dict[str, int], ...] = (
    {"k": 4, "width": 4, "nodes": 12},
    {"k": 6, "width": 4, "nodes": 16},
    {"k": 8, "width": 4, "nodes": 32},
    {"k": 8, "width": 6, "nodes": 48},
)
GROWING = ("hybrid-traversal", "traversal")


@dataclass(frozen=True, slots=True)
class Cell:
    """What one draft kept on one set of prompts: tokens a round, and times what the chain keeps."""

    drafter: str
    rule: str
    draft: str
    prompts: str
    kept: float
    ratio: Interval


def ways(options: argparse.Namespace) -> list[tuple[str, str, dict[str, int]]]:
    """Drafter, rule and budget: chains of four, then the trees."""
    of_chains, of_trees = ("block", GROWING) if options.temperature else ("greedy", ("greedy",))
    drafters = dict.fromkeys(("draft", *options.drafters))
    chains = [(drafter, of_chains, CHAIN) for drafter in drafters]
    trees = [(d, rule, b) for d in options.drafters for b in BUDGETS for rule in of_trees]
    return [*chains, *trees]


def said(budget: dict[str, int]) -> str:
    """A budget in words."""
    tree = f", {budget['width']} wide, {budget['nodes']} nodes" if "nodes" in budget else ""
    return f"k = {budget['k']}{tree}"


def texts_of(llm: LLM, rule: str, name: str, options: argparse.Namespace) -> list[Drafted]:
    """The drafts of all prompts of a set, prompt i under seed i."""
    prompts = eval_prompts(name)[: options.prompts]
    params = [
        SamplingParams(
            temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True, seed=i
        )
        for i in range(len(prompts))
    ]
    done = llm.generate(prompts, params, rule=rule)
    return [Drafted(one.stats.accepted, one.stats.rounds, 0.0) for one in done]


def table(cells: Sequence[Cell]) -> str:
    """One line per draft, two columns per set of prompts."""
    sets = list(dict.fromkeys(cell.prompts for cell in cells))
    rows = [["drafter", "draft", "rule", *(f"{name}: kept | of the chain" for name in sets)]]
    rows.append(["---"] * (3 + 2 * len(sets)))
    for drafter, draft, rule in dict.fromkeys((c.drafter, c.draft, c.rule) for c in cells):
        own = [c for c in cells if (c.drafter, c.draft, c.rule) == (drafter, draft, rule)]
        figures = [
            f"{c.kept:.2f} | {c.ratio.mean:.2f} [{c.ratio.low:.2f}, {c.ratio.high:.2f}]"
            for c in own
        ]
        rows.append([f"`{drafter}`", draft, f"`{rule}`", *figures])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def measured(options: argparse.Namespace, command: str) -> None:
    """Decodes with every draft, saves and prints."""
    cells: list[Cell] = []
    chain: dict[str, list[Drafted]] = {}
    for drafter, rule, budget in track(ways(options), "drafts", transient=True):
        llm = LLM.load("bundled", drafter, **budget)
        for name in options.sets:
            texts = texts_of(llm, rule, name, options)
            ratio = kept_ratio(texts, chain.setdefault(name, texts))
            cells.append(Cell(drafter, rule, said(budget), name, kept(texts), ratio))
        asked = {name: getattr(options, name) for name in ("prompts", "tokens", "temperature")}
        save(options.json, command, {**asked, "cells": [asdict(cell) for cell in cells]})
    print(table(cells))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens, options.sets = 2, 8, ("code",)
        options.drafters = ("draft",)
    return exit_code(lambda: measured(options, command_of("grown", arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--drafters", type=names, default=("eagle:bundled",), help="whose trees")
    add("--sets", type=names, default=EVAL_SETS, help=f"prompts: {','.join(EVAL_SETS)}")
    add("--prompts", type=int, default=24, help="prompts of each set")
    add("--tokens", type=int, default=48, help="new tokens a prompt")
    add("--temperature", type=float, default=1.0, help="0: the likeliest tokens")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
