"""Heads beside a draft model on a large target: tokens kept for equal seconds of drafting.

    python benchmarks/heads.py --json docs/heads.json

The target is an inflated copy of the bundled one (docs/benchmarks.md), of the bundled vocabulary,
so that the bundled heads fit it; the draft model is inflated to the cost ratio asked for. Chains of
the draft model and of the heads, and the heads' trees, continue held-out prompts in turn. Every
chain of the draft model is then compared with one draft of the head: every other prompt chooses it,
as the one that keeps most of those that take no longer to be drafted, and the prompts between judge
it. `--minutes` bounds the time: each set at a temperature gets its share, and fewer prompts where
that is up. 4 GB; `--smoke` half a minute. The JSON is written after each set of prompts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.drafters import PLAIN, Drafted, Setting, tallied
from outrider import LLM
from outrider.bench.calibrate import Probe, size_draft
from outrider.bench.inflate import Size, inflate, weights_read
from outrider.bench.machine import Neighbours
from outrider.bench.paired import RESAMPLES, Interval
from outrider.bench.script import (
    command_of,
    exit_code,
    floats,
    names,
    others_at_work,
    parser_of,
    save,
)
from outrider.drafters import Drafter, EagleDrafter, EarlyExitDrafter, ModelDrafter, NoDrafter
from outrider.errors import InvalidConfig
from outrider.models.bundled import EVAL_SETS, bundled_path
from outrider.models.checkpoint import load_llama
from outrider.models.hf import HuggingFaceTarget, default_dtype
from outrider.models.speculators import load_head
from outrider.models.text import TextTokenizer

PROBED = 96
FEWEST = 4
"""Prompts of a set at least, whatever the time."""
HEADS = ("eagle", "early-exit:2")
"""MTP module and exit's head go by the number of the target's layers, which is another one here."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft: levels, and for trees children of a row and nodes."""

    drafter: str
    k: int = 0
    width: int = 1
    nodes: int | None = None

    def __str__(self) -> str:
        tree = "" if self.nodes is None else f", {self.width} wide, {self.nodes} nodes"
        return self.drafter if not self.k else f"{self.drafter}, k = {self.k}{tree}"


