"""Laws on the few tokens that top_k leaves: the same laws, and the same decisions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider import noise
from outrider.decoding import RULES, Draft, Law, RoundNoise, TargetFew, TargetLaws, Verdict
from outrider.decoding.draft import Kind
from outrider.decoding.laws import law_of_few, one_table, processed_probs
from outrider.decoding.rules.base import all_rows, chain_probs
from outrider.tree import TokenTree

WIDTH, DEPTH, NUM = 400, 3, 300


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16_384, 20_011])
def test_laws_of_few_tokens_are_those_written_out(dtype: torch.dtype, width: int):
    logits = (torch.randn(5, width, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    logits[1, 4:] = -torch.inf  # fewer than top_k leaves
    logits[2, :20] = logits[2].max() + 1  # more of the largest than top_k leaves
    controls = (
        torch.tensor([1.0, 0.7, 1.3, 0.5, 1.0], dtype=torch.float64),
        torch.tensor([40, 7, 3, 7, 40]),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0], dtype=torch.float64),
        torch.ones(5, dtype=torch.float64),
    )
    law = law_of_few(logits, controls)
    assert law is not None and law.ids is not None and law.ids.shape[1] < 100
    whole = processed_probs(logits, *controls)
    assert torch.equal(law.table(width), whole)
    assert law.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (whole[2, :20] > 0).all() and (whole[1] > 0).sum() == 4
    for row in range(5):
        kept = law.ids[row][law.probs[row] > 0]
        assert (kept.diff() > 0).all()
        alone = law_of_few(logits[row : row + 1], [part[row : row + 1] for part in controls])
        assert alone is not None and torch.equal(alone.table(width)[0], whole[row])


@pytest.mark.parametrize("why", ["nothing", "no top_k", "greedy", "narrow", "ties"])
def test_other_laws_are_not_of_few(why: str):
    # All negative: divided by zero each is -inf, which would be taken for a forbidden token.
    logits = -torch.rand(2, 16_383 if why == "narrow" else 16_384)
    if why == "ties":
        logits[1, ::50] = logits.max()
    heat, one = torch.tensor([0.7, 0.0 if why == "greedy" else 0.7]), torch.ones(2)
    ks = torch.tensor([5, 0 if why == "no top_k" else 5])
    assert (law_of_few(logits, (heat, ks, one, 0 * one, one)) is not None) == (why == "nothing")


@pytest.mark.parametrize("width", [50, 20_000])
def test_no_rows_have_no_laws(width: int):
    none, one = torch.zeros(0, width), torch.ones(0)
    controls = one, torch.full((0,), 5), one, one, one
    assert processed_probs(none, *controls).shape == (0, width)
    assert law_of_few(none, controls) is None


def test_tables_of_many_forms_are_one():
    few = Law.sparse(torch.tensor([[1, 4]]), torch.tensor([[0.25, 0.75]]))
    one = Law.point(torch.tensor([2]))
    both = one_table([few, one])
    assert both.ids is not None
    assert both.table(5).tolist() == [[0, 0.25, 0, 0, 0.75], [0, 0, 1, 0, 0]]
    dense = one_table([few, Law.dense(torch.full((1, 5), 0.2)), one])
    assert dense.ids is None
    assert torch.equal(dense.probs[[0, 2]], both.table(5))


def _case(form: str, dtype: torch.dtype, seed: int) -> tuple[Draft, torch.Tensor, Law]:
    """Chains of up to three tokens, the target's laws `[B, T, V]`, and the same on few tokens."""
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(NUM, DEPTH + 1, WIDTH, generator=chance, dtype=torch.float64) * 2
    best = logits.topk(12, -1)
    ids = best.indices.sort(-1).values
    few = torch.softmax(logits.gather(2, ids), -1).to(dtype).flatten(0, 1)
    # Some rows are shorter than others: the rest is padding.
    short = torch.arange(len(few)) % 3 == 0
    few[short, 9:] = 0
    few /= few.sum(-1, keepdim=True)
    ids = ids.flatten(0, 1).masked_fill(few == 0, 0)
    own = Law.sparse(ids, few)
    noisy = logits[:, :DEPTH] + torch.randn(NUM, DEPTH, WIDTH, generator=chance) / 2
    guess = noisy.flatten(0, 1).topk(15, -1)
    order = guess.indices.sort(-1)
    probs = torch.softmax(guess.values.gather(1, order.indices), -1).to(dtype)
    law = Law.sparse(order.values, probs)
    column = torch.multinomial(probs, 1, generator=chance)
    tokens = order.values.gather(1, column).view(NUM, DEPTH)
    lengths = torch.arange(NUM) % (DEPTH + 1)
    if form == "dense":
        law = Law.dense(law.table(WIDTH))
    draft = Draft.chain(tokens, lengths, None if form == "certain" else law)
    if form == "mixed":
        kinds = torch.where(torch.arange(DEPTH) == 1, int(Kind.POINT), int(Kind.IID))
        both = frozenset({Kind.POINT, Kind.IID})
        draft = Draft(
            TokenTree.chain(tokens, lengths), law, kinds_BN=kinds.expand(NUM, -1), kinds=both
        )
    return draft, own.table(WIDTH).view(NUM, DEPTH + 1, WIDTH), own


