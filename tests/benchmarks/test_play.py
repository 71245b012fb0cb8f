"""An arena: it goes on where it was killed, skips who is missing, and packs heats into memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arena.engines import ANCHOR, ENGINES, Arm
from benchmarks.arena.grid import Cell, Stage, cells
from benchmarks.arena.home import Home
from benchmarks.arena.play import EVERYWHERE, Arena, Settings, heats, prompts
from benchmarks.arena.record import Record
from outrider.errors import InvalidConfig
from tests.benchmarks.arenas import Toy

STAGE = Stage("small")
CELLS = [Cell(STAGE, 0.0, 1, 8), Cell(STAGE, 0.0, 2, 8)]
NAMES = ("outrider/none", "outrider/draft")


class Staged(Arena):
    """An arena of toys instead of processes."""

    toys: dict[str, Toy]

    def _started(self, stage: Stage, heat: Any, ends: Any) -> Any:
        return [TOYS[str(arm)] for arm in heat], []


TOYS: dict[str, Toy] = {}


@pytest.fixture
def toys():
    log: list[tuple[str, str]] = []
    TOYS.update({name: Toy(name, log) for name in NAMES})
    yield TOYS
    TOYS.clear()


def arena(path: Path, **changed: Any) -> Staged:
    settings = Settings(**{"arms": NAMES, "pairs": 4, "tokens": 4, **changed})
    record = Record.opened(path / "arena.json", {"pairs": settings.pairs}, "a command")
    quiet = {"prepare": lambda _: None, "tell": lambda _: None, "quiet": 1.0}
    return Staged(Home(path), settings, record, list(range(100)), **quiet)


def on_disk(path: Path) -> dict[str, Any]:
    return json.loads((path / "arena.json").read_text())


def test_every_cell_gets_its_rounds(tmp_path, toys):
    assert arena(tmp_path).play(CELLS)
    known = on_disk(tmp_path)["cells"]
    assert list(known) == [str(cell) for cell in CELLS]
    for found in known.values():
        assert sorted(found["0"]) == ["0", "1", "2", "3"]
        assert all(set(one["found"]) == set(NAMES) for one in found["0"].values())


def test_a_killed_arena_goes_on_where_it_was(tmp_path, toys):
    # Round 2 of the first cell: one arm has run, the other is killed.
    toys["outrider/draft"].dies_at = 2000
    with pytest.raises(KeyboardInterrupt):
        arena(tmp_path).play(CELLS)
    before = on_disk(tmp_path)["cells"][str(CELLS[0])]["0"]
    assert sorted(before) == ["0", "1"]
    toys["outrider/draft"].dies_at = None
    toys["outrider/none"].log.clear()
    again = arena(tmp_path)
    assert again.play(CELLS)
    after = on_disk(tmp_path)
    assert {n: after["cells"][str(CELLS[0])]["0"][n] for n in before} == before
    assert sorted(after["cells"][str(CELLS[0])]["0"]) == ["0", "1", "2", "3"]
    # Two missing rounds and four of the other cell, a warm-up each, by two arms.
    assert [what for _, what in toys["outrider/none"].log].count("run") == 2 * (2 + 4 + 2)
    assert len(after["commands"]) == 2
    assert again.play(CELLS), "nothing is left to do"


def test_other_settings_do_not_mix(tmp_path, toys):
    arena(tmp_path).play(CELLS)
    with pytest.raises(InvalidConfig, match="pairs"):
        arena(tmp_path, pairs=6)


def test_a_missing_engine_is_skipped_by_name(tmp_path, toys):
    one = arena(tmp_path, arms=(*NAMES, "vllm/plain"))
    assert one.play(CELLS)
    one.record.save()
    known = on_disk(tmp_path)
    assert "not installed" in known["skipped"][EVERYWHERE]["vllm/plain"]
    assert all(
        set(one["found"]) == set(NAMES) for one in known["cells"][str(CELLS[0])]["0"].values()
    )


def test_who_failed_takes_no_further_part(tmp_path, toys):
    toys["outrider/draft"].short = True
    one = arena(tmp_path)
    assert one.play(CELLS)
    assert [what for _, what in toys["outrider/draft"].log if what == "run"]
    ran = [name for name, what in toys["outrider/none"].log if what == "run"]
    assert ran.count("outrider/draft") == 1
    assert "unequal work" in one.record.skipped[str(STAGE)]["outrider/draft"]


def test_no_round_begins_after_the_time(tmp_path, toys):
    one = arena(tmp_path)
    late = Staged(
        one.home, one.settings, one.record, one.texts, one.prepare, one.tell, 0.0, False, 1.0
    )
    assert not late.play(CELLS)
    assert late.record.cells == {}


def test_heats_can_be_left_for_later(tmp_path, toys):
    one = arena(tmp_path)
    parts = one.home, one.settings, one.record, one.texts, one.prepare, one.tell
    assert Staged(*parts, None, False, 1.0, (1,)).play(CELLS)
    assert one.record.cells == {}
    assert Staged(*parts, None, False, 1.0, (0,)).play(CELLS)
    assert list(one.record.cells) == [str(cell) for cell in CELLS]


def test_an_unknown_arm_is_an_error():
    with pytest.raises(InvalidConfig, match="outrider/nothing"):
        Settings(("outrider/nothing",))


def test_heats_hold_what_fits_and_the_anchor():
    arms = [Arm(name, arm) for name, engine in ENGINES.items() for arm in engine.core]
    few = heats(arms, 2_000_000_000, 10.0)
    assert len(few) > 1
    assert all(ANCHOR in heat for heat in few)
    assert [arm for heat in few for arm in heat if arm != ANCHOR] == [
        a for a in arms if a != ANCHOR
    ]
    assert heats(arms, 2_000_000_000, 1000.0) == [arms]


def test_no_two_rounds_share_a_prompt():
    texts = list(range(1000))
    found = [prompts(texts, 8, 4, number, 5) for number in range(5)]
    assert len({prompt for group in found for prompt in group}) == 20
    assert all(len(prompt) == 8 for group in found for prompt in group)


def test_imposed_acceptance_is_greedy_and_on_random_weights_alone():
    grid = cells(("half", "qwen3-0.6b"), (0.0, 0.8), (1, 4), (128,), (0.7, 0.9), (0.1, 0.2))
    natural = [cell for cell in grid if cell.stage.checkpoint == "half"]
    imposed = [cell for cell in grid if cell.stage.checkpoint != "half"]
    assert len(natural) == 4 and all(cell.stage.alpha is None for cell in natural)
    assert len(imposed) == 8 and {cell.temperature for cell in imposed} == {0.0}
    assert {cell.stage.alpha for cell in imposed} == {0.7, 0.9}


def test_a_record_begun_before_there_was_a_choice_of_dtype_goes_on(tmp_path: Path) -> None:
    asked = {"pairs": 3, "dtype": "float32"}
    record = Record.opened(tmp_path / "arena.json", {"pairs": 3}, "a command")
    record.save()
    assert Record.opened(tmp_path / "arena.json", asked, "again").settings == asked
    with pytest.raises(InvalidConfig, match="another dtype of the settings"):
        Record.opened(tmp_path / "arena.json", {**asked, "dtype": "bfloat16"}, "in another")