DRAFTED = tuple(Way("draft", k) for k in (2, 4, 6))
OF_HEADS = (
    Way("eagle", 4),
    *(Way("eagle", k, 4, nodes) for k, nodes in ((4, 12), (6, 16), (8, 32))),
    Way("eagle", 8, 6, 48),
    Way("early-exit:2", 4),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What one way did on one set of prompts at one temperature.

    Attributes:
        texts: what became of the drafts, prompt by prompt; a prompt's reading is drafting too.
        tok_s: new tokens over seconds, all prompts together, their reading included.
        speedup: tokens per second over plain decoding's, per prompt.
    """

    way: Way
    prompts: str
    temperature: float
    texts: tuple[Drafted, ...]
    tok_s: float
    speedup: Interval

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Cell:
        """The cell of a record."""
        texts = tuple(Drafted(**text) for text in found["texts"])
        ways, spread = Way(**found["way"]), Interval(**found["speedup"])
        return cls(**{**found, "way": ways, "texts": texts, "speedup": spread})


def kept(texts: Sequence[Drafted]) -> float:
    """Mean accepted length: 1 + accepted tokens over rounds with a draft."""
    return 1 + sum(text.accepted for text in texts) / max(1, sum(text.rounds for text in texts))


def draft_ms(texts: Sequence[Drafted]) -> float:
    """Drafting of a round with a draft; 0 where nobody drafts."""
    return 1000 * sum(text.draft_s for text in texts) / max(1, sum(text.rounds for text in texts))


def kept_ratio(one: Sequence[Drafted], other: Sequence[Drafted], seed: int = 0) -> Interval:
    """How much longer the accepted length of `one` is, the prompts of both being the same.

    `mean` is the ratio of both means, its interval the bootstrap's over prompts.
    """
    sums = [[(t.accepted + t.rounds, t.rounds) for t in texts] for texts in (one, other)]
    own_PD, their_PD = np.asarray(sums, dtype=np.float64)
    num = len(own_PD)
    chosen = np.random.default_rng(seed).integers(0, num, (RESAMPLES, num))

    def ratio(own: Any, their: Any) -> Any:
        return own[..., 0] / own[..., 1] * their[..., 1] / their[..., 0]

    low, high = np.quantile(ratio(own_PD[chosen].sum(1), their_PD[chosen].sum(1)), (0.025, 0.975))
    mean, median = ratio(own_PD.sum(0), their_PD.sum(0)), np.median(ratio(own_PD, their_PD))
    return Interval(num, float(median), float(mean), float(low), float(high))


class Pair:
    """The inflated target, its draft model, and the bundled heads on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._dtype = default_dtype(torch.device("cpu"))
        small = load_llama(bundled_path("target"))
        vocab = int(small.config.vocab_size)
        big = inflate(small, Size(options.layers, options.feed_forward, vocab), 0)
        self.weights = weights_read(big)
        self.target = self._wrap(big)
        self.tokenizer = TextTokenizer(bundled_path("target"))
        tokens = list(range(1, PROBED + 1))
        probe = Probe(self.target, tokens)
        self.draft = size_draft(
            load_llama(bundled_path("draft")),
            options.cost,
            vocab=vocab,
            target=probe,
            target_layers=options.layers,
            target_weights=self.weights,
            wrap=self._wrap,
            prompt=tokens,
            seed=1,
            rounds=5,
        )
        probe.close()

    def setting(self, way: Way) -> Setting:
        """One way, ready to decode."""
        trees = {} if way.nodes is None else {"width": way.width, "nodes": way.nodes}
        drafter = self._drafter(way.drafter)
        llm = LLM(self.target, self.tokenizer, drafter, k=way.k or 1, **trees)
        return Setting(str(way), "tree" if trees else "chain", llm)

    def _drafter(self, name: str) -> Drafter:
        if name == PLAIN:
            return NoDrafter()
        if name == "draft":
            return ModelDrafter(self.draft.target)
        if name.startswith("early-exit"):
            return EarlyExitDrafter(int(name.partition(":")[2]))
        return EagleDrafter(load_head(bundled_path(name), self.target))

    def _wrap(self, model: torch.nn.Module) -> HuggingFaceTarget:
        whole: Any = model.to(self._dtype)
        return HuggingFaceTarget(whole, share_prefixes=False)


def cells_of(
    ways: Sequence[tuple[Way, Setting]],
    name: str,
    temperature: float,
    options: argparse.Namespace,
    tick: Callable[[str], None],
    deadline: float,
) -> list[Cell]:
    """What all ways did on a set of prompts, the first of them being plain decoding."""

    def enough(done: int) -> bool:
        return done >= FEWEST and time.monotonic() > deadline

    tallies = tallied([own for _, own in ways], name, temperature, options, tick, enough)
    plain = tallies[0].seconds
    return [
        Cell(
            way,
            name,
            temperature,
            tally.texts,
            options.tokens * len(tally.seconds) / sum(tally.seconds),
            Interval.of([a / b for a, b in zip(plain, tally.seconds, strict=True)]),
        )
        for (way, _), tally in zip(ways, tallies, strict=True)
    ]


def table(cells: Sequence[Cell], temperature: float) -> str:
    """One line per way, four columns per set of prompts."""
    sets = list(dict.fromkeys(cell.prompts for cell in cells))
    found = {(c.way, c.prompts): c for c in cells if c.temperature == temperature}
    rows = [["draft", *(f"{name}: kept | drafting, ms | tok/s | speed-up" for name in sets)]]
    rows.append(["---"] * (1 + 4 * len(sets)))
    for way in dict.fromkeys(cell.way for cell in cells):
        rows.append([str(way), *(figures(found[way, name]) for name in sets)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def figures(cell: Cell) -> str:
    """Four figures as four columns."""
    ratio = cell.speedup
    if not cell.way.k:
        return f"1.00 | | {cell.tok_s:.0f} | 1.00"
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    rate = f"{cell.tok_s:.0f} | {ratio.mean:.2f} {interval}"
    return f"{kept(cell.texts):.2f} | {draft_ms(cell.texts):.1f} | {rate}"


def chosen(chain: Cell, heads: Sequence[Cell]) -> Cell | None:
    """Of the heads' drafts that take no longer than a chain's the one that keeps most.

    Every other prompt says so; those between have no part in it.
    """
    most = draft_ms(chain.texts[::2])
    able = [cell for cell in heads if draft_ms(cell.texts[::2]) <= most]
    return max(able, key=lambda cell: kept(cell.texts[::2]), default=None)


def equal_time(cells: Sequence[Cell]) -> str:
    """For each chain of the draft model what a head's draft of no more time keeps.

    All figures are those of the prompts that had no part in the choice.
    """
    head = ["prompts", "temperature", "draft model", "ms", "kept", "head", "ms", "kept", "ratio"]
    rows = [head, ["---"] * len(head)]
    groups = dict.fromkeys((cell.prompts, cell.temperature) for cell in cells)
    for name, temperature in groups:
        own = [c for c in cells if (c.prompts, c.temperature) == (name, temperature) and c.way.k]
        heads = [cell for cell in own if cell.way.drafter == "eagle"]
        for chain in (cell for cell in own if cell.way.drafter == "draft"):
            best = chosen(chain, heads)
            if best is None:
                continue
            ratio = kept_ratio(best.texts[1::2], chain.texts[1::2])
            row = [name, f"{temperature:g}"]
            for cell in (chain, best):
                judged = cell.texts[1::2]
                row += [str(cell.way), f"{draft_ms(judged):.1f}", f"{kept(judged):.2f}"]
            rows.append([*row, f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(record: Mapping[str, Any]) -> str:
    """What docs/heads.md says of a record."""
    cells = [Cell.read(cell) for cell in record["cells"]]
    said: list[str] = []
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        said += [f"Temperature {temperature:g}:", table(cells, temperature)]
    return "\n\n".join([*said, "For equal seconds of drafting:", equal_time(cells)])


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures, saves after each set at a temperature, and prints."""
    for name in options.heads:
        if name not in HEADS:
            raise InvalidConfig(f"head {name!r} is none of {', '.join(HEADS)}; give some of these")
    if options.prompts < 2:
        raise InvalidConfig(
            f"prompts={options.prompts}: one prompt chooses the head's draft and another judges "
            "it; give at least 2"
        )
    others = others_at_work(options)
    neighbours = Neighbours()
    pair = Pair(options)
    asked = [way for way in (*DRAFTED, *OF_HEADS) if way.drafter in ("draft", *options.heads)]
    ways = [(way, pair.setting(way)) for way in (Way(PLAIN), *asked)]
    record: dict[str, Any] = {
        "target_weights": pair.weights,
        "draft_weights": pair.draft.weights_read,
        "cost_ratio": pair.draft.cost,
        "dtype": str(default_dtype(torch.device("cpu"))).removeprefix("torch."),
        "others_before": others,
        "cells": [],
    }
    runs = [(name, heat) for heat in options.temperatures for name in options.sets]
    with Progress(transient=True) as bar:
        task = bar.add_task("texts", total=len(runs) * options.prompts * len(ways))

        def tick(label: str) -> None:
            bar.update(task, advance=1, description=label)

        start = time.monotonic()
        for i, (name, temperature) in enumerate(runs, start=1):
            deadline = start + 60 * options.minutes * i / len(runs)
            found = cells_of(ways, name, temperature, options, tick, deadline)
            record["cells"] += [asdict(cell) for cell in found]
            record["others_during"] = neighbours.share()
            save(options.json, command, record)
    print(page(json.loads(json.dumps(record))))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.prompts, options.tokens, options.sets = 2, 8, ("code",)
        options.layers, options.feed_forward = 7, 1152
    return exit_code(lambda: measured(options, command_of("heads", arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--heads", type=names, default=HEADS, help=",".join(HEADS))
    add("--sets", type=names, default=EVAL_SETS, help=f"prompts: {','.join(EVAL_SETS)}")
    add("--temperatures", type=floats, default=(0.0, 1.0), help="0,1")
    add("--prompts", type=int, default=32, help="prompts of each set at most")
    add("--minutes", type=float, default=45.0, help="for all sets and temperatures")
    add("--tokens", type=int, default=48, help="new tokens a prompt")
    add("--layers", type=int, default=24, help="of the target")
    add("--feed-forward", type=int, default=16384, help="of the target")
    add("--cost", type=float, default=0.1, help="cost ratio of the draft model")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
