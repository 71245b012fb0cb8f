"""What log-probabilities tell of a law: never something else than the law is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from outrider import SamplingParams
from outrider.certify.endpoint.rows import REST, Row, known
from outrider.certify.model.book import Book, Text
from tests.certify.faulty import END, VOCAB, models
from tests.engine.control_laws import Table

SEEN = (5, 5, 7, 9)
TEXT = Text((1,), (*SEEN, 4))


def told(most: int, came: int = REST) -> Row:
    """The likeliest tokens after the text; a token's number is its id and one."""
    row_V = models()[0][SEEN[-1]]
    row_V = row_V - np.logaddexp.reduce(row_V)
    order = np.argsort(-row_V, kind="stable")[:most]
    return Row(order + 1, row_V[order], came)


def due(params: SamplingParams) -> np.ndarray:
    """The whole law, as the book has it."""
    book = Book(Table(torch.tensor(models()[0])), (END,))
    return book.laws(book.logits([TEXT]), [TEXT], params)[-1].numpy()


@pytest.mark.parametrize("most", [3, 8, 20])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.6),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.8, top_p=0.6),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, min_p=0.1),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.7),
        SamplingParams(presence_penalty=1.5, top_k=6, temperature=0.8),
        SamplingParams(presence_penalty=-1.5, top_k=6),
        SamplingParams(frequency_penalty=1.0, top_p=0.7, min_p=0.05),
        SamplingParams(logit_bias={5: 2.0, 6: -3.0}, temperature=1.3),
    ],
    ids=str,
)
def test_it_is_the_law_of_the_tokens_it_judges(params: SamplingParams, most: int) -> None:
    law_V = due(params)
    shifted = {token + 1: number for token, number in params.bias_pairs}
    counts = Counter(token + 1 for token in SEEN)
    options = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    got = known(told(most), SamplingParams(**(options | {"logit_bias": shifted})), counts)
    tokens = got.tokens[got.tokens != REST]
    probs = got.probs[got.tokens != REST]
    if got.whole:
        # Of those at the edge of a cut-off nothing is said: it is the law of the others.
        share = law_V[tokens - 1].sum() if len(got.unsure) else 1.0
        assert np.allclose(probs, law_V[tokens - 1] / share, atol=1e-6)
        assert got.probs.sum() == pytest.approx(1)
    elif len(got.ranked):
        ranked_V = law_V[got.ranked - 1]
        there = np.isin(got.ranked, tokens)
        assert np.allclose(ranked_V[~there], 0)
        assert np.allclose(probs, (ranked_V / ranked_V.sum())[there], atol=1e-6)


def test_the_rest_has_its_mass_where_it_is_known() -> None:
    got = known(told(3), SamplingParams(), {})
    assert got.whole and got.judges(told(3))
    assert got.probs[got.tokens == REST] == pytest.approx(1 - np.exp(told(3).logprobs).sum())
    warm = known(told(3), SamplingParams(temperature=1.2), {})
    assert not warm.judges(told(3))
    assert warm.judges(told(3, int(told(3).tokens[0])))


def test_a_cut_off_that_is_told_whole_forbids_the_rest() -> None:
    assert known(told(8), SamplingParams(top_k=6), {}).judges(told(8))
    # A penalty may have let a token that was not told into the six.
    moved = known(told(6), SamplingParams(top_k=6, presence_penalty=2.0), Counter(told(6).tokens))
    assert not moved.whole


COARSE = np.array([5.0, 4.0, 3.0, 3.0, 3.0, 2.0, 0.0])
"""Logits in few bits: three tokens have one."""


def kept(params: SamplingParams, order: np.ndarray, ties: bool) -> set[int]:
    """What an engine keeps of COARSE which sorts equals in this order, and may keep all of them."""
    law = np.exp(COARSE[order]) / np.exp(COARSE).sum()
    count = params.top_k or int((law.cumsum() >= params.top_p).argmax()) + 1
    last = COARSE[order[count - 1]]
    return {int(x) for i, x in enumerate(order) if i < count or (ties and COARSE[x] == last)}


def engines() -> Iterator[tuple[np.ndarray, bool]]:
    for sign in (1, -1):
        yield np.lexsort((sign * np.arange(len(COARSE)), -COARSE)), False
    yield np.argsort(-COARSE, kind="stable"), True


def coarse(token: int, most: int) -> Row:
    """What is told where a token came: among equals it stands last."""
    order = sorted(range(len(COARSE)), key=lambda x: (-COARSE[x], x == token))[:most]
    logprobs = COARSE - np.logaddexp.reduce(COARSE)
    came = token + 1 if token in order else REST
    return Row(np.array(order) + 1, logprobs[order], came, float(logprobs[token]))


@pytest.mark.parametrize("most", [3, 4, 6])
@pytest.mark.parametrize("near", [0.0, 0.1])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=3), SamplingParams(top_k=4), SamplingParams(top_p=0.85)],
    ids=str,
)
def test_which_of_equals_a_cut_off_keeps_is_no_fault(
    params: SamplingParams, near: float, most: int
) -> None:
    for order, ties in engines():
        for token in kept(params, order, ties):
            row = coarse(token, most)
            law = known(row, params, {}, near)
            assert not law.judges(row) or float(law.probs[law.tokens == row.came].sum()) > 0
    for token, due in ((0, True), (5, False), (6, False)):
        row = coarse(token, most)
        law = known(row, params, {}, near)
        assert law.judges(row) or not law.whole
        if law.whole:
            assert (float(law.probs[law.tokens == row.came].sum()) > 0) is due
    assert known(coarse(0, 6), params, {}, near).whole


def test_nothing_told_says_nothing() -> None:
    silent = Row(np.zeros(0, dtype=np.int64), np.zeros(0), REST)
    assert not known(silent, SamplingParams(), {}).judges(silent)
    assert VOCAB > 20
