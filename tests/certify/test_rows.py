"""What log-probabilities tell of a law: never something else than the law is."""

from __future__ import annotations

from collections import Counter

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
        assert np.allclose(probs, law_V[tokens - 1], atol=1e-6)
        assert got.probs.sum() == pytest.approx(1)
    elif len(got.ranked):
        ranked_V = law_V[got.ranked - 1]
        there = np.isin(got.ranked, tokens)
        assert np.allclose(ranked_V[~there], 0)
        assert np.allclose(probs, (ranked_V / ranked_V.sum())[there], atol=1e-6)


def test_the_rest_has_its_mass_where_it_is_known() -> None:
    got = known(told(3), SamplingParams(), {})
    assert got.whole and got.judges(REST)
    assert got.probs[got.tokens == REST] == pytest.approx(1 - np.exp(told(3).logprobs).sum())
    warm = known(told(3), SamplingParams(temperature=1.2), {})
    assert not warm.judges(REST) and warm.judges(int(told(3).tokens[0]))


def test_a_cut_off_that_is_told_whole_forbids_the_rest() -> None:
    assert known(told(8), SamplingParams(top_k=6), {}).judges(REST)
    # A penalty may have let a token that was not told into the six.
    moved = known(told(6), SamplingParams(top_k=6, presence_penalty=2.0), Counter(told(6).tokens))
    assert not moved.whole


def test_nothing_told_says_nothing() -> None:
    silent = Row(np.zeros(0, dtype=np.int64), np.zeros(0), REST)
    assert not known(silent, SamplingParams(), {}).judges(REST)
    assert VOCAB > 20
