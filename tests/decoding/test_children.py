"""Drawing children and growing trees: against plain Python, address by address, and in law."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from outrider import noise
from outrider.certify.reference import inverse_cdf
from outrider.decoding import RULES, Draws, Kind, Law, RoundNoise
from outrider.decoding.children import (
    Children,
    Drawing,
    Places,
    Raced,
    TailThenTop,
    Top,
    Without,
    WithReplacement,
)
from outrider.decoding.grow import Shape, grow
from outrider.errors import DraftShapeMismatch, InvalidConfig
from outrider.tree import TokenTree, best_first, full

DRAWINGS: dict[str, Drawing] = {
    "iid": WithReplacement(),
    "without": Without(),
    "top": Top(),
    "hybrid": TailThenTop(),
    "raced": Raced(),
}


def noise_of(num_texts: int, seed: int = 0, anchor: int = 5) -> RoundNoise:
    return RoundNoise(
        noise.as_key(range(seed, seed + num_texts)),
        torch.zeros(num_texts, dtype=torch.int64),
        torch.full((num_texts,), anchor),
    )


def table(num: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Laws with ties and zeros; supports of one token to all."""
    chance = torch.Generator().manual_seed(seed)
    whole = (torch.randint(0, 6, (num, width), generator=chance).double() - 3).clamp(min=0)
    whole[:, 0] += whole.sum(1) == 0
    real = torch.rand(num, width, generator=chance, dtype=torch.float64)
    mixed = torch.where(torch.rand(num, 1, generator=chance) < 0.5, whole, real)
    return (mixed / mixed.sum(1, keepdim=True)).to(dtype)


def sparse(probs: torch.Tensor) -> Law:
    """The support in front, ids ascending, padding behind."""
    ids = (probs == 0).to(torch.int8).sort(dim=1, stable=True).indices
    width = int((probs > 0).sum(1).max())
    return Law.sparse(ids[:, :width], probs.gather(1, ids)[:, :width])


def drawn(drawing: Drawing, law: Law, num: int, at: RoundNoise, depth: int = 2) -> Children:
    index = torch.arange(len(law))[:, None] * 10 + torch.arange(num)
    return drawing.children(law, num, Places(at, index, depth))


