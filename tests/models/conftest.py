"""What the machine compiles for itself, in a folder that no other test finds."""

from __future__ import annotations

import pytest

from outrider.models.attention_own import OwnAttention
from outrider.models.product import Product, product


@pytest.fixture(scope="session")
def own_products(tmp_path_factory: pytest.TempPathFactory) -> Product:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path_factory.mktemp("own")))
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
