"""Each foreign library has one door, and importing Outrider is quiet and light."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

from tests.house import layout
from tests.house.layout import ROOT, part_of

DOORS: dict[str, set[str]] = {
    "transformers": {"models", "interop"},
    "tokenizers": {"models"},
    "huggingface_hub": {"models"},
    "safetensors": {"models", "train"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "fastapi": {"serve"},
    "uvicorn": {"serve"},
    "ray": {"cluster"},
    "vllm": {"cluster"},
    "matplotlib": {"bench", "train"},
    "pyarrow": {"train"},
    "scipy": {"certify"},
    "llguidance": {"models"},
    "llama_cpp": {"models"},
    "pytest": {"certify"},
    "triton": {"decoding", "models"},
    "beartype": set(),
}
EVERYWHERE = {"torch", "numpy", "outrider"}


def test_foreign_libraries_enter_through_their_doors() -> None:
    wrong = [
        str(found)
        for found in layout.all_imports()
        if found.top in DOORS and part_of(layout.module_of(found.path)) not in DOORS[found.top]
    ]
    assert wrong == []


def test_no_library_without_a_door() -> None:
    known = (
        EVERYWHERE | set(DOORS) | set(sys.stdlib_module_names) | {"jaxtyping", "outrider_models"}
    )
    assert [str(i) for i in layout.all_imports() if i.top not in known] == []


def test_jaxtyping_is_for_annotations_only() -> None:
    imports = [i for i in layout.all_imports() if i.top == "jaxtyping"]
    assert [str(i) for i in imports if not i.type_checking] == []


def test_ruff_holds_the_same_doors() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    banned = config["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(DOORS)


def run(code: str) -> str:
    """The standard output and error of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


IMPORT_AND_LIST = """
import json, sys, torch, numpy
seen = set(sys.modules)
loaded = {}
for name in ("outrider.errors", "outrider.noise", "outrider.decoding", "rich"):
    __import__(name)
    loaded[name] = sorted({m.partition(".")[0] for m in set(sys.modules) - seen})
print(json.dumps(loaded))
"""


def test_the_mathematics_needs_torch_and_numpy_alone() -> None:
    """What torch and numpy themselves load, before or lazily later, is theirs."""
    loaded = {name: set(found) for name, found in json.loads(run(IMPORT_AND_LIST)).items()}
    foreign = loaded["outrider.decoding"] - sys.stdlib_module_names - {"outrider", "torch", "numpy"}
    assert foreign == set()
    assert "rich" in loaded["rich"], "the listing must see a foreign library when there is one"


def test_nothing_is_printed_at_import() -> None:
    modules = [layout.module_of(path) for path in layout.files() if path.name == "__init__.py"]
    assert run("\n".join(f"import {module}" for module in modules)) == ""


def test_the_plugin_of_pytest_is_light() -> None:
    """Every run of pytest loads it, wherever Outrider is installed."""
    code = "import sys, outrider.certify.pytest_plugin, outrider.certify.testing as t\n"
    code += "assert callable(t.assert_lossless)\n"
    code += "print({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'transformers'})"
    assert run(code).strip() == "set()"


def test_rules_are_certified_without_transformers() -> None:
    """References, enumeration and golden vectors; and what turns a report into a page."""
    names = ("paths", "tree_paths", "enumerate", "vectors", "bets", "page.charts", "model.report")
    code = "\n".join(f"import outrider.certify.{name}" for name in names)
    code += "\nimport sys; print('transformers' in sys.modules, 'numpy' in sys.modules)"
    assert run(code).strip() == "False True"
