"""Exact enumeration of whole runs: right rules have total variation 0, every broken one more."""

from __future__ import annotations

from fractions import Fraction

import pytest

from outrider.certify import enumerate as exact
from outrider.certify import pairs, proof
from outrider.certify.enumerate import Replay, Scheme, distance, output_law, target_law
from outrider.certify.reference import IN_LAW
from outrider.certify.wrong import Wrong, wrong_schemes
from outrider.noise import STREAM_ACCEPT

BROKEN = wrong_schemes()


@pytest.mark.parametrize("rule", list(IN_LAW))
def test_whole_runs_have_the_target_law(rule: str):
    found = proof.enumerate_rule(rule, 3)
    assert found.max_tv == 0
    assert found.kept_as_in_theory
    assert (
        found.sun_kept
        == {"match": Fraction(52, 81), "token": Fraction(10, 9), "block": Fraction(11, 9)}[rule]
    )


@pytest.mark.parametrize("wrong", BROKEN, ids=lambda wrong: wrong.name)
def test_a_broken_variant_is_caught(wrong: Wrong):
    assert proof.catch(wrong).found


@pytest.mark.parametrize(
    "wrong", [w for w in BROKEN if w.scheme.grid is None], ids=lambda w: w.name
)
def test_the_pair_of_a_broken_variant_is_no_excuse(wrong: Wrong):
    """On the same pair the right rule is exact."""
    pair = wrong.pair
    law = output_law(
        Scheme("right", IN_LAW[wrong.rule]), pair.target, pair.draft, pair.depth, pair.length
    )
    assert distance(law.probs, target_law(pair.target, pair.length)) == 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_strict_test_is_exact_on_the_real_grid(rule: str):
    """Uniforms of 24 bits, as production has them, on a pair with a forbidden token."""
    pair = next(w.pair for w in BROKEN if w.scheme.grid is not None)
    scheme = Scheme("strict", IN_LAW[rule], grid=2**24)
    law = output_law(scheme, pair.target, pair.draft, pair.depth, pair.length)
    assert distance(law.probs, target_law(pair.target, pair.length)) == 0


def test_at_least_three_broken_variants_per_rule():
    for rule in IN_LAW:
        assert sum(wrong.rule == rule for wrong in BROKEN) >= 3


def test_the_uncapped_test_is_off_by_a_ninth():
    """The published finding on Sun's pair: more kept than any valid rule may keep, and biased."""
    wrong = next(w for w in BROKEN if w.scheme.name == "last test uncapped")
    pair = pairs.fixed("sun", [1, 2], [2, 1], depth=2, length=3)
    law = output_law(wrong.scheme, pair.target, pair.draft, 2, 3)
    assert distance(law.probs, target_law(pair.target, 3)) == Fraction(1, 9)
    assert law.first_kept == Fraction(12, 9)


def test_several_rounds_are_enumerated():
    pair = pairs.toy()
    law = output_law(Scheme("token", IN_LAW["token"]), pair.target, pair.draft, 2, 4)
    assert law.most_rounds == 4
    assert sum(law.probs.values()) == 1
    with pytest.raises(exact.TooManyLeaves):
        output_law(Scheme("token", IN_LAW["token"]), pair.target, pair.draft, 2, 4, max_leaves=10)


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


def test_random_pairs_are_what_they_promise():
    some = [pairs.random_pair(seed) for seed in range(60)]
    assert {pair.vocab_size for pair in some} >= {2, 3, 4, 5, 6}
    assert {pair.depth for pair in some} == {1, 2, 3}
    rows = [
        law(prefix)
        for pair in some
        for law in (pair.target, pair.draft)
        for prefix in ((), (0,), (1, 0))
    ]
    assert all(sum(row) == 1 for row in rows)
    assert any(0 in row for row in rows)
    assert any(1 in row for row in rows)
    assert any(pair.target((0,)) == pair.draft((0,)) for pair in some)
    assert any(pair.target((0, 1)) != pair.target((1, 1)) for pair in some)


def test_the_page_tells_a_failure():
    good = proof.Proof(enumerated=[proof.enumerate_rule("token", 1)])
    assert good.ok
    assert "everything holds" in proof.as_markdown(good, "scripts/prove")
    assert good.as_dict()["rules"][0]["max_tv"] == "0"
    bad = proof.Proof(wrong=[proof.Caught("token: let through", "0", found=False)])
    assert not bad.ok
    assert "SOMETHING FAILED" in proof.as_markdown(bad, "scripts/prove")
