"""Every test runs with the package's shape contracts switched on."""

import os
import tempfile

from tests import shapes

# What the user has compiled must not decide what is tested.
_caches = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE_DIR"] = _caches.name

shapes.install("outrider")
