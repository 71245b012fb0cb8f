"""Lossy rules: the surrogate's law exactly, its bound, and never by accident."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.certify import surrogates
from outrider.decoding import RULES, Draft, Kind, Law, RoundNoise, TargetLaws
from outrider.decoding.children import Places
from outrider.decoding.rules import LOSSY, rule_named
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.coupled import CoupledRule
from outrider.decoding.rules.lossy import (
    Lenience,
    LossyRule,
    Mixture,
    Surrogate,
    SurrogateRows,
    Threshold,
    TypicalAcceptance,
)
from outrider.decoding.rules.token import TokenRule
from outrider.errors import InvalidConfig
from outrider.tree import TokenTree, full
from tests.decoding.toy_trees import Model, drawn, nobody_left_out, noise_of

SURROGATES = [Lenience(0.5), Lenience(0.9), TypicalAcceptance(), Threshold(0.25), Mixture(0.05)]


def law_of(weights: list[int]) -> Tensor:
    row = torch.tensor([weights], dtype=torch.float64)
    return row / row.sum()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8),
    st.sampled_from(SURROGATES),
)
def test_a_surrogate_is_a_law_within_its_bound(
    weights: list[tuple[int, int]], surrogate: Surrogate
):
    ps, qs = ([a for a, _ in weights], [b for _, b in weights])
    if not sum(ps) or not sum(qs):
        return
    p, q = law_of(ps), law_of(qs)
    pi = surrogate.law(p, q)
    assert bool((pi >= 0).all()) and float(pi.sum()) == pytest.approx(1)
    assert float((pi - p).abs().sum()) / 2 <= float(surrogate.bound(p)) + 1e-12
    assert bool((pi[(p == 0) & (q == 0)] == 0).all())
    kept = torch.minimum(pi, q).sum()
    if not isinstance(surrogate, (Threshold, TypicalAcceptance)):
        assert float(kept) >= float(torch.minimum(p, q).sum()) - 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6))
def test_surrogates_are_those_of_the_certificate(weights: list[tuple[int, int]]):
    ps, qs = ([a for a, _ in weights], [b for _, b in weights])
    if not sum(ps) or not sum(qs):
        return
    exact = [tuple(Fraction(x, sum(row)) for x in row) for row in (ps, qs)]
    pairs = [
        (Lenience(0.5), surrogates.Lenience(Fraction(1, 2))),
        (Threshold(0.25), surrogates.Threshold(Fraction(1, 4))),
        (
            TypicalAcceptance(0.3, 0.6),
            surrogates.TypicalAcceptance(Fraction(3, 10), Fraction(3, 5)),
        ),
    ]
    for ours, theirs in pairs:
        wanted = torch.tensor([[float(x) for x in theirs(*exact)]], dtype=torch.float64)
        torch.testing.assert_close(ours.law(law_of(ps), law_of(qs)), wanted)


def test_bounds_are_met_where_they_are_tight():
    """A certain token that p gives 1 - bound."""
    q = torch.tensor([[1.0, 0.0]]).double()
    for surrogate, p in ((Lenience(0.5), 0.5), (Threshold(0.25), 0.25), (Mixture(0.1), 0.4)):
        row = torch.tensor([[p, 1 - p]], dtype=torch.float64)
        apart = (surrogate.law(row, q) - row).abs().sum() / 2
        assert float(apart) == pytest.approx(float(surrogate.bound(row)))


def test_lenience_on_the_worked_example():
    """p = (.1, .6, .3), q = (.5, .35, .15), l = 1/2: (1/5, 43/80, 21/80), TV 1/10, kept .7."""
    p, q = law_of([10, 60, 30]), law_of([50, 35, 15])
    pi = Lenience(0.5).law(p, q)
    wanted = torch.tensor([[1 / 5, 43 / 80, 21 / 80]], dtype=torch.float64)
    torch.testing.assert_close(pi, wanted)
    assert float(torch.minimum(pi, q).sum()) == pytest.approx(0.7)
    assert float((pi - p).abs().sum()) / 2 == pytest.approx(0.1)


def test_lenience_keeps_what_leviathan_keeps():
    """The exact rule towards pi tests u * l * q < p, and adds from max(0, p - q)."""
    p, q = law_of([3, 1, 4, 2, 0]), law_of([1, 4, 2, 2, 1])
    pi = Lenience(0.6).law(p, q)
    torch.testing.assert_close((pi / q).clamp(max=1), (p / 0.6 / q).clamp(max=1))
    left, right = (pi - q).clamp(min=0), (p - q).clamp(min=0)
    torch.testing.assert_close(left / left.sum(), right / right.sum())


def test_a_mixture_raises_acceptance_by_its_epsilon():
    p, q = law_of([1, 2, 3, 4]), law_of([4, 3, 2, 1])
    for epsilon in (0.0, 0.1, 0.3, 0.5):
        kept = torch.minimum(Mixture(epsilon).law(p, q), q).sum()
        assert float(kept) == pytest.approx(min(1, 0.6 + epsilon))


def round_laws(surrogate: Surrogate, seed: int, depth: int) -> tuple[Tensor, Tensor]:
    """Laws of depth + 1 tokens: pi while something was drafted and p after it; and p throughout."""
    target, draft = Model(2 * seed, 3), Model(2 * seed + 1, 3)
    lossy, plain = (torch.ones((3,) * (depth + 1), dtype=torch.float64) for _ in range(2))
    for text in itertools.product(range(3), repeat=depth + 1):
        for i, x in enumerate(text):
            p, q = target(text[:i])[None], draft(text[:i])[None]
            pi = surrogate.law(p, q) if i < depth else p
            lossy[text] *= pi[0, x]
            plain[text] *= p[0, x]
    return lossy, plain


def written(rule: LossyRule, seed: int, shape: tuple[int, ...], rounds: int) -> Tensor:
    """How often each text came out: one round each, completed with the surrogate."""
    case = drawn([shape] * rounds, 3, seed)
    verdict = rule.verify(case.draft, case.target, case.noise)
    depth = case.draft.tree.depth
    target, draft = Model(2 * seed, 3), Model(2 * seed + 1, 3)
    chance = torch.Generator().manual_seed(seed)
    seen = torch.zeros((3,) * (depth + 1), dtype=torch.float64)
    decided = zip(
        case.draft.tree.tokens_BN.tolist(),
        verdict.path_BD.tolist(),
        verdict.token_B.tolist(),
        torch.rand(rounds, depth + 1, generator=chance).tolist(),
        strict=True,
    )
    for tokens, path, token, uniforms in decided:
        text = (*(tokens[row - 1] for row in path if row), token)
        while len(text) <= depth:
            p, q = target(text)[None], draft(text)[None]
            law = rule.surrogate.law(p, q) if len(text) < depth else p
            u, x = uniforms[len(text)], 0
            while x < 2 and u >= float(law[0, : x + 1].sum()):
                x += 1
            text = (*text, x)
        seen[text] += 1
    return seen


def surprise(seen: Tensor, law: Tensor) -> float:
    """Standard errors by which chi-square exceeds its mean; cells nobody should see count most."""
    expected = (law * seen.sum()).flatten()
    if float(seen.flatten()[expected == 0].sum()):
        return float("inf")
    here = expected > 0
    chi = ((seen.flatten()[here] - expected[here]) ** 2 / expected[here]).sum()
    freedom = int(here.sum()) - 1
    return float((chi - freedom) / max(1, 2 * freedom) ** 0.5)


CASES = [
    (Lenience(0.5), (0, 1)),
    (TypicalAcceptance(0.3, 0.6), (0, 1)),
    (Threshold(0.25), (0, 1)),
    (Mixture(0.2), (0, 1)),
    (Lenience(0.5), full(2, 2)),
    (Threshold(0.25), full(2, 2)),
]


@pytest.mark.parametrize(("surrogate", "shape"), CASES)
def test_texts_have_the_surrogates_law(surrogate: Surrogate, shape: tuple[int, ...]):
    """Chains and trees; and the target's own law is far from what is written."""
    seen = written(LossyRule(surrogate), 4, shape, 6000)
    lossy, plain = round_laws(surrogate, 4, 2)
    assert surprise(seen, lossy) < 5
    assert surprise(seen, plain) > 20


