"""Who wants the processor's cores: threads that spin while they wait lose most of them to others.

Knows no torch: what is set has to be set before that is loaded.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
LOOKS, BETWEEN_S = 3, 0.002
"""How often the machine is looked at, and how far apart: what runs for a moment is in one look."""


def others_at_work() -> bool | None:
    """Whether other threads want cores that torch's would wait on; None where one cannot tell."""
    try:
        running, others = map(min, zip(*(_num_running() for _ in range(LOOKS)), strict=True))
    except (OSError, ValueError, IndexError):
        return None
    # This thread is one of those that run: where none is, the number means nothing.
    if running < 1:
        return None
    return others + len(os.sched_getaffinity(0)) > (os.cpu_count() or 1)


def spinning(num_threads: int) -> str | None:
    """What to do where so many threads will spin beside others at work; None where all is well."""
    if num_threads < 2 or POLICY in os.environ or SPINS in os.environ or not others_at_work():
        return None
    return (
        f"other processes want this machine's cores, and torch's {num_threads} threads spin while "
        f"they wait for each other: steps can take many times as long; start Python with "
        f"{POLICY}=passive, or set it in os.environ before torch is imported"
    )


def _num_running() -> tuple[int, int]:
    """Threads that run or could run just now on the whole machine, and those of other processes.

    Libraries' own threads spin for a while after they are started: these are no neighbours.
    """
    time.sleep(BETWEEN_S)
    before = _num_own()
    running = int(Path("/proc/loadavg").read_text("ascii").split()[3].split("/")[0])
    return running, running - min(before, _num_own())


def _num_own() -> int:
    """Threads of this process among them."""
    return sum(map(_runs, Path("/proc/self/task").iterdir()))


def _runs(task: Path) -> bool:
    """Whether a thread runs or could; one that is gone does not."""
    try:
        # Its name, in parentheses, may hold anything.
        return (task / "stat").read_text("utf-8", "replace").rpartition(") ")[2][:1] == "R"
    except (FileNotFoundError, ProcessLookupError):
        return False
