"""Two samples of one law are told from two of different ones."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.arena.engines import Arm
from benchmarks.arena.law import compare, sampled, variation
from tests.benchmarks.arenas import Toy


def texts(weights: list[float], seed: int, num: int = 200) -> list[tuple[int, ...]]:
    drawn = np.random.default_rng(seed).choice(len(weights), num, p=weights)
    return [(int(token), 7) for token in drawn]


FAIR, SKEWED = [0.1, 0.6, 0.3], [0.25, 0.45, 0.3]


def test_the_same_law_passes():
    found = [
        compare("a", texts(FAIR, 3 * s), texts(FAIR, 3 * s + 1), texts(FAIR, 3 * s + 2)).p_value
        for s in range(5)
    ]
    assert sorted(found)[2] > 0.05


def test_another_law_is_found():
    verdict = compare("a", texts(FAIR, 0), texts(FAIR, 1), texts(SKEWED, 2))
    assert verdict.p_value < 0.01
    assert verdict.distance > verdict.control


def test_variation_is_half_the_distance():
    one, other = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    assert variation(one, other, 3) == pytest.approx(0.25)


def test_what_no_drafter_touched_does_not_count():
    toy = Toy(str(Arm("outrider", "none")))
    assert sampled(toy, [1, 2], 6, 0) == [(1, 2)] * 6
    assert [what for _, what in toy.log] == ["wake", *["run"] * 6, "rest"]
