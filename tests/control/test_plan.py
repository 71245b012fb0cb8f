"""The planner on toy models: what it foretells of a machine whose times are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import SamplingParams
from outrider.control import plan as plan_module
from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.control.plan import Candidate, Search, plan
from outrider.control.record import Asked, recorded
from outrider.control.trace import TracedText
from outrider.drafters import CombinedDrafter, ModelDrafter, NgramDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from tests.engine.toys import blurred, markov

WIDE = markov(9, 2, seed=1)
PROMPTS = [[1], [2, 3, 4], [0, 0, 1, 2, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEARCH = Search(("draft", "ngram"), depth=4, widths=(2,), batches=(1, 2), verify=0)


def served() -> Requests:
    draft = ModelDrafter(ProtocolTarget(blurred(WIDE, 2, 0.4)))
    drafter = CombinedDrafter([draft, NgramDrafter()])
    engine = Engine(ProtocolTarget(WIDE), drafter, Emitter(None))
    return Requests(engine, depth=4, end_tokens=frozenset())


def clocked(row_s: float, level_s: float, forward_s: float = 10.0):
    """`timed`, but on a machine where a forward, its rows and levels take what is said."""

    def timed(requests, asked, depths) -> tuple[list[TracedText], list[TracedText]]:
        few = replace(asked, sampling=replace(asked.sampling, max_tokens=12))
        texts = []
        for depth in depths:
            for text in recorded(requests, replace(few, depth=depth)):
                rounds = []
                for one in text.rounds:
                    nodes = len(one.trace.tokens)
                    draws = text.settings.drafter == "draft"
                    times = replace(
                        one.trace.times,
                        draft_s=level_s * nodes if draws else 0.0,
                        score_s=forward_s + row_s * one.trace.num_rows,
                        verify_s=0.0,
                        commit_s=0.0,
                    )
                    rounds.append(replace(one, trace=replace(one.trace, times=times)))
                texts.append(replace(text, rounds=tuple(rounds)))
        return texts, texts

    return timed


def test_where_rows_are_cheap_the_best_is_deep_or_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "timed", clocked(0.01, 0.1))
    found = plan(served(), Asked(PROMPTS, GREEDY, 0), SEARCH)
    for batch in (1, 2):
        own = found.of(batch)
        assert [one.speedup.mean for one in own] == sorted(
            (one.speedup.mean for one in own), reverse=True
        )
        best, plain = found.best(batch), own[-1] if own[-1].candidate.depth == 0 else None
        assert best.candidate.drafter == "draft" and best.speedup.low > 1.2
        assert best.candidate.depth >= 2
        # Never above what no drafting could pass: every level kept.
        assert all(one.tokens_per_round <= 1 + one.candidate.depth for one in own)
        assert plain is None or plain.speedup.mean == 1
    trees = [one for one in found.of(1) if one.candidate.nodes or one.candidate.shape]
    chains = {
        one.candidate.depth: one
        for one in found.of(1)
        if one.candidate.drafter == "draft" and not one.candidate.trees
    }
    assert trees and set(chains) == {0, 1, 2, 3, 4} - {0}
    assert any(one.tokens_per_round > chains[one.candidate.depth].tokens_per_round for one in trees)
    assert found.acceptance["draft"] == tuple(sorted(found.acceptance["draft"], reverse=True))
    for one in found.break_even:
        assert one.acceptance is not None and one.acceptance < 0.1


def test_each_speed_up_is_over_the_plain_rounds_timed_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One drafter is timed while the machine is at half its speed: its plain rounds are, too."""

    def timed(requests, asked, depths):
        slower = 20.0 if asked.drafter == "ngram" else 10.0
        return clocked(0.01, 0.1, forward_s=slower)(requests, asked, depths)

    monkeypatch.setattr(plan_module, "timed", timed)
    found = plan(served(), Asked(PROMPTS, GREEDY, 0), replace(SEARCH, batches=(1,)))
    plain = {one.candidate.drafter: one.plain_tokens_per_s for one in found.of(1)}
    assert plain["draft"] == pytest.approx(plain["none"])
    assert plain["ngram"] == pytest.approx(plain["none"] / 2, rel=0.01)
    for one in found.of(1):
        over = one.tokens_per_s.mean / one.plain_tokens_per_s
        assert over == pytest.approx(one.speedup.mean)


def test_a_level_and_a_node_are_one() -> None:
    shape = Candidate("draft", "greedy", 1, 1, shape=(0, 0))
    assert str(shape) == "draft, 1 level, a shape of 2 nodes"
    assert str(Candidate("draft", "greedy", 1, 2, 3, 1)) == "draft, 2 levels, 1 node"


def test_where_nothing_pays_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "timed", clocked(1000.0, 100.0))
    found = plan(served(), Asked(PROMPTS, GREEDY, 0), SEARCH)
    for batch in (1, 2):
        assert found.best(batch).candidate == Candidate("none", "greedy", batch)
    for one in found.break_even:
        # Each row costs what a step does, and the draft model beside that.
        assert one.acceptance is None if one.drafter == "draft" else one.acceptance > 0.97
        assert one.found < 0.9


def test_the_acceptance_that_would_pay() -> None:
    """A token more costs 18 where a step costs 20, so 9 of 10 must be kept."""
    forwards = tuple(ForwardCost(1, rows, 0, 10.0 + 10.0 * rows) for rows in (1, 2, 3))
    costs = Costs(forwards, {"draft": DraftCost(level_s=8.0), "slow": DraftCost(level_s=30.0)})
    assert plan_module._needed(costs, "draft", 1, 2) == pytest.approx(0.9)
    assert plan_module._needed(costs, "slow", 1, 2) is None


def test_the_best_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "timed", clocked(0.01, 0.1))
    requests, said = served(), []
    search = replace(SEARCH, batches=(1,), verify=2, widths=())
    found = plan(requests, Asked(PROMPTS, SamplingParams(max_tokens=12), 0), search, said.append)
    assert len(found.verified) == 2
    assert [one.prediction for one in found.verified] == found.of(1)[:2]
    for one in found.verified:
        assert one.tokens_per_s > 0 and one.speedup.low <= one.speedup.mean <= one.speedup.high
        assert one.prediction.candidate.rule == "block"
    assert said == [
        "1 of 5: draft, guesses behind every token",
        "2 of 5: draft, what rounds cost, 1 at a time",
        "3 of 5: ngram, guesses behind every token",
        "4 of 5: ngram, what rounds cost, 1 at a time",
        "5 of 5: running the best 2, 1 at a time",
    ]
    assert requests.engine.trees is None


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"drafters": ()}, "one at least"),
        ({"drafters": ("none",)}, "looked at anyway"),
        ({"depth": 0}, "depth=0"),
        ({"widths": (1,)}, "widths=1"),
        ({"batches": (0,)}, "batches=0"),
        ({"verify": -1}, "verify=-1"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(search, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        Search(**{"drafters": ("draft",), **search})


def test_no_prompt_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="no prompt"):
        plan(served(), Asked([], GREEDY, 0), SEARCH)
