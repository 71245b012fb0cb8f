"""A worker's process: started, spoken with, stopped while another one is timed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arena.contest import Job, Outcome, Refused
from benchmarks.arena.engines import ENGINES
from benchmarks.arena.home import Home
from outrider.errors import ModelError

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
LOAD_S, RUN_S = 1200.0, 300.0
"""Seconds after which a worker that has not answered counts as stuck."""


@dataclass(slots=True)
class Process:
    """One engine's process with its models loaded.

    Attributes:
        startup_s: from the start of the program until the models were ready.
        about: what it says of itself.
    """

    engine: str
    popen: subprocess.Popen[str]
    startup_s: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, home: Home, engine: str, task: Mapping[str, Any], log: Path) -> Process:
        """Starts a worker and has it load its models.

        Raises:
            Refused: it cannot, in its own words.
            ModelError: it failed.
        """
        python = home.python(engine) or Path(sys.executable)
        before = time.perf_counter()
        with log.open("ab") as errors:
            popen = subprocess.Popen(
                [str(python), str(WORKERS / ENGINES[engine].worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(engine, python, task["threads"]),
                # Its own group, so that it is stopped with everything it started.
                start_new_session=True,
            )
        started = cls(engine, popen)
        try:
            started.about = started.ask({"do": "load", **task}, LOAD_S)
        except (Refused, ModelError):
            started.end()
            raise
        started.startup_s = time.perf_counter() - before
        return started

    def ask(self, message: Mapping[str, Any], limit_s: float = RUN_S) -> dict[str, Any]:
        """One message, one answer.

        Raises:
            Refused: the engine does not do this, in its own words.
            ModelError: it failed, has ended, or does not answer.
        """
        assert self.popen.stdin is not None and self.popen.stdout is not None
        try:
            self.popen.stdin.write(json.dumps(message) + "\n")
            self.popen.stdin.flush()
            # A worker answers in whole lines, so nothing is left in a buffer from before.
            if not select.select([self.popen.stdout], [], [], limit_s)[0]:
                raise ModelError(f"the worker of {self.engine} gave no answer in {limit_s:g} s")
            line = self.popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ModelError(
                f"the worker of {self.engine} ended with code {self.popen.wait()}; read its log"
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "error" in answer:
            raise ModelError(f"{self.engine}: {answer['error']}")
        return answer

    def rest(self) -> None:
        """Stops it and what it started: idle engines take no processor, spinning threads or not."""
        os.killpg(self.popen.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Lets it go on."""
        os.killpg(self.popen.pid, signal.SIGCONT)

    def seconds(self) -> float:
        """Processor time it has taken, with all it started."""
        return sum(_ticks(pid) for pid in self._family()) / TICKS

    def peak_bytes(self) -> int:
        """The most memory it has held, with all it started; mapped files count."""
        return sum(_peak(pid) for pid in self._family())

    def end(self) -> None:
        """Ends it, stopped or not."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()

    def _family(self) -> list[int]:
        """Processes of its group."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getpgid(int(entry.name)) == self.popen.pid:
                        found.append(int(entry.name))
                except ProcessLookupError:
                    continue
        return found


@dataclass(slots=True)
class ProcessContender:
    """An arm of a process."""

    name: str
    arm: str
    process: Process

    def run(self, job: Job) -> Outcome:
        """Decodes; raises Refused where the engine does not do this."""
        answer = self.process.ask(
            {
                "do": "run",
                "arm": self.arm,
                "prompts": [list(prompt) for prompt in job.prompts],
                "tokens": job.tokens,
                "temperature": job.temperature,
                "top_k": job.top_k,
                "seed": job.seed,
            }
        )
        return Outcome(
            tuple(map(tuple, answer["texts"])),
            answer["seconds"],
            answer["first_s"],
            answer["rounds"],
            answer["drafted"],
            answer["accepted"],
        )

    def rest(self) -> None:
        """Another one is timed."""
        self.process.rest()

    def wake(self) -> None:
        """Its turn comes."""
        self.process.wake()


def _environment(engine: str, python: Path, threads: int) -> dict[str, str]:
    """The user's own, without what leads an engine's Python astray; one number of threads."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ENGINES[engine].folder is None:
        env["PYTHONPATH"] = str(ROOT)
    if engine == "vllm":
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "LD_PRELOAD": ":".join(_preloads(python)),
        }
    return env


def _preloads(python: Path) -> list[str]:
    """What vLLM's instructions for CPUs load first, as far as it is there."""
    own = sorted(python.parents[1].rglob("libiomp5.so"))[:1]
    system = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1]
    return [str(path) for path in [*system, *own]]


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _peak(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return 1024 * sum(kilobytes)
