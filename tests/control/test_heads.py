"""Heads among the alternatives: what is chosen changes, the tokens do not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from outrider import SamplingParams
from outrider.control import Controller
from outrider.drafters import Drafter, EarlyExitDrafter, NgramDrafter, NoDrafter
from outrider.models.hf import HuggingFaceTarget
from tests.drafters.heads import drafter_of, random_head, tiny_target
from tests.drafters.serving import RAGGED, TREES, served, texts
from tests.drafters.test_exit_head import random_exit_head
from tests.models.families import one_thread

single = pytest.fixture(scope="module", autouse=True)(one_thread)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=3)


@pytest.fixture(autouse=True)
def ticks(monkeypatch) -> None:
    """Every stage takes one second: drafts cost little, and what is chosen changes all the time."""
    count = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(count)))
    monkeypatch.setattr("outrider.engine.laps.time", clock)


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return tiny_target()


def head_drafter(kind: str, target: HuggingFaceTarget) -> Drafter:
    if kind == "early-exit":
        return EarlyExitDrafter(2, head=random_exit_head(), exit_threshold=0.5)
    return drafter_of(random_head(kind, target))


@pytest.mark.parametrize("trees", [None, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["eagle", "medusa", "mtp of two", "early-exit"])
def test_tokens_are_those_of_plain_decoding(kind: str, trees, target: HuggingFaceTarget) -> None:
    drafter = Controller([head_drafter(kind, target), NgramDrafter(1, 2)])
    requests = served(target, drafter, trees)
    for params in (GREEDY, SEEDED):
        assert texts(requests, params, RAGGED) == texts(served(target, NoDrafter()), params, RAGGED)
    assert drafter.report()[drafter.drafters[0].name]["rounds"] > 0


def test_several_heads_share_the_hidden_states_of_a_round(target: HuggingFaceTarget) -> None:
    drafter = Controller([head_drafter(kind, target) for kind in ("mtp", "medusa", "eagle")])
    requests = served(target, drafter)
    plain = texts(served(target, NoDrafter()), SEEDED, RAGGED)
    for _ in range(3):
        assert texts(requests, SEEDED, RAGGED) == plain
    assert drafter.report().keys() >= {"mtp", "medusa", "eagle"}
