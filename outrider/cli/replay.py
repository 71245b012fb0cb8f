"""`outrider replay`: what other depths, trees and policies would have made of traced texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli import options, terminal
from outrider.config import counted
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.control.costs import Costs
    from outrider.control.replayed import Replayed
    from outrider.control.trace import TracedText

FILE_WIDTH = 100


def replay(
    traces: Annotated[
        list[Path], typer.Argument(help="Files of `outrider generate --trace`.", metavar="FILE...")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="traced, none, depth:K, tree:K,N, threshold:P, expected, auto (the controller) or "
            "oracle; of several traced drafters one's begins with its name (draft:4, "
            "ngram:oracle). May be repeated. By default none, some depths, expected, auto and "
            "oracle.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Texts at a time.")] = 1,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Draw each policy's regret, token by token."),
    ] = None,
    json_output: options.Json = False,
) -> int:
    """Replay traced texts under other policies: their rounds, and how long they would have taken.

    Of texts traced with --observe any depth up to the traced one, and any budget of nodes, walks as
    it would have run, and `auto` is the controller itself, choosing among the traced drafters. An
    oracle looks into the future: no policy that runs can, and it is marked.
    What rounds take is fitted to the rounds of all files that ran as they would without a trace.

    \b
    Examples:
      outrider replay rounds.jsonl
      outrider replay rounds.jsonl --policy none --policy depth:2 --policy oracle --png regret.png
      outrider replay rounds.jsonl --policy threshold:0.4 --json
      outrider replay rounds.jsonl --policy auto --policy draft:4 --policy ngram:8 --png regret.png
    """
    from outrider.bench.charts import draw_regret, figures
    from outrider.control.policies import FORMS, policy_of
    from outrider.control.replay import replay as run

    if batch < 1:
        raise InvalidConfig(f"batch={batch}: at least 1 is due")
    if png is not None and batch > 1:
        raise InvalidConfig("png: regret is drawn of texts one by one; leave --batch out")
    if png is not None:
        figures()
    texts, costs = _read(traces)
    specs = policy or _default(texts, batch)
    names = {text.settings.drafter for text in texts}
    found = [run(texts, policy_of(spec, names), costs, batch=batch) for spec in specs]
    best = min(found, key=lambda one: one.seconds)
    if png is not None:
        oracle = run(texts, policy_of("oracle"), costs)
        draw_regret(found, oracle, png)
    seen = _Seen(texts, batch, best)
    if json_output:
        rows = [seen.as_dict(one) for one in found]
        about = {"texts": len(best.steps), "batch": batch, "policies": rows, "meanings": FORMS}
        typer.echo(json.dumps({**about, "costs": costs.as_dict()}))
    else:
        _print(found, seen)
    return 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was replayed, and the quickest of it."""

    texts: list[TracedText]
    batch: int
    best: Replayed

    def as_dict(self, one: Replayed) -> dict[str, Any]:
        """A policy's figures."""
        return {
            "policy": one.policy,
            "oracle": one.oracle,
            "tokens": one.tokens,
            "rounds": one.rounds,
            "rounds_by_drafter": one.rounds_by_drafter,
            "drafted": one.drafted,
            "accepted": one.accepted,
            "mean_acceptance_length": one.mean_acceptance_length,
            "seconds": one.seconds,
            "prompt_s": one.prompt_s,
            "tokens_per_s": one.tokens_per_s,
            "regret_s": one.seconds - self.best.seconds,
            "unknown_rounds": one.unknown,
        }


def _read(files: list[Path]) -> tuple[list[TracedText], Costs]:
    """The texts to walk through, and what rounds took."""
    from outrider.control.fit import costs_of
    from outrider.control.trace import read_trace

    texts = [text for file in files for text in read_trace(file)]
    if not texts:
        raise InvalidConfig(
            f"no round in {', '.join(map(str, files))}; write a trace with "
            "`outrider generate --trace FILE`"
        )
    ran = [text for text in texts if not text.settings.observed]
    costs = costs_of(ran or texts)
    return [text for text in texts if text.settings.observed] or texts, costs


def _default(texts: list[TracedText], batch: int) -> list[str]:
    from outrider.control.guesses import together
    from outrider.control.record import depths_to_time

    depth = min(text.settings.depth for text in texts)
    own = [*(f"depth:{one}" for one in depths_to_time(depth) if one), "expected"]
    watched = together(texts)
    alike = all(one.keys() == watched[0].keys() for one in watched)
    if alike and len(watched[0]) > 1:
        short = [policy.removeprefix("depth:") for policy in own]
        own = [f"{name}:{policy}" for name in watched[0] for policy in short]
    chains = all(one.settings.observed and one.settings.width is None for one in texts)
    return ["none", *own, *["auto"] * (alike and chains), *["oracle"] * (batch == 1)]


def _chooses(text: TracedText) -> bool:
    """Whether a controller drafted."""
    return text.settings.drafter == "auto" or "," in text.settings.drafter


def _print(found: list[Replayed], seen: _Seen) -> None:
    console = terminal.out()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("tokens/s", "rounds", "tokens/round", "drafted", "kept", "ms behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(found, key=lambda one: one.seconds):
        table.add_row(
            one.policy + (" (sees the future)" if one.oracle else ""),
            f"{one.tokens_per_s:.1f}",
            str(one.rounds),
            f"{one.tokens / one.rounds:.2f}",
            str(one.drafted),
            str(one.accepted),
            f"{1e3 * (one.seconds - seen.best.seconds):.0f}",
        )
    console.print(table)
    unknown = max(one.unknown for one in found)
    lines = [
        f"{counted(len(seen.best.steps), 'text')}, {counted(seen.best.tokens, 'token')}, "
        f"{seen.batch} at a time"
    ]
    several = sorted({one.settings.drafter for one in seen.texts if _chooses(one)})
    if several:
        lines.append(
            f"{', '.join(several)} chose among drafters, whose guesses and times are taken as one "
            "drafter's; trace with --drafter and one name"
        )
    if unknown:
        lines.append(
            f"up to {counted(unknown, 'round')} begin where the trace has no guess, and count as "
            "keeping nothing there; trace with --observe"
        )
    for line in lines:
        console.out(line, style="dim", highlight=False)
