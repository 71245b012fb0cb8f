"""Trees by optimisation: no other shape promises more, whatever the costs."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest

from outrider.control.trees import (
    StaticTree,
    TreeCosts,
    best_static_tree,
    best_tree,
    node_budget,
)
from outrider.decoding import theory
from outrider.errors import InvalidConfig

VECTORS = {
    "falling": (Fraction(6, 10), Fraction(2, 10), Fraction(1, 10), Fraction(1, 20)),
    "flat": (Fraction(1, 4),) * 4,
    "one rank": (Fraction(8, 10),),
    "the second is better": (Fraction(1, 10), Fraction(7, 10), Fraction(1, 10)),
}
COSTS = {
    "flat": TreeCosts((Fraction(1),) * 9, Fraction(1, 10)),
    "a step after four rows": TreeCosts((Fraction(10),) * 4 + (Fraction(20),) * 5, Fraction(1, 2)),
    "a dip": TreeCosts(tuple(map(Fraction, (10, 13, 16, 12, 17, 18, 13, 20, 21))), Fraction(1)),
    "rows": TreeCosts(tuple(Fraction(4 + i) for i in range(9)), Fraction(1), Fraction(1, 5)),
    "dear": TreeCosts((Fraction(1),) * 9, Fraction(2), other=Fraction(1)),
}


@cache
def shapes(nodes: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every ordered forest of so many nodes: its trees, each by what hangs below its root."""
    if nodes == 0:
        return ((),)
    found = []
    for first in range(nodes):
        for below in shapes(first):
            found += [(below, *rest) for rest in shapes(nodes - 1 - first)]
    return tuple(found)


def parents_of(forest) -> Iterator[int]:
    level, rows = [(0, forest)], 0
    while level:
        below = []
        for row, trees in level:
            for tree in trees:
                rows += 1
                yield row
                below.append((rows, tree))
        level = below


def levels_of(parents) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def all_trees(nodes: int) -> list[tuple[int, ...]]:
    return [tuple(parents_of(forest)) for forest in shapes(nodes)]


def test_brute_force_sees_every_ordered_tree() -> None:
    assert [len(set(all_trees(n))) for n in range(9)] == [1, 1, 2, 5, 14, 42, 132, 429, 1430]


@pytest.mark.parametrize("name", VECTORS)
def test_the_programme_equals_brute_force(name: str) -> None:
    rates = VECTORS[name]
    for nodes in range(9):
        known = [
            (levels_of(p), theory.expected_tokens_by_rank(p, rates))
            for p in all_trees(nodes)
            if max(map(p.count, p), default=0) <= len(rates)
        ]
        for levels in range(1, 9):
            fitting = [value for depth, value in known if depth <= levels]
            if not fitting:
                with pytest.raises(InvalidConfig, match="no tree has so many"):
                    best_tree(rates, nodes, levels)
                continue
            tree = best_tree(rates, nodes, levels)
            assert tree.tokens == max(fitting)
            assert len(tree.parents) == nodes and tree.levels == levels_of(tree.parents) <= levels
            assert theory.expected_tokens_by_rank(tree.parents, rates) == tree.tokens


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("vector", VECTORS)
def test_sizes_and_depths_are_chosen_by_measured_costs(vector: str, name: str) -> None:
    rates, costs = VECTORS[vector], COSTS[name]
    best = max(
        theory.expected_tokens_by_rank(p, rates) * costs.verify[0] / costs.of(n, levels_of(p))
        for n in range(8)
        for p in all_trees(n)
        # A child without a rate would be a row for nothing, and where the curve dips it could pay.
        if max(map(p.count, p), default=0) <= len(rates)
    )
    tree = best_static_tree(rates, costs, max_nodes=7, max_levels=7)
    assert tree.speedup == best
    assert (tree.parents == ()) == (best == 1)
    chain = best_static_tree(rates[:1], costs, max_nodes=7, max_levels=7)
    assert tree.speedup >= chain.speedup


def test_nothing_is_drafted_where_nothing_pays() -> None:
    tree = best_static_tree(VECTORS["flat"], COSTS["dear"], max_nodes=8, max_levels=8)
    assert tree == StaticTree((), 0, 1, 1)


@pytest.mark.parametrize(
    ("cost", "depths"),
    [
        (0.02, ((0.5, 4, 1.794), (0.6, 6, 2.170), (0.7, 8, 2.758), (0.8, 11, 3.817),
                (0.9, 19, 6.365))),
        (0.05, ((0.5, 3, 1.630), (0.6, 4, 1.921), (0.7, 6, 2.353), (0.8, 8, 3.092),
                (0.9, 13, 4.674))),
        (0.1, ((0.5, 2, 1.458), (0.6, 3, 1.674), (0.7, 4, 1.981), (0.8, 6, 2.470),
               (0.9, 10, 3.431))),
        (0.2, ((0.5, 1, 1.250), (0.6, 2, 1.400), (0.7, 3, 1.583), (0.8, 4, 1.868),
               (0.9, 7, 2.373))),
    ],
)  # fmt: skip
def test_published_optimal_depths(cost: float, depths) -> None:
    """Leviathan et al. 2023, figure 3: a chain is a tree of one rank."""
    costs = TreeCosts((1.0,) * 33, cost)
    for alpha, depth, speedup in depths:
        tree = best_static_tree([alpha], costs, max_nodes=32, max_levels=32)
        assert tree.parents == tuple(range(depth)) and tree.levels == depth
        assert tree.speedup == pytest.approx(speedup, abs=6e-4)
        # The same rate at every place: nodes of a chain are worth alpha, alpha^2, ...
        values = [alpha**i for i in range(1, 33)]
        assert node_budget(values, costs, 32) == depth


def test_a_budget_ends_where_the_next_node_costs_more_than_it_is_worth() -> None:
    values = [0.6, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01]
    rows = TreeCosts(tuple(1 + 0.1 * i for i in range(9)), 0.1)
    best = node_budget(values, rows, 3)

    def rate(n: int) -> float:
        return (1 + sum(values[:n])) / rows.of(n, min(3, n))

    assert best == max(range(9), key=rate) and 0 < best < 8
    # One more node is worth less than it costs at the rate reached; one fewer would be worth more.
    assert values[best] / (rows.verify[best + 1] - rows.verify[best]) < rate(best)
    assert values[best - 1] / (rows.verify[best] - rows.verify[best - 1]) > rate(best - 1)
    assert node_budget(values, TreeCosts((1.0,) * 9, 5.0), 3) == 0
    assert node_budget(values, TreeCosts((1.0,) * 9, 0.1), 3) == 8


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: TreeCosts((), 1), "verify=\\(\\)"),
        (lambda: TreeCosts((0.0,), 1), "above 0"),
        (lambda: best_tree([0.5], 64, 64), "nodes=64"),
        (lambda: best_tree([0.5], 2, -1), "levels=-1"),
        (lambda: best_static_tree([0.5], COSTS["flat"], max_nodes=-1, max_levels=1), "max_nodes"),
    ],
)
def test_what_makes_no_tree_is_refused(call, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        call()
