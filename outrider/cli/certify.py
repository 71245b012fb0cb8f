"""`outrider certify`: rules held to the target's law by enumeration, models by what they write."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli import options, terminal
from outrider.cli.certify_endpoint import certify_endpoint
from outrider.cli.certify_model import certify_model
from outrider.cli.certify_self import certify_self
from outrider.cli.certify_vectors import certify_vectors
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.certify.certificate import Certificate, Certified

NOT_EXACT = 1
LONG_FRACTION = 16
"""Characters from which a fraction is shown as a decimal."""
FILE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""

certify = typer.Typer(rich_markup_mode=None)
certify.command("self")(certify_self)
certify.command("model")(certify_model)
certify.command("endpoint")(certify_endpoint)
certify.command("vectors")(certify_vectors)


@certify.callback(invoke_without_command=True)
def certifying(context: typer.Context) -> None:
    """Check that speculation leaves the law of the text as it is."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@certify.command("rules")
def certify_rules(
    pairs: Annotated[
        int,
        typer.Option(
            "--pairs", "-n", help="Tabular pairs per rule, drafter and tree; 1 takes least."
        ),
    ] = 12,
    processes: Annotated[
        int | None, typer.Option(help="Worker processes; by default one per core.")
    ] = None,
    json_output: options.Json = False,
) -> int:
    """Certify every rule in exact fractions; catch the broken ones.

    Every choice that drafter, tree and rule can make with their noise is enumerated over several
    rounds, on pairs of laws that depend on the whole text. The total variation of what is written
    from what must be written is 0 for every rule and more for every variant broken on purpose.
    `kept` is the expected number of drafted tokens kept per round on a toy pair, `most` the
    largest that any lossless rule could keep there (a linear program). The exit code is 1 where
    a rule is not exact or a broken one was not caught.

    \b
    Examples:
      outrider certify rules
      outrider certify rules --pairs 1
      outrider certify rules --pairs 50
      outrider certify rules --json
    """
    for name, count in (("pairs", pairs), ("processes", processes)):
        if count is not None and count < 1:
            raise InvalidConfig(f"{name}={count}: at least 1 is needed")
    from outrider.certify.certificate import certify_rules as run
    from outrider.certify.certificate import wrong_schemes
    from outrider.certify.schemes import certifiables

    console = terminal.err()
    parts = f"{len(certifiables())} certificates and {len(wrong_schemes())} broken variants"
    console.out(
        f"{parts}, pairs of each: {pairs}; the longest come first, all take minutes",
        highlight=False,
    )
    certificate = run(
        num_pairs=pairs,
        processes=processes or os.cpu_count() or 1,
        progress=lambda line: console.out(line, highlight=False),
    )
    if json_output:
        typer.echo(json.dumps(certificate.as_dict()))
    else:
        _print(certificate, terminal.out())
    return 0 if certificate.ok else NOT_EXACT


def _print(certificate: Certificate, console: Console) -> None:
    if not console.is_terminal:
        console.width = FILE_WIDTH
    rules = Table(title="Rules", title_justify="left", box=None, pad_edge=False)
    for name in ("rule", "drafter", "tree"):
        rules.add_column(name)
    for name in ("cases", "exact TV", "kept", "most", "verdict"):
        rules.add_column(name, justify="right", no_wrap=True)
    for rule in certificate.rules:
        rules.add_row(
            rule.rule,
            rule.drafter,
            rule.tree,
            str(rule.cases),
            str(rule.max_tv),
            shown(rule.expected_accepted),
            f"{rule.optimum:.4f}",
            verdict(rule),
        )
    wrong = Table(title="\nBroken on purpose", title_justify="left", box=None, pad_edge=False)
    wrong.add_column("variant")
    wrong.add_column("exact TV", justify="right", no_wrap=True)
    wrong.add_column("found", justify="right", no_wrap=True)
    for caught in certificate.wrong:
        wrong.add_row(
            terminal.escaped(caught.name).replace("[", r"\["),
            caught.measure,
            "yes" if caught.found else "NO",
        )
    console.print(rules)
    console.print(wrong)
    exact, found = (
        sum(rule.exact for rule in certificate.rules),
        sum(caught.found for caught in certificate.wrong),
    )
    console.out(
        f"\n{exact} of {len(certificate.rules)} exact, {found} of {len(certificate.wrong)} broken "
        f"variants found, {certificate.seconds:.0f} s: {'ok' if certificate.ok else 'FAILED'}",
        highlight=False,
    )


def verdict(rule: Certified) -> str:
    """What speaks against a rule, or for it."""
    if rule.exact:
        return "exact, optimal" if rule.optimal else "exact"
    if rule.max_tv > 0:
        return "BIASED"
    return "OTHER TEXT" if rule.max_other > 0 else "NOT AS IN THEORY"


def shown(number: Fraction) -> str:
    """A short fraction as it is, a long one with its first digits."""
    text = str(number)
    return text if len(text) < LONG_FRACTION else f"~{float(number):.6g}"
