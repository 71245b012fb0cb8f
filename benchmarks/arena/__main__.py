"""Engines side by side: the same checkpoints, prompts, tokens, threads and precision, interleaved.

    python -m benchmarks.arena setup
    python -m benchmarks.arena run --grid core --json arena.json
    python -m benchmarks.arena report arena.json --png arena.png

`setup` makes a virtual environment for each engine; `run` measures, and goes on where it was
stopped; `report` prints the tables. An engine that is missing is skipped by name. Needs an
otherwise idle machine. See docs/arena.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.arena.checkpoints import make
from benchmarks.arena.convert import convert
from benchmarks.arena.engines import DTYPES, ENGINES, FLOAT32
from benchmarks.arena.grid import GRIDS, Cell, Stage, cells
from benchmarks.arena.home import Home, default_home
from benchmarks.arena.law import verdicts
from benchmarks.arena.picture import draw
from benchmarks.arena.play import Arena, Settings
from benchmarks.arena.record import Record
from benchmarks.arena.setup import STEPS, set_up
from benchmarks.arena.tables import Found
from outrider.bench.machine import QUIET
from outrider.bench.script import exit_code, floats, ints, names, others_at_work
from outrider.errors import InvalidConfig
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.text import TextTokenizer


def main(arguments: list[str] | None = None) -> int:
    """0; 2 after one line about a user's mistake or a busy machine; 3 where the time was over."""
    options = _parser().parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.arena", *given])
    results: list[int] = []
    code = exit_code(lambda: results.append(DO[options.do](options, command)))
    return code or results[0]


def setup(options: argparse.Namespace, command: str) -> int:
    """Virtual environments."""
    _known(options.engines, STEPS)
    set_up(Home(options.home), options.engines or tuple(STEPS), print)
    return 0


def run(options: argparse.Namespace, command: str) -> int:
    """Measures, or goes on measuring."""
    if not options.wait and not options.prepare:
        options.smoke = False
        others_at_work(options)
    arena = _arena(options, command)
    chosen = _cells(options)
    if options.prepare:
        for stage in dict.fromkeys(cell.stage for cell in chosen):
            arena.prepare(stage)
        return 0
    finished = arena.play(chosen)
    arena.record.save()
    arena.tell("finished" if finished else "time over; the same command goes on")
    return 0 if finished else 3


def law(options: argparse.Namespace, command: str) -> int:
    """Samples short texts by everybody, and prints who follows the law."""
    arena = _arena(options, command)
    stage = _cells(options)[0].stage
    arena.prepare(stage)
    print("| arm | texts | variation | control | p |\n| --- | --- | --- | --- | --- |")
    for one in verdicts(arena, stage, options.texts):
        figures = f"{one.distance:.3f} | {one.control:.3f} | {one.p_value:.3f}"
        print(f"| {one.arm} | {one.texts} | {figures} |", flush=True)
    return 0


def report(options: argparse.Namespace, command: str) -> int:
    """Tables and a picture of what was found."""
    found = Found.read(options.record)
    print(found.markdown(options.record.name))
    if options.png:
        draw(found, options.png)
    return 0


DO = {"setup": setup, "run": run, "law": law, "report": report}


def _arena(options: argparse.Namespace, command: str) -> Arena:
    """The arena that the options ask for; `law` keeps no record on disk."""
    home = Home(options.home.resolve())
    settings = Settings(
        _arms(options),
        options.pairs,
        options.tokens,
        options.k,
        options.threads,
        memory_gb=options.memory or round(0.6 * _memory_gb(), 1),
        dtype=options.dtype,
    )
    tokenizer = TextTokenizer(bundled_path("target"))
    texts = [token for text in eval_prompts("code") for token in tokenizer.encode(text)]

    def tell(what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)

    def prepare(stage: Stage) -> None:
        folder, draft = home.checkpoint(stage.checkpoint), f"draft-{stage.cost:g}"
        if not (folder / draft).is_dir():
            tell(f"making {stage}")
            make(stage.checkpoint, folder, (stage.cost,))
        convert(home, stage.checkpoint, draft, settings.dtype)

    path = options.json or home.root / "law.json"
    record = Record.opened(path, asdict(settings), command)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    quiet = 1.0 if options.anyway else QUIET
    return Arena(
        home, settings, record, texts, prepare, tell, deadline, options.wait, quiet, options.heats
    )


