"""Neighbours: another process's work shows, this one's own does not."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.bench.machine import Machine, Neighbours

has_stat = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc/stat")


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@has_stat
def test_own_work_is_not_a_neighbour():
    machine = Machine.here()
    quiet = Neighbours()
    spin(0.5)
    alone = quiet.share()
    code = "import time\nend = time.time() + 0.5\nwhile time.time() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    loud = Neighbours()
    time.sleep(0.5)
    crowded = loud.share()
    for process in processes:
        process.wait()
    assert alone is not None
    assert crowded is not None
    assert 0 <= alone <= 1
    # In processors: two busy neighbours take at least half of one, however many there are.
    assert crowded * machine.num_cpus > 0.5


def test_machine_names_what_runs():
    machine = Machine.here()
    assert machine.num_cpus >= 1
    assert machine.torch.count(".") >= 2
    assert len(machine.load_average) == 3
