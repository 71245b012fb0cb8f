"""`grow_best` against plain Python, and in law.

The best rows of a level are expanded, the best nodes stay, and what stays of a drawn child does not
depend on what came out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from outrider.decoding import RULES, Draft, Draws, Kind, Law, RoundNoise, TargetLaws
from outrider.decoding.best import grow_best
from outrider.decoding.children import Children, Drawing, Places
from outrider.tree import TokenTree, TreeBudget
from tests.decoding.toy_trees import Model, Text, noise_of

NUM, MOST = 30, 4
DEPTHS = torch.arange(NUM) % (MOST + 1)
BUDGETS = [(2, 2), (2, 5), (3, 7), (3, 40), (4, 63)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child that was drawn; one that is not there is worth nothing."""

    text: Text
    parent: int | None
    kind: Kind
    worth: float


def drawn_by_hand(
    rule: str, model: Model, at: RoundNoise, width: int, depth: int
) -> list[Candidate]:
    """The candidates of one text by number, which is the index of their noise."""
    found: list[Candidate] = []
    level: list[int | None] = [None]
    for below in range(depth):
        made: list[int] = []
        for row in level:
            parent = Candidate((), None, Kind.POINT, 1.0) if row is None else found[row]
            numbers = list(range(len(found), len(found) + width))
            places = Places(at, torch.tensor([numbers]), below)
            kids = RULES[rule].drawing.children(Law.dense(model(parent.text)[None]), width, places)
            assert kids.worth_nK is not None
            for k in range(width):
                text = (*parent.text, int(kids.tokens_nK[0, k]))
                there = k < int(kids.counts_n)
                worth = parent.worth * float(kids.worth_nK[0, k]) if there else 0.0
                found.append(Candidate(text, row, Kind(int(kids.kinds_nK[0, k])), worth))
            made += numbers
        # Rows worth nothing are expanded too: their numbers are passed over.
        level = list(sorted(made, key=lambda i: (-found[i].worth, i))[:width])
    return found


def kept_by_hand(found: list[Candidate], num: int) -> list[int]:
    """The numbers of the best, in order."""
    ranked = sorted(range(len(found)), key=lambda i: (-found[i].worth, i))[:num]
    return sorted(i for i in ranked if found[i].worth > 0)


def grown(rule: str, model: Model, at: RoundNoise, budget: TreeBudget) -> Draft:
    """The same by production."""

    def expand(tree: TokenTree, rows_BL: Tensor) -> Law:
        laws: list[Tensor] = []
        for b, rows in enumerate(rows_BL.tolist()):
            texts: list[Text] = [()]
            above, tokens = tree.parents_BN[b].tolist(), tree.tokens_BN[b].tolist()
            for parent, token in zip(above, tokens, strict=True):
                texts.append((*texts[parent], token))
            laws += [model(texts[row]) for row in rows]
        return Law.dense(torch.stack(laws))

    return grow_best(Draws(RULES[rule], at), budget, DEPTHS, expand)


def difference(rule: str, budget: TreeBudget, seed: int) -> int:
    """Texts whose trees, kinds or laws are not those of the plain lines."""
    at, model = noise_of(NUM, seed), Model(seed, 3 + seed)
    draft = grown(rule, model, at, budget)
    tree, wrong = draft.tree, 0
    for b in range(NUM):
        own = at.select(torch.tensor([b]))
        found = drawn_by_hand(rule, model, own, budget.width, int(DEPTHS[b]))
        kept = kept_by_hand(found, budget.nodes)
        rows = {None: 0} | {number: row + 1 for row, number in enumerate(kept)}
        count = int(tree.counts_B[b])
        same = tree.tokens_BN[b, :count].tolist() == [found[i].text[-1] for i in kept]
        same &= tree.parents_BN[b, :count].tolist() == [rows[found[i].parent] for i in kept]
        same &= draft.node_kinds()[b, :count].tolist() == [found[i].kind for i in kept]
        if draft.law is not None and count:
            due = torch.stack([model(found[i].text[:-1]) for i in kept])
            same &= torch.equal(draft.law.probs[draft.law_rows()[b, :count]], due)
        wrong += not same
    return wrong


