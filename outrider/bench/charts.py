"""Charts of replays and plans: each with a title, units, and a line that says how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.control.replay import Replayed
from outrider.errors import MissingExtra

COLOURS = ("#1f6f8b", "#e0a030", "#7a5195", "#5b8c5a", "#c8553d", "#63b0c9", "#8a8a8a", "#b07aa1")


def sheet(panels: int, *, columns: int = 2) -> tuple[Any, list[Any]]:
    """A figure of so many panels.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("charts need matplotlib; pip install 'outrider[bench]'") from error
    columns = min(columns, panels)
    lines = -(-panels // columns)
    figure: Any = Figure(figsize=(7.0 * columns, 5.0 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for axis in axes[panels:]:
        axis.set_axis_off()
    return figure, axes[:panels]


def titled(axis: Any, title: str, reading: str, units: tuple[str, str]) -> None:
    """The title of a panel, below it how to read it, and the units of both axes."""
    axis.set_title(f"{title}\n", fontsize=11, loc="left", fontweight="bold")
    axis.text(0.0, 1.015, reading, transform=axis.transAxes, fontsize=8.5, color="#444444")
    axis.set_xlabel(units[0])
    axis.set_ylabel(units[1])
    axis.grid(alpha=0.25)


def draw_regret(found: Sequence[Replayed], best: Replayed, path: Path) -> None:
    """Seconds that each policy takes longer than the best known, token by token.

    Args:
        found: replays of the same texts, one text at a time.
        best: what they are compared with, an oracle where there is one.
        path: the PNG.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure, (axis,) = sheet(1)
    due = curve(best)
    for colour, one in zip(COLOURS * len(found), found, strict=False):
        own = curve(one)
        behind = [1e3 * (mine - least) for mine, least in zip(own, due, strict=True)]
        axis.plot(range(len(own)), behind, color=colour, label=one.policy, linewidth=1.5)
    axis.legend(fontsize=8)
    name = f"the oracle ({best.policy})" if best.oracle else best.policy
    titled(
        axis,
        f"Regret against {name}",
        "Lower is better: the height at the right is the time lost over all texts.",
        ("tokens made", "milliseconds behind"),
    )
    figure.savefig(path, dpi=110)


def curve(one: Replayed) -> list[float]:
    """Seconds at each token of all texts, one after another; a round's tokens come at its end."""
    times, now = [0.0], 0.0
    for text in one.steps:
        for step in text:
            now += step.seconds
            times += [now] * (step.kept + 1)
    return times
