"""A certification's report as lines of text."""

from __future__ import annotations

import json

from outrider.certify.model.report import Report


def as_text(report: Report) -> str:
    """Verdict, checks, and the cases that show what is wrong."""
    lines = [f"verdict: {report.verdict} ({report.subject})"]
    for check in (*report.checks, report.control):
        caught = check is report.control and check.verdict == "rule bias"
        lines.append(f"  {check.name}: {'found' if caught else check.verdict}: {check.said}")
    lines += [
        f"{check.name}, to see it: {json.dumps(case)}"
        for check in report.checks
        if (case := check.case)
    ]
    asked = ", ".join(f"{name} {value}" for name, value in report.controls.items())
    lines.append(f"asked: {asked}; within {report.within:g}, alpha {report.alpha:g}")
    return "\n".join(lines)
