"""How a worker speaks with the arena: lines of JSON on its standard input and output.

Nothing but the standard library: every engine's own Python runs this file. What an engine prints
goes to standard error.

    {"do": "load", "arms": [...], "target": DIR, ...}   -> {"ready": true, "version": ..., ...}
    {"do": "run", "arm": ..., "prompts": [[...]], ...}  -> {"texts": [[...]], "seconds": ..., ...}
    a way that an engine does not have                  -> {"refused": "its own words"}
    anything else that goes wrong                       -> {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1


class RefusedError(Exception):
    """The engine does not do this; the message is its own."""


class Worker(Protocol):
    """One engine with its models loaded."""

    def about(self) -> dict[str, Any]:
        """Its version, and whatever it measured of itself."""
        ...

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes `job["prompts"]` with `job["arm"]`.

        `texts` are the new tokens, `seconds` those of the call, `first_s` those until the first new
        token of the last prompt to have one; `rounds`, `drafted` and `accepted` are None where the
        engine does not tell.
        """
        ...


def die_with_parent() -> None:
    """A worker that was stopped with SIGSTOP would outlive a killed arena otherwise."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(load: Any) -> None:
    """Answers lines until standard input ends; `load` makes a Worker of the first message."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message["do"] == "load":
                worker = load(message)
                answer = {"ready": True, **worker.about()}
            else:
                answer = worker.run(message)
        except RefusedError as error:
            answer = {"refused": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
