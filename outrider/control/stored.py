"""Costs kept on disk, in a folder of the user's own: one file per model, machine and dtype."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.control.costs import Costs
from outrider.errors import InvalidConfig
from outrider.models.packages import cache_folder, is_own, key_of


def place_of(facts: Mapping[str, Any]) -> Path:
    """The file of the costs that were measured under these facts, this torch and processor."""
    return cache_folder().parent / "costs" / f"{key_of(facts)}.json"


def store(costs: Costs, facts: Mapping[str, Any]) -> Path:
    """Keeps costs in the place of older ones; returns the file.

    Raises:
        InvalidConfig: the folder cannot be written, or others may write to it.
    """
    place = place_of(facts)
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_own(place.parent):
            raise InvalidConfig(
                f"others may write to {str(place.parent)!r}; give it to yourself alone (chmod "
                "go-w), or set OUTRIDER_CACHE_DIR to a folder of your own"
            )
        handle, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"facts": dict(facts), "costs": costs.as_dict()}, file)
        Path(name).replace(place)
    except OSError as error:
        raise InvalidConfig(
            f"costs cannot be kept in {str(place.parent)!r} ({error}); set OUTRIDER_CACHE_DIR to a "
            "folder of your own"
        ) from error
    return place


def stored(facts: Mapping[str, Any]) -> Costs | None:
    """The costs kept of these facts; None where none are one's own and can be read."""
    place = place_of(facts)
    try:
        if not (is_own(place.parent) and is_own(place)):
            return None
        return Costs.from_dict(json.loads(place.read_text("utf-8"))["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        # InvalidConfig is a ValueError: costs of another format are measured anew.
        return None
