"""The corpus: the sources of Python's own standard library, pinned file by file.

The manifest records the interpreter's version and every file's sha256, its part being `train` or
`held_out`. Another interpreter's files give other weights, so a difference is an error and never a
silent substitute.
"""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidConfig
from outrider.train.recipe import CorpusRecipe

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "pydoc_data"}
)
"""Tests are no ordinary code, site-packages is not the library, pydoc_data is generated."""

MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the corpus: its path relative to the standard library's root, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The files that are trained on and those that never are."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(root: Path, recipe: CorpusRecipe) -> dict[str, str]:
    """Path -> part (`train` or `held_out`) of every source file the recipe reads, sorted."""
    parts: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        folders = relative.split("/")[:-1]
        # The build's own settings differ from machine to machine and hold its paths.
        if (
            SKIPPED_FOLDERS.intersection(folders)
            or relative.startswith("_sysconfigdata")
            or folders[:1] == ["config"]
        ):
            continue
        if folders and folders[0].startswith("config-"):
            continue
        if _matches(relative, recipe.skip):
            continue
        parts[relative] = "held_out" if _matches(relative, recipe.held_out) else "train"
    if recipe.max_files is not None:
        train = [p for p, part in parts.items() if part == "train"][: recipe.max_files]
        held = [p for p, part in parts.items() if part == "held_out"][: recipe.max_files]
        parts = {p: parts[p] for p in sorted([*train, *held])}
    return parts


def _matches(relative: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path is one of the files or lies in one of the folders (ending in `/`)."""
    return any(relative.startswith(p) if p.endswith("/") else relative == p for p in patterns)


def build_manifest(root: Path, recipe: CorpusRecipe) -> dict[str, object]:
    """What the corpus is made of, ready to be written as JSON."""
    files = {
        relative: {"part": part, "sha256": _sha256(root / relative)}
        for relative, part in list_sources(root, recipe).items()
    }
    return {"python": platform.python_version(), "files": files}


def load_corpus(recipe: CorpusRecipe, manifest_path: Path, root: Path | None = None) -> Corpus:
    """The pinned corpus; InvalidConfig when this interpreter's files are not the manifest's."""
    root = stdlib_root() if root is None else root
    if not manifest_path.is_file():
        raise InvalidConfig(
            f"no corpus manifest at {manifest_path}; write one with outrider.train.write_manifest"
        )
    try:
        manifest: Mapping[str, Any] = json.loads(manifest_path.read_text("utf-8"))
        files: Mapping[str, Mapping[str, str]] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(
            f"{manifest_path} is no corpus manifest ({error}); "
            "write one with outrider.train.write_manifest"
        ) from error
    found = list_sources(root, recipe)
    pinned = {
        path: entry for path, entry in files.items() if recipe.max_files is None or path in found
    }
    wrong = [
        path
        for path, entry in pinned.items()
        if found.get(path) != entry["part"] or _sha256(root / path) != entry["sha256"]
    ]
    wrong += [path for path in found if path not in files]
    if wrong:
        shown = ", ".join(sorted(wrong)[:MAX_SHOWN]) + (
            f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        )
        raise InvalidConfig(
            f"the standard library of Python {platform.python_version()} is not the corpus of "
            f"{manifest_path.name} (Python {manifest['python']}): {shown} differ; "
            f"run Python {manifest['python']}, or pin your own corpus with "
            "outrider.train.write_manifest and name it in the recipe (the weights will differ)"
        )
    documents = {part: [] for part in ("train", "held_out")}
    for path, entry in sorted(pinned.items()):
        documents[entry["part"]].append(Document(path, (root / path).read_text("utf-8")))
    return Corpus(tuple(documents["train"]), tuple(documents["held_out"]))


def write_manifest(recipe: CorpusRecipe, path: Path, root: Path | None = None) -> None:
    """Pin the running interpreter's standard library in a new manifest."""
    manifest = build_manifest(stdlib_root() if root is None else root, recipe)
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", "utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
