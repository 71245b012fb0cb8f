"""Runs in turn, and what may be concluded from how many of them."""

from __future__ import annotations

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.control import runs as runs_module
from outrider.control.record import Asked, completed
from outrider.control.runs import bootstrapped, compared, measured, whole
from outrider.engine import Requests
from outrider.types import Completion
from tests.control.test_plan import served

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def test_items_fill_whole_batches() -> None:
    assert whole([1, 2], 1) == [1, 2, 1]
    assert whole([1, 2, 3, 4], 1) == [1, 2, 3, 4]
    assert whole([1, 2, 3], 2) == [1, 2, 3, 1, 2, 3]
    assert whole([1, 2, 3, 4, 5, 6, 7], 2) == [1, 2, 3, 4, 5, 6, 7, 1]


def test_every_round_has_as_many_texts_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer prompts than a batch has texts, too."""
    sizes: list[tuple[int, int | None]] = []

    def noted(requests: Requests, asked: Asked) -> list[Completion]:
        sizes.append((len(asked.prompts), asked.batch))
        return completed(requests, asked)

    monkeypatch.setattr(runs_module, "completed", noted)
    (found,) = measured(served(), [Asked([[1], [2, 3]], GREEDY, 2, batch=4, drafter="draft")])
    assert set(sizes) == {(4, 4)} and found.num_groups == 3


def test_noise_does_not_pay() -> None:
    """A percent of noise in three runs is no speed-up, and a lone run would be no evidence."""
    plain = [(64, 1.01), (64, 1.01), (64, 1.01)]
    _, gain = bootstrapped([(64, 1.0), (64, 1.005), (64, 0.995)], plain)
    assert gain.mean > 1 > gain.low
    _, gain = bootstrapped([(64, 0.5), (64, 0.51), (64, 0.52)], plain)
    assert gain.low > 1.8
    with pytest.raises(AssertionError):
        bootstrapped(plain[:1], plain[:1])


def test_few_groups_cover_the_truth() -> None:
    """Where both ways are alike, at most some 5 percent of threes say that one is faster."""
    random = np.random.default_rng(3)

    def paying(size: int) -> float:
        found = 0
        for _ in range(150):
            own, plain = (
                [(64, float(s)) for s in random.lognormal(0, 0.1, size)] for _ in range(2)
            )
            found += bootstrapped(own, plain)[1].low > 1
        return found / 150

    assert paying(3) < 0.07 and paying(6) < 0.07


def test_the_first_arm_is_what_others_are_compared_with() -> None:
    asked = Asked([[1], [2, 3], [4]], GREEDY, 0, batch=1)
    (rate, one), (other_rate, other) = compared(served(), [(asked, None), (asked, None)])
    assert one.mean == one.low == one.high == 1
    assert other.mean == pytest.approx(other_rate.mean / rate.mean)
