"""Exact enumeration of whole runs: right rules have total variation 0, every broken one more."""

from __future__ import annotations

from fractions import Fraction

import pytest

from outrider.certify import pairs
from outrider.certify.certificate import catch, certify, wrong_schemes
from outrider.certify.enumerate import (
    Scheme,
    TooManyLeaves,
    TreeScheme,
    distance,
    first_kept,
    output_law,
    target_law,
)
from outrider.certify.growth import STYLES, Drafting, raced, static
from outrider.certify.reference import IN_LAW
from outrider.certify.reference_trees import DraftedTree, coupled, recursive, traversal
from outrider.certify.schemes import Certifiable, certifiables
from outrider.certify.wrong import Wrong
from outrider.decoding import LOSSY, RULES, theory

RIGHT = certifiables()
BROKEN = wrong_schemes()
NUM_PAIRS = 2


def named(thing: Certifiable) -> str:
    return f"{thing.rule}, {thing.drafter}, {thing.tree}"


@pytest.mark.parametrize("thing", RIGHT, ids=named)
def test_whole_runs_have_the_right_law(thing: Certifiable):
    found = certify(thing, NUM_PAIRS, max_leaves=500)
    assert found.max_tv == 0
    assert found.max_other == 0
    assert found.as_in_theory is not False
    assert found.cases == NUM_PAIRS
    assert found.exact


def test_every_rule_is_certified():
    rules = {thing.rule for thing in RIGHT}
    assert rules == {
        *("greedy", "match", "token", "block", "coupled", "recursive", "hybrid", "traversal"),
        *("hybrid-traversal", "kseq", "gbv", "lenience", "typical-acceptance", "threshold"),
        "mixture",
    }
    assert set(RULES) | set(LOSSY) <= rules
    assert len({named(thing) for thing in RIGHT}) == len(RIGHT)
    assert max(thing.depth for thing in RIGHT) == 3


@pytest.mark.parametrize("wrong", BROKEN, ids=lambda wrong: wrong.name)
def test_a_broken_variant_is_caught(wrong: Wrong):
    assert catch(wrong).found


@pytest.mark.parametrize("wrong", BROKEN, ids=lambda wrong: wrong.name)
def test_the_pair_of_a_broken_variant_is_no_excuse(wrong: Wrong):
    """On the same pair the right rule is exact."""
    pair = wrong.pair
    law = output_law(wrong.right, pair.target, pair.draft, pair.depth, pair.length)
    assert distance(law.probs, target_law(pair.target, pair.length)) == 0


def test_the_battery_is_large_and_names_what_was_met():
    names = [wrong.name for wrong in BROKEN]
    assert len(names) == len(set(names)) >= 24
    rules = {thing.rule for thing in RIGHT} - {"greedy", *LOSSY}
    assert {wrong.rule for wrong in BROKEN} == rules
    met = {wrong.reported for wrong in BROKEN}
    assert met >= {"transformers#47932", "vLLM#47386", "DeepSpec#31", "SGLang#33643"}


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_a_strict_test_is_exact_on_the_real_grid(rule: str):
    """Uniforms of 24 bits, as production has them, on a pair with a forbidden token."""
    wrong = next(w for w in BROKEN if w.scheme.grid is not None and w.rule == rule)
    scheme = Scheme("strict", IN_LAW[rule], grid=wrong.scheme.grid)
    pair = wrong.pair
    law = output_law(scheme, pair.target, pair.draft, pair.depth, pair.length)
    assert distance(law.probs, target_law(pair.target, pair.length)) == 0


def test_the_uncapped_test_is_off_by_a_ninth():
    """On Sun's pair: more is kept than any lossless rule may keep, and the law is biased."""
    wrong = next(w for w in BROKEN if w.scheme.name == "last test uncapped")
    for depth, kept, tv in ((2, "12/9", "1/9"), (3, "16/9", "8/81")):
        pair = pairs.fixed("sun", [1, 2], [2, 1], depth, depth + 1)
        law = output_law(wrong.scheme, pair.target, pair.draft, depth, depth + 1)
        assert distance(law.probs, target_law(pair.target, depth + 1)) == Fraction(tv)
        assert law.first_kept == Fraction(kept)
        assert law.first_kept > theory.block_expected_accepted(pair.target, pair.draft, depth)


