"""The compiled products with another line in them, for negative controls."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider.errors import ModelError
from outrider.models import product
from outrider.models.product import LIBRARY, Product


def refuse(tmp_path: Path, *changes: tuple[str, str]) -> None:
    """Checks that products with other lines in them are refused."""
    library = variant(tmp_path, *changes)
    with pytest.raises(ModelError, match="off by"):
        Product(library)


def variant(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The library with a wrong line for each right one; one for each kind of processor, say."""
    texts = {source.name: source.read_text() for source in product.SOURCES}
    for right, wrong in changes:
        assert sum(text.count(right) for text in texts.values()) == 1, right
        texts = {name: text.replace(right, wrong) for name, text in texts.items()}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    library = tmp_path / LIBRARY
    sources = [str(tmp_path / name) for name in texts if name.endswith(".cpp")]
    subprocess.run(["g++", *product.FLAGS, *sources, "-o", str(library)], check=True)
    return library
