"""Token trees: what their tables say, against plain walks up the parents."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DraftShapeMismatch, InvalidConfig
from outrider.tree import TokenTree, best_first, from_paths, full

parent_rows = st.integers(0, 9).flatmap(
    lambda num: st.tuples(*(st.integers(0, j) for j in range(num)))
)
batches = st.lists(parent_rows, min_size=1, max_size=4)


def tree_of(parents: list[tuple[int, ...]]) -> TokenTree:
    return TokenTree.of([[7 + j for j in range(len(p))] for p in parents], parents)


def path_to(parents: tuple[int, ...], row: int) -> list[int]:
    """Rows from below the root down to a row."""
    path: list[int] = []
    while row:
        path.append(row)
        row = parents[row - 1]
    return path[::-1]


@given(batches)
@settings(deadline=None, max_examples=60)
def test_tables_are_what_a_walk_up_finds(parents: list[tuple[int, ...]]):
    tree = tree_of(parents)
    depths, ranks, children = tree.depths(), tree.ranks(), tree.children()
    masks, nodes = tree.ancestors(), tree.is_node()
    num_nodes = max(map(len, parents))
    assert tree.tokens_BN.shape == (len(parents), num_nodes)
    assert tree.is_chain == all(p == tuple(range(len(p))) for p in parents)
    for b, above in enumerate(parents):
        count = len(above)
        assert nodes[b].tolist() == [j < count for j in range(num_nodes)]
        for row in range(count + 1):
            path = path_to(above, row)
            below = [j + 1 for j, parent in enumerate(above) if parent == row]
            assert depths[b, row] == len(path)
            assert children[b, row].tolist() == below + [0] * (children.shape[2] - len(below))
            for rank, child in enumerate(below):
                assert ranks[b, child - 1] == rank
            if row:
                assert int(masks[b, row - 1]) == sum(1 << (at - 1) for at in path)
        assert not children[b, count + 1 :].any()
        leaves = [row for row in range(1, count + 1) if row not in above]
        assert tree.paths()[b] == [tuple(path_to(above, row)) for row in leaves]
    assert tree.depth == max(len(path_to(p, row)) for p in parents for row in range(len(p) + 1))
    if not tree.is_chain:
        assert tree.width == max(2, max(p.count(r) for p in parents for r in p))


def test_padding_changes_no_table():
    """Whatever stands behind a tree's last node."""
    tree = tree_of([(0, 0, 1), (0, 1)])
    parents = tree.parents_BN.clone()
    for junk in range(3):
        parents[1, 2] = junk
        other = TokenTree(tree.tokens_BN, parents, tree.counts_B, tree.depth, tree.width)
        assert torch.equal(other.children(), tree.children())
        assert torch.equal(other.depths()[1, :3], tree.depths()[1, :3])
        assert torch.equal(other.ranks()[1, :2], tree.ranks()[1, :2])


def test_a_chain_is_a_tree():
    tokens, lengths = torch.tensor([[4, 5, 6], [7, 8, 9]]), torch.tensor([3, 1])
    chain = TokenTree.chain(tokens, lengths)
    assert (chain.is_chain, chain.depth, chain.width) == (True, 3, 1)
    assert chain.parents_BN.tolist() == [[0, 1, 2]] * 2
    assert chain.depths().tolist() == [[0, 1, 2, 3]] * 2
    assert chain.children().squeeze(2).tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]]
    assert chain.paths() == [[(1, 2, 3)], [(1,)]]
    ragged = TokenTree.of([[4, 5, 6], [7]], [[0, 1, 2], [0]])
    assert ragged.is_chain
    assert ragged.parents_BN.tolist() == [[0, 1, 2]] * 2
    assert not TokenTree.of([[4, 5]], [[0, 0]]).is_chain


@pytest.mark.parametrize("num_texts", [0, 2])
def test_nothing_is_a_tree_too(num_texts: int):
    none = TokenTree.of([[]] * num_texts, [[]] * num_texts)
    empty = torch.zeros(num_texts, 0, dtype=torch.int64)
    for tree in (none, TokenTree(empty, empty, empty.sum(1), 0, 2)):
        assert tree.num_nodes == 0
        assert tree.depths().tolist() == [[0]] * num_texts
        assert tree.children().shape[:2] == (num_texts, 1)
        assert tree.ranks().shape == tree.ancestors().shape == (num_texts, 0)
        assert tree.paths() == [[]] * num_texts


