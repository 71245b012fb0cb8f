"""Results of a long proof, kept part by part: a run that was cut short goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

FRACTION = "fraction"


class Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=Record)


class Journal(Generic[T]):
    """Records by name, a line of JSON each; those of other code or counts are forgotten.

    Args:
        file: where they are kept; its folder is made.
        of: a digest of everything that the results depend on.
        kinds: the classes of records.
    """

    def __init__(self, file: Path, of: str, kinds: Iterable[type[T]]) -> None:
        self._file = file
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._found: dict[str, T] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if lines[:1] == [of]:
            for line in lines[1:]:
                self._take(line)
        # A line that was cut off is not written on.
        file.write_text(
            "".join(f"{line}\n" for line in (of, *map(self._line, self._found))), encoding="utf-8"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> T:
        return self._found[name]

    def __len__(self) -> int:
        return len(self._found)

    def keep(self, name: str, record: T) -> None:
        """Adds a record, on disk when this returns."""
        self._found[name] = record
        with self._file.open("a", encoding="utf-8") as out:
            out.write(self._line(name) + "\n")

    def end(self) -> None:
        """Forgets everything: the proof is whole."""
        self._file.unlink(missing_ok=True)

    def _line(self, name: str) -> str:
        record = self._found[name]
        fields = {key: _told(value) for key, value in asdict(record).items()}
        return json.dumps({"name": name, "kind": type(record).__name__, "fields": fields})

    def _take(self, line: str) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            return
        fields = {key: _read(value) for key, value in told["fields"].items()}
        self._found[told["name"]] = self._kinds[told["kind"]](**fields)


def _told(value: Any) -> Any:
    return {FRACTION: str(value)} if isinstance(value, Fraction) else value


def _read(value: Any) -> Any:
    return Fraction(value[FRACTION]) if isinstance(value, Mapping) else value


def digest(files: Iterable[Path], *more: object) -> str:
    """Of some files, and of what else results depend on."""
    found = hashlib.sha256(repr(more).encode())
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()
