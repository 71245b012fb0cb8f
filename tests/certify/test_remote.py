"""Texts of a server as token ids: an end that is not told is put back as it would have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from outrider import SamplingParams
from outrider.certify.endpoint.remote import Reference, Remote
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import Answer, Ask
from outrider.certify.model.book import Book
from tests.engine.control_laws import Table

LAW = torch.tensor([0.1, 0.2, 0.3, 0.4])
RUNS = 400


class Silent(Server):
    """Tells no end of its texts."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        super().__init__("http://silent")
        self.ids = ids

    def all(self, asked: Sequence[Ask]) -> list[Answer]:
        return [Answer("", "stop", self.ids) for _ in asked]


def last(ends: tuple[int, ...], params: SamplingParams, ids: tuple[int, ...] = (3,)) -> Counter:
    """Which tokens stand last in texts of one prompt and many seeds."""
    book = Book(Table(LAW.log().double().expand(4, 4)), ends)
    made = Remote(Silent(ids), Reference("x", book))([(0,)] * RUNS, params, 5)
    return Counter(one.token_ids[len(ids) :] for one in made)


def test_the_one_end_is_put_back() -> None:
    assert last((1,), SamplingParams(max_tokens=4)) == {(1,): RUNS}
    assert last((1, 2), SamplingParams(max_tokens=4), (3, 2)) == {(): RUNS}
    assert last((1, 2), SamplingParams(max_tokens=4, ignore_eos=True)) == {(): RUNS}


def test_of_several_ends_each_comes_as_often_as_its_law_says() -> None:
    found = last((1, 2), SamplingParams(max_tokens=4))
    assert set(found) == {(1,), (2,)}
    assert abs(found[1,] / RUNS - 0.4) < 0.1
    assert last((1, 2), SamplingParams(max_tokens=4, temperature=0)) == {(2,): RUNS}
    assert last((1, 2), SamplingParams(max_tokens=4, logit_bias={1: -100.0})) == {(2,): RUNS}
