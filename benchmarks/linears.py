"""Time one linear layer for a few rows, in gigabytes of weights a second, beside a bare read.

    python benchmarks/linears.py --json docs/linears.json
    python benchmarks/linears.py --dtype bfloat16 --rows 1,5,8,16,32,128

Each shape has as many different weights as take 256 MB together, so that none is in a processor's
cache when its turn comes again. Ways are interleaved; medians over rounds. `arranged` is what a
layer becomes when a model is loaded, `product` what it becomes when the model is compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from outrider.bench.machine import read_bandwidth
from outrider.bench.script import command_of, exit_code, ints, others_at_work, parser_of, save
from outrider.models.packing import PackedLinear, arrange_linears, can_pack, use_product
from outrider.models.product import product

SHAPES = ((1024, 1024), (3072, 1024), (1024, 3072), (2048, 2048), (8192, 2048), (12288, 384))
"""Outputs and inputs: layers of 0.6 and of 1.2 billion weights, and a wide and narrow one."""
ROWS = (1, 2, 4, 5, 8, 12, 16, 32)
TOTAL = 1 << 28
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Cell:
    """Gigabytes of weights a second of each way, for so many rows of one shape."""

    outputs: int
    inputs: int
    rows: int
    rates: dict[str, float]


def ways(
    layers: list[nn.Linear], dtype: torch.dtype
) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """The same layers computed in several ways."""
    found: dict[str, list[Callable[[Tensor], Tensor]]] = {"plain": list(layers)}
    if can_pack(torch.device("cpu"), dtype):
        found["packed"] = [PackedLinear(layer.weight, None) for layer in layers]
    for name in ("arranged", "product"):
        own = product(build=True) if name == "product" else None
        if name == "product" and own is None:
            continue
        models = [nn.Sequential(layer) for layer in layers]
        for model in models:
            arrange_linears(model)
            use_product(model, own)
        found[name] = [model[0] for model in models]
    return found


@torch.inference_mode()
def measured(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell, shape by shape."""
    for outputs, inputs in ((512, 64),) if options.smoke else SHAPES:
        dtype = DTYPES[options.dtype]
        num = 2 if options.smoke else max(2, TOTAL // (dtype.itemsize * outputs * inputs))
        layers = [nn.Linear(inputs, outputs, bias=False, dtype=dtype) for _ in range(num)]
        everybody = ways(layers, dtype)
        for rows in options.rows:
            given = torch.randn(rows, inputs, dtype=dtype)
            times: dict[str, list[float]] = {name: [] for name in everybody}
            order = list(everybody)
            for _ in range(options.rounds):
                for name in order:
                    start = time.perf_counter()
                    for layer in everybody[name]:
                        layer(given)
                    times[name].append(time.perf_counter() - start)
                order.reverse()
            size = num * outputs * inputs * dtype.itemsize / 1e9
            yield Cell(
                outputs, inputs, rows, {n: size / statistics.median(t) for n, t in times.items()}
            )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=ints, default=ROWS, help="rows of a product")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and rows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a cell")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _run(options, command_of("linears", arguments)))


def _run(options: argparse.Namespace, command: str) -> None:
    others = others_at_work(options)
    read = read_bandwidth(1 << 20 if options.smoke else TOTAL) / 1e9
    print(f"{read:.1f} GB/s read at best\n")
    cells: list[Cell] = []
    for cell in measured(options):
        if not cells:
            print(f"| outputs x inputs | rows | {' | '.join(cell.rates)} |")
            print("|---" * (2 + len(cell.rates)) + "|")
        cells.append(cell)
        rates = " | ".join(f"{rate:.1f}" for rate in cell.rates.values())
        print(f"| {cell.outputs} x {cell.inputs} | {cell.rows} | {rates} |", flush=True)
    found = {
        "others": others,
        "dtype": options.dtype,
        "read": read,
        "cells": [asdict(cell) for cell in cells],
    }
    save(options.json, command, found)


if __name__ == "__main__":
    raise SystemExit(main())
