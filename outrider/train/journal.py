"""What a run writes of itself: a line of JSON for each step, and a picture of them all."""

from __future__ import annotations

import importlib.util
import json
import logging
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from outrider.errors import InvalidConfig
from outrider.train.loop import Progress, ProgressCallback
from outrider.train.together import Together

try:
    import fcntl
except ImportError:  # Not on Windows.
    fcntl = None

LOG, PICTURE = "log.jsonl", "log.png"
log = logging.getLogger(__name__)


def journal_of(state: Path, resume: bool, together: Together) -> Journal:
    """The journal of a run in its folder of state.

    Raises:
        InvalidConfig: a folder that cannot be made.
    """
    return WrittenJournal(state, resume=resume) if together.leads else NoJournal()


def check_free(state: Path) -> None:
    """Refuses a folder of state whose run is at work.

    Raises:
        InvalidConfig: one is.
    """
    if (state / LOG).is_file():
        with (state / LOG).open("a", encoding="utf-8") as file:
            hold(file)


def hold(file: IO[str]) -> None:
    """Holds a run's log until it is closed; a run that is killed holds it no longer.

    Raises:
        InvalidConfig: another run does; the file is closed.
    """
    if fcntl is None:
        return
    folder = Path(file.name).parents[1]
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InvalidConfig(
            f"another run is at work in {folder}; wait until it has ended, or give another folder"
        ) from error
    except OSError:
        log.warning("%s cannot be locked: let no other run into it", folder)


class Journal(ABC):
    """Where the steps of a run are noted."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Nothing to close."""

    @abstractmethod
    def note(self, at: Progress) -> None:
        """One step."""

    def noting(self, progress: ProgressCallback | None) -> ProgressCallback:
        """Notes each step, then tells whoever asked."""

        def noted(at: Progress) -> None:
            self.note(at)
            if progress is not None:
                progress(at)

        return noted


class NoJournal(Journal):
    """That of a process that another one leads."""

    def note(self, at: Progress) -> None:
        """Nothing: it is noted there."""


class WrittenJournal(Journal):
    """A run's log in its folder of state; the picture is drawn when it ends, however it ends.

    Without matplotlib there is no picture, and one that fails is no reason for a run to fail.
    """

    def __init__(self, state: Path, *, resume: bool) -> None:
        try:
            state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(
                f"out={str(state.parent)!r} is no folder and cannot be made one "
                f"({error.strerror}); give another folder"
            ) from error
        self._state = state
        self._resume = resume
        self._file: IO[str] | None = None

    def __enter__(self) -> WrittenJournal:
        path = self._state / LOG
        self._file = path.open("a", encoding="utf-8")
        hold(self._file)
        if not self._resume:
            self._file.truncate(0)
        elif self._file.tell() and not path.read_bytes().endswith(b"\n"):
            # A kill in the middle of a line: the next one is not to be lost with it.
            self._file.write("\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        if importlib.util.find_spec("matplotlib") is None:
            return
        try:
            draw(self._state)
        except Exception:
            log.warning("no picture of the run in %s", self._state, exc_info=True)

    def note(self, at: Progress) -> None:
        """One line, at once on the disk."""
        line: dict[str, Any] = {
            "step": at.step,
            "loss": at.loss,
            "rate_tok_s": at.rate_tok_s,
            "elapsed_s": at.elapsed_s,
        }
        if at.held_out is not None:
            line[key_of(at.figure)] = at.held_out
        assert self._file is not None, "a journal is written within its context"
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def key_of(figure: str) -> str:
    """The log's name of what is measured on held-out text."""
    return figure.removeprefix("held-out ").replace(" ", "_")


def noted(state: Path) -> dict[int, dict[str, Any]]:
    """A log's entries by step, in their order: the last of those that were taken again.

    Lines that a kill has cut are left out.
    """
    found: dict[int, dict[str, Any]] = {}
    for line in (state / LOG).read_text("utf-8", "replace").splitlines():
        try:
            entry = json.loads(line)
            found[entry["step"]] = {"loss": entry["loss"], **entry}
        except (ValueError, TypeError, KeyError):
            continue
    return dict(sorted(found.items()))


def draw(state: Path) -> None:
    """Draw a log: the loss, and beside it what was measured on held-out text."""
    # Outside of any window and of the user's own figures.
    from matplotlib.backends.backend_agg import (  # pyright: ignore[reportMissingImports]
        FigureCanvasAgg,
    )
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    entries = noted(state)
    if not entries:
        return
    known = {"step", "loss", "rate_tok_s", "elapsed_s"}
    figures = sorted({key for entry in entries.values() for key in entry} - known)
    figure: Any = Figure(figsize=(8, 3 * (1 + len(figures))), layout="constrained")
    axes: Any = figure.subplots(1 + len(figures), squeeze=False)[:, 0]
    axes[0].plot(list(entries), [entry["loss"] for entry in entries.values()], linewidth=1)
    axes[0].set(xlabel="step", ylabel="loss")
    for axis, name in zip(axes[1:], figures, strict=True):
        measured = {step: entry[name] for step, entry in entries.items() if name in entry}
        axis.plot(list(measured), list(measured.values()), marker="o")
        axis.set(xlabel="step", ylabel=name.replace("_", " "))
    FigureCanvasAgg(figure).print_png(str(state / PICTURE))
