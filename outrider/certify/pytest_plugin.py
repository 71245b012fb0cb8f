"""The fixture `assert_lossless`, which every pytest has where Outrider is installed.

It is loaded with each run of pytest, so it loads nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(name="assert_lossless", scope="session")
def assert_lossless_fixture() -> Callable[..., Any]:
    """`outrider.certify.testing.assert_lossless`."""
    from outrider.certify.testing import assert_lossless

    return assert_lossless
