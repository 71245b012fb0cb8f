"""The compiled products with another line in them, for negative controls."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider.errors import ModelError
from outrider.models import product
from outrider.models.product import LIBRARY, Product


def refuse(tmp_path: Path, right: str, wrong: str) -> None:
    """Checks that products with another line in them are refused."""
    library = variant(tmp_path, right, wrong)
    with pytest.raises(ModelError, match="off by"):
        Product(library)


def variant(tmp_path: Path, right: str, wrong: str) -> Path:
    """The library with another line in it."""
    texts = {source.name: source.read_text() for source in product.SOURCES}
    assert sum(text.count(right) for text in texts.values()) == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(right, wrong))
    library = tmp_path / LIBRARY
    sources = [str(tmp_path / name) for name in texts]
    subprocess.run(["g++", *product.FLAGS, *sources, "-o", str(library)], check=True)
    return library
