"""`outrider certify vectors`: cases any implementation can be held to, over standard input."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options, terminal
from outrider.errors import InvalidConfig

WRONG = 1


def certify_vectors(
    emit: Annotated[
        bool, typer.Option("--emit", help="Write the cases and their answers.")
    ] = False,
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="COMMAND",
            help="Hold a command to them: it reads a case a line and writes an answer a line.",
        ),
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="Read cases and answer with Outrider's own rules.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Check the cases written here, not those made now."),
    ] = None,
    json_output: options.Json = False,
) -> int:
    """Golden vectors of every verification rule: laws and noise in, tokens out.

    A case has `rule`, the drafted `tokens`, their `parents` (0 is the root, node j is j + 1), how
    each was drawn (`kinds`: certain, drawn, without, tail), the law it was drawn from (`draft`),
    the target's laws by row (`target`), and `noise`: uniforms `accept` by node and `extra` by row,
    `gumbel` by depth and token. The answer is {"path": rows kept, "token": the one added}, or null
    for a rule that is not there. Laws are multiples of 1/128, and no decision is nearer than 1e-6
    to its threshold.

    \b
    Exit codes: 0 all right, 1 some wrong, 2 usage.

    \b
    Examples:
      outrider certify vectors --emit
      outrider certify vectors --check "outrider certify vectors --answer"
      outrider certify vectors --check "./my-verifier --stdin" --json
    """
    if [emit, check is not None, answer].count(True) != 1:
        raise InvalidConfig("one of --emit, --check COMMAND and --answer is due")
    from outrider.certify import vectors

    if answer:
        for line in sys.stdin:
            typer.echo(json.dumps(vectors.answer(json.loads(line))))
        return 0
    if emit:
        typer.echo(json.dumps({"version": vectors.VERSION, "cases": list(vectors.emit())}))
        return 0
    cases = list(vectors.emit()) if file is None else _read(file)
    try:
        command = shlex.split(check or "")
    except ValueError as error:
        raise InvalidConfig(f"--check {check!r}: no command line: {error}") from error
    if not command:
        raise InvalidConfig("--check is empty; give the command that answers")
    found = vectors.check(command, cases)
    if json_output:
        told = {"right": found.right, "wrong": found.wrong, "skipped": found.skipped}
        typer.echo(json.dumps({**told, "failures": found.failures, "ok": found.ok}))
    else:
        console = terminal.out()
        for name, due, got in found.failures:
            console.out(
                f"{name}: {json.dumps(due)} is due, {json.dumps(got)} came", highlight=False
            )
        console.out(
            f"{found.right} right, {found.wrong} wrong, {found.skipped} skipped", highlight=False
        )
    return 0 if found.ok else WRONG


def _read(file: Path) -> list[dict[str, Any]]:
    from outrider.certify import vectors

    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        version, cases = held["version"], held["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"--file {file}: no vectors can be read there: {error}") from error
    if version != vectors.VERSION:
        raise InvalidConfig(
            f"--file {file}: version {version!r}, and this release reads {vectors.VERSION}; "
            "write them anew with --emit"
        )
    return cases
