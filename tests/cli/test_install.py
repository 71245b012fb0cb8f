"""What is installed, from where, and what the distributions carry."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hatchling import build

from tests.house.layout import PACKAGE, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def test_torch_alone_comes_from_the_index_for_torch(tmp_path: Path) -> None:
    venv = str(tmp_path / "venv")
    index = "--index-url https://torch.example/cpu"
    make = ["make", "-n", f"{venv}/installed-dev", f"VENV={venv}", f"PIP_TORCH_ARGS={index}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if " pip install " in line]
    (of_torch,) = [line for line in lines if index in line]
    assert of_torch.endswith(f"-c constraints.txt {index} --no-deps torch")
    assert lines.index(of_torch) < next(i for i, line in enumerate(lines) if "-e ." in line)
    assert all("-c constraints.txt" in line for line in lines)


def test_every_extra_is_pinned_and_told() -> None:
    """The error that names a missing extra is its install line."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    told = set(re.findall(r"pip install 'outrider\[([\w-]+)\]'", source))
    assert told <= set(EXTRAS)
    for extra, requirements in EXTRAS.items():
        for requirement in requirements:
            name = re.split(r"[\[<>=]", requirement)[0]
            ours = name in ("outrider", "outrider-models")
            assert ours or re.search(rf"^{name}==", pins, re.MULTILINE), f"{name} is not pinned"
            assert extra in ("dev", *told) or f"pip install {name}" in source, extra


Built = Callable[[Path, Any], str]


def built(project: Path, tmp_path: Path, hook: Built) -> Path:
    """What a build hook makes of a project, outside the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return tmp_path / hook(tmp_path, None)


def test_the_sdist_carries_what_works_in_it(tmp_path: Path) -> None:
    with tarfile.open(built(ROOT, tmp_path, build.build_sdist)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "outrider/engine/engine.py"} <= names
    # They read the clone around them: models, tools, constraints, what git lists.
    assert not [name for name in names if name.startswith(("tests", "scripts", "benchmarks"))]


def test_the_models_carry_their_licences(tmp_path: Path) -> None:
    project = ROOT / "outrider-models"
    with zipfile.ZipFile(built(project, tmp_path, build.build_wheel)) as wheel:
        folder = next(name.partition("/")[0] for name in wheel.namelist() if "dist-info" in name)
        carried = {
            name: wheel.read(f"{folder}/licenses/{name}") for name in ("LICENSE", "LICENSE.python")
        }
    assert carried["LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in carried["LICENSE.python"]
    with tarfile.open(built(project, tmp_path, build.build_sdist)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(carried) <= names


def test_contributing_names_what_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:outrider|scripts|tests|benchmarks)[\w-]*/?[\w./]*)`", text)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []
