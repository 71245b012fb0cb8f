"""What an arena has found so far, on disk after every round: a run goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arena.contest import Round
from benchmarks.arena.engines import FLOAT32
from outrider.bench.machine import Machine
from outrider.errors import InvalidConfig


@dataclass(slots=True)
class Record:
    """The JSON of a run, as it grows.

    `cells[cell][heat]` holds rounds by number; `arms[arm]` of a stage what is known of its process;
    `skipped` the arms that do not take part, in a cell or at all, with the reason.
    """

    path: Path
    settings: dict[str, Any]
    commands: list[str] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def opened(cls, path: Path, settings: Mapping[str, Any], command: str) -> Record:
        """A new record, or the one on disk to go on with.

        Raises:
            InvalidConfig: what is on disk was measured under other settings or another machine.
        """
        # Through JSON, so that tuples compare as what was read back.
        asked = json.loads(json.dumps(dict(settings)))
        machine = {**asdict(Machine.here()), "load_average": None}
        record = cls(path, asked)
        if path.is_file():
            known = json.loads(path.read_text("utf-8"))
            if isinstance(known, dict) and "dtype" in asked:
                # Records begun before there was a choice.
                known.get("settings", {}).setdefault("dtype", FLOAT32)
            if not isinstance(known, dict) or not {"settings", "machine", "cells"} <= set(known):
                raise InvalidConfig(f"{path} is no record of the arena; write to another file")
            for name, ours, theirs in (
                ("settings", asked, known["settings"]),
                ("machine", json.loads(json.dumps(machine)), known["machine"]),
            ):
                changed = [key for key in ours if ours[key] != theirs.get(key)]
                if changed:
                    raise InvalidConfig(
                        f"{path} was measured with another {changed[0]} of the {name} "
                        f"({theirs.get(changed[0])!r}, now {ours[changed[0]]!r}); go on as it was "
                        "begun, or write to another file"
                    )
            record = cls(
                path,
                asked,
                *(known[name] for name in ("commands", "machines", "stages", "cells", "skipped")),
            )
        record.commands.append(command)
        record.machines.append(asdict(Machine.here()))
        return record

    def done(self, cell: str, heat: str) -> set[int]:
        """Rounds that are not to be taken again."""
        return set(map(int, self.cells.get(cell, {}).get(heat, {})))

    def add(self, cell: str, heat: str, found: Round, clocks_mhz: float | None) -> None:
        """Keeps a round, on disk too."""
        rounds = self.cells.setdefault(cell, {}).setdefault(heat, {})
        rounds[str(found.number)] = {**found.as_dict(), "clocks_mhz": clocks_mhz}
        self.save()

    def skip(self, where: str, arm: str, why: str) -> None:
        """Notes why an arm does not take part there."""
        self.skipped.setdefault(where, {})[arm] = why

    def arm(self, stage: str, arm: str, **known: Any) -> None:
        """Notes something about an arm's process."""
        self.stages.setdefault(stage, {}).setdefault(arm, {}).update(known)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "commands": self.commands,
            "machine": {**asdict(Machine.here()), "load_average": None},
            "machines": self.machines,
            "settings": self.settings,
            "stages": self.stages,
            "skipped": self.skipped,
            "cells": self.cells,
        }

    def save(self) -> None:
        """Writes it whole or not at all."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.as_dict(), indent=1) + "\n", "utf-8")
        part.replace(self.path)
