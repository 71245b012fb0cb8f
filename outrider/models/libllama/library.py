"""The one door of llama-cpp-python: the library, loaded on first use, and what it says in its log.

Its bindings are handed on as they are. The log, which would go to standard error, goes to the
logger of this module, and its errors are kept for who raises one.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections import deque
from functools import cache
from typing import Any

from outrider.errors import MissingExtra, ModelError

log = logging.getLogger(__name__)

CHANGING = threading.RLock()
"""Held by who loads a file, makes a context or adds a device: ggml's list of those has no lock."""

_WARNING, _ERROR = 3, 4
_LEVELS = {_WARNING: logging.DEBUG, _ERROR: logging.INFO}
_complaints: deque[str] = deque(maxlen=8)
_interrupts: list[BaseException] = []
_heard: list[Any] = []
"""The log's callback, which must be there for as long as the library is."""


@cache
def library() -> Any:
    """The bindings of libllama.

    Raises:
        MissingExtra: llama-cpp-python is not installed; the message is the install line.
        ModelError: it is installed and cannot be loaded.
    """
    try:
        bindings = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "GGUF files need llama-cpp-python: pip install 'outrider[gguf]'"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"llama-cpp-python is installed and cannot be loaded ({error}); install it anew: "
            "pip install --force-reinstall 'outrider[gguf]'"
        ) from error
    _heard.append(bindings.llama_log_callback(_hear))
    bindings.llama_log_set(_heard[-1], ctypes.c_void_p(0))
    bindings.llama_backend_init()
    return bindings


def _hear(level: int, text: bytes, _: Any) -> None:
    # What is raised in here Python would print and forget, an interrupt above all.
    try:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR and line:
            _complaints.append(line.splitlines()[0])
        log.log(_LEVELS.get(level, logging.DEBUG), "%s", line)
    except BaseException as error:
        _interrupts.append(error)


def forget_complaints() -> None:
    """Keep what follows apart from what was said before."""
    _complaints.clear()
    _interrupts.clear()


def interrupted() -> BaseException | None:
    """What was raised while the library spoke, since `forget_complaints`; to be raised again."""
    return _interrupts.pop() if _interrupts else None


def complaint() -> str:
    """The first error the library has told since `forget_complaints`, without the name before it.

    The first is the reason; those that follow say who gave up over it.
    """
    return _complaints[0].rpartition(": ")[2] if _complaints else "libllama gives no reason"
