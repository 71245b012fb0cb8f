"""What may be shipped: no weights in the core, small shards beside it, a small checkout."""

from __future__ import annotations

import io
import subprocess
import zipfile

from outrider_models import HEADS, MODELS, path

from tests.house.layout import PACKAGE, ROOT

MB = 1e6


def test_the_core_wheel_carries_code_alone() -> None:
    """The wheel is the package folder, zipped."""
    carried = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {p.suffix for p in carried} <= {".py", ".typed", ".cpp", ".h"}
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        for file in carried:
            out.write(file, file.relative_to(PACKAGE))
    assert 0.2 * MB < wheel.tell() < 2 * MB


def test_the_pair_is_small_and_in_shards() -> None:
    files = [p for name in MODELS for p in path(name).rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 30 * MB
    assert max(p.stat().st_size for p in files) <= 15 * MB


def test_the_heads_are_small() -> None:
    files = [p for name in HEADS for p in path(name).rglob("*") if p.is_file()]
    assert 0 < sum(p.stat().st_size for p in files) <= 8 * MB


def test_the_checkout_is_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name]
    files = [ROOT / name for name in names if (ROOT / name).is_file()]
    assert sum(p.stat().st_size for p in files) < 50 * MB
