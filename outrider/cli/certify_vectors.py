"""`outrider certify vectors`: cases any implementation can be held to, over standard input."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options, terminal
from outrider.config import check_between
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
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a file of cases.")
    ] = False,
    who: Annotated[
        str, typer.Option("--with", help="Who answers: torch, reference or triton.")
    ] = "torch",
    timeout: Annotated[
        float, typer.Option(help="Seconds that a checked command may take for all cases.")
    ] = 600.0,
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
    to its threshold. `--schema` has all of it as a JSON schema.

    \b
    Exit codes: 0 all right, 1 some wrong, 2 usage.

    \b
    Examples:
      outrider certify vectors --emit
      outrider certify vectors --check "outrider certify vectors --answer"
      outrider certify vectors --check "outrider certify vectors --answer --with reference"
      outrider certify vectors --check "./my-verifier --stdin" --timeout 60 --json
    """
    if [emit, check is not None, answer, schema].count(True) != 1:
        raise InvalidConfig("one of --emit, --check COMMAND, --answer and --schema is due")
    check_between("timeout", timeout, 0, float("inf"), low_open=True)
    from outrider.certify import vectors
    from outrider.certify.vectors_schema import SCHEMA

    if schema:
        typer.echo(json.dumps(SCHEMA, indent=2))
        return 0
    if answer:
        return _answer(who)
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
    found = vectors.check(command, cases, timeout)
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


def _answer(who: str) -> int:
    from outrider.certify.answerers import answerer

    answers = answerer(who)
    for number, line in enumerate(sys.stdin, 1):
        try:
            told = answers(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidConfig(
                f"line {number} of standard input is no case ({error!r}); --schema tells what is"
            ) from error
        typer.echo(json.dumps(told))
    return 0


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
