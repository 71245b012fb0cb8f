"""The linear program over all verifiers: published values on chains, a roof over every rule."""

from __future__ import annotations

import sys
from fractions import Fraction

import pytest

from outrider.certify import pairs
from outrider.certify.enumerate import first_kept, tree_law
from outrider.certify.growth import STYLES, paths, static
from outrider.certify.linear import optimum
from outrider.certify.schemes import certifiables
from outrider.certify.wrong import wrong_chains
from outrider.decoding import theory
from outrider.errors import MissingExtra

WITH, WITHOUT = STYLES["with replacement"], STYLES["without replacement"]


@pytest.mark.parametrize(("depth", "value"), [(1, "2/3"), (2, "11/9"), (3, "5/3")])
def test_block_is_the_best_on_chains(depth: int, value: str):
    """Sun et al. 2025, theorem 2, on their pair."""
    pair = pairs.fixed("sun", [1, 2], [2, 1], depth, depth + 1)
    trees = tree_law(static(tuple(range(depth)), WITH), pair.draft, depth)
    assert theory.block_expected_accepted(pair.target, pair.draft, depth) == Fraction(value)
    assert optimum(trees, pair.target, depth) == pytest.approx(float(Fraction(value)), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_block_is_the_best_on_laws_that_depend_on_the_text(seed: int):
    pair = pairs.tree_pair(seed, 2, 2, 3)
    trees = tree_law(static((0, 1), WITH), pair.draft, 2)
    best = theory.block_expected_accepted(pair.target, pair.draft, 2)
    assert optimum(trees, pair.target, 2) == pytest.approx(float(best), abs=1e-9)


@pytest.mark.parametrize("count", [2, 3])
def test_one_level_is_the_optimal_transport(count: int):
    """`1 + min_H p(H) - Pr[all drafts in H]`: Hu et al. 2025, Khisti et al. 2025."""
    for seed in range(3):
        pair = pairs.tree_pair(seed, 2, 1, 2)
        p, q = pair.target(()), pair.draft(())
        trees = tree_law(paths(count, 1), pair.draft, 1)
        alpha = theory.optimal_acceptance_iid(p, q, count)
        assert optimum(trees, pair.target, 1) == pytest.approx(float(alpha), abs=1e-9)


def test_no_rule_keeps_more():
    """On another toy than the certificate's; the large trees are left to that."""
    for thing in certifiables():
        if thing.depth < 3 and thing.size < 6:
            pair = pairs.fixed("other", [1, 4, 2], [3, 2, 2], thing.depth, thing.length)
            trees = tree_law(thing.grow, pair.draft, thing.depth)
            kept = first_kept(thing.scheme, pair.target, pair.draft, thing.depth)
            assert float(kept) <= optimum(trees, thing.goal(pair), thing.depth) + 1e-9


def test_a_biased_rule_may_keep_more():
    """Which is how one sees at a glance that it is biased."""
    wrong = next(w for w in wrong_chains() if w.scheme.name == "last test uncapped")
    pair = pairs.fixed("sun", [1, 2], [2, 1], 2, 3)
    trees = tree_law(static((0, 1), WITH), pair.draft, 2)
    kept = first_kept(wrong.scheme, pair.target, pair.draft, 2)
    assert float(kept) > optimum(trees, pair.target, 2) + 0.1


def test_too_large_a_case_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.certify.linear.MAX_VARIABLES", 10)
    pair = pairs.toy()
    with pytest.raises(ValueError, match="at most 10"):
        optimum(tree_law(static((0, 0, 1), WITHOUT), pair.draft, 2), pair.target, 2)


def test_without_scipy_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"pip install 'outrider\[certify\]'"):
        optimum({}, pairs.toy().target, 1)
