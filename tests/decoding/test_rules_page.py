"""docs/rules.md and docs/origins.md say what the code says."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest

from outrider.decoding import LOSSY, RULES, Kind, Rule
from outrider.decoding.children import Raced, TailThenTop, Top, Unranked, Without, WithReplacement
from tests.house.layout import ROOT

RULES_PAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
ORIGINS_PAGE = (ROOT / "docs" / "origins.md").read_text(encoding="utf-8")
DRAWINGS = {
    Top: "top K",
    WithReplacement: "with replacement",
    Without: "without replacement",
    TailThenTop: "tail, then top K-1",
    Raced: "top K of the race",
}


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first heading it is."""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            break
    next(lines)
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def as_said(name: str, rule: Rule) -> list[str]:
    kinds = {frozenset(Kind): "any", frozenset({Kind.IID}): "iid"}[rule.kinds]
    drawing = rule.drawing.drawing if isinstance(rule.drawing, Unranked) else rule.drawing
    return [
        f"`{name}`",
        rule.guarantee,
        "trees" if rule.trees else "chains",
        kinds,
        DRAWINGS[type(drawing)],
        "yes" if rule.needs_draft_law else "no",
        rule.reads,
    ]


def test_the_table_is_the_registry():
    rows = rows_of(RULES_PAGE, "rule | text")
    assert [row[:7] for row in rows] == [as_said(*item) for item in {**RULES, **LOSSY}.items()]


def test_sources_are_those_of_the_code():
    for row, rule in zip(
        rows_of(RULES_PAGE, "rule | text"), {**RULES, **LOSSY}.values(), strict=True
    ):
        assert set(re.findall(r"\d{4}\.\d{5}", row[7])) == set(
            re.findall(r"\d{4}\.\d{5}", rule.source)
        ), row[0]


def test_settings_of_lossy_rules_are_the_defaults():
    rows = rows_of(RULES_PAGE, "rule | settings")
    assert [row[0].strip("`") for row in rows] == list(LOSSY)
    for row, rule in zip(rows, LOSSY.values(), strict=True):
        surrogate = rule.surrogate
        assert dataclasses.is_dataclass(surrogate)
        said = dict(re.findall(r"`(\w+)`[^,\d]*([\d.]+)", row[1]))
        assert {name: float(value) for name, value in said.items()} == dataclasses.asdict(surrogate)


def names_of_ours() -> list[str]:
    found = re.findall(r"`((?:outrider)\.[\w.]+)`", ORIGINS_PAGE)
    assert len(found) > 30
    return sorted(set(found))


@pytest.mark.parametrize("name", names_of_ours())
def test_what_the_origins_map_to_exists(name: str):
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            there = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            fields = getattr(there, "__dataclass_fields__", {})
            there = fields[part] if part in fields else getattr(there, part)
        return
    raise AssertionError(name)
