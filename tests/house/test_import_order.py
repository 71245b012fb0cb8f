"""Imports point left: the order of design section 4, held by reading every import."""

from __future__ import annotations

from pathlib import Path

import pytest

import outrider
from tests.house import layout
from tests.house.layout import PACKAGE, SAME_PLACE_ALLOWED, Import, part_of, place_of


def violation(module: str, imported: str) -> str | None:
    """Why a module of the package must not import another; None when it may."""
    ours, theirs = part_of(module), part_of(imported)
    if not ours:
        return None  # the package's own __init__ is the public namespace and looks right lazily
    if ours == theirs or not theirs:
        return None
    here, there = place_of(ours), place_of(theirs)
    if there is None:
        return None if theirs.startswith("__") else f"{theirs} has no place in the order"
    assert here is not None
    if there > here:
        return f"{theirs} stands right of {ours}"
    if there == here and (ours, theirs) not in SAME_PLACE_ALLOWED:
        return f"{ours} and {theirs} must not know each other"
    return None


def violations(imports: list[Import]) -> list[str]:
    found = [
        (imported, violation(layout.module_of(imported.path), imported.module))
        for imported in imports
        if imported.top == "outrider"
    ]
    return [f"{imported}: {why}" for imported, why in found if why]


def test_imports_point_left() -> None:
    assert violations(layout.all_imports()) == []


def test_every_part_has_a_place() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in layout.files()}
    assert {part for part in parts if place_of(part) is None} == {"__init__"}


def test_public_names_are_imported_from_where_they_live() -> None:
    """`from outrider import LLM` inside the package would hide what it depends on."""
    public = {f"outrider.{name}" for name in outrider.__all__}
    assert [str(found) for found in layout.all_imports() if found.module in public] == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("decoding/x.py", "from outrider.models import Target"),
        ("cache/x.py", "import outrider.drafters"),
        ("engine/x.py", "def f():\n    from outrider.llm import LLM"),
        ("train/x.py", "from outrider.bench import run"),
        ("llm/x.py", "from outrider import cli"),
        ("config.py", "from outrider.types import Request"),
        ("engine/x.py", "from ..llm import LLM"),
    ],
)
def test_a_wrong_import_is_found(path: str, line: str) -> None:
    place: Path = PACKAGE / path
    imports = list(layout.imports_of(line, place, layout.module_of(place)))
    assert violations(imports)
