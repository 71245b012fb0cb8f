"""The check at the first load under new versions: where it fails `LLM.load` speculates with nobody.

`outrider.decoding.known_answers` is asked once for each release of torch, transformers and Outrider
on each processor; what it said is kept in the user's cache folder. OUTRIDER_SELF_CHECK=0 switches
that off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from outrider import __version__
from outrider.decoding import known_answers
from outrider.models.packages import cache_folder, is_own

log = logging.getLogger(__name__)

SWITCH = "OUTRIDER_SELF_CHECK"
OFF = "0", "off", "false", "no"
FIRST_LOAD, BY_HAND = "first load", "outrider certify self"


_unchecked: ContextVar[bool] = ContextVar("outrider_unchecked", default=False)


@contextmanager
def unchecked() -> Iterator[None]:
    """What is loaded meanwhile speculates whatever was found: a check is to see it."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check of this installation found.

    Attributes:
        fault: what is not as it was proved; None where all is.
        by: who found it, `FIRST_LOAD` or `BY_HAND`.
    """

    fault: str | None
    by: str = FIRST_LOAD

    def __str__(self) -> str:
        return f"{'passed' if self.fault is None else 'failed'} at {self.by}" + (
            "" if self.fault is None else f": {self.fault}"
        )


def finding() -> Finding | None:
    """What is known of this installation, found out now if nothing is; None if switched off."""
    if _unchecked.get() or os.environ.get(SWITCH, "").lower() in OFF:
        return None
    kept = _read()
    if kept is not None:
        return kept
    found = Finding(known_answers.fault())
    log.info("noise, laws and rules were checked under %s: %s", _facts(), found)
    # A fault may have been an accident of this process: the next one looks again.
    if found.fault is None:
        keep(found)
    return found


def refusal() -> str | None:
    """Why this installation may not speculate; None where it may."""
    found = finding()
    if found is None or found.fault is None:
        return None
    return (
        f"this installation decides otherwise than proved ({found}), so texts are decoded plainly; "
        "`outrider certify self` tests it again, and OUTRIDER_SELF_CHECK=0 speculates all the same"
    )


def keep(found: Finding) -> None:
    """Writes a finding where the next load looks; a folder that takes none is no error."""
    try:
        file = place()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix="writing-", delete=False, encoding="utf-8"
        ) as new:
            json.dump({**_facts(), **asdict(found)}, new)
        Path(new.name).replace(file)
    except (OSError, RuntimeError) as error:
        log.info("the check of this installation is not kept: %s", error)


def place() -> Path:
    """The file of this installation's finding; other versions, other file."""
    text = json.dumps(_facts(), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return cache_folder().parent / "self-check" / f"{key}.json"


def _facts() -> dict[str, str]:
    return {
        "outrider": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
        "answers": hashlib.sha256(repr(known_answers.ANSWERS).encode()).hexdigest()[:16],
        "processor": f"{platform.machine()} {sorted(torch.cpu.get_capabilities().items())}",
    }


def _read() -> Finding | None:
    """What is kept; None where there is nothing that can be read, or others could have written."""
    try:
        file = place()
        if not is_own(file) or not is_own(file.parent):
            return None
        held = json.loads(file.read_text(encoding="utf-8"))
        fault, by = held["fault"], held["by"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    known = (fault is None or isinstance(fault, str)) and by in (FIRST_LOAD, BY_HAND)
    return Finding(fault, by) if known else None