def by_hand(name: str, q: list[float], num: int, at: RoundNoise, b: int) -> list[tuple[int, Kind]]:
    """The children of row b in a few lines."""
    address = at.seed_B[b], at.sample_B[b], noise.STREAM_DRAFT, at.anchor_B[b]

    def sampled(gone: set[int], k: int) -> int:
        weights = [0.0 if x in gone else w for x, w in enumerate(q)]
        return inverse_cdf(weights, float(noise.uniforms53(*address, 10 * b + k)))

    support = [x for x, w in enumerate(q) if w > 0]
    likeliest = sorted(support, key=lambda x: (-q[x], x))
    if name == "iid":
        return [(sampled(set(), k), Kind.IID) for k in range(num)]
    if name == "without":
        gone: list[int] = []
        for k in range(min(num, len(support))):
            gone.append(sampled(set(gone), k))
        return [(x, Kind.WITHOUT) for x in gone]
    if name == "top":
        return [(x, Kind.POINT) for x in likeliest[:num]]
    if name == "hybrid":
        tops = likeliest[: num - 1]
        tail = [(sampled(set(tops), 0), Kind.TAIL)] if len(support) >= num else []
        return [*tail, *((x, Kind.POINT) for x in tops)]
    position = at.anchor_B[b] + 2
    made = noise.gumbels(at.seed_B[b], at.sample_B[b], position, torch.arange(len(q))).tolist()
    order = sorted(support, key=lambda x: -(math.log(q[x]) + made[x]))
    return [(x, Kind.WITHOUT) for x in order[:num]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("name", list(DRAWINGS))
def test_children_are_what_a_few_lines_draw(name: str, form: str, dtype: torch.dtype):
    for seed, num in itertools.product(range(2), (1, 2, 4)):
        probs = table(150, 7, seed, dtype)
        law = Law.dense(probs) if form == "dense" else sparse(probs)
        at = noise_of(150, 100 * seed)
        made = drawn(DRAWINGS[name], law, num, at)
        assert torch.equal(made.counts_n, DRAWINGS[name].counts(law, num))
        seen = set()
        for b, q in enumerate(probs.double().tolist()):
            count = int(made.counts_n[b])
            seen.add(count)
            tokens, kinds = made.tokens_nK[b, :count].tolist(), made.kinds_nK[b, :count].tolist()
            expected = by_hand(name, q, num, at, b)
            assert list(zip(tokens, kinds, strict=True)) == expected
            assert {Kind(kind) for kind in kinds} <= DRAWINGS[name].kinds
        assert num == 1 or name == "iid" or len(seen) > 1


@pytest.mark.parametrize("form", ["dense", "sparse", "point"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_one_child_is_the_chains_token(rule: str, form: str):
    """Chains and trees draw at the same addresses."""
    probs = table(200, 600, 3)
    law = {
        "dense": Law.dense(probs),
        "sparse": sparse(probs),
        "point": Law.point(probs.argmax(1)),
    }[form]
    rows, index = torch.arange(200), torch.full((200, 1), 3)
    draws = Draws(RULES[rule], noise_of(200))
    made = draws.children(law, rows, index, 3)
    assert torch.equal(made.tokens_nK[:, 0], draws.draw(law, 3, rows))


@pytest.mark.parametrize("rule", ["recursive", "hybrid", "traversal", "hybrid-traversal"])
def test_one_child_of_a_tree_rule_is_tokens(rule: str):
    probs = table(200, 9, 4)
    rows, index = torch.arange(200), torch.full((200, 1), 3)
    made = Draws(RULES[rule], noise_of(200)).children(Law.dense(probs), rows, index, 3)
    chain = Draws(RULES["token"], noise_of(200)).draw(Law.dense(probs), 3, rows)
    assert torch.equal(made.tokens_nK[:, 0], chain)


def test_pairs_without_replacement_have_their_law():
    """By inverse cdf and by the race alike; pairs drawn with replacement are far out."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    num = 20_000
    expected = q[:, None] * q / (1 - q[:, None])
    expected.fill_diagonal_(0)

    def surprise(drawing: Drawing) -> float:
        made = drawn(drawing, Law.dense(q.expand(num, 4)), 2, noise_of(num))
        pairs = torch.bincount(made.tokens_nK[:, 0] * 4 + made.tokens_nK[:, 1], minlength=16)
        off = ~torch.eye(4, dtype=torch.bool).flatten()
        gap = (pairs - num * expected.flatten())[off] ** 2 / (num * expected.flatten()[off])
        return float((gap.sum() - 11) / math.sqrt(22))

    assert surprise(Without()) < 4.5
    assert surprise(Raced()) < 4.5
    assert surprise(WithReplacement()) > 4.5


def test_what_was_drawn_does_not_come_again():
    """Tiny and huge weights side by side; the second is drawn as the tiny ones stand."""
    q = torch.tensor([1e-30, 1 - 1e-7, 1e-7, 0.0, 1e-20, 0.0]).expand(500, 6)
    made = drawn(Without(), Law.dense(q), 6, noise_of(500))
    assert made.counts_n.tolist() == [4] * 500
    for row in made.tokens_nK[:, :4].tolist():
        assert sorted(row) == [0, 1, 2, 4]
    even = torch.tensor([1e-30, 1.0, 0.0, 3e-30, 0.0, 4e-30]).expand(8000, 6)
    firsts, seconds = drawn(Without(), Law.dense(even), 2, noise_of(8000)).tokens_nK.unbind(1)
    assert (firsts == 1).all()
    seen = torch.bincount(seconds, minlength=6)
    due = torch.tensor([1000, 0, 0, 3000, 0, 4000])
    assert ((seen - due).abs() <= 5 * due.sqrt()).all()


def test_a_race_is_for_the_coupled_alone():
    """Other rules test with noise that must not be the target's own."""
    with pytest.raises(InvalidConfig, match=r"rule='recursive'.*coupled"):
        Draws(RULES["recursive"], noise_of(2), Raced())
    assert Draws(RULES["coupled"], noise_of(2), Raced()).num_texts == 2


def test_the_race_is_one_whatever_the_form():
    probs = table(100, 40, 5)
    few = torch.where(torch.arange(40) < 4, probs + 1e-3, 0)
    for rows in (probs + 1e-3, few):
        whole = drawn(Raced(), Law.dense(rows), 3, noise_of(100)).tokens_nK
        order = torch.stack([torch.randperm(40) for _ in range(100)])
        shuffled = Law.sparse(order, rows.gather(1, order))
        assert torch.equal(whole, drawn(Raced(), shuffled, 3, noise_of(100)).tokens_nK)


def test_a_wider_draw_begins_with_the_narrower():
    """A child's token does not depend on how many siblings follow it; hybrid's tail does."""
    law = Law.dense(table(100, 8, 6) * 0.9 + 0.0125)
    for name in ("iid", "without", "top", "raced"):
        three = drawn(DRAWINGS[name], law, 3, noise_of(100)).tokens_nK
        two = drawn(DRAWINGS[name], law, 2, noise_of(100)).tokens_nK
        assert torch.equal(three[:, :2], two)


def worth_by_hand(q: list[float], drawn: list[int]) -> list[float]:
    """What children without replacement are worth: all of a sharp law, 0.4 / k of a flat one."""
    refused, worths = 1.0, list[float]()
    for k in range(len(drawn)):
        left = [0.0 if x in drawn[:k] else mass for x, mass in enumerate(q)]
        agree = sum((mass / sum(left)) ** 2 for mass in left)
        flat = 0.4 / (k + 1)
        worth = min(refused * (flat + (1 - flat) * agree), *worths[-1:], 1.0)
        worths.append(worth)
        refused -= worth
    return worths


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_child_without_replacement_is_worth_what_its_law_says(form: str):
    probs = table(300, 7, 1)
    made = drawn(
        Without(), Law.dense(probs) if form == "dense" else sparse(probs), 4, noise_of(300)
    )
    assert made.worth_nK is not None
    for b, q in enumerate(probs.tolist()):
        count = int(made.counts_n[b])
        due = worth_by_hand(q, made.tokens_nK[b, :count].tolist())
        assert made.worth_nK[b, :count].tolist() == pytest.approx(due, abs=1e-9)
    assert ((made.worth_nK >= 0) & (made.worth_nK <= 1)).all()
    assert (made.worth_nK.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("name", ["without", "hybrid"])
def test_what_came_out_of_a_child_is_not_in_its_worth(name: str):
    """Children of one law and the same earlier siblings, thousands of them: one worth."""
    law = Law.dense(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(2000, 4))
    made = drawn(DRAWINGS[name], law, 3, noise_of(2000))
    assert made.worth_nK is not None
    worths: dict[tuple[int, ...], set[float]] = {}
    for tokens, worth in zip(made.tokens_nK.tolist(), made.worth_nK.tolist(), strict=True):
        for k in range(3):
            worths.setdefault(tuple(tokens[:k] if name == "without" else [k]), set()).add(worth[k])
    assert {len(found) for found in worths.values()} == {1}
    assert len({*made.tokens_nK[:, 0].tolist()}) > 1


def laws_by_path(tree: TokenTree, rows: torch.Tensor, width: int = 5) -> Law:
    """A law for every path, most supports short; a function of the tokens alone."""
    index = torch.zeros_like(rows)
    at, parents = rows, torch.nn.functional.pad(tree.parents_BN, (1, 0))
    tokens = torch.nn.functional.pad(tree.tokens_BN, (1, 0))
    for _ in range(tree.depth):
        index = torch.where(at > 0, index * width + tokens.gather(1, at) + 1, index)
        at = parents.gather(1, at)
    bank = table(97, width, 9)
    bank[0] = 1 / width
    return Law.dense(bank[(index % 97).flatten()])


SHAPES = [full(2, 3), full(3, 2), (0, 0, 0, 1, 1, 2, 4, 4, 7), (0, 1, 0, 2, 2, 3), (0, 1, 2), (0,)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", list(DRAWINGS))
def test_a_grown_tree_is_what_a_few_lines_grow(name: str, shape: tuple[int, ...]):
    """Node by node in breadth-first order, the noise index being the number of nodes so far."""
    at = noise_of(60)
    rule = RULES["coupled" if name == "raced" else "recursive"]
    draft = grow(Draws(rule, at, DRAWINGS[name]), shape, laws_by_path)
    tree = draft.tree
    assert (tree.num_nodes, tree.is_chain) == (len(shape), full(1, len(shape)) == shape)
    for b in range(60):
        expected = grown_by_hand(name, shape, at, b)
        count = int(tree.counts_B[b])
        got = list(zip(tree.tokens_BN[b].tolist(), tree.parents_BN[b].tolist(), strict=True))
        assert got[:count] == [(token, parent) for token, parent, _, _ in expected]
        assert draft.node_kinds()[b, :count].tolist() == [kind for _, _, kind, _ in expected]
        if draft.law is not None:
            rows = draft.law.probs[draft.law_rows()[b, :count]]
            assert rows.tolist() == [q for _, _, _, q in expected]
        assert all(parent <= j for j, (_, parent) in enumerate(got))


def grown_by_hand(
    name: str, shape: tuple[int, ...], at: RoundNoise, b: int
) -> list[tuple[int, int, Kind, list[float]]]:
    """Tokens, parent rows, kinds and base laws."""
    made: list[tuple[int, int, Kind, list[float]]] = []
    level = [(0, 0)]  # rows in the shape, and in the tree
    while level:
        following: list[tuple[int, int]] = []
        for place, row in level:
            wanted = [j + 1 for j, parent in enumerate(shape) if parent == place]
            if not wanted:
                continue
            so_far = TokenTree.of([[m[0] for m in made]], [[m[1] for m in made]])
            q = laws_by_path(so_far, torch.tensor([[row]])).probs[0].tolist()
            depth = int(so_far.depths()[0, row])
            first = len(made)
            shifted = RoundNoise(at.seed_B[b : b + 1], at.sample_B[:1], at.anchor_B[:1])
            index = torch.arange(first, first + len(wanted))[None]
            law = Law.dense(torch.tensor([q], dtype=torch.float64))
            drawing = DRAWINGS[name]
            kids = drawing.children(law, len(wanted), Places(shifted, index, depth))
            for k in range(int(kids.counts_n[0])):
                made.append((int(kids.tokens_nK[0, k]), row, Kind(int(kids.kinds_nK[0, k])), q))
                following.append((wanted[k], len(made)))
        level = following
    return made


def test_supports_run_out_without_a_gap():
    """Most trees here are ragged, and padding is last."""
    draft = grow(Draws(RULES["recursive"], noise_of(60)), full(3, 3), laws_by_path)
    counts = draft.tree.counts_B
    assert len(counts.unique()) > 3
    assert int(counts.max()) <= 39


@pytest.mark.parametrize("name", ["iid", "without", "hybrid"])
def test_growing_uses_every_address_once(name: str):
    with noise.NoiseLedger() as ledger:
        grow(Draws(RULES["recursive"], noise_of(60), DRAWINGS[name]), full(3, 3), laws_by_path)
    assert {stream for _, _, stream, _, _ in ledger.addresses} == {noise.STREAM_DRAFT}


def test_certain_children_use_no_noise():
    with noise.NoiseLedger() as ledger:
        draft = grow(Draws(RULES["greedy"], noise_of(5)), full(2, 2), laws_by_path)
    assert not ledger.addresses
    assert draft.law is None and draft.kinds == {Kind.POINT}


def test_sparse_laws_of_many_widths_make_one_table():
    def expand(tree: TokenTree, rows: torch.Tensor) -> Law:
        return sparse(laws_by_path(tree, rows).probs)

    at = noise_of(30)
    one, other = (
        grow(Draws(RULES["recursive"], at), full(2, 3), how) for how in (expand, laws_by_path)
    )
    assert torch.equal(one.tree.tokens_BN, other.tree.tokens_BN)
    assert one.law is not None and one.law.ids is not None and other.law is not None
    rows = one.law_rows()[one.tree.is_node()]
    assert torch.equal(
        one.law.table(5)[rows], other.law.probs[other.law_rows()[other.tree.is_node()]]
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_grown_chain_is_a_chain(rule: str):
    """Laws lie as chains have them, tokens are those of drawing one after another."""
    at, width = noise_of(40), 6
    bank = table(40 * 3, width, 2).view(40, 3, width)
    draft = grow(
        Draws(RULES[rule], at), (0, 1, 2), lambda tree, rows: Law.dense(bank[:, tree.depth])
    )
    assert draft.law_rows_BN is None and draft.law is not None
    assert torch.equal(draft.law.probs, bank.flatten(0, 1))
    draws, everyone = Draws(RULES[rule], at), torch.arange(40)
    for i in range(3):
        drawn_i = draws.draw(Law.dense(bank[:, i]), i, everyone)
        assert torch.equal(draft.tree.tokens_BN[:, i], drawn_i)


def test_a_shape_is_read_breadth_first():
    assert Shape.of((0, 1, 0, 2, 2, 3)).levels == ((2,), (1, 1), (2, 0))
    assert Shape.of(full(2, 2)).levels == ((2,), (2, 2))
    assert Shape.of(()).levels == ()
    with pytest.raises(DraftShapeMismatch, match="node 0 has parent row 1"):
        Shape.of((1,))


@pytest.mark.parametrize("name", list(DRAWINGS))
@pytest.mark.parametrize("shape", SHAPES)
def test_no_texts_grow_no_trees(shape: tuple[int, ...], name: str):
    rule = RULES["coupled" if name == "raced" else "recursive"]
    draft = grow(Draws(rule, noise_of(0), DRAWINGS[name]), shape, laws_by_path)
    assert draft.tree.tokens_BN.shape == (0, len(shape))


def test_no_shape_drafts_nothing():
    draft = grow(Draws(RULES["traversal"], noise_of(3)), (), laws_by_path)
    assert draft.tree.counts_B.tolist() == [0, 0, 0]
    assert draft.tree.num_nodes == 0


def test_a_best_first_part_of_a_shape_grows():
    shape = full(2, 2)
    kept = best_first([0.9, 0.5, 0.8, 0.1, 0.4, 0.3], shape, 4)
    parents = [shape[j] for j in kept]
    rows = {0: 0} | {j + 1: i + 1 for i, j in enumerate(kept)}
    draft = grow(
        Draws(RULES["recursive"], noise_of(3)),
        [rows[parent] for parent in parents],
        lambda tree, at: Law.dense(torch.full((at.numel(), 4), 0.25)),
    )
    assert draft.tree.counts_B.tolist() == [4, 4, 4]
    assert draft.tree.parents_BN[0].tolist() == [rows[parent] for parent in parents]
