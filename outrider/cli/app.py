"""The commands put together, and how they end: 0 done, 1 not equal, 2 error, 130 interrupted."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.certify import certify
from outrider.cli.demo import demo
from outrider.cli.doctor import doctor
from outrider.cli.export import export
from outrider.cli.generate import generate
from outrider.cli.plan import plan
from outrider.cli.profile import profile
from outrider.cli.replay import replay
from outrider.cli.terminal import INTERRUPTED, drop_output, error_line, flush, prepare
from outrider.cli.train import (
    train_draft,
    train_eagle3,
    train_early_exit,
    train_lm,
    train_mtp,
)
from outrider.errors import OutriderError

ERROR = 2
# typer carries click under a private name of its own, and older releases use click itself.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
train = typer.Typer(rich_markup_mode=None)
app.add_typer(train, name="train")
app.add_typer(certify, name="certify")
app.command()(generate)
app.command()(demo)
app.command()(doctor)
app.command()(profile)
app.command()(plan)
app.command()(replay)
app.command()(export)
train.command("lm")(train_lm)
train.command("draft")(train_draft)
train.command("eagle3")(train_eagle3)
train.command("mtp")(train_mtp)
train.command("early-exit")(train_early_exit)


@app.callback(invoke_without_command=True)
def outrider(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Lossless speculative decoding: the same text, sooner.

    \b
    Examples:
      outrider demo
      outrider generate "def fibonacci(n):"
      outrider generate --model ./my-model --drafter ngram --file prompt.txt --compare
      outrider doctor
      outrider profile
      outrider plan
    """
    if version:
        typer.echo(f"outrider {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@train.callback(invoke_without_command=True)
def training(context: typer.Context) -> None:
    """Train models by recipe: a target, a draft model or a head for one."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line (None = the process's own) and returns its exit code.

    Errors raised on purpose, and arguments that cannot be meant, end in one line on standard error.
    """
    prepare()
    try:
        code = _invoke(sys.argv[1:] if arguments is None else arguments)
        flush()
    except OutriderError as error:
        return _refused(str(error))
    except UsageError as error:
        return _refused(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
    except (KeyboardInterrupt, typer.Abort):
        error_line("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as in `outrider generate ... | head -1`: nothing more can be said.
        drop_output()
        return 0
    except OSError as error:
        # Input is refused with errors of its own, so this is output.
        drop_output()
        name = error.filename or "the output"
        return _refused(f"{name} cannot be written: {error.strerror or error}; {_remedy(error)}")
    return code if isinstance(code, int) else 0


def _invoke(arguments: list[str]) -> object:
    """What the command returns. `app()` itself would answer a broken pipe by exiting with 1."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("outrider", arguments, obj=tuple(arguments)) as context:
            return command.invoke(context)
    except typer.Exit as done:
        return done.exit_code


def _remedy(error: OSError) -> str:
    """What to do where nothing can be written."""
    folder = Path(str(error.filename or ".")).absolute().parent
    if not folder.is_dir():
        return f"its folder {str(folder)!r} does not exist; make it first, or write elsewhere"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "make room or write elsewhere" if full else "write elsewhere"


def _refused(message: str) -> int:
    error_line(f"error: {message}")
    return ERROR


def main() -> None:
    """The entry point of the `outrider` command."""
    sys.exit(run())