def test_no_texts_have_tables_of_no_rows():
    wide = torch.zeros(0, 3, dtype=torch.int64)
    tree = TokenTree(wide, wide, wide.sum(1), 2, 2)
    assert tree.children().shape == (0, 4, 2)
    assert tree.ranks().shape == tree.ancestors().shape == (0, 3)


def test_ancestors_have_room_for_64():
    chain = tree_of([tuple(range(64))])
    assert int(chain.ancestors()[0, 63]) == -1  # all 64 bits
    assert int(chain.ancestors()[0, 62]) == 2**63 - 1
    with pytest.raises(DraftShapeMismatch, match="65 nodes"):
        tree_of([tuple(range(65))]).ancestors()


def test_a_parent_stands_before_its_child():
    with pytest.raises(DraftShapeMismatch, match="tree 1: node 1 has parent row 2"):
        TokenTree.of([[1], [1, 2]], [[0], [0, 2]])
    with pytest.raises(DraftShapeMismatch, match="2 tokens and 1 parents"):
        TokenTree.of([[1, 2]], [[0]])
    with pytest.raises(DraftShapeMismatch):
        TokenTree.of([[1]], [[-1]])


@pytest.mark.parametrize(("branch_factor", "depth"), list(itertools.product((1, 2, 3), range(4))))
def test_a_full_tree_is_full(branch_factor: int, depth: int):
    parents = full(branch_factor, depth)
    assert len(parents) == sum(branch_factor**d for d in range(1, depth + 1))
    assert all(0 <= parent <= j for j, parent in enumerate(parents))
    lengths = [len(path_to(parents, row)) for row in range(len(parents) + 1)]
    assert lengths == sorted(lengths)
    for row, length in enumerate(lengths):
        assert parents.count(row) == (branch_factor if length < depth else 0)


def test_paths_merge_where_that_is_lawful():
    paths = [(1, 2, 3), (1, 2, 4), (1, 5), (2,)]
    assert from_paths(paths, merge=True) == ((1, 2, 3, 4, 5, 2), (0, 1, 2, 2, 1, 0))
    tokens, parents = from_paths(paths, merge=False)
    assert tokens == (1, 2, 3, 1, 2, 4, 1, 5, 2)
    assert parents == (0, 1, 2, 0, 4, 5, 0, 7, 0)
    assert from_paths([], merge=True) == ((), ())
    same = [(1, 2), (1, 2)]
    assert from_paths(same, merge=True) == ((1, 2), (0, 1))
    assert len(from_paths(same, merge=False)[0]) == 4


@pytest.mark.parametrize("drawn", ["iid", "without"])
def test_drawn_paths_do_not_merge(drawn: str):
    """Each duplicate is a draw of its own; of certain tokens it is the same one."""
    same = [(1, 2), (1, 2)]
    with pytest.raises(InvalidConfig, match=f"merge=True with drawn='{drawn}'"):
        from_paths(same, merge=True, drawn=drawn)
    assert from_paths(same, merge=False, drawn=drawn) == ((1, 2, 1, 2), (0, 1, 0, 3))
    assert from_paths(same, merge=True, drawn="certain") == ((1, 2), (0, 1))
    with pytest.raises(InvalidConfig, match="certain, iid, without"):
        from_paths(same, merge=False, drawn="tail")


@given(parent_rows, st.data())
@settings(deadline=None, max_examples=60)
def test_best_first_keeps_the_best_that_hang_together(
    parents: tuple[int, ...], data: st.DataObject
):
    values = [data.draw(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.9])) for _ in parents]
    num = data.draw(st.integers(0, len(parents)))
    kept = best_first(values, parents, num)
    assert len(kept) == num and list(kept) == sorted(set(kept))
    assert all(parents[j] == 0 or parents[j] - 1 in kept for j in kept)
    along = [min(values[row - 1] for row in path_to(parents, j + 1)) for j in range(len(parents))]
    rest = [along[j] for j in range(len(parents)) if j not in kept]
    assert not kept or not rest or min(along[j] for j in kept) >= max(rest)
