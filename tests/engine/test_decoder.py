"""SpeculativeDecoder on tabular models: the same tokens where they are promised, in every batch."""

from __future__ import annotations

import math
import random

import pytest

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.drafters import NgramDrafter
from outrider.models.tabular import FixedDistDraftModel, FixedDistTargetModel
from tests.engine.toys import Certain, blurred, decoder, markov

TARGET = markov(7, 2, seed=1)
DRAFTS = {
    "good": blurred(TARGET, 2, 0.2),
    "bad": markov(7, 1, seed=3),
    "certain": Certain(7, 0),
    "ngram": NgramDrafter(1, 3),
}
PREFIXES = [[1], [2, 3, 4], [0, 0, 1, 2, 1], [6, 5], [3]]


def plain_greedy(prefix: list[int], length: int) -> list[int]:
    text = list(prefix)
    for _ in range(length):
        text.append(int(TARGET.law(text).argmax()))
    return text[len(prefix) :]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_greedy_is_plain_greedy(draft: str, k: int) -> None:
    out = decoder(DRAFTS[draft], TARGET, k, temperature=0.0).generate_batch(PREFIXES, 23)
    assert out == [plain_greedy(prefix, 23) for prefix in PREFIXES]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled", "greedy"])
def test_temperature_zero_is_greedy_under_every_rule(draft: str, rule: str) -> None:
    out = decoder(DRAFTS[draft], TARGET, 3, rule, temperature=0.0).generate([2, 3], 15, seed=4)
    assert out == plain_greedy([2, 3], 15)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", [1, 4])
def test_a_seed_means_the_same_tokens_whoever_drafts(draft: str, k: int) -> None:
    plain = decoder(None, TARGET).generate_batch(PREFIXES, 40, seed=11)
    assert decoder(DRAFTS[draft], TARGET, k).generate_batch(PREFIXES, 40, seed=11) == plain
    assert [decoder(DRAFTS[draft], TARGET, k).generate(p, 40, seed=11) for p in PREFIXES] == plain
    assert decoder(None, TARGET).generate_batch(PREFIXES, 40, seed=12) != plain


def test_in_law_rules_do_not_promise_the_tokens_of_plain_sampling() -> None:
    plain = decoder(None, TARGET, rule="block").generate_batch(PREFIXES, 40, seed=11)
    assert (
        decoder(DRAFTS["good"], TARGET, 3, "block").generate_batch(PREFIXES, 40, seed=11) != plain
    )


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled"])
def test_a_batch_gives_row_by_row_what_each_gives_alone(rule: str) -> None:
    make = lambda: decoder(DRAFTS["good"], TARGET, 3, rule, top_k=5, temperature=0.8)  # noqa: E731
    alone = [make().generate(prefix, 20, seed=9) for prefix in PREFIXES]
    assert make().generate_batch(PREFIXES, 20, seed=9) == alone


def test_end_of_text_inside_an_accepted_run_ends_it() -> None:
    target = FixedDistTargetModel([0.0, 0.5, 0.5])
    config = SpeculativeDecoderConfig(k=4).with_eos(2)
    for seed in range(12):
        out = SpeculativeDecoder(target, target, config).generate([1], 30, seed=seed)
        assert 2 not in out[:-1] and (len(out) == 30 or out[-1] == 2)
        plain = SpeculativeDecoder(None, target, config).generate([1], 30, seed=seed)
        assert out == plain


def test_min_tokens_keeps_the_end_away() -> None:
    target = FixedDistTargetModel([0.1, 0.2, 0.7])
    config = SpeculativeDecoderConfig(k=4, sampling=SamplingParams(min_tokens=9)).with_eos(2)
    lengths = []
    for seed in range(15):
        out = SpeculativeDecoder(target, target, config).generate([1], 60, seed=seed)
        assert 2 not in out[:-1] and out == SpeculativeDecoder(None, target, config).generate(
            [1], 60, seed=seed
        )
        lengths.append(len(out))
    assert min(lengths) == 10 and max(lengths) < 60


def test_stop_tokens_end_the_text_too() -> None:
    target = FixedDistTargetModel([0.5, 0.5])
    out = decoder(target, target, 4, stop_token_ids=(1,)).generate([0], 50, seed=3)
    assert out[-1] == 1 and 1 not in out[:-1]


def test_max_tokens_is_exact_and_the_last_token_is_never_drafted_for() -> None:
    spec = decoder(Certain(3, 1), FixedDistTargetModel([0, 1, 0]), 4)
    for length in range(1, 12):
        spec.reset_metrics()
        assert spec.generate([0], length, seed=1) == [1] * length
        assert spec.metrics.committed == length
        assert spec.metrics.drafted == spec.metrics.accepted == length - math.ceil(length / 5)
    assert spec.generate([0], 0) == []


@pytest.mark.parametrize(("rule", "accepted"), [("token", 10 / 9), ("block", 11 / 9)])
def test_mean_accepted_is_the_published_figure(rule: str, accepted: float) -> None:
    """Sun et al. 2025, section 3: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens."""
    spec = decoder(
        FixedDistDraftModel([2 / 3, 1 / 3]), FixedDistTargetModel([1 / 3, 2 / 3]), 2, rule
    )
    spec.generate_batch([[0]], 900, seed=7)
    metrics = spec.metrics
    assert abs(metrics.accepted / metrics.rounds - accepted) < 0.06, metrics.rounds
    if rule == "token":
        assert abs(metrics.alpha - 2 / 3) < 0.03


def test_fresh_entropy_differs_and_a_seed_does_not() -> None:
    spec = decoder(DRAFTS["good"], TARGET)
    assert spec.generate([1], 30) != spec.generate([1], 30)
    assert spec.generate([1], 30, seed=5) == spec.generate([1], 30, seed=5)
    assert spec.generate([1], 30, rng=random_rng(5)) == spec.generate([1], 30, rng=random_rng(5))


class random_rng:  # noqa: N801
    """A user's generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uniform(self) -> float:
        return self._random.random()


def test_metrics_stay_within_their_definitions() -> None:
    spec = decoder(DRAFTS["bad"], TARGET, 4, "token")
    spec.generate_batch(PREFIXES, 50, seed=2)
    metrics = spec.metrics
    assert metrics.committed == 250
    assert 0 < metrics.acceptance_rate < 1 and 0 < metrics.alpha < 1
    assert metrics.mean_acceptance_length == 1 + metrics.accepted / metrics.rounds
    assert metrics.acceptance_per_pos == sorted(metrics.acceptance_per_pos, reverse=True)
    assert all(0 <= rate <= 1 for rate in metrics.conditional_acceptance_per_pos)
    assert metrics.tokens_per_step_avg == 250 / (metrics.rounds + metrics.plain_rounds)
    assert set(metrics.definitions()) <= set(metrics.as_dict())
    spec.reset_metrics()
    assert spec.metrics.rounds == 0