RANKED = ["greedy", "hybrid", "hybrid-traversal", "recursive", "traversal", "coupled"]


@pytest.mark.parametrize("rule", RANKED)
@pytest.mark.parametrize(("width", "nodes"), BUDGETS)
def test_the_best_tree_is_what_a_few_lines_grow(rule: str, width: int, nodes: int):
    for seed in range(2):
        assert difference(rule, TreeBudget(width, nodes), seed) == 0


@pytest.mark.parametrize("rule", ["hybrid", "traversal", "coupled"])
def test_another_ranking_is_found(rule: str, monkeypatch: pytest.MonkeyPatch):
    """The first drawn stay, whatever they are worth."""
    budget = TreeBudget(3, 7)
    monkeypatch.setattr(
        f"{__name__}.kept_by_hand",
        lambda found, num: list(range(min(num, len(found)))),
    )
    assert difference(rule, budget, 1) > NUM / 3


class ByValue(Drawing):
    """Children of another drawing, worth the probability of the token that came out."""

    ranked = True

    def __init__(self, drawing: Drawing) -> None:
        self._drawing, self.kinds = drawing, drawing.kinds

    def children(self, law: Law, num: int, places: Places) -> Children:
        made = self._drawing.children(law, num, places)
        worth_nK = law.probs.gather(1, made.tokens_nK).double()
        return replace(made, worth_nK=worth_nK.cummin(1).values)


# After each token, and last after the text: a target and a draft that lean apart.
P = torch.tensor([[6, 2, 1, 1], [1, 6, 2, 1], [1, 1, 6, 2], [2, 1, 1, 6], [4, 3, 2, 1]]) / 10
Q = torch.tensor([[2, 4, 3, 1], [3, 3, 1, 3], [5, 1, 2, 2], [1, 3, 4, 2], [1, 2, 3, 4]]) / 10


def after(tree: TokenTree, rows_BL: Tensor) -> Tensor:
    """Which law follows some rows."""
    roots_BT = torch.nn.functional.pad(tree.tokens_BN, (1, 0), value=len(P) - 1)
    return roots_BT.gather(1, rows_BL)


def surprise(rule: str, drawing: Drawing | None, num: int) -> float:
    """How far the first token of `num` rounds is from the target's law, in standard errors."""
    at = noise_of(num, 3)
    draft = grow_best(
        Draws(RULES[rule], at, drawing),
        TreeBudget(2, 3),
        torch.full((num,), 2),
        lambda tree, rows_BL: Law.dense(Q[after(tree, rows_BL).flatten()].double()),
    )
    rows_BT = torch.arange(draft.tree.num_nodes + 1).expand(num, -1)
    verdict = RULES[rule].verify(draft, TargetLaws(P[after(draft.tree, rows_BT)].double()), at)
    kept_B1 = draft.tree.tokens_BN.gather(1, (verdict.path_BD[:, :1] - 1).clamp(min=0))
    first_B = torch.where(verdict.num_accepted_B > 0, kept_B1[:, 0], verdict.token_B)
    seen, due = torch.bincount(first_B, minlength=4), P[-1].double() * num
    return float((((seen - due) ** 2 / due).sum() - 3) / 6**0.5)


@pytest.mark.parametrize("rule", ["recursive", "traversal", "hybrid", "hybrid-traversal"])
def test_what_stays_of_drawn_children_leaves_the_law(rule: str):
    assert surprise(rule, None, 4000) < 4.5


def test_children_that_stay_by_what_came_out_do_not():
    assert surprise("traversal", ByValue(RULES["traversal"].drawing), 4000) > 4.5
