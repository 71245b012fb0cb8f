"""The replay: an address is one choice, a race one point of a simplex, every path visited once."""

from __future__ import annotations

from fractions import Fraction

from outrider.certify.replay import Replay, every_path
from outrider.decoding import theory
from outrider.noise import STREAM_ACCEPT, STREAM_TARGET

RACE = STREAM_TARGET, 0, 0


def test_an_address_is_one_choice():
    """Met again, a uniform keeps to the interval it was left with."""
    replay = Replay([True], None)
    uniform = replay.uniform(STREAM_ACCEPT, 0, 0)
    assert uniform < Fraction(1, 2)
    assert replay.uniform(STREAM_ACCEPT, 0, 0) < Fraction(2, 3)
    assert not replay.uniform(STREAM_ACCEPT, 0, 0) * 2 < Fraction(0)
    assert replay.weight == Fraction(1, 2)
    assert replay.uniform(STREAM_ACCEPT, 0, 0) < Fraction(1, 8)
    assert replay.weight == Fraction(1, 8)
    assert replay.uniform(STREAM_ACCEPT, 1, 0) < Fraction(1, 2)
    assert replay.weight == Fraction(1, 16)


def test_paths_weigh_one_together():
    def three_uniforms(replay: Replay) -> int:
        tests = [replay.uniform(STREAM_ACCEPT, 0, i) < Fraction(i + 1, 5) for i in range(3)]
        return sum(tests)

    paths = list(every_path(three_uniforms))
    assert len(paths) == 8
    assert sum(replay.weight for replay, _ in paths) == 1
    assert sum(replay.weight * count for replay, count in paths) == Fraction(6, 5)


def test_a_race_draws_without_replacement():
    """The order of a race is Plackett and Luce's: each place drawn from what is left."""
    law = Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)
    orders: dict[tuple[int, ...], Fraction] = {}
    for replay, order in every_path(lambda replay: replay.race(RACE, law, 3)):
        orders[order] = orders.get(order, Fraction(0)) + replay.weight
    assert len(orders) == 6
    for (first, second, _), mass in orders.items():
        assert mass == law[first] * law[second] / (1 - law[first])


def test_two_races_on_one_noise_agree_as_the_closed_form_says():
    p = Fraction(1, 2), Fraction(1, 4), Fraction(1, 5), Fraction(1, 20)
    q = Fraction(1, 8), Fraction(1, 2), Fraction(0), Fraction(3, 8)

    def agree(replay: Replay) -> bool:
        return replay.race(RACE, p, 1) == replay.race(RACE, q, 1)

    kept = sum(replay.weight for replay, same in every_path(agree) if same)
    assert kept == theory.gumbel_acceptance(p, q)
    apart = [
        replay.weight
        for replay, same in every_path(
            lambda replay: replay.race(RACE, p, 1) == replay.race((STREAM_TARGET, 1, 0), q, 1)
        )
        if same
    ]
    assert sum(apart) == theory.match_acceptance(p, q)
