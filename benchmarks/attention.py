"""Time one layer's attention for a few rows on a long cache, beside transformers' masked sdpa.

    python benchmarks/attention.py --json docs/attention.json

Both sides get the same queries, keys and values: 32 query heads, 8 key heads, width 64. Ours
includes writing the new keys and values to the block pool; transformers' gets them already in
place, and an explicit mask, which is what a cache with staged rows needs there. "own" is
attention.cpp, where the processor has AVX2 or AVX-512; it is compiled first. Runs are interleaved,
medians are printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from outrider.bench.script import command_of, exit_code, ints, others_at_work, parser_of, save
from outrider.cache import CacheManager
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, Options
from outrider.models.attention_strict import STRICT_BLOCK, StrictBody
from outrider.models.base import Rows
from outrider.models.plan import make_plan
from outrider.models.product import product

QUERY_HEADS, KEY_HEADS, WIDTH = 32, 8, 64
ROWS = (1, 8, 16)
CACHED = (512, 2048, 8192, 32768)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table: medians in milliseconds."""

    dtype: str
    cached: int
    rows: int
    own_ms: float | None
    ours_ms: float
    strict_ms: float
    sdpa_ms: float


def ours(
    cached: int, rows: int, dtype: torch.dtype, body: Body, align: int
) -> Callable[[], object]:
    """Return one layer's call of the op: `rows` new rows on `cached` committed tokens."""
    cache = CacheManager()
    seq = cache.open(cached + rows)
    query = torch.randn(1, rows, QUERY_HEADS, WIDTH).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(1, KEY_HEADS, rows, WIDTH).to(dtype) for _ in range(2))
    cache.reserve(seq, cached)
    pool = cache.pool(0, keys[0], values[0])
    pool.keys.normal_()
    pool.values.normal_()
    cache.stage(seq, cached)
    cache.commit(seq, cached)
    flat = Rows((seq,), (rows,), torch.zeros(rows, dtype=torch.int64))
    forward = Forward(cache, make_plan(cache, flat, CPU, align=align), body)
    options = Options(WIDTH**-0.5)
    return lambda: forward.attend(0, query, keys, values, options)


def theirs(cached: int, rows: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return transformers' sdpa call with an explicit mask on the same shapes."""
    query = torch.randn(1, rows, QUERY_HEADS, WIDTH).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(1, KEY_HEADS, cached + rows, WIDTH).to(dtype) for _ in range(2))
    mask = torch.ones(rows, cached + rows, dtype=torch.bool).tril(cached)[None, None]
    layer: Any = SimpleNamespace(num_key_value_groups=QUERY_HEADS // KEY_HEADS, is_causal=True)
    return lambda: sdpa_attention_forward(layer, query, keys, values, mask, scaling=WIDTH**-0.5)


def medians_ms(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Return each call's median, all of them interleaved back and forth for `seconds`."""
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    stop = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < stop:
        for index in order:
            start = time.perf_counter()
            calls[index]()
            times[index].append((time.perf_counter() - start) * 1e3)
        order.reverse()
    return [statistics.median(series[1:]) for series in times]


@torch.inference_mode()
def measure(dtype: torch.dtype, lengths: tuple[int, ...], seconds: float) -> list[Case]:
    """Return the table of one dtype, the row counts of one length interleaved."""
    cases: list[Case] = []
    compiled = product(build=True)
    own = None if compiled is None else compiled.attention()
    bodies = [(own, 1)] if own is not None else []
    bodies += [(attend_cpu, 1), (StrictBody(), STRICT_BLOCK)]
    for cached in lengths:
        calls: list[Callable[[], object]] = []
        for rows in ROWS:
            calls += [ours(cached, rows, dtype, body, align) for body, align in bodies]
            calls.append(theirs(cached, rows, dtype))
        found = iter(medians_ms(calls, seconds))
        name = str(dtype).removeprefix("torch.")
        for rows in ROWS:
            first = next(found) if own is not None else None
            cases.append(Case(name, cached, rows, first, next(found), next(found), next(found)))
            print(row(cases[-1]), flush=True)
    return cases


def row(case: Case) -> str:
    """Return the case as a line of the table."""
    times = (case.own_ms, case.ours_ms, case.strict_ms, case.sdpa_ms)
    return (
        f"| {case.dtype} | {case.cached} | {case.rows} | "
        + " | ".join("" if t is None else f"{t:.2f}" for t in times)
        + " |"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="time per cached length")
    parser.add_argument("--cached", type=ints, default=CACHED, help="committed tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    if options.smoke:
        options.seconds, options.cached = 0.0, (64,)
    return exit_code(lambda: _run(options, command_of("attention", arguments)))


def _run(options: argparse.Namespace, command: str) -> None:
    others = others_at_work(options)
    torch.manual_seed(0)
    print("| dtype | cached | rows | own ms | cpu ms | strict ms | masked sdpa ms |")
    print("|---" * 7 + "|")
    cases = [
        case
        for name in options.dtypes
        for case in measure(getattr(torch, name), options.cached, options.seconds)
    ]
    for one, eight in zip(cases[:: len(ROWS)], cases[1 :: len(ROWS)], strict=True):
        own = ""
        if one.own_ms is not None and eight.own_ms is not None:
            own = f"own {eight.own_ms / one.own_ms:.1f}, "
        print(
            f"{one.cached} cached, {one.dtype}: 8 rows cost {own}"
            f"cpu {eight.ours_ms / one.ours_ms:.1f} times one row"
        )
    save(options.json, command, {"others": others, "cases": [asdict(case) for case in cases]})


if __name__ == "__main__":
    raise SystemExit(main())
