"""What the benchmark scripts share: lists as options, an idle machine, and a record of a run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.machine import QUIET, Machine, busy_now
from outrider.errors import InvalidConfig, OutriderError


def names(text: str) -> tuple[str, ...]:
    """An option's value, words set apart by commas."""
    return tuple(part for part in text.split(",") if part)


def ints(text: str) -> tuple[int, ...]:
    """An option's value, whole numbers set apart by commas; none at all for nothing."""
    return tuple(map(int, names(text)))


def floats(text: str) -> tuple[float, ...]:
    """An option's value, numbers set apart by commas."""
    return tuple(map(float, names(text)))


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every timing has, `doc` as its help."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="OUT", help="write everything found as JSON")
    add("--anyway", action="store_true", help="time even when other processes are busy")
    add("--smoke", action="store_true", help="tiny sizes; the numbers mean nothing")
    return parser


def others_at_work(options: argparse.Namespace) -> float:
    """The share of the processors that others take.

    Raises:
        InvalidConfig: it is too large for a timing, and `--anyway` was not given.
    """
    others = busy_now(0.2 if options.smoke else 2.0)
    if others > QUIET and not options.anyway:
        raise InvalidConfig(
            f"other processes use {others:.0%} of the processors, and a timing would measure "
            f"them too; wait until it is below {QUIET:.0%}, or use --anyway"
        )
    return others


def command_of(script: str, arguments: Sequence[str] | None) -> str:
    """The command line that a run can be had with again."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", f"benchmarks/{script}.py", *given])


def save(path: Path | None, command: str, found: Mapping[str, Any]) -> None:
    """Writes what was found beside its command and its machine; nothing without a path."""
    if path is not None:
        record = {"command": command, "machine": asdict(Machine.here()), **found}
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def exit_code(run: Callable[[], None]) -> int:
    """0, or 2 after one line about a user's mistake or a busy machine."""
    try:
        run()
    except OutriderError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        return 2
    return 0
