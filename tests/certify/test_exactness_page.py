"""The biases of docs/exactness.md are what the broken variants have."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from outrider.certify.certificate import catch, wrong_schemes
from tests.house.layout import ROOT

PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| (\d|all) \|", line)
]


def cited(where: str) -> list[str]:
    """What must stand in the name of a variant of that place."""
    return re.findall(r"#\d+", where) or [where.split()[0].removesuffix("'s")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_bias_is_a_variants_own(row: list[str]) -> None:
    _, _, where, bias = row
    variants = [one for one in wrong_schemes() if all(c in one.name for c in cited(where))]
    assert variants
    fraction, _, decimal = bias.rpartition(" = ")
    measures = [catch(one).measure for one in variants if not one.name.startswith("block: ar")]
    if fraction:
        assert fraction in measures
        assert f"{float(Fraction(fraction)):.3g}" == decimal
    else:
        assert decimal in [f"{float(Fraction(one)):.3g}" for one in measures]


def test_most_move_more_than_one_text_in_fifty() -> None:
    small = [row for row in ROWS if float(row[3].rpartition("= ")[2]) <= 0.02]
    assert (len(small), len(ROWS)) == (2, 15)
    assert "All but two move more than one text in fifty" in PAGE