def _noise() -> RoundNoise:
    whole = torch.zeros(NUM, dtype=torch.int64)
    return RoundNoise(noise.as_key(range(NUM)), whole, whole + 5)


def _alike(one: Verdict, other: Verdict) -> bool:
    pairs = (
        (one.num_accepted_B, other.num_accepted_B),
        (one.token_B, other.token_B),
        (one.path_BD, other.path_BD),
    )
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


KINDS = {
    "dense": {Kind.IID},
    "sparse": {Kind.IID},
    "certain": {Kind.POINT},
    "mixed": {Kind.POINT, Kind.IID},
}
CASES = [
    (name, form)
    for name, rule in RULES.items()
    for form, kinds in KINDS.items()
    if rule.guarantee != "surrogate" and name != "kseq" and kinds <= rule.kinds
]


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rules_decide_alike_on_few_tokens(name: str, form: str, dtype: torch.dtype):
    rule = RULES[name]
    draft, whole, few = _case(form, dtype, 1)
    rows = TargetFew(few, (NUM, DEPTH + 1, WIDTH))
    dense = rule.verify(draft, TargetLaws(whole), _noise())
    assert _alike(rule.verify(draft, rows, _noise()), dense)
    assert 0 < float(dense.num_accepted_B.float().mean()) < 1.5
    at = all_rows(rows).flatten()
    assert torch.equal(rows.argmax(at), TargetLaws(whole).argmax(at))
    for ours, theirs in zip(
        chain_probs(draft, rows), chain_probs(draft, TargetLaws(whole)), strict=True
    ):
        assert torch.equal(ours[draft.tree.is_node()], theirs[draft.tree.is_node()])


def nothing(self: Law, row: int, tokens: np.ndarray) -> np.ndarray:
    """A draft's law that takes nothing from the target's."""
    return np.zeros(len(tokens), self.probs.numpy().dtype)


def _the_next(self: Law, row: int, tokens: np.ndarray) -> np.ndarray:
    return _at(self, (row + 1) % len(self), tokens)


_at = Law.at


@pytest.mark.parametrize("wrong", [nothing, _the_next])
@pytest.mark.parametrize("name", ["token", "block"])
def test_another_law_taken_is_seen(name: str, wrong: Callable[..., np.ndarray], monkeypatch):
    """The negative control: what the draft's law has at the target's few tokens matters."""
    draft, whole, few = _case("sparse", torch.float64, 1)
    dense = RULES[name].verify(draft, TargetLaws(whole), _noise())
    monkeypatch.setattr(Law, "at", wrong)
    rows = TargetFew(few, (NUM, DEPTH + 1, WIDTH))
    assert not _alike(RULES[name].verify(draft, rows, _noise()), dense)
