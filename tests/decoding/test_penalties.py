"""The parts of the controls that look at the text, each by itself."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from outrider.decoding import penalties


def test_the_penalties_and_their_order() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0]])
    seen = torch.tensor([[True, True, True, False]])
    counts = torch.tensor([[0.0, 3.0, 1.0, 0.0]])
    made = penalties.penalised(logits, seen, counts, repetition=2.0, presence=0.5, frequency=0.25)
    assert made.tolist() == [[1.0, -4.0 - 0.5 - 0.75, -0.5 - 0.25, 3.0]]
    assert penalties.penalised(logits, seen, counts) is logits


def test_repetition_is_transformers_in_every_bit() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (4, 20), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, 50, dtype=torch.bool).scatter_(1, ids, True)
    for penalty in (1.3, 0.7):
        made = penalties.penalised(logits, seen, seen.float(), repetition=penalty)
        assert torch.equal(made, RepetitionPenaltyLogitsProcessor(penalty)(ids, logits))


def test_what_is_forbidden_stays_forbidden() -> None:
    rows = torch.full((1, 3), -torch.inf)
    penalties.bias(rows, torch.tensor([0]), torch.tensor([5.0]))
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    made = penalties.penalised(
        rows, everywhere, torch.ones(1, 3), repetition=0.5, presence=-2.0, frequency=-1.0
    )
    assert (made == -torch.inf).all()


def test_allowing_and_forbidding_in_place() -> None:
    rows = torch.arange(8.0).view(2, 4)
    penalties.allow(rows, torch.tensor([1, 3]))
    assert rows.tolist() == [[-torch.inf, 1, -torch.inf, 3], [-torch.inf, 5, -torch.inf, 7]]
    penalties.forbid(rows, [[1], []])
    assert rows[:, 1].tolist() == [-torch.inf, 5]


@pytest.mark.parametrize(
    ("before", "found"),
    [((), {7}), ((1,), {7, 2}), ((2, 1), {7, 2, 0}), ((1, 2), {7, 4}), ((9, 1, 2), {7, 4})],
)
def test_the_last_tokens_of_words(before: tuple[int, ...], found: set[int]) -> None:
    words = [(7,), (1, 2), (2, 1, 0), (1, 2, 4), (3, 1, 2, 5)]
    assert penalties.last_of_words(words, before) == found


@pytest.mark.parametrize(
    ("before", "size", "start", "found"),
    [
        ((1, 2, 3, 1, 2), 3, 0, {3}),
        ((1, 2, 3, 1, 2), 3, 3, set()),
        ((1, 2, 1, 3, 1), 2, 0, {2, 3}),
        ((1, 2, 1, 3, 1), 2, 2, {3}),
        ((4, 5), 1, 0, {4, 5}),
        ((4, 5), 1, 1, {5}),
        ((), 1, 0, set()),
        ((1,), 3, 0, set()),
        ((1, 1, 1), 2, 0, {1}),
    ],
)
def test_what_would_repeat(before, size: int, start: int, found: set[int]) -> None:
    assert penalties.repeating(before, size, start) == found
