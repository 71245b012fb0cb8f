"""What the terminal gets: escaped text, colours where they can be seen, one line per error."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from outrider import cores
from outrider.types import Source

INTERRUPTED = 130
SPINS = "3000"
"""How often a thread of torch's looks before it sleeps; behind a busy neighbour each is lost."""
STYLES: dict[Source, str] = {"draft": "green", "correction": "bold magenta", "bonus": "bold cyan"}
MEANINGS: dict[Source, str] = {
    "draft": "guessed by the drafter, accepted by the target",
    "correction": "the target's, in place of a rejected guess",
    "bonus": "the target's, after its guesses",
}
KEPT = "\n\t"
# Marks that reorder what stands around them could make shown code differ from real code.
BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def prepare() -> None:
    """Sets up the process: threads that yield, silent libraries, streams that always encode."""
    # Threads that spin while they wait lose most of their time when anything else wants a core, and
    # ones that sleep at once wake up late where nothing does. Read once, when torch is loaded.
    if cores.POLICY not in os.environ:
        os.environ[cores.POLICY] = "passive"
        if cores.others_at_work() is False:
            os.environ.setdefault(cores.SPINS, SPINS)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The variable is read once, when the library is loaded; this holds where it is loaded already.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Stream(Console):
    """A console that leaves a reader who went away to the command line as a whole."""

    def on_broken_pipe(self) -> None:
        """Lets the BrokenPipeError that is being handled go on: rich itself would exit with 1."""
        raise


def out() -> Console:
    """Standard output: colours only on a terminal, and never under NO_COLOR."""
    return _Stream(highlight=False, soft_wrap=True)


def err() -> Console:
    """Standard error, where everything goes that is not the result."""
    return _Stream(stderr=True, highlight=False, soft_wrap=True)


def flush() -> None:
    """Writes out what standard output still holds; at the exit nobody could report a failure."""
    if sys.stdout is not None:  # None where the process was started with it closed
        sys.stdout.flush()


def drop_output() -> None:
    """Sends the rest of standard output nowhere, so that the exit does not fail on it again."""
    # There may be none, or one without a file behind it.
    with contextlib.suppress(AttributeError, OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def shows_colours(console: Console) -> bool:
    """Whether sources can be told by colour there."""
    return console.is_terminal and not console.no_color


def error_line(message: str) -> None:
    """One line on standard error, where that can be written to."""
    with contextlib.suppress(OSError):
        err().out(escaped(" ".join(message.split())), highlight=False)


def escaped(text: str) -> str:
    """Text with control and reordering characters spelt out; newline and tab stay."""
    return "".join(_spelt(char) if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    if char in KEPT:
        return False
    if unicodedata.category(char) in ("Cc", "Zl", "Zp"):
        return True
    return unicodedata.bidirectional(char) in BIDIRECTIONAL


def _spelt(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def legend() -> Text:
    """One line that says what each colour means."""
    line = Text()
    for source, style in STYLES.items():
        line.append(f"{source}", style=style)
        line.append(f" {MEANINGS[source]}   ", style="dim")
    line.rstrip()
    return line


def size(num_bytes: int) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
