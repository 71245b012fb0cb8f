"""`outrider export`: a head in another engine's folder, and the command line that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import terminal


def export(
    head: Annotated[Path, typer.Argument(help="The folder of an EAGLE-3 head.")],
    to: Annotated[str, typer.Option(help="speculators, vllm, sglang or gguf.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")],
    target: Annotated[
        str | None,
        typer.Option(help="The model it is served with; by default that it was trained for."),
    ] = None,
    depth: Annotated[int, typer.Option("--depth", "-k", help="Tokens guessed per round.")] = 4,
) -> int:
    """Write a head for another engine, and the exact command line that serves it.

    The last line is its acceptance test: whether the server's texts have the target's law.

    \b
    Examples:
      outrider export runs/head --to vllm --out served/head
      outrider export runs/head --to gguf --out served/head --target ./my-model
    """
    from outrider.interop.export import export_head

    exported = export_head(head, to=to, out=out, target=target, k=depth)
    out_console = terminal.out()
    for line in (*exported.commands, *(f"# {note}" for note in exported.notes)):
        out_console.out(line, highlight=False)
    out_console.out("# whether its texts have the target's law:", highlight=False)
    out_console.out(exported.acceptance_test, highlight=False)
    return 0
