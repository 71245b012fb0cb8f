"""Where everything lies: virtual environments, builds and checkpoints, in a folder the user names.

HOME/venvs/ENGINE                   a virtual environment each
HOME/llama.cpp                      its sources and its build
HOME/checkpoints/NAME/target        a Hugging Face folder; draft-C beside it
HOME/checkpoints/NAME/gguf, .../openvino    the same, converted
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arena.engines import ENGINES


def default_home() -> Path:
    """A folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "outrider-arena"


@dataclass(frozen=True, slots=True)
class Home:
    """The arena's folder."""

    root: Path

    def venv(self, engine: str) -> Path | None:
        """The engine's virtual environment; None where it runs in this Python."""
        folder = ENGINES[engine].folder
        return None if folder is None else self.root / "venvs" / folder

    def python(self, engine: str) -> Path | None:
        """The interpreter of that environment."""
        venv = self.venv(engine)
        return None if venv is None else venv / "bin" / "python"

    @property
    def llama_cpp(self) -> Path:
        """Where llama.cpp is built."""
        return self.root / "llama.cpp"

    @property
    def llama_server(self) -> Path:
        """The program that is timed."""
        return self.llama_cpp / "build" / "bin" / "llama-server"

    @property
    def llama_sources(self) -> Path:
        """Its sources, converters among them; None of it is there before `setup`."""
        found = sorted(self.llama_cpp.glob("llama_cpp_python-*/vendor/llama.cpp"))
        return found[-1] if found else self.llama_cpp / "missing"

    def checkpoint(self, name: str) -> Path:
        """A checkpoint's folder."""
        return self.root / "checkpoints" / name

    def missing(self, engine: str) -> str | None:
        """Why the engine cannot take part; None where it can."""
        python = self.python(engine)
        if python is not None and not python.is_file():
            return f"not installed; python -m benchmarks.arena setup {engine}"
        if engine == "llama.cpp" and not self.llama_server.is_file():
            return f"not built; python -m benchmarks.arena setup {engine}"
        return None
