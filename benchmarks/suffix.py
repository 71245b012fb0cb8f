"""Time suffix drafting: taking one token in and proposing after it, at growing lengths of context.

    python benchmarks/suffix.py --json docs/suffix.json

`source` is Python source of the interpreter's own library split into words: it repeats itself as
code does. `random` is uniform over 1000 tokens, `periodic` repeats 7 tokens: the shortest and the
longest chains of suffixes. After every token a proposal of up to 24 tokens is made. Figures are the
10th percentile of windows of 50 tokens, which other processes disturb least; the median is beside.
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import sysconfig
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from outrider.drafters.automaton import SuffixAutomaton
from outrider.drafters.suffix import Match

LONGEST, WINDOW, WINDOWS = 24, 50, 200
LENGTHS = (1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table: microseconds per token of the text."""

    text: str
    context: int
    extend_us: float
    propose_us: float
    both_us: float
    both_median_us: float
    drafted: float


def source(count: int) -> list[int]:
    """Words of the library's files, numbered as they come."""
    known: dict[str, int] = {}
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8", errors="ignore"))
        tokens += [known.setdefault(word, len(known)) for word in words]
        if len(tokens) >= count:
            return tokens[:count]
    return tokens


def texts(count: int) -> dict[str, list[int]]:
    """Texts of `count` tokens by name."""
    chance = random.Random(0)
    return {
        "source": source(count),
        "random": [chance.randrange(1000) for _ in range(count)],
        "periodic": list(islice(cycle(range(7)), count)),
    }


def timed(name: str, tokens: list[int], context: int) -> Case:
    """One case: windows at the end of the context, so that it has the length named."""
    automaton = SuffixAutomaton(LONGEST)
    automaton.extend(tokens[: max(0, context - WINDOW * WINDOWS)])
    extend: list[float] = []
    propose: list[float] = []
    drafted = 0
    for window in range(max(0, context - WINDOW * WINDOWS), context, WINDOW):
        in_s = out_s = 0.0
        for token in tokens[window : window + WINDOW]:
            start = time.perf_counter()
            automaton.extend((token,))
            middle = time.perf_counter()
            match = Match(automaton, *automaton.last())
            chain = match.chain(min(LONGEST, match.length), 0.1)
            out_s += time.perf_counter() - middle
            in_s += middle - start
            drafted += len(chain)
        extend.append(in_s / WINDOW * 1e6)
        propose.append(out_s / WINDOW * 1e6)
    both = [a + b for a, b in zip(extend, propose, strict=True)]
    each = drafted / (WINDOW * len(both))
    return Case(name, context, *map(least, (extend, propose, both)), statistics.median(both), each)


def least(values: list[float]) -> float:
    """The 10th percentile."""
    return statistics.quantiles(values, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    cases = [
        timed(name, tokens, context)
        for name, tokens in texts(max(LENGTHS)).items()
        for context in LENGTHS
    ]
    print("text      context  extend us  propose us  together  median  tokens drafted")
    for case in cases:
        print(
            f"{case.text:9} {case.context:7} {case.extend_us:10.1f} {case.propose_us:11.1f} "
            f"{case.both_us:9.1f} {case.both_median_us:7.1f} {case.drafted:15.1f}"
        )
    if given.json:
        machine = {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
        }
        report = {"machine": machine, "cases": [asdict(case) for case in cases]}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
