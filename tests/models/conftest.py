"""What the machine compiles for itself, in a folder that no other test finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.models.attention_own import OwnAttention
from outrider.models.product import Product, product


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that some files share, whichever process runs them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def own_products(packages: Path) -> Product:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(packages))
        made = product(build=True)
    if made is None:
        pytest.skip("there are own products on Linux alone")
    return made


@pytest.fixture(scope="session")
def own_attention(own_products: Product) -> OwnAttention:
    made = own_products.attention()
    if made is None:
        pytest.skip("this processor has neither AVX2 with FMA nor AVX-512")
    return made
