"""The compiled products with another line in them, for negative controls."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from outrider.errors import ModelError
from outrider.models import product
from outrider.models.product import LIBRARY, Product

_kept = tempfile.TemporaryDirectory(prefix="outrider-variants-")


def refuse(tmp_path: Path, *changes: tuple[str, str]) -> None:
    """Checks that products with other lines in them are refused."""
    library = variant(tmp_path, *changes)
    with pytest.raises(ModelError, match="off by"):
        Product(library)


def variant(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The library with a wrong line for each right one; one for each kind of processor, say."""
    return changed(tmp_path / LIBRARY, product.SOURCES, product.FLAGS, *changes)


def changed(
    library: Path, sources: Sequence[Path], flags: Sequence[str], *changes: tuple[str, str]
) -> Path:
    """A library of such sources with a wrong line for each right one.

    What no change is in is compiled once in a process.
    """
    texts = {source.name: source.read_text() for source in sources}
    for right, wrong in changes:
        assert sum(text.count(right) for text in texts.values()) == 1, right
        texts = {name: text.replace(right, wrong) for name, text in texts.items()}
    for name, text in texts.items():
        (library.parent / name).write_text(text)
    objects = [_object(library.parent, texts, n, flags) for n in texts if n.endswith(".cpp")]
    subprocess.run(["g++", *flags, *objects, "-o", str(library)], check=True)
    return library


def _object(folder: Path, texts: Mapping[str, str], name: str, flags: Sequence[str]) -> str:
    """What the compiler makes of one file."""
    own = [text for other, text in texts.items() if other == name or other.endswith(".h")]
    key = hashlib.sha256("\0".join([*flags, *own]).encode()).hexdigest()
    made = Path(_kept.name) / f"{key}.o"
    if not made.exists():
        told = [flag for flag in flags if not product._links(flag)]
        command = ["g++", *told, "-c", str(folder / name), "-o", str(made)]
        subprocess.run(command, check=True)
    return str(made)
