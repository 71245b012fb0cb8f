"""Drafts whose laws leave next to nothing beside one token: what they write has the target's law.

What is left of such a law is below the grain of its own sums, or denormal in float32.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.decoding import RULES, Draft, Draws, Kind, Law, RoundNoise, TargetLaws, TargetLogits
from outrider.decoding import children as drawing
from outrider.decoding.grow import grow
from outrider.decoding.rules import residual
from outrider.tree import TokenTree

NUM = 4000
WELL, OUT = 30.0, 300.0
"""Chi-square of up to three degrees of freedom: less than the first, more than the second."""
RULES_OF_SIBLINGS = ["recursive", "traversal", "hybrid", "hybrid-traversal"]


def noise_of(num: int) -> RoundNoise:
    zero_B = torch.zeros(num, dtype=torch.int64)
    return RoundNoise(torch.arange(num), zero_B, zero_B)


def chi_square(tokens_n: Tensor, law_V: Tensor) -> float:
    due_V = len(tokens_n) * law_V.double()
    seen_V = torch.bincount(tokens_n, minlength=len(law_V)).double()
    real_V = due_V > 0
    if seen_V[~real_V].any():
        return math.inf
    return float(((seen_V - due_V)[real_V] ** 2 / due_V[real_V]).sum())


def siblings(rule: str, q_V: Tensor) -> Draft:
    """Two children of each text, drawn as the rule wants them."""
    law = Law.dense(q_V.expand(NUM, -1).contiguous())
    return grow(Draws(RULES[rule], noise_of(NUM)), (0, 0), lambda tree, rows: law)


def written(rule: str, q_V: Tensor, p_V: Tensor) -> Tensor:
    """The first token of each text's round."""
    draft = siblings(rule, q_V)
    target = TargetLaws(p_V.expand(NUM, 3, -1).contiguous())
    verdict = RULES[rule].verify(draft, target, noise_of(NUM))
    first_B1 = (verdict.path_BD[:, :1] - 1).clamp(min=0)
    kept_B = draft.tree.tokens_BN.gather(1, first_B1).squeeze(1)
    return torch.where(verdict.num_accepted_B > 0, kept_B, verdict.token_B)


@pytest.mark.parametrize("gap", [-34.0, -40.0])
def test_a_second_child_has_the_law_of_what_is_left(gap: float, monkeypatch: pytest.MonkeyPatch):
    """Without the care for sharp rows the grain of the sums decides; at last the last token."""
    q_V = torch.softmax(torch.tensor([0, gap, gap - 1, gap - 2]), -1)
    left_V = torch.cat((torch.zeros(1), q_V[1:])).double()
    left_V = left_V / left_V.sum()

    def surprise() -> float:
        return chi_square(siblings("recursive", q_V).tree.tokens_BN[:, 1], left_V)

    assert surprise() < WELL
    monkeypatch.setattr(drawing, "_SHARP", 0.0)
    assert surprise() > (OUT if gap < -35 else WELL)


@pytest.mark.parametrize("rule", RULES_OF_SIBLINGS)
def test_a_sharp_draft_writes_the_targets_law(rule: str, monkeypatch: pytest.MonkeyPatch):
    q_V = torch.softmax(torch.tensor([0.0, -40, -41, -42]), -1)
    p_V = torch.tensor([0.1, 0.3, 0.3, 0.3])
    assert chi_square(written(rule, q_V, p_V), p_V) < WELL
    monkeypatch.setattr(drawing, "_SHARP", 0.0)
    assert chi_square(written(rule, q_V, p_V), p_V) > OUT


@pytest.mark.parametrize("gap", [-80.0, -90.0, -95.0])
@pytest.mark.parametrize("rule", RULES_OF_SIBLINGS)
def test_a_denormal_tail_writes_the_targets_law(
    rule: str, gap: float, monkeypatch: pytest.MonkeyPatch
):
    """Refusing what was drawn of it is a step beyond float32's range."""
    scores = torch.tensor([[[0, gap, -200.0, -200.0]]])
    q_V = TargetLogits(scores).probs(torch.tensor([0]))[0]
    p_V = torch.tensor([0.1, 0, 0.45, 0.45])
    assert chi_square(written(rule, q_V, p_V), p_V) < WELL
    if gap < -89 and not rule.startswith("hybrid"):
        monkeypatch.setattr(residual, "STEEP", math.inf)
        with pytest.raises(RuntimeError, match="overflow"):
            written(rule, q_V, p_V)


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_laws_of_padding_may_hold_anything(rule: str):
    """Text 0 has no node: its law rows are NaN, and stand where absent children point."""
    tokens_BN = torch.tensor([[0, 0], [1, 2], [1, 0]])
    q = [[0.2, 0.4, 0.4]]
    rounds = 200

    def decided(junk: float) -> list[tuple[list[int], list[int]]]:
        laws = torch.tensor([[junk] * 3] * 2 + q * 3 + [[junk] * 3])
        tree = TokenTree(tokens_BN, torch.zeros_like(tokens_BN), torch.tensor([0, 2, 1]), 1, 2)
        draft = Draft(tree, Law.dense(laws), None, None, frozenset({Kind.IID}))
        target = TargetLaws(torch.tensor([0.9, 0.05, 0.05]).expand(3, 3, 3).contiguous())
        zero_B = torch.zeros(3, dtype=torch.int64)
        made: list[tuple[list[int], list[int]]] = []
        for seed in range(rounds):
            verdict = RULES[rule].verify(draft, target, RoundNoise(zero_B + seed, zero_B, zero_B))
            made.append((verdict.num_accepted_B.tolist(), verdict.token_B.tolist()))
        return made

    assert decided(math.nan) == decided(1 / 3)
