"""Text of a user's own to train on: files, folders, and JSONL or Parquet of conversations."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidConfig, MissingExtra
from outrider.models.text import Tokenizer

log = logging.getLogger(__name__)

HELD_OUT_EVERY = 20
"""One document of so many is held out; of a single one its last part of so many."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents as token ids, and the sha256 of what they were read from."""

    train: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    sha256: str


def read_texts(paths: Sequence[str | Path], tokenizer: Tokenizer) -> Texts:
    """The documents of files and folders, in the order of their names.

    Files of a folder that are no text are left out, hidden ones and bytecode too.

    A line of a `.jsonl` file, or a row of a `.parquet` file, holds a `text`, or `messages` of a
    conversation, which is read through the tokenizer's chat template up to its last message, the
    assistant's.

    Raises:
        InvalidConfig: a path that is none; a file that is no text; lines that are neither; nothing.
        MissingExtra: Parquet without pyarrow.
    """
    digest = hashlib.sha256()
    documents: list[tuple[int, ...]] = []
    named = {Path(path) for path in paths}
    for path in _files(paths):
        if path.suffix == ".parquet":
            digest.update(path.read_bytes())
            documents += [tuple(ids) for ids in _rows(path, tokenizer) if ids]
            continue
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            if path not in named:
                log.warning("left out %s: it is no text in UTF-8", path)
                continue
            raise InvalidConfig(
                f"{str(path)!r} is no text in UTF-8 ({error}); leave it out"
            ) from error
        digest.update(content)
        if path.suffix == ".jsonl":
            documents += [tuple(ids) for ids in _conversations(path, text, tokenizer) if ids]
        elif text:
            documents.append(tuple(tokenizer.encode(text)))
    train, held_out = _parted([ids for ids in documents if ids])
    if not any(train) or not any(held_out):
        raise InvalidConfig(
            f"{', '.join(map(str, paths))}: too little text to train on; give more of it"
        )
    return Texts(train, held_out, digest.hexdigest())


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and not _hidden(file.relative_to(path))
            )
        elif path.is_file():
            yield path
        else:
            raise InvalidConfig(f"text {str(path)!r} is no file or folder; give one that exists")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _conversations(path: Path, text: str, tokenizer: Tokenizer) -> Iterable[list[int]]:
    # Of all that ends a line elsewhere, JSON leaves some as they are within strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"line {number} of {path.name}"
            yield _document(place, _record(place, line), tokenizer)


def _rows(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The documents of a Parquet file, a batch of rows at a time."""
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{path.name} is read with pyarrow, which is not installed: "
            "pip install 'outrider[train]'"
        ) from error
    try:
        file = ParquetFile(path)
        columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist() or [{}] * batch.num_rows:
                number += 1
                yield _document(f"row {number} of {path.name}", record, tokenizer)
    except (ArrowException, OSError) as error:
        raise InvalidConfig(f"{str(path)!r} is no Parquet file ({error}); leave it out") from error


def _record(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidConfig(f"{place} is no JSON ({error}); correct it") from error


def _document(place: str, record: Any, tokenizer: Tokenizer) -> list[int]:
    record = record if isinstance(record, dict) else {}
    if isinstance(record.get("text"), str):
        return tokenizer.encode(record["text"])
    messages = record.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and isinstance(messages[-1], dict):
        answer = messages[-1].get("content")
        if messages[-1].get("role") == "assistant" and isinstance(answer, str):
            return [*tokenizer.chat(messages[:-1]), *tokenizer.spell(answer)]
    raise InvalidConfig(
        f"{place} holds neither a text nor a conversation that ends with the assistant; give "
        '{"text": ...} or {"messages": [...]}'
    )


def _parted(
    documents: list[tuple[int, ...]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Documents that are trained on, and those that are held out."""
    if len(documents) == 1:
        (ids,) = documents
        cut = len(ids) - len(ids) // HELD_OUT_EVERY
        documents = [ids[:cut], ids[cut:]]
    every = min(HELD_OUT_EVERY, len(documents))
    last = every - 1
    return (
        tuple(ids for i, ids in enumerate(documents) if i % every != last),
        tuple(ids for i, ids in enumerate(documents) if i % every == last),
    )
