"""Processed laws against transformers' own processors; Law's three forms against dense tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.decoding import Law, check_logits, laws, processed_probs

TEMPERATURES = (1.0, 0.3, 1.7)
TOP_KS = (0, 1, 3, 40, 10**6)
TOP_PS = (1.0, 0.95, 0.5, 1e-6)
MIN_PS = (0.0, 0.05, 1.0)


def oracle(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float = 1.0,
) -> torch.Tensor:
    steps = LogitsProcessorList()
    if temperature != 1:
        steps.append(TemperatureLogitsWarper(temperature))
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(TopPLogitsWarper(top_p))
    if min_p:
        steps.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        steps.append(TypicalLogitsWarper(typical_p))
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", stable_sort)
        # Wide float32 rows sum up within a few millionths only, by how many numbers a vector has.
        return torch.softmax(steps(ids, logits), -1, dtype=torch.float64).float()


def stable_sort(values: torch.Tensor, descending: bool) -> Any:
    """Torch's sort leaves equals in any order on some processors; the rule is a stable one's."""
    return values.sort(dim=-1, descending=descending, stable=True)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("width", [2, 7, 64, 3000])
def test_typical_is_transformers(width: int, ties: bool):
    logits = tied_logits(width, 8, width, ties)
    for typical_p in (0.95, 0.5, 0.2, 1e-6):
        for top_k in (0, 3):
            controls = 0.9, top_k, 1.0, 0.0, typical_p
            assert_same_law(processed_probs(logits, *controls), oracle(logits, *controls))


def test_typical_keeps_all_that_are_as_far_from_the_entropy():
    """Four equals: one would be mass enough, and all stay; the likeliest may go."""
    logits = torch.tensor([[0.4, 0.15, 0.15, 0.15, 0.15]]).log()
    assert kept_tokens(processed_probs(logits, 1.0, typical_p_R=0.1)) == [1, 2, 3, 4]


def kept_tokens(probs: torch.Tensor) -> list[int]:
    return probs[0].nonzero().squeeze(1).tolist()


def tied_logits(seed: int, rows: int, width: int, ties: bool) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=chance) * 2
    if ties:
        logits = logits.round()
        logits[torch.rand(rows, width, generator=chance) < 0.1] = -math.inf
        logits[:, 0] = 0.0
    return logits


def assert_same_law(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("width", [2, 7, 64])
@pytest.mark.parametrize("top_p", TOP_PS)
def test_every_combination_is_transformers(width: int, top_p: float, ties: bool):
    logits = tied_logits(width, 6, width, ties)
    for temperature in TEMPERATURES:
        for top_k in TOP_KS:
            for min_p in MIN_PS:
                controls = temperature, top_k, top_p, min_p
                assert_same_law(processed_probs(logits, *controls), oracle(logits, *controls))


@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.booleans(),
    st.floats(0.05, 3),
    st.integers(0, 45),
    st.floats(0.001, 1),
    st.floats(0, 1),
    st.floats(0.001, 1),
)
@settings(max_examples=60, deadline=None)
def test_any_controls_are_transformers(
    seed: int,
    width: int,
    ties: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
):
    logits = tied_logits(seed, 3, width, ties)
    controls = temperature, top_k, top_p, min_p, typical_p
    assert_same_law(processed_probs(logits, *controls), oracle(logits, *controls))


def test_a_mixed_batch_is_its_rows():
    combinations = [
        (t, k, p, m) for t in (*TEMPERATURES, 0.0) for k in TOP_KS for p in TOP_PS for m in MIN_PS
    ]
    logits = tied_logits(5, len(combinations), 23, ties=True)
    columns = [
        torch.tensor(column, dtype=torch.float64) for column in zip(*combinations, strict=True)
    ]
    columns[1] = columns[1].long()
    mixed = processed_probs(logits, *columns)
    for row, controls in enumerate(combinations):
        alone = processed_probs(logits[row : row + 1], *controls)
        assert torch.equal(alone[0] > 0, mixed[row] > 0)
        torch.testing.assert_close(alone[0], mixed[row])


@pytest.mark.parametrize("ties", [True, False])
def test_wide_rows_find_the_same_nucleus(ties: bool):
    """Rows wider than the first guess, flat enough to need a second one."""
    logits = tied_logits(3, 4, 5000, ties)
    logits[2:] *= 0.2
    for top_p in (0.999, 0.9, 0.3, 0.01):
        for top_k in (0, 300):
            controls = 1.0, top_k, top_p, 0.0
            assert_same_law(processed_probs(logits, *controls), oracle(logits, *controls))


@pytest.mark.parametrize("width", [16_384, 20_011])
@pytest.mark.parametrize("ties", [True, False])
def test_few_of_a_wide_row_are_worked_on_alone(
    width: int, ties: bool, monkeypatch: pytest.MonkeyPatch
):
    """What top_k leaves of wide rows is all that is looked at; ties at its edge are kept whole."""
    whole: list[int] = []
    of_all = laws._of_all  # pyright: ignore[reportPrivateUsage]

    def watched(scores: torch.Tensor, controls: Any) -> torch.Tensor:
        whole.append(len(scores) if scores.shape[1] == width else 0)
        return of_all(scores, controls)

    monkeypatch.setattr(laws, "_of_all", watched)
    logits = tied_logits(11, 6, width, ties)
    logits[1, 3:] = -math.inf
    logits[2, -5:] = logits[2].max() + torch.arange(5) / 2  # behind the last block, if at all
    logits[3, ::100] = logits[3].max()  # far more than are looked at
    ks = torch.tensor([1, 8, 8, 3, 0, 5])
    tops = torch.tensor([1.0, 0.9, 1.0, 0.7, 0.95, 1.0], dtype=torch.float64)
    least = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.1], dtype=torch.float64)
    temperatures = torch.tensor([1.0, 0.5, 1.3, 1.0, 0.8, 0.7], dtype=torch.float64)
    mixed = processed_probs(logits, temperatures, ks, tops, least)
    few = 6 - sum(whole)
    # The row without top_k, and those of more ties than are looked at, are worked on whole.
    assert few == 4 or (ties and few < 4)
    for row in range(6):
        own = (temperatures[row], ks[row], tops[row], least[row])
        alone = processed_probs(logits[row : row + 1], *(one[None] for one in own))
        assert torch.equal(alone[0], mixed[row])
        t, k, p, m = (float(one) for one in own)
        assert_same_law(mixed[row : row + 1], oracle(logits[row : row + 1], t, int(k), p, m))


def test_unpatched_transformers_keeps_the_same_probabilities():
    """Whatever the order of equals, what is kept weighs the same."""
    logits = tied_logits(4, 5, 64, ties=True)
    for top_p in TOP_PS[1:]:
        kept = TopPLogitsWarper(top_p)(torch.zeros(5, 1, dtype=torch.int64), logits)
        theirs = torch.softmax(kept, -1).sort(-1).values
        ours = processed_probs(logits, 1.0, 0, top_p).sort(-1).values
        torch.testing.assert_close(ours, theirs)


def test_another_order_of_controls_is_noticed():
    """Top-p before temperature is another law: the oracle would tell."""
    logits = tied_logits(9, 4, 30, ties=False)
    wrong = processed_probs(oracle(logits, 1.0, 0, 0.8, 0.0).log(), 2.0)
    assert not torch.equal(wrong > 0, oracle(logits, 2.0, 0, 0.8, 0.0) > 0)


def test_temperature_zero_is_the_first_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, -math.inf, 2.0]])
    expected = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0]])
    assert torch.equal(processed_probs(logits, 0.0), expected)
    assert torch.equal(processed_probs(logits, 0.0, 2, 0.1, 0.9), expected)
    half = processed_probs(logits, torch.tensor([0.0, 1.0]))
    assert torch.equal(half[0], expected[0])
    torch.testing.assert_close(half[1], torch.tensor([1 / 3, 1 / 3, 0, 1 / 3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype):
    probs = processed_probs(torch.randn(2, 9).to(dtype), 0.8, 4, 0.9, 0.1)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, dtype=probs.dtype))


def test_usable_rows():
    rows = torch.zeros(5, 3)
    rows[1, 1], rows[2, 0], rows[3, :], rows[4, 2] = math.nan, math.inf, -math.inf, -math.inf
    assert check_logits(rows).tolist() == [True, False, False, False, True]


def test_controls_that_are_off_sort_nothing(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a control that is off did work")

    for step in ("_top_k", "_top_p", "_min_p", "typical"):
        monkeypatch.setattr(laws, step, refuse)
    logits = torch.randn(3, 8)
    probs = processed_probs(logits, torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 8, 9]))
    torch.testing.assert_close(probs[0], logits[0].softmax(-1))
    torch.testing.assert_close(probs[2], (2 * logits[2]).softmax(-1))


def test_forms_of_law_agree_with_tables():
    ids = torch.tensor([[4, 1, 0], [2, 0, 0]])
    law = Law.sparse(ids, torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]))
    table = torch.tensor([[0.25, 0.25, 0, 0, 0.5], [0, 0, 1.0, 0, 0]])
    dense = Law.dense(table)
    assert torch.equal(law.table(5), table)
    assert len(law) == len(dense) == 2
    weights = torch.rand(2, 5)
    for form in (law, dense):
        for token in range(5):
            tokens = torch.tensor([token, 4 - token])
            assert torch.equal(form.prob_of(tokens), table.gather(1, tokens[:, None])[:, 0])
        torch.testing.assert_close(form.excess(weights), (weights - table).clamp(min=0))
        assert form.argmax().tolist() == [4, 2]
        rows = torch.tensor([1, 1, 0])
        assert torch.equal(form.select(rows).table(5), table[rows])
    point = Law.point(torch.tensor([3, 0]))
    assert torch.equal(point.table(5), torch.eye(5)[[3, 0]])
    assert point.prob_of(torch.tensor([3, 1])).tolist() == [1.0, 0.0]
    assert torch.equal(point.excess(weights), (weights - torch.eye(5)[[3, 0]]).clamp(min=0))
