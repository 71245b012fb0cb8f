"""Every test runs with the package's shape contracts switched on, and with a chance of its own."""

import os
import random
import tempfile

from tests import shapes

# What the user has compiled must not decide what is tested.
_caches = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE_DIR"] = _caches.name
# Read when torch is loaded: beside other tests threads that spin lose most of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

shapes.install("outrider")

import pytest  # noqa: E402
import torch  # noqa: E402

# Read when Triton is loaded: its interpreter runs kernels where no GPU can.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws without a seed, those of requests too, come the same in any order of tests."""
    torch.manual_seed(0)
    monkeypatch.setattr("outrider.noise.secrets.randbits", random.Random(0).getrandbits)
