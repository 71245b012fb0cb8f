"""One cell: the order of rounds, who rests meanwhile, and what is not timed."""

from __future__ import annotations

import pytest

from benchmarks.arena.contest import BusyMachine, rounds, warm
from outrider.errors import ModelError
from tests.benchmarks.arenas import Toy, job, others


def ignored(_: str) -> None: ...


def test_contenders_run_forwards_and_backwards_in_turn():
    log: list[tuple[str, str]] = []
    toys = [Toy(name, log) for name in "abc"]
    found = list(rounds(toys, {n: job(n) for n in range(4)}, others(), ignored))
    ran = "".join(name for name, what in log if what == "run")
    assert ran == "abc" + "cba" + "abc" + "cba"
    assert [one.number for one in found] == [0, 1, 2, 3]
    assert all(set(one.found) == set("abc") for one in found)


def test_the_others_rest_while_one_runs():
    log: list[tuple[str, str]] = []
    list(rounds([Toy(name, log) for name in "ab"], {0: job()}, others(), ignored))
    assert log == [
        ("a", "wake"), ("a", "run"), ("a", "rest"), ("b", "wake"), ("b", "run"), ("b", "rest"),
    ]  # fmt: skip


def test_one_rests_also_after_it_failed():
    log: list[tuple[str, str]] = []
    with pytest.raises(KeyboardInterrupt):
        list(rounds([Toy("a", log, dies_at=0)], {0: job()}, others(), ignored))
    assert log[-1] == ("a", "rest")


def test_a_disturbed_round_is_taken_anew():
    toy = Toy("a")
    found = list(rounds([toy], {0: job()}, others(0.5, 0.2, 0.01), ignored))
    assert [what for _, what in toy.log].count("run") == 3
    assert [one.others for one in found] == [0.01]


def test_a_machine_that_stays_busy_is_refused():
    with pytest.raises(BusyMachine, match="50%"):
        list(rounds([Toy("a")], {0: job()}, others(0.5, 0.5, 0.5), ignored))


def test_a_machine_that_does_not_tell_is_timed():
    assert len(list(rounds([Toy("a")], {0: job()}, others(None), ignored))) == 1


def test_who_refuses_is_named_and_the_others_go_on():
    warmed = warm([Toy("a"), Toy("b", refuses=True)], job())
    assert [toy.name for toy in warmed.able] == ["a"]
    assert warmed.refused == {"b": "one text at a time"}
    assert warmed.failed == {}


def test_unequal_work_is_not_compared():
    warmed = warm([Toy("a", short=True)], job())
    assert "unequal work" in warmed.failed["a"]
    with pytest.raises(ModelError, match="unequal work"):
        list(rounds([Toy("a", short=True)], {0: job()}, others(), ignored))
