"""Requests with top_k through the engine: laws on few tokens, the same texts, the same law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider import SamplingParams
from outrider.decoding import Law, TargetFew, laws
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests, group
from outrider.engine.draws import GroupDraws
from outrider.models.protocol import ProtocolTarget
from outrider.models.tabular import MarkovModel
from outrider.types import Request
from tests.decoding.test_few import nothing
from tests.engine.test_law import LENGTH, PREFIX, chi_square
from tests.engine.toys import blurred, markov

SMALL = markov(6, 2, seed=4)
BIG = markov(60, 1, seed=5)


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of any width are wide, and here is noted how many were worked on as few tokens."""
    monkeypatch.setattr(laws, "_WIDE", 1)
    monkeypatch.setattr(laws, "_BLOCK", 1)
    monkeypatch.setattr(laws, "_TIED", 1)
    seen: list[int] = []

    def noted(law: Law, shape: tuple[int, int, int]) -> TargetFew:
        seen.append(shape[0] * shape[1])
        return TargetFew(law, shape)

    monkeypatch.setattr(group, "TargetFew", noted)
    return seen


def texts_of(
    model: MarkovModel,
    rule: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
) -> list[tuple[int, ...]]:
    """What is written where a like model drafts three tokens a round."""
    drafter = ModelDrafter(ProtocolTarget(blurred(model, 3, 0.5)))
    engine = Engine(ProtocolTarget(model), drafter, Emitter(None), max_texts=500)
    requests = Requests(engine, depth=3, end_tokens=frozenset())
    pairs = zip(prompts, params, strict=True)
    asked = [Request(tuple(prompt), own, rule=rule) for prompt, own in pairs]
    return [completion.token_ids for completion in requests.complete(asked)]


def cut(model: MarkovModel, k: int) -> MarkovModel:
    """The law of its k likeliest tokens."""

    def best(rows: np.ndarray) -> np.ndarray:
        least = np.sort(rows, -1)[..., -k, None]
        return np.where(rows >= least, rows, 0.0)

    return MarkovModel(best(model.init), best(model.rows))


def distance(rule: str, count: int) -> float:
    params = [SamplingParams(top_k=3, seed=seed, max_tokens=LENGTH) for seed in range(count)]
    texts = texts_of(SMALL, rule, [PREFIX] * count, params)
    return chi_square(Counter(texts), cut(SMALL, 3))


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "match"])
def test_first_tokens_follow_the_targets_likeliest(rule: str, used: list[int]):
    assert distance(rule, 2000) < 4.5
    assert max(used) > 100


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_residual_that_leaves_the_draft_in_is_found(rule: str, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(Law, "at", nothing)
    assert distance(rule, 2000) > 8


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "match"])
def test_other_laws_of_few_tokens_are_found(rule: str, monkeypatch):
    """The negative control: all that is left is as likely as another."""

    def even(logits, k, controls):
        law, whole = of_few(logits, k, controls)
        some = (law.probs > 0).to(law.probs)
        return Law(some / some.sum(-1, keepdim=True), law.ids), whole

    of_few = laws._of_equally_few
    monkeypatch.setattr(laws, "_of_equally_few", even)
    assert distance(rule, 2000) > 8


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "match"])
def test_texts_are_those_of_whole_rows(rule: str, used: list[int], monkeypatch):
    """Texts of one top_k and of several; one without, beside them, has all worked on whole."""
    prompts = [[1], [2, 3, 4], [0, 0, 1, 2, 1], [6, 5], [3]]
    for few, ks in ((True, [4] * 5), (True, [4, 9, 4, 2, 25]), (False, [4, 0, 4, 2, 25])):
        texts: list[list[tuple[int, ...]]] = []
        for wide in (1, 1 << 20):
            monkeypatch.setattr(laws, "_WIDE", wide)
            used.clear()
            params = [
                SamplingParams(temperature=0.9, top_k=k, top_p=0.95, seed=7, max_tokens=30)
                for k in ks
            ]
            texts.append(texts_of(BIG, rule, prompts, params))
            # The one without top_k may end first, and leave the others alone.
            assert bool(used) == (wide == 1) or not few
        assert texts[0] == texts[1]


def test_laws_of_many_forms_are_joined_where_they_are():
    """Laws on a device other than the processor, of three tokens, of all and of none."""
    draws = GroupDraws.__new__(GroupDraws)
    whole, part = torch.empty(60, device="meta"), torch.empty(3, device="meta")
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    draws._laws = [[(part, ids), (whole, None)], [(part, ids)], []]
    law = draws._stacked(2)
    assert law.probs.device.type == "meta" and law.probs.shape == (6, 60)
