"""Costs and acceptance: lines through measured points, and counts that forget."""

from __future__ import annotations

import json

import numpy as np
import pytest

from outrider.control import Acceptance, Costs, DraftCost, ForwardCost, Prior
from outrider.control.acceptance import Counts
from outrider.control.book import ENOUGH, Book
from outrider.control.confidence import Confidence
from outrider.control.live import EVERY, LiveDraft
from outrider.drafters.stop import CLASSES, class_of
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


def test_chances_that_are_shared_go_with_those_they_are_thought_like() -> None:
    of = Counts(Acceptance())
    own = Counts(Acceptance(), like=of)
    for counts in (of, own):
        before = counts.first(3)
        assert counts.first(3) is before == counts.survival(8)[:3]
        of.saw(0, 3)
        assert counts.first(3) == counts.survival(8)[:3] != before


def test_counts_survive_json() -> None:
    seen = Acceptance().saw(2, 3).saw(0, 3)
    assert Acceptance.from_dict(json.loads(json.dumps(seen.as_dict()))) == seen
    assert seen.weight > 1.9
    with pytest.raises(InvalidConfig):
        Acceptance.from_dict({"kept": [1.0]})
    with pytest.raises(InvalidConfig, match="give one each"):
        Acceptance((1.0,), ())


def test_a_sure_drafter_that_is_often_wrong_ends_by_its_depth() -> None:
    """All its tokens have probability one, half of them are kept: chances multiply by level."""
    found, chance = Confidence(), np.random.default_rng(1)
    assert not found.settled
    for _ in range(300):
        kept = int(np.argmin([*(chance.random(6) < 0.5), False]))
        found.saw([1.0] * 6, kept)
    assert found.settled
    stop = found.stop(0.2)
    own = stop.chances[class_of(1.0)]
    assert own == pytest.approx(0.5, abs=0.12)
    # The token behind is kept as often as all are: what pays at 0.2 has to stand at 0.4.
    assert stop.least == pytest.approx(0.2 / own, rel=0.2)
    assert found.stop(0.4).least == pytest.approx(2 * stop.least)


def test_tokens_are_believed_as_they_turned_out() -> None:
    """Half sure is nearly always right, quite sure never: whatever was thought of that."""
    found = Confidence()
    for _ in range(200):
        found.saw([0.4, 0.4 * 0.95], 1)
    chances = found.stop(0.1).chances
    assert chances[class_of(0.4)] > 0.95 and chances[class_of(0.95)] < 0.05
    others = set(range(CLASSES)) - {class_of(0.4), class_of(0.95)}
    fresh = Confidence().stop(0.1).chances
    assert all(chances[own] == fresh[own] for own in others)
    assert list(fresh) == sorted(fresh), "a likelier token is thought likelier kept"


def test_what_stands_behind_a_token_that_was_not_kept_says_nothing() -> None:
    found, other = Confidence(), Confidence()
    for _ in range(20):
        found.saw([0.9, 0.5, 0.01], 0)
        other.saw([0.9], 0)
    assert found.stop(0.3) == other.stop(0.3)


def test_a_draft_that_underflows_is_counted() -> None:
    found = Confidence()
    found.saw([1e-200, 0.0, 0.0], 3)
    assert found.stop(0.1).chances[0] > Confidence().stop(0.1).chances[0]


@pytest.mark.parametrize(("start", "level"), [(0.0, 0.5), (0.3, 0.5), (2.0, 0.1)])
def test_a_round_and_its_levels_are_told_apart(start: float, level: float) -> None:
    """As far as 40 percent of what a level takes, all told; of one depth nothing is told apart."""
    live, now = LiveDraft("draft"), 0
    for _ in range(4):
        now += 1
        live.saw(1, 4, start + 4 * level, now)
    assert live.seconds(1, 1.0, now) == pytest.approx((0.0, start / 4 + level))
    for _ in range(3 * EVERY):
        for levels in (1, 2, 4):
            now += 1
            live.saw(1, levels, start + levels * level, now)
    before, each = live.seconds(1, 1.0, now)
    usual = live._levels[1].value
    assert each == pytest.approx(max(level, 0.4 * usual))
    assert before + 2 * each == pytest.approx(start + 2 * level), "the depth in the middle"


def test_levels_that_stand_the_wrong_way_round_cost_what_they_did() -> None:
    """A deep draft timed while nothing else ran, a short one beside a neighbour."""
    live, now = LiveDraft("draft"), 0
    for levels, seconds in ((1, 4.0), (4, 2.0)):
        for _ in range(4):
            now += 1
            live.saw(1, levels, seconds, now)
    before, each = live.seconds(1, 1.0, now + 1)
    assert before >= 0 and each > 0


def test_a_few_tokens_are_no_rate() -> None:
    book = Book()
    for _ in range(3):
        book.saw(book.cell(1), 0, 3)
    assert book.rate is None
    for _ in range(4):
        book.saw(book.cell(1), 0, 3)
    assert book.drafted >= ENOUGH and book.rate == 0.0
