"""A head beside the one that is shipped: what chains of four of each keep of the same prompts.

    python benchmarks/learned.py eagle:runs/quick --text src/ --json docs/learned.json

Prompts are held-out ones of each evaluation set, and, with `--text`, stretches of what the head's
own training on that text held out. Every prompt has the same seed for both; nothing is timed, and a
busy machine changes no figure. `--smoke` takes half a minute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.drafters import Drafted
from benchmarks.heads import kept, kept_ratio
from outrider import LLM, SamplingParams
from outrider.bench.paired import Interval
from outrider.bench.script import command_of, exit_code, parser_of, save
from outrider.models.bundled import EVAL_SETS, bundled_path, eval_prompts
from outrider.models.text import TextTokenizer
from outrider.train.texts import read_texts

HELD_OUT = "the text's own"
PROMPT_TOKENS = 64
RULES = {0.0: "greedy", 1.0: "block"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What both heads keep of some prompts, tokens a round, and their ratio."""

    prompts: str
    temperature: float
    head: float
    shipped: float
    kept_ratio: Interval
    accepted_ratio: float | None


def stretches(paths: Sequence[Path], count: int) -> list[list[int]]:
    """So many prompts, evenly spread over what training on these holds out, put end to end."""
    texts = read_texts(paths, TextTokenizer(bundled_path("target")))
    held_out = [token for document in texts.held_out for token in document]
    room = max(1, len(held_out) - PROMPT_TOKENS)
    starts = [i * room // count for i in range(count)]
    return [held_out[start : start + PROMPT_TOKENS] for start in starts]


def drafted(
    llm: LLM, prompts: Sequence[str | list[int]], temperature: float, tokens: int
) -> list[Drafted]:
    """The drafts for all prompts, prompt i under seed i."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    done = llm.generate(list(prompts), params, rule=RULES[temperature])
    return [Drafted(one.stats.accepted, one.stats.rounds, 0.0) for one in done]


def table(cells: Sequence[Cell]) -> str:
    """One line for each set of prompts and temperature."""
    rows = [["prompts", "temperature", "head", "shipped", "ratio of kept", "ratio of accepted"]]
    rows.append(["---"] * len(rows[0]))
    for c in cells:
        ratio = f"{c.kept_ratio.mean:.2f} [{c.kept_ratio.low:.2f}, {c.kept_ratio.high:.2f}]"
        accepted = "" if c.accepted_ratio is None else f"{c.accepted_ratio:.2f}"
        figures = f"{c.head:.2f}", f"{c.shipped:.2f}", ratio, accepted
        rows.append([c.prompts, f"{c.temperature:g}", *figures])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def measured(options: argparse.Namespace, command: str) -> None:
    """Decodes with both heads, saves and prints."""
    sets: dict[str, list[str] | list[list[int]]] = {}
    if options.text:
        sets[HELD_OUT] = stretches(options.text, options.prompts)
    sets |= {name: eval_prompts(name)[: options.prompts] for name in EVAL_SETS}
    heads = [LLM.load("bundled", head, k=4) for head in (options.head, "eagle:bundled")]
    cells: list[Cell] = []
    for name in track(sets, "prompts", transient=True):
        for temperature in RULES:
            ours, shipped = (drafted(llm, sets[name], temperature, options.tokens) for llm in heads)
            ratio = kept_ratio(ours, shipped)
            more, theirs = kept(ours) - 1, kept(shipped) - 1
            accepted = more / theirs if theirs else None
            cells.append(Cell(name, temperature, kept(ours), kept(shipped), ratio, accepted))
            asked = {"prompts": options.prompts, "tokens": options.tokens}
            save(options.json, command, {**asked, "cells": [asdict(cell) for cell in cells]})
    print(table(cells))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens = 2, 8
    return exit_code(lambda: measured(options, command_of("learned", arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("head", help="spec of the head, such as eagle:runs/head")
    add("--text", type=Path, action="append", help="a file or folder it learned from; repeatable")
    add("--prompts", type=int, default=64, help="prompts of each set")
    add("--tokens", type=int, default=48, help="new tokens a prompt")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
