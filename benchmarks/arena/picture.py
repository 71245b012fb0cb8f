"""A picture of an arena: rates of every arm, speed-ups over imposed acceptance and draft cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.arena.engines import SHARED
from benchmarks.arena.tables import Found, Row
from outrider.bench.paired import Interval
from outrider.errors import MissingExtra

COLOURS = {
    "outrider": "#1f6f8b",
    "outrider-gguf": "#63b0c9",
    "transformers": "#e0a030",
    "llama.cpp": "#7a5195",
    "openvino": "#5b8c5a",
    "vllm": "#c8553d",
}
DASHES = ("-", "--", ":", "-.")


def draw(found: Found, path: Path) -> None:
    """A panel of bars for each cell; for cells of imposed acceptance one of lines instead.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures need matplotlib; pip install 'outrider[bench]'") from error
    bars = [cell for cell in found.cells if found.alpha_of(cell) is None]
    imposed = [cell for cell in found.cells if found.alpha_of(cell) is not None]
    panels = len(bars) + bool(imposed)
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure: Any = Figure(figsize=(7.5 * columns, 5.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, cell in zip(axes, bars, strict=False):
        _bars(axis, cell, found.rows(cell))
    if imposed:
        _lines(axes[len(bars)], found, imposed)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.savefig(path, dpi=110)


def _bars(axis: Any, cell: str, rows: list[Row]) -> None:
    """Tokens per second with intervals; hatched where a law is wrong or weights have 8 bits."""
    rows = rows[::-1]
    for place, row in enumerate(rows):
        error = [[row.rate.mean - row.rate.low], [row.rate.high - row.rate.mean]]
        odd = row.wrong is not None or row.arm.precision != SHARED
        axis.barh(
            place,
            row.rate.mean,
            xerr=error,
            color=COLOURS[row.arm.engine],
            hatch="//" if odd else None,
            alpha=0.6 if odd else 1.0,
            capsize=2,
        )
    axis.set_yticks(range(len(rows)), [str(row.arm) for row in rows], fontsize=8)
    axis.set_xlabel("new tokens per second")
    axis.set_title(cell, fontsize=9)


def _lines(axis: Any, found: Found, cells: list[str]) -> None:
    """Speed-up over plain decoding of the same engine, over alpha; a line per engine and c.

    Engines differ by colour, what they ran by its dashes.
    """
    points: dict[tuple[str, str], list[tuple[float, Interval]]] = {}
    costs: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        shape = f"{cell.partition(' alpha=')[0]} {cell.partition(' T=')[2].partition(' ')[2]}"
        for row in found.rows(cell):
            if row.over_plain is not None:
                key = row.arm.engine, shape
                points.setdefault(key, []).append((found.alpha_of(cell) or 0.0, row.over_plain))
                costs.setdefault(key, []).extend(filter(None, [found.cost_of(cell)]))
    shapes = list(dict.fromkeys(shape for _, shape in points))
    # What is the same of all lines stands above them.
    shared = [word for word in shapes[0].split() if all(word in one.split() for one in shapes)]
    for (engine, shape), known in points.items():
        known.sort(key=lambda pair: pair[0])
        measured = costs[engine, shape]
        label = " ".join([engine, *(word for word in shape.split() if word not in shared)])
        if measured:
            label += f" ({sum(measured) / len(measured):.2f} measured)"
        means = [ratio.mean for _, ratio in known]
        below = [ratio.mean - ratio.low for _, ratio in known]
        above = [ratio.high - ratio.mean for _, ratio in known]
        at = [alpha for alpha, _ in known]
        axis.errorbar(
            at,
            means,
            yerr=[below, above],
            marker="o",
            linestyle=DASHES[shapes.index(shape) % len(DASHES)],
            capsize=3,
            color=COLOURS[engine],
            label=label,
        )
    axis.axhline(1.0, color="grey", linewidth=0.8)
    title = "Speed-up by acceptance: above the grey line drafts pay"
    axis.set_title(f"{title}\n{' '.join(shared)}", fontsize=9)
    axis.set_xlabel("imposed acceptance alpha, chance that a drafted token is kept")
    axis.set_ylabel("times as fast as the same engine's plain decoding")
    axis.legend(fontsize=7, ncols=len(shapes), loc="upper center", bbox_to_anchor=(0.5, -0.12))
