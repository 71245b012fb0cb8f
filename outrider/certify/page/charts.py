"""Charts as HTML with SVG inside. Curves stretch with the page, and letters keep their size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.certify.page.markup import number, tag, text

SIZE = 1000
"""Units of a curve's own square, which is stretched to the space there is."""
TICKS = 5
"""Marks of an axis at most, about."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What every chart says in words.

    Attributes:
        title: what is shown.
        units: of both axes.
        reading: what it comes to, in one line.
    """

    title: str
    units: str
    reading: str

    def around(self, drawing: str) -> str:
        """The figure with its drawing."""
        parts = (
            tag("figcaption", tag("h3", text(self.title)) + tag("p", text(self.units))),
            drawing,
            tag("p", text(self.reading), class_="reading"),
        )
        return tag("figure", "".join(parts))


def wealth(figure: Figure, path: Sequence[Sequence[float]], threshold: float) -> str:
    """A path of (tokens, e-value), its logarithm upwards, and the line it would have to cross."""
    values = [math.log10(max(e, 1e-3)) for _, e in path]
    top = max(math.log10(threshold), *values) + 0.5
    low = min(0.0, *values) - 0.3
    last = max(1.0, path[-1][0])

    def x(tokens: float) -> float:
        return SIZE * tokens / last

    def y(power: float) -> float:
        return SIZE * (top - power) / (top - low)

    # It stays where it was until the next point.
    steps = [(x(path[0][0]), y(values[0]))]
    for (_, before), ((tokens, _), power) in pairwise(zip(path, values, strict=True)):
        steps += [(x(tokens), y(before)), (x(tokens), y(power))]
    curve = " ".join(f"{a:.1f},{b:.1f}" for a, b in steps)
    step = max(1, math.ceil((top - low) / TICKS))
    powers = range(math.ceil(low / step) * step, math.floor(top) + 1, step)
    across = _nice(last)
    lines = [_line(0, y(power), SIZE, y(power), "grid") for power in powers]
    lines += [_line(x(tokens), 0, x(tokens), SIZE, "grid") for tokens in across]
    lines.append(_line(0, y(math.log10(threshold)), SIZE, y(math.log10(threshold)), "bound"))
    lines.append(tag("polyline", points=curve, class_="curve"))
    drawn = tag(
        "svg",
        "".join(lines),
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=figure.title,
    )
    named = tag(
        "span",
        text(f"threshold {number(threshold)}"),
        class_="named",
        style=f"top:{y(math.log10(threshold)) / 10:.2f}%",
    )
    up = [tag("span", _power(power), style=f"top:{y(power) / 10:.2f}%") for power in powers]
    along = [
        tag("span", text(number(tokens)), style=f"left:{x(tokens) / 10:.2f}%") for tokens in across
    ]
    parts = (
        tag("div", "".join(up), class_="up"),
        tag("div", drawn + named, class_="plot"),
        tag("div", "".join(along), class_="along"),
    )
    return figure.around(tag("div", "".join(parts), class_="wealth"))


def intervals(figure: Figure, looks: Mapping[str, Mapping[str, float]], within: float) -> str:
    """An interval for each thing that was looked at, beside the band they are to lie in."""
    most = max(within, *(abs(one[end]) for one in looks.values() for end in ("low", "high")))
    reach = 1.15 * most

    def x(value: float) -> str:
        return f"{50 + 50 * value / reach:.2f}%"

    band = tag(
        "rect",
        x=x(-within),
        y=0,
        width=f"{100 * within / reach:.2f}%",
        height="100%",
        class_="band",
    )
    middle = tag("line", x1="50%", x2="50%", y1=0, y2="100%", class_="grid")
    rows: list[str] = []
    for name, one in looks.items():
        outside = max(abs(one["low"]), abs(one["high"])) > within
        kind = "bar beyond" if outside else "bar"
        bar = tag("line", x1=x(one["low"]), x2=x(one["high"]), y1="50%", y2="50%", class_=kind)
        dot = tag("circle", cx=x(one["mean"]), cy="50%", r=4, class_=kind)
        said = f"{one['mean']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        rows.append(
            tag("span", text(name), class_="look")
            + tag("svg", band + middle + bar + dot, role="img", aria_label=f"{name}: {said}")
            + tag("span", text(said), class_="said")
        )
    # Marks at the edges of the band, unless they would run into each other.
    edge = within if within > 0.3 * reach else most
    ticks = (
        tag("span", text(f"{value:+.3g}" if value else "0"), style=f"left:{x(value)}")
        for value in (-edge, 0.0, edge)
    )
    rows.append(tag("span", class_="look") + tag("div", "".join(ticks), class_="along"))
    return figure.around(tag("div", "".join(rows), class_="looks"))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=kind)


def _power(power: int) -> str:
    return "1" if power == 0 else f"10{tag('sup', text(str(power).replace('-', '−')))}"


def _nice(last: float) -> list[float]:
    """Round numbers from 0 to the last."""
    step = 10 ** math.floor(math.log10(last / TICKS)) if last > TICKS else 1
    step *= next(factor for factor in (1, 2, 5, 10) if last / (step * factor) <= TICKS)
    return [float(step * i) for i in range(math.floor(last / step) + 1)]
