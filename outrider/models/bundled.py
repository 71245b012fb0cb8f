"""The bundled models: a small target, its draft model and its heads, as `outrider-models`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from outrider.errors import InvalidConfig, MissingExtra

PARTS = ("target", "draft", "eagle", "mtp", "early-exit")
BUNDLED = "bundled"
"""What stands for a folder of theirs."""
EVAL_SETS = ("code", "prose", "foreign")


def _package() -> Path:
    try:
        package = importlib.import_module("outrider_models")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "the bundled models are not installed: pip install outrider-models "
            "(in a clone: pip install -e ./outrider-models)"
        ) from error
    assert package.__file__ is not None
    return Path(package.__file__).parent


def bundled_path(part: str) -> Path:
    """The folder of the bundled `target`, its `draft` model or one of its heads.

    Raises:
        MissingExtra: outrider-models is not installed; the message is the install line.
        InvalidConfig: there is no such part.
    """
    if part not in PARTS:
        raise InvalidConfig(f"bundled part {part!r} does not exist; parts are {', '.join(PARTS)}")
    return _package() / part


def eval_prompts(name: str = "code") -> list[str]:
    """Held-out prompts: `code`, `prose` (docstrings, licences), `foreign` (random identifiers)."""
    if name not in EVAL_SETS:
        raise InvalidConfig(f"eval set {name!r} does not exist; sets are {', '.join(EVAL_SETS)}")
    lines = (_package() / "eval" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
