"""`outrider certify self`: whether what is installed here still does what was proved."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from outrider.cli import options, terminal

FAILED = 1


def certify_self(json_output: options.Json = False) -> int:
    """Test this installation: rules, noise addresses, strict bits, the law of the bundled pair.

    Half a minute on two cores. It is what to run after torch or transformers were updated; the exit
    code is 1 where something is not as it was proved. The result is kept: where it failed, models
    are loaded without speculation, and where it passed, with it again.

    \b
    Examples:
      outrider certify self
      outrider certify self --json
    """
    from outrider.certify.self_test import certify_self as run
    from outrider.llm.first_load import BY_HAND, Finding, keep

    with terminal.err().status("testing ...") as status:
        report = run(lambda line: status.update(terminal.escaped(line)))
    keep(Finding(report.fault, BY_HAND))
    if json_output:
        typer.echo(json.dumps(report.as_dict()))
        return 0 if report.ok else FAILED
    table = Table(box=None, pad_edge=False)
    for name in ("part", "holds", "what was seen"):
        table.add_column(name)
    for part in report.parts:
        said = terminal.escaped(part.said).replace("[", r"\[")
        table.add_row(part.name, "yes" if part.ok else "NO", said)
    console = terminal.out()
    console.print(table)
    told = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    seconds = sum(part.seconds for part in report.parts)
    console.out(f"\n{told}; {seconds:.0f} s: {'ok' if report.ok else 'FAILED'}", highlight=False)
    return 0 if report.ok else FAILED
