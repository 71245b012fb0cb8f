"""Trees or chains, and how large: what pays is drafted, within what the user allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.cli.generate import _chosen
from outrider.control.book import Book
from outrider.control.rounds import Round
from outrider.control.sizes import Grown, rows_of, sizes_of
from outrider.decoding import Draft
from outrider.drafters import Drafter, RecycleDrafter
from outrider.tree import TokenTree, TreeBudget
from tests.control.clocked import World, fixed

BUDGET = TreeBudget(2, 16)
HALF = {"wrong": lambda place: 0.4, "second": True, "draft_s": lambda rows: 0.03}
"""A draft model whose second guess is right wherever its first is not."""


def cheap(rows: int) -> float:
    return 1.0 + 0.002 * rows


def dear(rows: int) -> float:
    return 0.6 + 0.4 * rows


def watched(world: World) -> list[Round]:
    """The rounds of a world's controller."""
    seen: list[Round] = []
    timed = world.controller.timed

    def noted(texts, times) -> None:
        done = world.controller._round
        assert done is not None
        seen.append(done)
        timed(texts, times)

    world.controller.timed = noted  # type: ignore[method-assign]
    return seen


def chosen(rounds: list[Round]) -> list[Round]:
    """Those in which something was drafted, samples left out."""
    return [one for one in rounds if one.plan.depth and one.choice.stake is None]


def nodes(done: Round) -> int:
    trees = done.plan.trees
    return 0 if trees is None else trees.nodes


def best_fixed(monkeypatch, trees: TreeBudget | None, target_s: Callable[[int], float]) -> float:
    """Tokens a second of the draft model at its best fixed depth."""
    worlds = [
        World(monkeypatch, drafter=fixed(depth), target_s=target_s, trees=trees, **HALF)
        for depth in (2, 5, 8)
    ]
    return max(world.run(120) for world in worlds)


def test_where_rows_are_cheap_large_trees_are_taken(monkeypatch) -> None:
    world = World(monkeypatch, target_s=cheap, trees=BUDGET, **HALF)
    world.run(100)
    rounds = watched(world)
    rate = world.run(160)
    drawn = chosen(rounds)
    assert sum(nodes(one) == BUDGET.nodes for one in drawn) > 0.7 * len(drawn)
    assert rate > 0.8 * best_fixed(monkeypatch, BUDGET, cheap)
    assert rate > 1.15 * best_fixed(monkeypatch, None, cheap)
    report = world.controller.report()["draft"]
    assert 0 < report["tree_rounds"] <= report["rounds"]
    assert report["mean_nodes"] > 1.3 * report["mean_depth"]


def test_where_rows_are_dear_chains_are_taken(monkeypatch) -> None:
    """And the trees that are sampled cost next to nothing."""
    good = {**HALF, "wrong": lambda place: 0.2}
    world = World(monkeypatch, target_s=dear, trees=BUDGET, **good)
    world.run(100)
    rounds = watched(world)
    rate = world.run(160)
    drawn = chosen(rounds)
    assert sum(nodes(one) > 0 for one in drawn) < 0.1 * len(rounds)
    chains = World(monkeypatch, target_s=dear, **good)
    chains.run(100)
    assert rate > 0.95 * chains.run(160)


def test_a_tree_ends_where_rows_become_dear(monkeypatch) -> None:
    """A step in the costs comes after eight rows: the text's own and seven nodes."""

    def steep(rows: int) -> float:
        return 1.0 if rows <= 8 else 2.0

    world = World(monkeypatch, target_s=steep, trees=TreeBudget(2, 28), **HALF)
    world.run(150)
    rounds = watched(world)
    world.run(120)
    drawn = chosen(rounds)
    assert sum(one.branches and 6 <= max(one.offered) <= 7 for one in drawn) > 0.7 * len(drawn)


def test_it_keeps_to_the_budget_of_the_round(monkeypatch) -> None:
    """Whatever was allowed before: the engine's budget is looked at anew in each round."""
    world = World(monkeypatch, target_s=cheap, trees=BUDGET, **HALF)
    rounds = watched(world)
    world.run(80)
    for trees in (TreeBudget(3, 5), None, TreeBudget(2, 30), TreeBudget.of_shape((0, 0, 1, 3))):
        rounds.clear()
        world.engine.trees = trees
        world.run(80)
        assert any(one.plan.depth for one in rounds)
        most = 16 if trees is None else max(16, trees.nodes)
        for one in rounds:
            assert max(one.offered) <= (most if one.plan.trees is None else one.plan.trees.nodes)
            assert trees is not None or one.plan.trees is None
            if one.plan.trees is not None:
                assert trees is not None
                assert one.plan.trees.nodes <= trees.nodes and one.plan.trees.width <= trees.width
        if trees is not None and trees.shape is not None:
            assert {one.plan.trees for one in rounds} <= {None, trees}


