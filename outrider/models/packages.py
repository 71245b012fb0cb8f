"""Where machine code is kept that was compiled here: a folder of the user's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import ModelError


def cache_folder() -> Path:
    """Where packages are kept: OUTRIDER_CACHE_DIR, or a folder in the user's own cache."""
    own = os.environ.get("OUTRIDER_CACHE_DIR")
    if own:
        return Path(own).expanduser() / "compiled"
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(general) / "outrider" / "compiled"


@contextmanager
def keeping() -> Iterator[None]:
    """Around what reads and writes the folder.

    Raises:
        ModelError: it cannot be.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"compiled forwards cannot be kept ({first_line(error)}); set OUTRIDER_CACHE_DIR to a "
            "folder of your own"
        ) from error


def check_owner(path: Path) -> None:
    """Refuses code that somebody else may have written."""
    if not hasattr(os, "getuid"):
        return
    found = path.lstat()
    if (
        stat.S_ISLNK(found.st_mode)
        or found.st_uid != os.getuid()
        or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise ModelError(
            f"compiled forwards are kept in {str(path)!r}, which others may write to, or a link; "
            "give it to yourself alone (chmod go-w), or set OUTRIDER_CACHE_DIR to a folder of "
            "your own"
        )


def first_line(error: Exception) -> str:
    """What an error says first, with its kind."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
