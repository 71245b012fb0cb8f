"""Charts of replays and plans: each with a title, units, and a line that says how to read it."""

# matplotlib is an extra, which need not be there.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.control.plan import Plan, Prediction
from outrider.control.replayed import Replayed
from outrider.errors import MissingExtra

COLOURS = ("#1f6f8b", "#e0a030", "#7a5195", "#5b8c5a", "#c8553d", "#63b0c9", "#8a8a8a", "#b07aa1")


def figures() -> Any:
    """What figures are made with; who draws after long work asks for it before.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("charts need matplotlib; pip install 'outrider[bench]'") from error
    return Figure


def sheet(panels: int, *, columns: int = 2) -> tuple[Any, list[Any]]:
    """A figure of so many panels.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    columns = min(columns, panels)
    lines = -(-panels // columns)
    figure = figures()(figsize=(7.0 * columns, 5.0 * lines), layout="constrained")
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
    against = "the oracle, which sees the future" if best.oracle else best.policy
    titled(
        axis,
        f"Regret against {against}",
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


def draw_plan(found: Plan, folder: Path) -> list[Path]:
    """Four charts: speed-up by depth and batch, acceptance, where time goes, foretold and run.

    Returns:
        The PNGs; the last one only where something was run.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "speedup.png": _speedup,
        "acceptance.png": _acceptance,
        "stages.png": _stages,
        **({"predicted.png": _predicted} if found.verified else {}),
    }
    for name, draw in drawn.items():
        draw(found).savefig(folder / name, dpi=110)
    return [folder / name for name in drawn]


def _batches(found: Plan) -> list[int]:
    return sorted({one.candidate.batch for one in found.predictions})


def _speedup(found: Plan) -> Any:
    batches = _batches(found)
    figure, axes = sheet(len(batches))
    for axis, batch in zip(axes, batches, strict=True):
        lines: dict[str, list[Prediction]] = {}
        for one in found.of(batch):
            kind = one.candidate
            if kind.depth and kind.shape is None:
                name = kind.drafter + (f", trees {kind.width} wide" if kind.nodes else "")
                name += f", {kind.rule}"
                lines.setdefault(name, []).append(one)
        for colour, (name, own) in zip(COLOURS * len(lines), sorted(lines.items()), strict=False):
            own.sort(key=lambda one: one.candidate.depth)
            depths = [one.candidate.depth for one in own]
            axis.plot(depths, [one.speedup.mean for one in own], "o-", color=colour, label=name)
            low, high = ([getattr(one.speedup, end) for one in own] for end in ("low", "high"))
            axis.fill_between(depths, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(1, 1 + max(one.candidate.depth for one in found.of(batch))))
        axis.legend(fontsize=8)
        best = found.best(batch)
        said = f"Run {best.candidate}." if best.candidate.depth else "Nothing surely pays."
        titled(
            axis,
            f"Predicted speed-up, {batch} text{'s' * (batch > 1)} at a time",
            f"Above 1 it pays; bands are intervals of 95 %. {said}",
            ("levels drafted", "times as fast as plain decoding"),
        )
    return figure


def _acceptance(found: Plan) -> Any:
    figure, (axis,) = sheet(1)
    for colour, (name, rates) in zip(COLOURS, found.acceptance.items(), strict=False):
        axis.plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=name)
    axis.set_ylim(0, 1)
    axis.set_xticks(range(1, 1 + max(map(len, found.acceptance.values()))))
    axis.legend(fontsize=8)
    titled(
        axis,
        "Acceptance by position",
        "How likely all guesses up to a position are kept; the area below is what a round gains.",
        ("position in the draft", "probability"),
    )
    return figure


def _stages(found: Plan) -> Any:
    batches = _batches(found)
    figure, axes = sheet(len(batches))
    for axis, batch in zip(axes, batches, strict=True):
        own = found.of(batch)
        plain = next(one for one in own if one.candidate.depth == 0)
        shown = [plain, *[one for one in own if one.candidate.depth][:5]][::-1]
        left = [0.0] * len(shown)
        for colour, part, name in zip(
            COLOURS,
            range(3),
            ("drafting", "target's forward", "rules, controls, rest"),
            strict=False,
        ):
            widths = [1e3 * one.stages[part] / (batch * one.tokens_per_round) for one in shown]
            axis.barh(range(len(shown)), widths, left=left, color=colour, label=name)
            left = [at + width for at, width in zip(left, widths, strict=True)]
        names = [str(one.candidate) for one in shown]
        axis.set_yticks(range(len(shown)), names, fontsize=8)
        axis.legend(fontsize=8)
        titled(
            axis,
            f"Where the time of a token goes, {batch} at a time",
            "A round's time shared out over the tokens it makes; shorter is faster.",
            ("milliseconds a token", ""),
        )
    return figure


def _predicted(found: Plan) -> Any:
    figure, (axis,) = sheet(1)
    told = [one.prediction.speedup for one in found.verified]
    ran = [one.speedup for one in found.verified]
    held = sum(one.holds for one in found.verified)
    for colour, one in zip(COLOURS * len(ran), found.verified, strict=False):
        x, y = one.prediction.speedup, one.speedup
        axis.errorbar(
            x.mean,
            y.mean,
            xerr=[[x.mean - x.low], [x.high - x.mean]],
            yerr=[[y.mean - y.low], [y.high - y.mean]],
            fmt="o",
            color=colour,
            capsize=2,
            label=f"{one.prediction.candidate}, batch {one.prediction.candidate.batch}",
        )
    ends = [
        0.9 * min(one.low for one in (*told, *ran)),
        1.1 * max(one.high for one in (*told, *ran)),
    ]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(ends, [0.9 * at for at in ends], [1.1 * at for at in ends], alpha=0.1)
    axis.legend(fontsize=8)
    titled(
        axis,
        "Predicted against measured speed-up",
        f"On the line both agree; the band is 10 %. {held} of {len(ran)} are in it, or in their "
        "interval.",
        ("predicted, times plain decoding", "measured, times plain decoding"),
    )
    return figure
