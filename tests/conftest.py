"""Every test runs with the package's shape contracts switched on."""

import os
import tempfile

from tests import shapes

# What the user has compiled must not decide what is tested.
_caches = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE_DIR"] = _caches.name
# Read when torch is loaded: beside other tests threads that spin lose most of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

shapes.install("outrider")

import torch  # noqa: E402

# Read when Triton is loaded: its interpreter runs kernels where no GPU can.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
