"""How long the bundled pair takes to its first token, and what it holds in memory.

    python benchmarks/start.py --json docs/start.json

Each of some processes imports Outrider, loads the pair without compiling, and makes one text; the
first of them warms the file cache and is not counted. `--smoke` starts one. See docs/profile.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass

from outrider.bench.script import command_of, exit_code, others_at_work, parser_of, save

ONE = """
import json, time

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return {l.split(":")[0]: 1024 * int(l.split()[1]) for l in lines if "kB" in l}

started = time.perf_counter()
from outrider import LLM, SamplingParams
imported, before, used = time.perf_counter(), resident(), time.process_time()
llm = LLM.load("bundled", "draft", compile=False)
loaded = time.perf_counter()
deltas = llm.stream("def fibonacci(n):", SamplingParams(temperature=0, max_tokens=64))
next(deltas)
first, used = time.perf_counter(), time.process_time() - used
for _ in deltas:
    pass
after = resident()
models = [llm._requests.engine.target, llm._requests.engine.drafter.model]
weights = sum(model.num_parameters * model.dtype.itemsize for model in models)
cache = llm.info()["cache"]
print(json.dumps({
    "imports_s": imported - started,
    "load_s": loaded - imported,
    "first_token_s": first - imported,
    "first_token_cpu_s": used,
    "weights_bytes": weights,
    "cache_held_bytes": cache["held_bytes"],
    "cache_planned_bytes": cache["planned_bytes"],
    "anonymous_bytes": after["RssAnon"] - before["RssAnon"],
    "resident_bytes": after["VmRSS"] - before["VmRSS"],
}))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Medians over processes: seconds after the imports, and bytes above those of the imports.

    Attributes:
        first_token_s: from the end of the imports to the first token: loading and one round.
        first_token_cpu_s: the processor time of that, which neighbours change less.
        resident_bytes: what came to be resident, libraries' code included that is read from files.
        anonymous_bytes: of these what is no file's.
        weights_bytes: parameters as they are computed with, tied ones once.
    """

    imports_s: float
    load_s: float
    first_token_s: float
    first_token_cpu_s: float
    weights_bytes: int
    cache_held_bytes: int
    cache_planned_bytes: int
    anonymous_bytes: int
    resident_bytes: int


def one() -> dict[str, float]:
    """What one process tells."""
    ran = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def table(found: Start) -> str:
    """Everything in one table."""
    held = found.weights_bytes + found.cache_held_bytes
    rows = {
        "imports": f"{found.imports_s:.2f} s",
        "loading": f"{found.load_s:.2f} s",
        "first token after the imports": f"{found.first_token_s:.2f} s, of the processor "
        f"{found.first_token_cpu_s:.2f} s",
        "weights": f"{found.weights_bytes / 1e6:.1f} MB",
        "cache held / planned": f"{found.cache_held_bytes / 1e6:.1f} / "
        f"{found.cache_planned_bytes / 1e6:.1f} MB",
        "resident above the imports": f"{found.resident_bytes / 1e6:.1f} MB, "
        f"{found.resident_bytes / held:.2f} of weights and held cache",
        "of it no file's": f"{found.anonymous_bytes / 1e6:.1f} MB, "
        f"{found.anonymous_bytes / held:.2f}",
    }
    return "\n".join(
        ["| what | median |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())]
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, default=5, help="processes that count (5)")
    options = parser.parse_args(arguments)
    return exit_code(lambda: measured(options, command_of("start", arguments)))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures, prints, and saves."""
    others = others_at_work(options)
    runs = [one() for _ in range(1 if options.smoke else options.processes + 1)]
    counted = runs if options.smoke else runs[1:]
    found = Start(**{name: statistics.median(run[name] for run in counted) for name in runs[0]})
    print(table(found))
    save(
        options.json, command, {"others_before": others, "medians": asdict(found), "runs": counted}
    )


if __name__ == "__main__":
    raise SystemExit(main())
