"""The page: verdict, checks, what shows a fault, charts of the evidence, and how it was run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, cast

from outrider.certify.model.report import Check, Report, Verdict
from outrider.certify.page.charts import Figure, intervals, wealth
from outrider.certify.page.markup import number, pairs, tag, text
from outrider.certify.page.style import STYLE

MEANINGS: Mapping[Verdict, str] = {
    "lossless": "Nothing speaks against it, and every number that was looked at is within the "
    "bound of where it should be.",
    "rule bias": "The law of the text is another one.",
    "control ignored": "It is the law of the request with a control left out, or told late; or "
    "log-probabilities are not the target's.",
    "seed ignored": "A seed does not give its text again, or two seeds give the same texts.",
    "numeric drift": "The law is another one, by as little as rounding makes it.",
    "undecided": "Nothing speaks against it, and what was looked at does not suffice to say "
    "lossless.",
    "void": "The planted bias was not found: the run proves nothing.",
}
CLASSES = {
    "lossless": "good",
    **dict.fromkeys(("undecided", "void", "refused", "not looked at"), "open"),
}
"""Of verdicts; every other one is bad."""
DRAWN = "path", "looks"
"""Evidence that is drawn, not listed."""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("outrider", "torch", "transformers")}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a report comes from.

    Attributes:
        command: the command line, or whatever was called.
        versions: of the packages that had a part in it.
        decode: token ids to text, for the prompts of what is shown; None leaves them as ids.
    """

    command: str
    versions: Mapping[str, str] = field(default_factory=_versions)
    decode: Callable[[Sequence[int]], str] | None = None


def page(report: Report, origin: Origin) -> str:
    """The whole page, as XML that is HTML too."""
    name = f"{report.verdict}: {report.subject}"
    head = (
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        + tag("title", text(name))
        + tag("style", STYLE)
    )
    parts = (_verdict(report), _checks(report), _faults(report, origin), *_charts(report))
    body = tag("main", "".join((*parts, _evidence(report), _run(report, origin))))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>{tag("body", body)}</html>\n'


def _verdict(report: Report) -> str:
    of_it = CLASSES.get(report.verdict, "bad")
    return (
        tag("h1", "Is it lossless? An outrider certification")
        + tag("p", text(report.verdict), class_=f"verdict {of_it}")
        + tag("p", text(MEANINGS[report.verdict]))
        + tag("p", text(report.subject), class_="quiet")
    )


def _checks(report: Report) -> str:
    head = tag("tr", "".join(tag("th", name) for name in ("check", "verdict", "what was seen")))
    rows: list[str] = []
    for check in (*report.checks, report.control):
        found = check is report.control and check.verdict == "rule bias"
        said = "found" if found else check.verdict
        of_it = "good" if found else CLASSES.get(check.verdict, "bad")
        cells = tag("td", text(check.name)) + tag("td", text(said), class_=of_it)
        rows.append(tag("tr", cells + tag("td", text(check.said))))
    return tag("h2", "Checks") + tag("table", tag("thead", head) + tag("tbody", "".join(rows)))


def _faults(report: Report, origin: Origin) -> str:
    shown = [(check, case) for check in report.checks if (case := check.case)]
    if not shown:
        return ""
    parts = [tag("h2", "To see it")]
    for check, case in shown:
        parts.append(tag("h3", text(check.name)) + tag("p", text(check.said)))
        if origin.decode is not None and (prompt := _prompt(case)):
            parts.append(tag("p", "The prompt as text, and the case:", class_="quiet"))
            parts.append(tag("pre", text(origin.decode(prompt))))
        parts.append(tag("pre", text(json.dumps(case, ensure_ascii=False))))
    return "".join(parts)


def _prompt(case: Mapping[str, Any]) -> Sequence[int]:
    """The token ids of the prompt that shows a fault."""
    every = case.get("prompts") or [case.get("prompt", ())]
    return cast("Sequence[int]", every[case.get("index", 0)])


def _charts(report: Report) -> list[str]:
    parts: list[str] = []
    threshold = 1 / report.alpha
    for check in report.checks:
        if path := check.evidence.get("path"):
            parts.append(wealth(_against(check, path, threshold), path, threshold))
        if looks := check.evidence.get("looks"):
            parts.append(intervals(_apart(report, looks), looks, report.within))
    if path := report.control.evidence.get("path"):
        figure = Figure(
            "Negative control: a bias that must be found",
            "Evidence against laws with a planted bias (e-value, logarithmic) over tokens",
            f"{report.control.said[:1].upper()}{report.control.said[1:]}.",
        )
        parts.append(wealth(figure, path, threshold))
    return [tag("h2", "Evidence")] * bool(parts) + parts


def _against(check: Check, path: Sequence[Sequence[float]], threshold: float) -> Figure:
    over = next((tokens for tokens, e in path if e >= threshold), None)
    if over is None:
        most = max(e for _, e in path)
        reading = (
            f"In {number(path[-1][0])} tokens it never rose above {number(most)}: nothing here "
            "speaks against the law."
        )
    else:
        reading = (
            f"The law is refuted: the threshold was crossed at token {number(over)} of "
            f"{number(path[-1][0])} that were read."
        )
    return Figure(
        f"Evidence against the law: {check.name}",
        "Largest e-value so far (logarithmic) over tokens that were looked at",
        reading,
    )


def _apart(report: Report, looks: Mapping[str, Mapping[str, float]]) -> Figure:
    beyond = [
        name
        for name, one in looks.items()
        if max(abs(one["low"]), abs(one["high"])) > report.within
    ]
    reading = f"All {len(looks)} lie within {report.within:g} of where they should be."
    if beyond:
        reading = (
            f"{len(beyond)} of {len(looks)} reach beyond {report.within:g} from where they should "
            f"be, {max(beyond, key=lambda name: abs(looks[name]['mean']))!r} with the largest mean."
        )
    return Figure(
        "How far what was looked at is from where it should be",
        f"Probability per token: mean and interval, all at once at {100 * (1 - report.alpha):g} %, "
        f"at any time; the band is ±{report.within:g}",
        reading,
    )


def _evidence(report: Report) -> str:
    parts = [tag("h2", "Numbers")]
    for check in (*report.checks, report.control):
        if listed := {k: v for k, v in check.evidence.items() if k not in DRAWN}:
            parts.append(tag("h3", text(check.name)) + pairs(listed))
    return "".join(parts) if len(parts) > 1 else ""


def _run(report: Report, origin: Origin) -> str:
    asked = {
        **report.controls,
        "within": report.within,
        "alpha": report.alpha,
        "seconds": round(report.seconds, 1),
    }
    command = tag("p", "Command", class_="quiet") + tag("pre", text(origin.command))
    return tag("h2", "How it was run") + command + pairs(asked) + pairs(origin.versions)
