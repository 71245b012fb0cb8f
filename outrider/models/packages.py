"""Where machine code is kept that was compiled here: folders of the user's own."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelError


def cache_folder() -> Path:
    """Where packages are kept: OUTRIDER_CACHE_DIR, or a folder in the user's own cache."""
    own = os.environ.get("OUTRIDER_CACHE_DIR")
    if own:
        return Path(own).expanduser() / "compiled"
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(general) / "outrider" / "compiled"


def key_of(facts: Mapping[str, Any]) -> str:
    """A name for what was compiled under these facts, this torch and this processor."""
    here = {"torch": torch.__version__, "processor": sorted(torch.cpu.get_capabilities().items())}
    text = json.dumps({**facts, **here}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def making(folder: Path, whole: str) -> Iterator[Path]:
    """A new folder, which appears in the place of `folder` when all went well, or not at all.

    Whoever was first has made it: `whole` is the file that shows it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owner(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as place:
        new = Path(place) / folder.name
        new.mkdir(mode=0o700)
        yield new
        for file in new.iterdir():
            file.chmod(0o600)
        try:
            new.rename(folder)
        except OSError:
            if not (folder / whole).is_file():
                raise


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


def is_own(path: Path) -> bool:
    """Whether nobody else may have written it; a link is not one's own."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.getuid() and not shared and not stat.S_ISLNK(found.st_mode)


def check_owner(path: Path) -> None:
    """Refuses code that somebody else may have written."""
    if not is_own(path):
        raise ModelError(
            f"compiled forwards are kept in {str(path)!r}, which others may write to, or a link; "
            "give it to yourself alone (chmod go-w), or set OUTRIDER_CACHE_DIR to a folder of "
            "your own"
        )


def first_line(error: Exception) -> str:
    """What an error says first, with its kind."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
