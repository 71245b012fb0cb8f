"""What is looked at in tokens averages to 0 under their law, and moves with its fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.certify.model.book import Text
from outrider.certify.model.looks import looks, names
from outrider.certify.model.signatures import Page
from tests.certify.faulty import END, VOCAB, subject

NAMES = names(with_draft=True, with_ends=True)
ROUNDS = 400
Draw = Callable[[Page, torch.Generator], Tensor]


def page() -> Page:
    """Forty tokens in five texts, whatever they are."""
    rng = np.random.default_rng(2)
    texts = [
        Text((int(rng.integers(4, VOCAB)),), tuple(int(x) for x in rng.integers(4, VOCAB, 8)))
        for _ in range(5)
    ]
    one = subject()
    return Page.of(texts, SamplingParams(temperature=1.3), one.target, one.draft)


def deviations(draw: Draw) -> dict[str, float]:
    """How many standard errors the mean of each look is from 0."""
    one, rng = page(), torch.Generator().manual_seed(0)
    points = np.random.default_rng(0)
    rows = [looks(one, draw(one, rng), points.random(len(one.p_NV))) for _ in range(ROUNDS)]
    seen = np.concatenate(rows)
    assert seen.shape[1] == len(NAMES)
    assert np.abs(seen).max() <= 1
    errors = seen.std(0) / np.sqrt(len(seen))
    return dict(zip(NAMES, (seen.mean(0) / errors).tolist(), strict=True))


def from_law(law_NV: Tensor, rng: torch.Generator) -> Tensor:
    return law_NV.multinomial(1, generator=rng).squeeze(1)


def test_under_the_law_all_average_to_nothing() -> None:
    found = deviations(lambda one, rng: from_law(one.p_NV, rng))
    assert max(map(abs, found.values())) < 4, found


def sharper(one: Page, rng: torch.Generator) -> Tensor:
    return from_law(one.p_NV**1.3, rng)


def towards_low_ids(one: Page, rng: torch.Generator) -> Tensor:
    return from_law(one.p_NV * torch.linspace(1.2, 0.8, VOCAB), rng)


def endless(one: Page, rng: torch.Generator) -> Tensor:
    return from_law(one.p_NV.index_fill(1, torch.tensor([END]), 0), rng)


def as_the_draft(one: Page, rng: torch.Generator) -> Tensor:
    assert one.q_NV is not None
    return from_law(one.q_NV, rng)


def one_point_for_neighbours(one: Page, rng: torch.Generator) -> Tensor:
    """Right token by token, and the next one drawn with the same uniform."""
    points = torch.rand(len(one.p_NV), generator=rng, dtype=torch.float64)
    points[1::2] = points[::2]
    return torch.searchsorted(one.p_NV.cumsum(1), points[:, None]).squeeze(1).clamp(max=VOCAB - 1)


def repeating(one: Page, rng: torch.Generator) -> Tensor:
    """Now and then the prompt's token once more."""
    tokens = from_law(one.p_NV, rng)
    prompts = torch.tensor([text.prompt[0] for text in one.texts for _ in text.output])
    return torch.where(torch.rand(len(tokens), generator=rng) < 0.05, prompts, tokens)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (sharper, "likeliest token"),
        (sharper, "place by probability, 1"),
        (towards_low_ids, "place by id, 1"),
        (endless, "end of text"),
        (as_the_draft, "where target exceeds draft"),
        (as_the_draft, "draft's likeliest token"),
        (one_point_for_neighbours, "place of neighbours"),
        (repeating, "came before"),
    ],
)
def test_each_moves_with_its_fault(draw: Draw, name: str) -> None:
    found = deviations(draw)
    assert abs(found[name]) > 5, found