@pytest.mark.parametrize("law", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "coupled"])
def test_texts_are_those_of_chains_whatever_is_chosen(law, monkeypatch) -> None:
    worlds = [
        World(monkeypatch, target_s=target_s, trees=trees, more=more, **HALF)
        for trees in (None, BUDGET, TreeBudget.of_shape((0, 0, 1, 1, 2, 3)))
        for target_s, more in ((cheap, [RecycleDrafter()]), (dear, list[Drafter]()))
    ]
    made = {
        tuple(one.token_ids for one in world.complete(60, [(1, 2, 3), (4, 5)], **law))
        for world in worlds
    }
    assert len(made) == 1
    assert any(world.controller.report()["draft"]["tree_rounds"] for world in worlds)


def test_sizes_are_halves_of_the_budget() -> None:
    grown = sizes_of(TreeBudget(3, 12), ranked=True)
    assert grown == (TreeBudget(3, 6), TreeBudget(3, 12))
    assert sizes_of(TreeBudget(6, 9), ranked=True)[0] == TreeBudget(4, 4)
    paths = sizes_of(TreeBudget(4, 12), ranked=False)
    assert paths == (TreeBudget(2, 12), TreeBudget(4, 12))
    shape = TreeBudget.of_shape((0, 0, 1, 2))
    assert sizes_of(shape, ranked=True) == sizes_of(shape, ranked=False) == (shape,)
    assert rows_of(TreeBudget(3, 14), 4, ranked=True) == (0, 3, 12, 14, 14)
    assert rows_of(TreeBudget(3, 7), 3, ranked=False) == (0, 3, 6, 6)
    assert rows_of(shape, 3, ranked=True) == (0, 2, 4, 4)


def test_a_tree_tells_what_smaller_ones_would_have_kept() -> None:
    """Two children of the root, two of the second, and one of the last: a 1, b 2, c 3, d 4, e 5."""
    tree = TokenTree.of([[1, 2, 3, 4, 5]], [[0, 0, 2, 2, 4]])
    worth_BN = torch.tensor([[0.5, 0.4, 0.1, 0.3, 0.2]], dtype=torch.float64)
    grown = Grown(Draft(tree, None, worth_BN=worth_BN), [2])
    # By worth they stand 1, 2, 4, 5, 3: a tree of two nodes keeps the first, of three the second.
    assert grown.kept(0, [9, 9, 2, 4, 5, 7], 3) == ([1, 2, 3], 0)
    assert grown.kept(0, [9, 9, 1, 7], 1) == ([0], 1)
    assert grown.kept(0, [9, 9, 2, 3, 7], 2) == ([1, 4], 0)
    assert grown.kept(0, [9, 9, 7], 0) == ([], 0)
    # A text that ends within what was kept.
    assert grown.kept(0, [9, 9, 2], 3) == ([1], 0)


def test_what_was_not_drafted_yet_is_as_good_as_what_is_smaller() -> None:
    chains = Book()
    for _ in range(40):
        chains.saw(chains.cell(7), 1, 3)
    trees = Book(chains)
    assert trees.cell(7) == chains.cell(7)
    assert trees.survival(7, 4) == pytest.approx(chains.survival(7, 4)[:4])
    # It goes on with the chains' until it has rounds of its own, and then by these.
    chains.saw(chains.cell(7), 3, 3)
    assert trees.survival(7, 4) == pytest.approx(chains.survival(7, 4)[:4])
    for _ in range(20):
        trees.saw(trees.cell(7), 3, 3)
    assert trees.survival(7, 3)[2] > 0.7 > 2 * chains.survival(7, 3)[2]


def test_the_closing_lines_tell_trees_from_chains() -> None:
    told = {"rounds": 9, "tokens_per_round": 3.0, "reasons": {"why": 9}, "mean_depth": 4.0}
    (trees,) = _chosen({"draft": {**told, "mean_nodes": 11.5, "tree_rounds": 6}})
    (chains,) = _chosen({"draft": {**told, "mean_nodes": 4.0, "tree_rounds": 0}})
    assert "in 9 rounds of 11.5 tokens on 4.0 levels, 6 with trees, 3.00 tokens a round" in trees
    assert "in 9 rounds of 4.0 tokens, 3.00 tokens a round" in chains


def test_a_rounds_budget_is_what_it_was(monkeypatch) -> None:
    """Narrowed for those who are asked, and for nobody else."""
    world = World(monkeypatch, trees=BUDGET, target_s=dear, **HALF)
    propose, sizes = world.controller.propose, list[TreeBudget | None]()

    def watched(texts, depths, draws):
        draft = propose(texts, depths, draws)
        sizes.append(draws.trees)
        return draft

    world.controller.propose = watched  # type: ignore[method-assign]
    world.run(60)
    assert len(sizes) > 20 and set(sizes) == {BUDGET}
