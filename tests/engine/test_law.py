"""The engine's law on tabular targets: chi-square of the first five tokens over several rounds."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from outrider import SamplingParams
from outrider.drafters import Drafter, NgramDrafter, ProtocolDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.tabular import MarkovModel
from outrider.types import Request
from tests.drafters.tapped import TappedTarget, ToyEagle
from tests.engine.toys import blurred, markov

LENGTH = 5
TARGET = markov(3, 2, seed=21, zeros=0.15)
PREFIX = (1, 2)


class Liar(ProtocolDrafter):
    """Draws from one law and reports another: the negative control."""

    def _ask(self, text, depth, draws, member):
        proposal = super()._ask(text, depth, draws, member)
        flat = np.log(np.full(3, 1 / 3))
        return type(proposal)(
            proposal.tokens, proposal.token_logprobs, [flat] * len(proposal.tokens)
        )


MAKERS = {
    "model": lambda: ProtocolDrafter(blurred(TARGET, 5, 0.6)),
    "ngram": lambda: NgramDrafter(1, 2),
}


def samples(drafter: Drafter, rule: str, count: int) -> Counter[tuple[int, ...]]:
    """The first tokens of `count` texts, each with its own seed."""
    engine = Engine(TappedTarget(TARGET), drafter, Emitter(None), max_texts=500)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    done = requests.complete(
        [
            Request(PREFIX, SamplingParams(seed=s, max_tokens=LENGTH), rule=rule)
            for s in range(count)
        ]
    )
    return Counter(completion.token_ids for completion in done)


def chi_square(counts: Counter[tuple[int, ...]], model: MarkovModel) -> float:
    """The statistic's distance from its mean, in standard deviations; cells below 5 are pooled."""
    total = sum(counts.values())
    pooled_seen = pooled_due = 0.0
    statistic, cells = 0.0, 0
    for text in itertools.product(range(model.vocab_size), repeat=LENGTH):
        due = float(total)
        for i, token in enumerate(text):
            due *= model.law([*PREFIX, *text[:i]])[token]
        if due == 0:
            assert counts[text] == 0, f"{text} has no mass in the target and was emitted"
        elif due < 5:
            pooled_seen, pooled_due = pooled_seen + counts[text], pooled_due + due
        else:
            statistic, cells = statistic + (counts[text] - due) ** 2 / due, cells + 1
    if pooled_due > 0:
        statistic, cells = statistic + (pooled_seen - pooled_due) ** 2 / pooled_due, cells + 1
    return (statistic - (cells - 1)) / (2 * (cells - 1)) ** 0.5


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled"])
@pytest.mark.parametrize("drafter", MAKERS)
def test_first_five_tokens_follow_the_target(rule: str, drafter: str) -> None:
    assert chi_square(samples(MAKERS[drafter](), rule, 1500), TARGET) < 4.5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_first_five_tokens_of_a_heads_drafts_follow_the_target(rule: str) -> None:
    """Its laws are over two of the three tokens."""
    assert chi_square(samples(ToyEagle(3, 1), rule, 1000), TARGET) < 4.5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_drafter_that_lies_about_its_law_is_found(rule: str) -> None:
    counts = samples(Liar(blurred(TARGET, 5, 0.6)), rule, 1500)
    try:
        distance = chi_square(counts, TARGET)
    except AssertionError:
        return
    assert distance > 8