def _arms(options: argparse.Namespace) -> tuple[str, ...]:
    if options.arms:
        return options.arms
    _known(options.engines or (), ENGINES)
    wanted = {
        name: engine.arms if options.grid == "full" else engine.core
        for name, engine in ENGINES.items()
        if name in (options.engines or ENGINES)
    }
    return tuple(f"{name}/{arm}" for name, arms in wanted.items() for arm in arms)


def _known(engines: Iterable[str], all_of_them: Collection[str]) -> None:
    for engine in engines:
        if engine not in all_of_them:
            there = ", ".join(all_of_them)
            raise InvalidConfig(f"engine {engine!r} does not exist; there are {there}")


def _cells(options: argparse.Namespace) -> list[Cell]:
    grid = list(GRIDS[options.grid])
    given = (
        options.checkpoints, options.temperatures, options.batches, options.prompts,
        options.alphas, options.costs,
    )  # fmt: skip
    return cells(*(theirs or own for own, theirs in zip(grid, given, strict=True)))


def _memory_gb() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arena",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    jobs = parser.add_subparsers(dest="do", required=True)
    home = argparse.ArgumentParser(add_help=False)
    home.add_argument(
        "--home", type=Path, default=default_home(), help="folder of environments and checkpoints"
    )
    one = jobs.add_parser("setup", parents=[home], help="install engines")
    one.add_argument("engines", nargs="*", help="all of them where none is named")
    measured = _measured(home)
    two = jobs.add_parser("run", parents=[measured], help="measure, or go on")
    two.add_argument("--json", type=Path, required=True, help="the record, gone on with")
    two.add_argument("--prepare", action="store_true", help="make the checkpoints and stop")
    four = jobs.add_parser("law", parents=[measured], help="who samples from the target's law")
    four.add_argument("--texts", type=int, default=200, help="short texts of each arm (200)")
    four.set_defaults(json=None)
    three = jobs.add_parser("report", help="tables and a picture")
    three.add_argument("record", type=Path, help="what `run` wrote")
    three.add_argument("--png", type=Path, help="draw a picture too (the extra `bench`)")
    return parser


def _measured(home: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Options of whatever starts engines."""
    parser = argparse.ArgumentParser(add_help=False, parents=[home])
    add = parser.add_argument
    add("--grid", choices=GRIDS, default="core", help="what is measured (core)")
    add("--engines", type=names, help=f"of {','.join(ENGINES)}")
    add("--arms", type=names, metavar="ENGINE/ARM,...", help="instead of the grid's own")
    add("--checkpoints", type=names, help="instead of the grid's own; so are the next ones")
    add("--temperatures", type=floats)
    add("--batches", type=ints)
    add("--prompts", type=ints, help="lengths of prompts in tokens")
    add("--alphas", type=floats, help="imposed acceptance, on random weights")
    add("--costs", type=floats, help="cost ratios that drafts are sized for, on random weights")
    add("--pairs", type=int, default=16, help="rounds of a cell: A B C and C B A in turn (16)")
    add("--tokens", type=int, default=64, help="new tokens a prompt (64)")
    add("--k", type=int, default=4, help="drafted tokens a round, for everybody (4)")
    add("--dtype", choices=DTYPES, default=FLOAT32, help="of everybody (float32)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of every engine (all)")
    add("--memory", type=float, help="GB for the processes of a heat (0.6 of the machine's)")
    add("--heats", type=ints, help="numbers of those to run now: 0 is the first (all)")
    add("--minutes", type=float, help="begin no round after so many")
    add("--wait", action="store_true", help="wait while others are at work, instead of refusing")
    add("--anyway", action="store_true", help="begin even when other processes are busy")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
