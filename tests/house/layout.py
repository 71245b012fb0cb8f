"""What the house tests read: the package's files, their imports, and the order they must keep."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outrider"

# Design section 4, left to right: a module may import what stands left of it. Members of one set
# must not know each other.
ORDER: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "errors cores",
        "types config",
        "noise host",
        "sequence",
        "tree",
        "decoding",
        "cache",
        "models",
        "drafters",
        "engine",
        "control",
        "llm",
        "interop certify train bench serve cluster",
        "cli",
    )
)
# The only two of one place that may meet: the records carry the sampling parameters.
SAME_PLACE_ALLOWED = {("types", "config")}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one file: the dotted module it names and where it stands."""

    path: Path
    line: int
    module: str
    type_checking: bool

    @property
    def top(self) -> str:
        """The library the import enters."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def part_of(module: str) -> str:
    """The part of the package a dotted name lies in: `decoding` of `outrider.decoding.laws`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else ""


def place_of(part: str) -> int | None:
    """The place of a part in ORDER; None when it is not listed."""
    return next((i for i, names in enumerate(ORDER) if part in names), None)


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    pieces = path.relative_to(path.parents[len(path.relative_to(PACKAGE).parts)]).with_suffix("")
    return ".".join(p for p in pieces.parts if p != "__init__")


def files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(source: str, path: Path, module: str) -> Iterator[Import]:
    """Every import of a source text, nested and type-checking ones included."""
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name, id(node) in guarded)
        elif isinstance(node, ast.ImportFrom):
            source_module = _absolute(node, path, module)
            names = [alias.name for alias in node.names] if source_module == "outrider" else []
            for name in [f"outrider.{name}" for name in names] or [source_module]:
                yield Import(path, node.lineno, name, id(node) in guarded)


def _absolute(node: ast.ImportFrom, path: Path, module: str) -> str:
    if not node.level:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + (path.name == "__init__.py")]
    return ".".join([*base, *([node.module] if node.module else [])])


def all_imports() -> list[Import]:
    """Every import of the package."""
    return [
        found
        for path in files()
        for found in imports_of(path.read_text(encoding="utf-8"), path, module_of(path))
    ]
