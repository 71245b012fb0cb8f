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
    # JSON's words for text, whole numbers and lists of them are TOML's.
    lines = [
        f"{name} = {json.dumps(found[name])}" for name in FIELDS if found.get(name) is not None
    ]
    lines += ["", "[about]", *(f"{name} = {json.dumps(text)}" for name, text in about.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
