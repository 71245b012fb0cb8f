"""Profiles: what `outrider plan` found best for a model on a machine, as TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import nearest
from outrider.errors import InvalidConfig

FIELDS = ("drafter", "k", "rule", "width", "nodes", "shape")
"""What a profile may say; the table `about` says where it comes from and is not read."""


def write_profile(path: Path, found: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Writes what to load a model with; fields that are None are left out."""
    lines = [f"{name} = {_words(found[name])}" for name in FIELDS if found.get(name) is not None]
    lines += ["", "[about]", *(f"{name} = {_words(text)}" for name, text in about.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _words(value: Any) -> str:
    """Text, a whole number or a list of them, as TOML writes it."""
    # So does JSON, but for characters it would escape as two surrogates, and one it leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_profile(path: Path | str) -> dict[str, Any]:
    """What a profile says.

    Raises:
        InvalidConfig: a file that cannot be read, or says what no profile says.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"profile {str(path)!r} cannot be read: {error}; write one with "
            "`outrider plan --save FILE`"
        ) from error
    found.pop("about", None)
    for name in found:
        if name not in FIELDS:
            raise InvalidConfig(
                f"profile {str(path)!r} says {name!r}, which no profile does; fields are "
                f"{', '.join(FIELDS)}" + nearest(name, FIELDS)
            )
    return found
