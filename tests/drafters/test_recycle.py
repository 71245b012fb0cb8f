"""Token recycling: the matrix holds the latest rows' best successors, drafts are read off it."""

from __future__ import annotations

import pytest
import torch

from outrider.drafters import RecycleDrafter
from outrider.drafters.points import Budget
from outrider.drafters.recycle import rank_tree
from outrider.errors import InvalidConfig
from outrider.tree import TreeBudget
from tests.drafters.test_suffix import Draws, text


def rows(*best: list[int], vocab: int = 10) -> torch.Tensor:
    """Rows whose likeliest tokens are the given ones, in this order."""
    out = torch.zeros(len(best), vocab)
    for row, tokens in enumerate(best):
        for rank, token in enumerate(tokens):
            out[row, token] = 9.0 - rank
    return out


def drafted(drafter: RecycleDrafter, tokens: list[int], depth: int = 4) -> list[int]:
    draws = Draws()
    drafter.propose([text(tokens)], [depth], draws)
    return draws.tokens[0]


def test_a_chain_follows_the_best_successors_as_far_as_they_are_known() -> None:
    drafter = RecycleDrafter(3)
    assert drafted(drafter, [1]) == []
    drafter.observe(text([1]), [1, 5], rows([5, 2, 3], [7, 1, 2]))
    assert drafted(drafter, [9, 1]) == [5, 7]
    assert drafted(drafter, [9, 1], depth=1) == [5]
    assert drafted(drafter, [9, 5]) == [7] and drafted(drafter, [2]) == []
    drafter.observe(text([1]), [5], rows([1, 7, 2]))
    assert drafted(drafter, [1]) == [5, 1, 5, 1], "the latest row counts"
    drafter.observe(text([1]), [2, 2], rows([3, 4, 5], [6, 4, 5]))
    assert drafted(drafter, [2]) == [6]


def test_a_wider_row_and_a_narrow_vocabulary_fit() -> None:
    drafter = RecycleDrafter(8)
    drafter.observe(text([1]), [1], rows([2, 0, 1], vocab=3))
    assert drafted(drafter, [1]) == [2] and drafted(drafter, [40]) == []
    drafter.observe(text([1]), [40], rows([1, 2, 3], vocab=50))
    assert drafted(drafter, [40]) == [1, 2]


def test_a_tree_holds_the_best_successors_of_its_nodes() -> None:
    drafter = RecycleDrafter(3)
    drafter.observe(text([1]), [1, 5, 2], rows([5, 2, 3], [7, 1, 2], [4, 4, 4]))
    draws = Draws(TreeBudget(8, 12))
    draft = drafter.propose([text([1]), text([8], 1)], [3, 3], draws)
    assert draft.tree.counts_B.tolist()[1] == 0 and 6 <= draft.tree.counts_B.tolist()[0] <= 12
    nodes: list[tuple[int, ...]] = [(1,)]
    for token, parent in zip(draws.tokens[0], draws.parents[0], strict=True):
        nodes.append((*nodes[parent], token))
        assert token in drafter._after[nodes[parent][-1]].tolist()
    assert nodes[1:4] == [(1, 5), (1, 5, 7), (1, 5, 1)] and len(set(nodes)) == len(nodes)


def test_the_shape_goes_deep_at_the_first_rank_and_wide_at_the_root() -> None:
    shape = rank_tree(8, Budget(60, 6))
    widths = [shape.parents.count(row) for row in range(61)]
    assert len(shape.tokens) == 60 and widths[0] == max(widths) == 8
    assert shape.chain == [0] * len(shape.chain) and len(shape.chain) >= 4
    assert max(shape.tokens) <= 7


def test_a_width_that_cannot_be_meant_is_named() -> None:
    with pytest.raises(InvalidConfig, match="width=0"):
        RecycleDrafter(0)
