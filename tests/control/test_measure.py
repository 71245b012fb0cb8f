"""Costs measured by the engine come out as they were put in, and are kept for their owner."""

from __future__ import annotations

import stat

import pytest

from outrider.control.measure import facts_of, measure_costs
from outrider.control.stored import place_of, store, stored
from outrider.drafters import NgramDrafter
from outrider.errors import InvalidConfig
from tests.control.clocked import World


def test_what_was_put_in_comes_out(monkeypatch) -> None:
    world = World(monkeypatch, target_s=lambda rows: 1.0 + 0.05 * rows, draft_s=lambda rows: 0.125)
    prompts = [[1, 2, 3] * 22, [1, 2, 4] * 22]
    costs = measure_costs(
        world.engine.target,
        [world.model, NgramDrafter()],
        prompts,
        depths=(1, 4),
        batches=(1, 2),
        tokens=10,
        clock=world.clock,
        limit_s=1e9,
    )
    context = costs.forwards[0].context
    for rows in (1, 2, 5):
        assert costs.score_s(rows, 1, context) == pytest.approx(1.0 + 0.05 * rows)
    assert costs.drafts["draft"].level_s == pytest.approx(0.125)
    assert costs.drafts["draft"].node_s == costs.drafts["ngram"].level_s == 0.0
    assert costs.prompt_token_s == pytest.approx(1.05 / 66 + 0.05, rel=0.2)
    seen = world.clock.now
    measure_costs(world.engine.target, [world.model], prompts, limit_s=0.0, clock=world.clock)
    assert world.clock.now - seen < 40
    with pytest.raises(InvalidConfig, match="no prompts"):
        measure_costs(world.engine.target, [], [])


def test_costs_are_kept_for_their_owner(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    world = World(monkeypatch)
    facts = facts_of("model", {"dtype": "float32"}, [world.model])
    assert stored(facts) is None
    costs = measure_costs(world.engine.target, [world.model], [[1, 2, 3]], tokens=4, depths=(1,))
    place = store(costs, facts)
    assert stored(facts) == costs and place == place_of(facts)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stored({**facts, "dtype": "bfloat16"}) is None
    place.chmod(0o666)
    assert stored(facts) is None
    place.chmod(0o600)
    place.write_text("{}")
    assert stored(facts) is None
