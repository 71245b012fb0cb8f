"""Costs and acceptance: lines through measured points, and counts that forget."""

from __future__ import annotations

import json

import pytest

from outrider.control import Acceptance, Costs, DraftCost, ForwardCost, Prior
from outrider.errors import InvalidConfig

COSTS = Costs(
    (
        ForwardCost(1, 1, 100, 10.0),
        ForwardCost(1, 5, 100, 12.0),
        ForwardCost(1, 9, 100, 20.0),
        ForwardCost(1, 1, 1100, 14.0),
        ForwardCost(1, 5, 1100, 16.0),
        ForwardCost(8, 8, 100, 20.0),
        ForwardCost(8, 40, 100, 60.0),
    ),
    {"draft": DraftCost(0.5, 1.0, 0.25, 0.1), "ngram": DraftCost(0.01)},
    prompt_token_s=0.5,
    verify_text_s=0.2,
    verify_row_s=0.1,
)


def test_forwards_lie_on_lines_between_measured_points() -> None:
    assert COSTS.score_s(1, context=100) == 10.0
    assert COSTS.score_s(3, context=100) == pytest.approx(11.0)
    assert COSTS.score_s(3, context=600) == pytest.approx(13.0)
    assert COSTS.score_s(11, context=100) == pytest.approx(24.0)
    assert COSTS.score_s(24, texts=8, context=100) == pytest.approx(40.0)


def test_noise_makes_no_work_cheaper() -> None:
    falling = Costs((ForwardCost(1, 1, 0, 10.0), ForwardCost(1, 5, 0, 9.0)))
    assert falling.score_s(50) == 9.0
    assert Costs((ForwardCost(1, 4, 7, 3.0),)).score_s(64, 9, 1000) == 3.0


def test_a_round_adds_up() -> None:
    assert COSTS.round_s(context=100) == pytest.approx(10.2)
    # Four levels of the draft model, five rows, four rows to verify beside the text.
    assert COSTS.round_s("draft", levels=4, nodes=4, context=100) == pytest.approx(
        4.5 + 12.0 + 0.2 + 0.4
    )
    assert COSTS.draft_s("draft", 2, 6) == pytest.approx(0.5 + 2.0 + 1.0)
    assert COSTS.draft_s("draft", 0) == COSTS.draft_s("unheard of", 0) == 0.0
    with pytest.raises(InvalidConfig, match="'eagle' was not measured; known are draft, ngram"):
        COSTS.draft_s("eagle", 1)


def test_costs_survive_json() -> None:
    again = Costs.from_dict(json.loads(json.dumps(COSTS.as_dict())))
    assert again == COSTS
    for wrong in ({}, {"format": 99}, {**COSTS.as_dict(), "forwards": [{"rows": 1}]}):
        with pytest.raises(InvalidConfig):
            Costs.from_dict(wrong)
    with pytest.raises(InvalidConfig, match="measure at least one"):
        Costs(())


@pytest.mark.parametrize("seconds", [0, 0.0, -1.0, float("nan"), float("inf"), "a", None])
def test_what_is_no_time_is_no_cost(seconds) -> None:
    with pytest.raises(InvalidConfig, match="seconds"):
        ForwardCost(1, 1, 0, seconds)
    if seconds != 0:
        with pytest.raises(InvalidConfig, match="level_s"):
            DraftCost(level_s=seconds)
        with pytest.raises(InvalidConfig, match="verify_row_s"):
            Costs((ForwardCost(1, 1, 0, 1.0),), verify_row_s=seconds)
    with pytest.raises(InvalidConfig, match="texts=0"):
        ForwardCost(0, 1, 0, 1.0)


def test_rates_come_near_the_truth_and_follow_a_change() -> None:
    seen = Acceptance()
    for _ in range(60):
        seen = seen.saw(3, 4).saw(1, 4)
    first, second, third, fourth = seen.conditional(4)
    assert first > 0.9
    assert second == pytest.approx(0.5, abs=0.06)
    assert third > 0.9
    assert fourth < 0.1
    assert seen.expected_tokens(4) == pytest.approx(3.0, abs=0.2)
    for _ in range(40):
        seen = seen.saw(0, 4)
    assert seen.conditional(1)[0] < 0.2


def test_positions_not_seen_go_on_like_the_last_one() -> None:
    assert Acceptance().conditional(3) == [0.6] * 3
    seen = Acceptance(prior=Prior(0.5, 2.0)).saw(2, 2)
    assert seen.conditional(4)[1:] == [seen.conditional(2)[1]] * 3


def test_counts_survive_json() -> None:
    seen = Acceptance().saw(2, 3).saw(0, 3)
    assert Acceptance.from_dict(json.loads(json.dumps(seen.as_dict()))) == seen
    assert seen.weight > 1.9
    with pytest.raises(InvalidConfig):
        Acceptance.from_dict({"kept": [1.0]})
    with pytest.raises(InvalidConfig, match="give one each"):
        Acceptance((1.0,), ())
