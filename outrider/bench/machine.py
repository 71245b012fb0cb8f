"""The machine a number comes from, and whether it was left alone while the number was taken."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

QUIET = 0.1
"""Share of the processors that others may use before a timing is refused."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a number was measured: versions, threads, dtype support and the load before."""

    processor: str
    system: str
    num_cpus: int
    num_threads: int
    capability: str
    python: str
    torch: str
    transformers: str
    load_average: tuple[float, float, float]

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            processor=_processor(),
            system=f"{platform.system()} {platform.machine()}",
            num_cpus=os.cpu_count() or 1,
            num_threads=torch.get_num_threads(),
            capability=torch.backends.cpu.get_cpu_capability(),
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=metadata.version("transformers"),
            load_average=os.getloadavg(),
        )


class Neighbours:
    """Measures the share of all processors that others take, from when it is made.

    None where the system does not tell (no /proc/stat). Time the hypervisor steals counts as
    others'; what `family` counts, in seconds, as one's own beside this process.
    """

    def __init__(self, family: Callable[[], float] = lambda: 0.0) -> None:
        self._family = family
        self._first = _ticks(family())

    def share(self) -> float | None:
        """The others' share so far."""
        before, now = self._first, _ticks(self._family())
        if before is None or now is None or now.total == before.total:
            return None
        others = (now.busy - before.busy) - (now.own - before.own)
        return min(1.0, max(0.0, others / (now.total - before.total)))


def busy_now(seconds: float = 2.0) -> float:
    """The others' share over the next seconds; where unknown, the load average per processor."""
    neighbours = Neighbours()
    time.sleep(seconds)
    share = neighbours.share()
    return os.getloadavg()[0] / (os.cpu_count() or 1) if share is None else share


def read_bandwidth(num_bytes: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes per second of the fastest of some streaming reads, with as many threads as torch has.

    A sum reads and does next to nothing else, a product with a vector is what linear layers do;
    `num_bytes` are to be more than the processor's caches hold.
    """
    matrix = torch.ones(num_bytes // 4096, 1024)
    vector = torch.ones(1024)
    found: list[float] = []
    for read in (matrix.sum, lambda: matrix @ vector):
        for _ in range(repeats):
            start = time.perf_counter()
            read()
            found.append(matrix.nbytes / (time.perf_counter() - start))
    return max(found)


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Clock ticks summed over all processors: elapsed, not idle, and one's own."""

    total: int
    busy: int
    own: float


def _ticks(family_s: float) -> _Ticks | None:
    try:
        line = Path("/proc/stat").read_text("ascii").splitlines()[0]
    except OSError:
        return None
    # user nice system idle iowait irq softirq steal; guest times are part of user and nice already.
    counts = [int(field) for field in line.split()[1:9]]
    own = os.times()
    per_second = os.sysconf("SC_CLK_TCK")
    total = sum(counts)
    own_s = own.user + own.system + family_s
    return _Ticks(total, total - counts[3] - counts[4], own_s * per_second)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
