"""`--html FILE` of the commands that certify: the report as one page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.certify.model.report import Report

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the report as a page of HTML, too."),
]
SECRET = re.compile(r"(--[\w-]*(?:key|password|secret|header)[\w-]*)(?:=.*)?")
INSIDE = re.compile(r"(?i)^(.*(?:key|token|secret|passw|auth)[^=:]*[=:])")
"""Options whose values do not go into a page that is passed on, and the same within a value."""


def check_html(file: Path | None) -> None:
    """Refuses a page that could not be written when all is done.

    Raises:
        InvalidConfig: naming the folder that is not there.
    """
    if file is None:
        return
    if file.is_dir():
        raise InvalidConfig(f"--html {file} is a folder; name a file in it")
    if not file.absolute().parent.is_dir():
        raise InvalidConfig(
            f"--html {file}: there is no folder {str(file.parent)!r}; make it first"
        )


def write_html(
    file: Path,
    report: Report,
    context: typer.Context,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> None:
    """Writes the page of a report.

    Args:
        file: where.
        report: what was found.
        context: of the command that found it.
        decode: token ids to text.
    """
    from outrider.certify.page.page import Origin, page

    origin = Origin(command_line(context), decode=decode)
    file.write_text(page(report, origin), encoding="utf-8")


def command_line(context: typer.Context) -> str:
    """The command line, keys and passwords left out."""
    words = ["outrider"]
    hidden = False
    for word in context.find_root().obj or ():
        secret, inside = SECRET.fullmatch(word), INSIDE.search(word)
        if hidden:
            words.append("...")
        elif secret and "=" in word:
            words.append(f"{secret[1]}=...")
        else:
            # A field of a request, or an engine's option.
            words.append(f"{inside[1]}..." if inside and not word.startswith("--") else word)
        hidden = bool(secret and "=" not in word)
    return shlex.join(words)
