"""Two sides' texts: alarms are as rare as declared, faults are found nearly as soon as can be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.certify.endpoint.paired import pairs_needed
from outrider.certify.endpoint.pairs import CONTEXTS, LOOKS, NONE, Habits, Paired, coded, fits
from outrider.certify.endpoint.wire import words
from outrider.certify.model.plan import Plan
from tests.certify.faulty import Row

ALPHA, VOCAB, LENGTH, BATCH = 0.05, 32, 8, 32
STRICT = 0.01
TWO_SIDED, POWER = 2.576, 1.282
"""Deviations of a fixed-sample test at the level 0.01 with a power of 0.9."""


def chain(seed: int = 0) -> Row:
    """The law of each token after each."""
    law_VV = np.exp(np.random.default_rng(seed).normal(0, 1.6, (VOCAB, VOCAB)))
    return law_VV / law_VV.sum(1, keepdims=True)


def surer(law_VV: Row, by: float) -> Row:
    """The same, off by a total variation: mass is moved to the likeliest token."""
    top_VV = np.eye(VOCAB)[law_VV.argmax(1)]
    share_V1 = by / (1 - law_VV.max(1, keepdims=True))
    return (1 - share_V1) * law_VV + share_V1 * top_VV


def drawn(law_VV: Row, rng: np.random.Generator, num: int = BATCH) -> np.ndarray:
    """Texts of a chain, one from each prompt."""
    upto_VV, token_N = law_VV.cumsum(1), np.arange(num) % VOCAB
    texts = []
    for _ in range(LENGTH):
        below_NV = upto_VV[token_N] < rng.random(num)[:, None]
        token_N = below_NV.sum(1).clip(max=VOCAB - 1)
        texts.append(token_N)
    return np.stack(texts, 1)


def false_alarms(runs: int, pairs: int) -> int:
    law_VV, alarms = chain(), 0
    for run in range(runs):
        rng, evidence = np.random.default_rng(run), Paired(ALPHA, pairs)
        while evidence.pairs < pairs:
            evidence.read(drawn(law_VV, rng), drawn(law_VV, rng))
        # `against` remembers the largest of the looks after every single pair.
        alarms += evidence.against
    return alarms


def test_one_law_raises_no_more_alarms_than_declared() -> None:
    assert false_alarms(40, 128) <= 40 * ALPHA + 2 * math.sqrt(40 * ALPHA)


@pytest.mark.slow
def test_two_thousand_runs_of_one_law_keep_the_level() -> None:
    assert false_alarms(2000, 320) <= 2000 * ALPHA


def test_bets_on_what_is_known_already_would_raise_many() -> None:
    """The negative control: looks that have learned from the texts they are bet on."""
    law_VV, alarms = chain(), 0
    for run in range(8):
        rng, evidence = np.random.default_rng(run), Paired(ALPHA, 320)
        while evidence.pairs < 320 and not evidence.against:
            on_NL, off_NL = drawn(law_VV, rng), drawn(law_VV, rng)
            for _ in range(4):
                evidence.habits.learn(on_NL, off_NL)
            evidence.read(on_NL, off_NL)
        alarms += evidence.against
    assert alarms > 4


def fixed_size(by: float) -> float:
    """Pairs that a test of fixed size needs, were it told which look to take."""
    law_VV, rng = chain(), np.random.default_rng(1)
    other_VV, habits = surer(law_VV, by), Habits()
    for _ in range(10):
        habits.learn(drawn(other_VV, rng, 400), drawn(law_VV, rng, 400))
    payoffs_NF = habits.looks(drawn(other_VV, rng, 40_000)) - habits.looks(
        drawn(law_VV, rng, 40_000)
    )
    clear_F = np.abs(payoffs_NF.mean(0)) / np.maximum(payoffs_NF.std(0), 1e-9)
    return float(((TWO_SIDED + POWER) / clear_F.max()) ** 2)


def stops(by: float, runs: int) -> list[int]:
    law_VV, found = chain(), list[int]()
    for run in range(runs):
        rng, evidence = np.random.default_rng(run), Paired(STRICT, 6000)
        while not evidence.against and evidence.pairs < 20_000:
            evidence.read(drawn(surer(law_VV, by), rng), drawn(law_VV, rng))
        found.append(evidence.pairs)
    return found


def test_a_bias_of_two_hundredths_is_found_within_twice_the_fixed_size() -> None:
    assert np.mean(stops(0.02, 5)) < 2 * fixed_size(0.02)


@pytest.mark.slow
def test_fifty_such_runs() -> None:
    assert np.mean(stops(0.02, 50)) < 2 * fixed_size(0.02)


def test_one_law_is_said_to_be_within_the_bound_in_time() -> None:
    plan = Plan(within=0.06, alpha=ALPHA, length=LENGTH)
    law_VV, rng, evidence = chain(), np.random.default_rng(0), Paired(ALPHA, pairs_needed(plan))
    while evidence.pairs < pairs_needed(plan):
        evidence.read(drawn(law_VV, rng), drawn(law_VV, rng))
    assert max(one.most for one in evidence.intervals().values()) <= plan.within


def test_texts_that_share_their_noise_need_fewer() -> None:
    law_VV, rng, evidence = chain(), np.random.default_rng(0), Paired(STRICT, 1000)
    while max(one.most for one in evidence.intervals().values()) > 0.06:
        same_NL = drawn(law_VV, rng)
        evidence.read(same_NL, same_NL)
    assert evidence.pairs < 600
    assert evidence.value == 1


def test_looks_are_bounded_and_see_their_fault() -> None:
    law_VV, rng, habits = chain(), np.random.default_rng(0), Habits()
    habits.learn(drawn(surer(law_VV, 0.2), rng, 2000), drawn(law_VV, rng, 2000))
    plain_NL = drawn(law_VV, rng, 2000)
    assert np.abs(habits.looks(plain_NL)).max() <= 0.5

    def moved(texts_NL: np.ndarray) -> dict[str, float]:
        off_F = habits.looks(texts_NL).mean(0) - habits.looks(plain_NL).mean(0)
        return dict(zip(LOOKS, off_F.tolist(), strict=True))

    short_NL = plain_NL.copy()
    short_NL[:, 5:] = NONE
    assert moved(short_NL)["length"] < -0.3
    again_NL = plain_NL.copy()
    again_NL[:, 1] = again_NL[:, 0]
    assert moved(again_NL)["came before"] > 0.05
    assert moved(drawn(surer(law_VV, 0.2), rng, 2000))["likeliest token"] > 0.1
    assert moved(drawn(surer(law_VV, 0.2), rng, 2000))["likelier with speculation"] > 0.005


def test_texts_as_numbers() -> None:
    assert words("if x1: go(2)") == ["if", " ", "x1", ":", " ", "go", "(", "2", ")"]
    text_L = coded(["a", "b", "a"], 5)
    assert text_L[0] == text_L[2] != text_L[1]
    assert text_L[3:].tolist() == [NONE, NONE]
    assert len(coded(["a"] * 9, 5)) == 5
    assert fits("length", 0.1) != fits("length", -0.1)
    assert fits("place by id, 1", 0.1) is None
    assert CONTEXTS > 1