@pytest.mark.parametrize("exact", [TokenRule(), BlockRule(), RULES["kseq"], RULES["traversal"]])
def test_any_rule_in_law_serves(exact):
    seen = written(LossyRule(Lenience(0.5), exact), 4, (0, 1), 6000)
    lossy, plain = round_laws(Lenience(0.5), 4, 2)
    assert surprise(seen, lossy) < 5
    assert surprise(seen, plain) > 20


@pytest.mark.parametrize("exact", [None, RULES["traversal"], RULES["hybrid"]])
def test_which_rows_have_children_is_no_matter_of_what_was_drawn(exact):
    """Elsewhere the law is the target's: trees of one shape have one declared law."""
    drawing = LossyRule(Lenience(), exact).drawing
    assert RULES["recursive"].drawing.ranked and not drawing.ranked
    law = Law.dense(torch.full((3, 4), 0.25))
    at = RoundNoise(*torch.tensor([[1, 2, 3], [0, 0, 0], [5, 5, 5]]))
    made = drawing.children(law, 2, Places(at, torch.tensor([[0, 1]] * 3), 0))
    assert made.worth_nK is None and made.counts_n.tolist() == [2, 2, 2]


def test_a_seeded_rule_does_not_serve():
    with pytest.raises(InvalidConfig, match="coupled"):
        LossyRule(Lenience(), CoupledRule())


