"""Traces on disk: a line of JSON for each text, and one for each of its rounds as it ends.

A line is written whole and at once, so a run that is killed loses the line in flight at most. The
tokens of the text stand in it, so its owner alone may read it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from outrider.errors import InvalidConfig
from outrider.types import RoundTrace

VERSION = 2
"""Of the lines; another one is not read."""
REMEDY = "write one with `outrider generate --trace FILE`"


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How a traced text was made.

    Attributes:
        drafter: who guessed.
        rule: the verification rule; of an observed text the one that would have decided.
        depth: levels drafted at most.
        temperature: of the law; 0 is greedy.
        prompt_tokens: tokens of the prompt.
        max_tokens: new tokens at most; None as far as the context goes.
        observed: whether nothing was kept, so that there is a guess behind every token.
        width, nodes: of drafted trees; None for chains.
        other_s: seconds of a round that no stage of it holds; 0 where they were not measured.
        certain: whether who guessed looks things up, and draws nothing.
    """

    drafter: str
    rule: str
    depth: int
    temperature: float
    prompt_tokens: int
    max_tokens: int | None
    observed: bool = False
    width: int | None = None
    nodes: int | None = None
    other_s: float = 0.0
    certain: bool = False


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round, and of an observed text the rows that its rule would have kept."""

    trace: RoundTrace
    would: tuple[int, ...] | None = None

    @property
    def path(self) -> tuple[int, ...]:
        """The rows that the rule keeps of the draft."""
        return self.trace.path if self.would is None else self.would

    @property
    def seconds(self) -> float:
        """All laps of the round."""
        times = self.trace.times
        return times.draft_s + times.score_s + times.verify_s + times.commit_s


@dataclass(frozen=True, slots=True)
class TracedText:
    """A text as it was made, round by round."""

    settings: TextSettings
    rounds: tuple[TracedRound, ...]

    @property
    def tokens(self) -> list[int]:
        """What was made."""
        return [
            token
            for one in self.rounds
            for token in [
                *(one.trace.tokens[row - 1] for row in one.trace.path),
                one.trace.added,
            ][: one.trace.kept]
        ]


class TraceWriter:
    """Writes texts and rounds as they come; lines of several texts may alternate."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._texts = 0

    def text(self, settings: TextSettings) -> int:
        """Begins a text; its number is for its rounds."""
        number, self._texts = self._texts, self._texts + 1
        self._line({"trace": VERSION, "text": number, **asdict(settings)})
        return number

    def round(self, text: int, trace: RoundTrace, would: tuple[int, ...] | None = None) -> None:
        """A round that is over."""
        self._line({"text": text, **trace.as_dict(), "would": would})

    def _line(self, found: dict[str, Any]) -> None:
        self._file.write(json.dumps(found) + "\n")
        self._file.flush()


def open_private(path: Path) -> IO[str]:
    """A file to write that its owner alone may read, as a file that was there becomes."""
    file = os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    )
    if path.is_file():
        path.chmod(0o600)
    return file


def write_trace(path: Path, texts: Iterable[TracedText]) -> None:
    """Writes texts that are there already."""
    with open_private(path) as file:
        writer = TraceWriter(file)
        for text in texts:
            number = writer.text(text.settings)
            for one in text.rounds:
                writer.round(number, one.trace, one.would)


def read_trace(path: Path) -> list[TracedText]:
    """The texts of a file, those without a round left out; a last line that was cut is no line.

    Raises:
        InvalidConfig: a file that cannot be read, or is no trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise InvalidConfig(
            f"the trace {str(path)!r} cannot be read: {error.strerror}; {REMEDY}"
        ) from error
    except UnicodeError as error:
        raise InvalidConfig(f"{str(path)!r} is no trace: it is no text; {REMEDY}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    settings: dict[int, TextSettings] = {}
    rounds: dict[int, list[TracedRound]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            text = found["text"]
            if "trace" in found:
                if found["trace"] != VERSION:
                    raise InvalidConfig(
                        f"the trace {str(path)!r} is of version {found['trace']}; {VERSION} is "
                        f"read; {REMEDY}"
                    )
                settings[text] = TextSettings(
                    **{field.name: found[field.name] for field in fields(TextSettings)}
                )
                rounds[text] = []
            else:
                would = None if found["would"] is None else tuple(found["would"])
                own = TracedRound(RoundTrace.from_dict(found), would)
                _check(own)
                rounds[text].append(own)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidConfig):
                raise
            raise InvalidConfig(
                f"line {number} of {str(path)!r} is no line of a trace ({_why(error)}); {REMEDY}"
            ) from error
    return [TracedText(settings[text], tuple(own)) for text, own in rounds.items() if own]


def _why(error: Exception) -> str:
    """What is wrong with a line, in words."""
    if isinstance(error, json.JSONDecodeError):
        return "it is no JSON"
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return str(error) if isinstance(error, ValueError) else "its JSON says something else"


def _check(one: TracedRound) -> None:
    """Raises ValueError where a round names rows that it does not have."""
    trace, size = one.trace, len(one.trace.tokens)
    parts = (trace.parents, trace.draft_probs, trace.target_probs, trace.worths or trace.tokens)
    if any(len(part) != size for part in parts):
        raise ValueError("fields of different lengths")
    if any(not 0 <= parent <= row for row, parent in enumerate(trace.parents)):
        raise ValueError(f"parents {trace.parents}")
    for path in (trace.path, one.path):
        if any(not 1 <= row <= size for row in path):
            raise ValueError(f"path {path}")
    if trace.num_texts < 1 or not 0 <= trace.kept <= len(trace.path) + 1:
        raise ValueError(f"kept {trace.kept}, num_texts {trace.num_texts}")