def test_a_ratio_upside_down_is_nearly_the_draft():
    """The closed form of the rule as read: (0.616, 0.306, 0.078)."""
    wrong = next(w for w in BROKEN if w.scheme.name.startswith("q(x) / p("))
    pair = pairs.fixed("reversed", [1, 6, 3], [6, 3, 1], depth=1, length=2)
    law = output_law(wrong.scheme, pair.target, pair.draft, 1, 2)
    first = [sum(m for text, m in law.probs.items() if text[0] == x) for x in range(3)]
    assert first == [Fraction(616, 1000), Fraction(306, 1000), Fraction(78, 1000)]


def test_several_rounds_are_enumerated():
    pair = pairs.toy()
    law = output_law(Scheme("token", IN_LAW["token"]), pair.target, pair.draft, 2, 4)
    assert law.most_rounds == 4
    assert sum(law.probs.values()) == 1
    with pytest.raises(TooManyLeaves):
        output_law(Scheme("token", IN_LAW["token"]), pair.target, pair.draft, 2, 4, max_leaves=10)


@pytest.mark.parametrize("seed", range(3))
def test_traversal_is_block_on_chains(seed: int):
    """Not only in law: each text and each count of kept tokens has the same probability."""
    pair = pairs.tree_pair(seed, 6, 3, 4)
    chain = TreeScheme("chain", static((0, 1, 2), STYLES["with replacement"]), traversal)
    laws = [
        output_law(scheme, pair.target, pair.draft, 3, 4)
        for scheme in (chain, Scheme("block", IN_LAW["block"]))
    ]
    assert laws[0] == laws[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_coupled_keeps_what_quadrature_says(count: int):
    """The race of K children and the target on one noise, exactly, and by an integral."""
    for seed in (0, 3, 5):
        pair = pairs.tree_pair(seed, 2, 1, 2)
        kept = first_kept(
            TreeScheme("coupled", raced((0,) * count), coupled), pair.target, pair.draft, 1
        )
        expected = theory.gumbel_top_acceptance(pair.target(()), pair.draft(()), count)
        assert float(kept) == pytest.approx(expected, abs=1e-9)


def test_what_was_drawn_may_not_decide_what_is_kept():
    """A second child hung on for the first one's value is exact, one taken off for its own not."""
    pair = pairs.fixed("wide", [4, 3, 2, 1], [1, 2, 3, 4], depth=1, length=2)
    pull = STYLES["without replacement"]

    def grown(drafting: Drafting) -> DraftedTree:
        tree = static((0, 0), pull)(drafting)
        likely = bool(tree.tokens) and tree.tokens[0] >= 2
        return static((0,) if likely else (0, 0), pull)(drafting)

    def pruned(drafting: Drafting) -> DraftedTree:
        tree = static((0, 0), pull)(drafting)
        likely = bool(tree.tokens) and tree.tokens[1] >= 2
        return static((0, 0) if likely else (0,), pull)(drafting)

    tv = [
        distance(
            output_law(TreeScheme("", grow, recursive), pair.target, pair.draft, 1, 2).probs,
            target_law(pair.target, 2),
        )
        for grow in (grown, pruned)
    ]
    assert tv[0] == 0
    assert tv[1] > 0


def test_random_pairs_are_what_they_promise():
    some = [pairs.random_pair(seed) for seed in range(60)]
    assert {pair.vocab_size for pair in some} >= {2, 3, 4, 5, 6}
    assert {pair.depth for pair in some} == {1, 2, 3}
    small = [pairs.tree_pair(seed, 3 + seed % 4, 2, 3) for seed in range(60)]
    assert {pair.vocab_size for pair in small} == {2, 3, 4}
    for pairs_ in (some, small):
        rows = [
            law(prefix)
            for pair in pairs_
            for law in (pair.target, pair.draft)
            for prefix in ((), (0,), (1, 0))
        ]
        assert all(sum(row) == 1 for row in rows)
        assert any(0 in row for row in rows)
        assert any(1 in row for row in rows)
        assert any(pair.target((0,)) == pair.draft((0,)) for pair in pairs_)
        assert any(pair.target((0, 1)) != pair.target((1, 1)) for pair in pairs_)