def test_lossless_settings_are_the_exact_rule():
    case = drawn([full(2, 2), (0, 1), ()] * 60, 4, 2)
    wanted = RULES["recursive"].verify(case.draft, case.target, case.noise)
    for surrogate in (Lenience(1.0), Mixture(0.0)):
        verdict = LossyRule(surrogate).verify(case.draft, case.target, case.noise)
        assert torch.equal(verdict.path_BD, wanted.path_BD)
        assert float((verdict.token_B != wanted.token_B).double().mean()) == 0


@pytest.mark.parametrize("name", list(LOSSY))
def test_leaving_texts_out_changes_nothing(name: str):
    case = drawn([full(2, 2), (0, 1), ()] * 40, 4, 3)
    rule = rule_named(name, lossless=False)
    verdict = rule.verify(case.draft, case.target, case.noise)
    with nobody_left_out():
        other = rule.verify(case.draft, case.target, case.noise)
    assert torch.equal(verdict.path_BD, other.path_BD)
    assert torch.equal(verdict.token_B, other.token_B)


def test_rows_without_children_stay_the_targets():
    case = drawn([(0, 0, 1)], 4, 1)
    rows = SurrogateRows(case.draft, case.target, Threshold(0.25))
    probs = rows.probs(torch.arange(4))
    assert torch.equal(probs[2:], case.target_BTV[0, 2:])
    assert not torch.equal(probs[:2], case.target_BTV[0, :2])
    tokens = torch.tensor([1, 0, 2, 3])
    assert torch.equal(rows.prob_of(torch.arange(4), tokens), probs[torch.arange(4), tokens])
    assert torch.equal(rows.argmax(torch.arange(4)), probs.argmax(1))


def test_a_certain_token_is_its_own_law():
    """Typical acceptance of a looked-up chain: kept where typical, whatever the noise."""
    target = TargetLaws(torch.tensor([[[0.5, 0.45, 0.05]] * 3]).expand(50, 3, 3))
    rule = rule_named("typical-acceptance", lossless=False)
    tokens = torch.tensor([[1, 0]]).expand(50, 2)
    verdict = rule.verify(Draft.chain(tokens, torch.full((50,), 2), None), target, _noise(50))
    assert verdict.num_accepted_B.tolist() == [2] * 50
    verdict = rule.verify(Draft.chain(tokens + 1, torch.full((50,), 2), None), target, _noise(50))
    assert verdict.num_accepted_B.tolist() == [0] * 50
    assert set(verdict.token_B.tolist()) == {0, 1}


def _noise(num_texts: int) -> RoundNoise:
    return noise_of(num_texts)


def test_lossy_rules_are_asked_for_by_name_and_by_intent():
    assert set(LOSSY) == {"lenience", "typical-acceptance", "threshold", "mixture"}
    assert not set(LOSSY) & set(RULES)
    for name, rule in LOSSY.items():
        assert (rule.name, rule.guarantee) == (name, "surrogate")
        assert rule_named(name, lossless=False) is rule
        with pytest.raises(InvalidConfig, match=f"{name}.*lossless=False"):
            rule_named(name)
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule.guarantee in ("seed", "law")
        assert rule_named(name) is rule is rule_named(name, lossless=False)
    with pytest.raises(InvalidConfig, match="did you mean 'lenience'"):
        rule_named("leniency")


@pytest.mark.parametrize(
    "build",
    [
        lambda: Lenience(0.0),
        lambda: Lenience(1.1),
        lambda: Threshold(-0.1),
        lambda: TypicalAcceptance(delta=1.0),
        lambda: TypicalAcceptance(epsilon=0.0),
        lambda: Mixture(2.0),
    ],
)
def test_settings_are_checked(build):
    with pytest.raises(InvalidConfig, match="is due"):
        build()


def test_kinds_and_trees_are_those_of_the_exact_rule():
    tree = TokenTree.of([[0, 1]], [[0, 0]])
    draft = Draft(tree, Law.dense(torch.ones(2, 2) / 2), None, None, frozenset({Kind.IID}))
    LossyRule(Lenience()).check(draft)
    with pytest.raises(InvalidConfig, match="chains"):
        LossyRule(Lenience(), TokenRule()).check(draft)
