"""Every test runs with the package's shape contracts switched on."""

import os
import tempfile
from pathlib import Path

from tests import shapes

# What the user has compiled must not decide what is tested.
_caches = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE_DIR"] = _caches.name
# Read when torch is loaded: beside other tests threads that spin lose most of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read when Triton is loaded, which torch may do: its interpreter runs kernels where no GPU can.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

shapes.install("outrider")
