"""The page of a report: well-formed, alone in its file, numbers finite, foreign text escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import pytest

from outrider.certify.model.plan import Plan
from outrider.certify.model.report import Check, Report
from outrider.certify.model.run import certify
from outrider.certify.page.markup import number, text
from outrider.certify.page.page import MEANINGS, Origin, page
from tests.certify.faulty import PARAMS, subject
from tests.certify.test_model import COARSE, PROMPTS

HOSTILE = '</pre><script src="http://x/y.js">alert(1)</script>&\x00\u202e'
ORIGIN = Origin("outrider certify model --html page.html", {"outrider": "1"}, lambda _: HOSTILE)


@cache
def reports() -> list[Report]:
    faulty = certify(subject("min_p ignored"), PROMPTS, PARAMS, COARSE)
    few = certify(subject(), PROMPTS[:4], PARAMS, Plan(budget=100))
    control = Check("negative control", "void", HOSTILE)
    greedy = Check("greedy", "rule bias", HOSTILE, {"gap": float("inf")}, {"prompt": [1]})
    bare = Report(HOSTILE, {HOSTILE: HOSTILE}, 0.1, 0.1, (greedy,), control, 0.0)
    return [faulty, few, bare]


def parsed(report: Report, origin: Origin = ORIGIN) -> ET.Element:
    return ET.fromstring(page(report, origin))


def said(root: ET.Element) -> str:
    return "".join(root.itertext())


@pytest.mark.parametrize("i", range(3))
def test_it_is_whole_and_asks_for_nothing(i: int) -> None:
    root = parsed(reports()[i])
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(one.tag for one in root.iter())
    named = {key for one in root.iter() for key in one.attrib}
    assert not named & {"src", "href", "onload", "onclick"}
    assert "url(" not in "".join(one.text or "" for one in root.iter("style"))
    assert "@import" not in said(root)


@pytest.mark.parametrize("i", range(3))
def test_every_coordinate_is_a_number(i: int) -> None:
    drawn = [one for svg in parsed(reports()[i]).iter("svg") for one in svg.iter()]
    for one in drawn:
        for key in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points"):
            for value in re.split(r"[ ,]", one.get(key, "0")):
                assert re.fullmatch(r"-?[\d.]+%?", value), (one.tag, key, value)


def test_foreign_text_is_shown_and_not_obeyed() -> None:
    for report in (reports()[0], reports()[2]):
        shown = said(parsed(report))
        assert '<script src="http://x/y.js">' in shown
        assert "\\x00\\u202e" in shown


def test_charts_say_what_the_numbers_say() -> None:
    faulty, few, bare = (parsed(report) for report in reports())
    evidence = reports()[0].checks[-1].evidence
    assert len(list(faulty.iter("figure"))) == 3
    for figure in (*faulty.iter("figure"), *few.iter("figure")):
        # A title, units, a reading.
        assert figure.find("figcaption/h3") is not None
        assert figure.findtext("figcaption/p")
        assert figure.findtext("p")
    assert "the threshold was crossed at token" in said(faulty)
    assert "nothing here speaks against" in said(few)
    assert all(name in said(faulty) for name in evidence["looks"])
    assert not list(bare.iter("figure"))


def test_the_path_leads_to_the_evidence() -> None:
    evidence = reports()[0].checks[-1].evidence
    path = evidence["path"]
    assert path[-1] == (evidence["tokens"], evidence["e"])
    assert [e for _, e in path] == sorted(e for _, e in path)
    control = reports()[0].control.evidence
    assert control["path"][-1][0] == control["tokens"]
    assert control["path"][-1][1] >= 1 / COARSE.alpha


def test_what_was_not_looked_at_is_no_fault() -> None:
    checks = tuple(Check(v, v, "") for v in ("refused", "not looked at", "seed ignored"))
    report = replace(reports()[1], checks=checks)
    cells = {one.text: one.get("class") for one in parsed(report).iter("td") if one.get("class")}
    assert {name: cells[name] for name in ("refused", "not looked at", "seed ignored")} == {
        "refused": "open", "not looked at": "open", "seed ignored": "bad"
    }  # fmt: skip


def test_every_verdict_has_its_meaning() -> None:
    for verdict, meaning in MEANINGS.items():
        check = Check("greedy", verdict, "")
        report = replace(reports()[2], checks=(check,), control=replace(check, verdict="rule bias"))
        if verdict != "void":
            assert meaning in said(parsed(report))


def test_numbers_and_text() -> None:
    assert [number(x) for x in (12345.0, 0.123456, float("nan"))] == [
        "12,345",
        "0.1235",
        "no number",
    ]
    assert text("a\n<b>\x1b") == "a\n&lt;b&gt;\\x1b"
