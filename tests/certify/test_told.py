"""Answers of a server as laws: what they leave open is not made up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from outrider import SamplingParams
from outrider.certify.endpoint.rows import REST
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.told import Told, ToldLaws
from outrider.certify.endpoint.wire import UNKNOWN, Answer
from outrider.errors import EndpointError

PARTS = {"a": -0.5, f"x{UNKNOWN}": -1.5, "b": -2.0, "c": -2.0}


def told(*tops: Mapping[str, float], came: str = "a", num: int | None = None) -> Told:
    """What is kept of one text."""
    kept = Told(Server("http://x"), ToldLaws(SamplingParams()), most=3)
    names = tuple(came for _ in tops)
    numbers = tuple(-1.0 for _ in tops)
    answer = Answer("", "stop", None, names, numbers, tops, num or len(tops))
    kept.given[7,] = "prompt"
    kept._made((7,), answer)
    return kept


def names(kept: Told) -> list[list[object]]:
    """The tokens that each place tells, as the server calls them."""
    (rows,) = kept.laws._rows.values()
    return [[kept.laws.vocabulary.name(x) for x in row.tokens.tolist()] for row in rows]


def test_nothing_counts_as_likely_behind_what_may_be_several_tokens() -> None:
    assert names(told(PARTS)) == [["a"]]
    assert names(told({"a": -0.5, "b": -1.0, f"{UNKNOWN}": -3.0})) == [["a", "b"]]


@pytest.mark.parametrize("came", ["b", "c"])
def test_of_equals_the_one_that_came_is_told_last(came: str) -> None:
    """Otherwise the law would have it whenever it came."""
    kept = told({"a": -0.5, "d": -1.0, "b": -2.0, "c": -2.0}, came=came)
    (other,) = {"b", "c"} - {came}
    assert names(kept) == [["a", "d", other]]
    (rows,) = kept.laws._rows.values()
    assert rows[0].came == REST


@pytest.mark.parametrize("num", [1, 3])
def test_a_text_of_more_tokens_than_are_told_is_refused(num: int) -> None:
    """A server that leaves the end out hides its chance, whatever it counts."""
    tops = [{"a": -0.5}] * 2
    told(*tops)
    with pytest.raises(EndpointError, match="leaves the end of text out"):
        told(*tops, num=num)
