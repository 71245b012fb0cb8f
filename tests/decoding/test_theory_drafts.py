"""Several drafts for one token: formulas against enumeration, a linear program and each other."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from outrider.certify import pairs
from outrider.decoding import theory
from outrider.decoding.theory import races
from outrider.errors import InvalidConfig

EXAMPLE = tuple(Fraction(i, 10) for i in (1, 2, 3, 4))
REVERSED = EXAMPLE[::-1]

laws_ = st.integers(2, 5).flatmap(
    lambda width: st.tuples(
        *[st.lists(st.integers(0, 9), min_size=width, max_size=width).filter(any) for _ in range(2)]
    )
)
pairs_ = laws_.map(lambda weights: tuple(map(pairs.fractions_of, weights)))
counts_ = st.integers(1, 4)


def without(q, drawn):
    """q without what was drawn, normalised; None where nothing is left."""
    rest = [0 if x in drawn else b for x, b in enumerate(q)]
    return [Fraction(b) / sum(rest) for b in rest] if any(rest) else None


def sequential(p, num_drafts: int, law_of: Callable):
    """Draws, tests and replaces for real: the chance that a draft is kept, and the law written."""
    kept, written = Fraction(0), [Fraction(0)] * len(p)

    def walk(residual, drawn, weight):
        nonlocal kept
        law = law_of(drawn) if len(drawn) < num_drafts else None
        if law is None:
            for x, mass in enumerate(residual):
                written[x] += weight * mass
            return
        for x, mass in enumerate(law):
            if mass == 0:
                continue
            keep = min(Fraction(1), residual[x] / mass)
            kept += weight * mass * keep
            written[x] += weight * mass * keep
            if keep < 1:
                walk(theory.excess(residual, law), (*drawn, x), weight * mass * (1 - keep))

    walk(p, (), Fraction(1))
    return kept, written


def set_law_iid(q, num_drafts: int):
    law = defaultdict(Fraction)
    for drawn in itertools.product(range(len(q)), repeat=num_drafts):
        law[frozenset(drawn)] += math.prod((q[x] for x in drawn), start=Fraction(1))
    return law


def set_law_in_order(q, num_drafts: int):
    """Without replacement, sequence by sequence."""
    law = defaultdict(Fraction)
    support = [x for x, mass in enumerate(q) if mass > 0]
    for drawn in itertools.permutations(support, min(num_drafts, len(support))):
        weight, left = Fraction(1), Fraction(1)
        for x in drawn:
            weight, left = weight * q[x] / left, left - q[x]
        law[frozenset(drawn)] += weight
    return law


def set_law_hybrid(q, num_drafts: int):
    order = sorted(range(len(q)), key=lambda x: (-q[x], x))
    certain = frozenset(x for x in order[: num_drafts - 1] if q[x] > 0)
    tail = without(q, certain)
    if tail is None:
        return {certain: Fraction(1)}
    return {certain | {x}: mass for x, mass in enumerate(tail) if mass > 0}


def linear_program(p, drafts) -> float:
    """The largest mass that a coupling of p and the set law puts on "the token is in the set"."""
    sets = list(drafts)
    pairs_of = [(i, y) for i, tokens in enumerate(sets) for y in tokens]
    rows = np.zeros((len(sets) + len(p), len(pairs_of)))
    for column, (i, y) in enumerate(pairs_of):
        rows[i, column] = rows[len(sets) + y, column] = 1
    limits = [float(drafts[tokens]) for tokens in sets] + [float(a) for a in p]
    return -linprog(-np.ones(len(pairs_of)), A_ub=rows, b_ub=limits, method="highs").fun


# Recursive rejection.


@given(pairs_, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_recursive_with_replacement_by_enumeration(pair, count: int):
    p, q = pair
    kept, written = sequential(p, count, lambda _: q)
    assert written == list(p)
    assert theory.recursive_acceptance_iid(p, q, count) == kept


@given(pairs_, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_recursive_without_replacement_by_enumeration(pair, count: int):
    p, q = pair
    kept, written = sequential(p, count, lambda drawn: without(q, drawn))
    assert written == list(p)
    assert theory.recursive_acceptance_without(p, q, count) == kept


def test_recursive_over_several_drafters_and_certain_children():
    laws = [REVERSED, (Fraction(1, 2), Fraction(1, 2), 0, 0), (0, 0, 0, Fraction(1))]
    kept, written = sequential(EXAMPLE, 3, lambda drawn: laws[len(drawn)])
    assert written == list(EXAMPLE)
    assert theory.recursive_acceptance(EXAMPLE, laws) == kept
    certain = [(0, 0, 0, Fraction(1)), (0, Fraction(1), 0, 0)]
    assert theory.recursive_acceptance(EXAMPLE, certain) == EXAMPLE[3] + EXAMPLE[1]


def test_the_enumerator_finds_a_wrong_sibling_law():
    """Drawn without replacement, tested as if with: the law written is not p."""
    kept, written = Fraction(0), [Fraction(0)] * 4
    residual = theory.excess(EXAMPLE, REVERSED)
    for first, mass in enumerate(REVERSED):
        keep = min(Fraction(1), EXAMPLE[first] / mass)
        kept += mass * keep
        written[first] += mass * keep
        rest = without(REVERSED, {first})
        refused = 1 - sum(
            b * min(1, r / q) for b, r, q in zip(rest, residual, REVERSED, strict=True)
        )
        second = theory.excess(residual, REVERSED)
        for x in range(4):
            here = rest[x] * min(Fraction(1), residual[x] / REVERSED[x]) + refused * second[x]
            written[x] += mass * (1 - keep) * here
    assert sum(written) == 1
    assert written != list(EXAMPLE)


# Hybrid and certain children.


@given(pairs_, counts_)
@settings(max_examples=80, deadline=None)
def test_hybrid_is_the_optimum_of_its_own_drafts(pair, count: int):
    p, q = pair
    drafts = set_law_hybrid(q, count)
    found = theory.hybrid_acceptance(p, q, count)
    assert found == theory.optimal_acceptance(p, drafts)
    assert found >= theory.acceptance(p, q)
    assert float(found) == pytest.approx(linear_program(p, drafts), abs=1e-9)


def test_hybrid_is_neither_above_nor_below_drafts_without_replacement():
    """It bets on the draft's likeliest tokens: a wrong bet costs, a right one beats the optimum."""
    wrong = (Fraction(1), 0, 0), (Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))
    assert theory.hybrid_acceptance(*wrong, 2) < theory.recursive_acceptance_without(*wrong, 2)
    right = (0, 0, Fraction(1)), (Fraction(1, 4), Fraction(1, 4), Fraction(1, 2))
    assert theory.hybrid_acceptance(*right, 2) == 1 > theory.optimal_acceptance_without(*right, 2)


def test_top_children_are_kept_as_often_as_the_target_draws_them():
    assert theory.top_acceptance(EXAMPLE, REVERSED, 2) == Fraction(3, 10)
    half = (Fraction(1, 2), Fraction(1, 2), 0, 0)
    assert theory.top_acceptance(EXAMPLE, half, 4) == Fraction(3, 10)
    assert theory.hybrid_acceptance(EXAMPLE, half, 4) == Fraction(3, 10)
    assert theory.hybrid_acceptance(EXAMPLE, REVERSED, 0) == 0


# K-SEQ.


def kseq(p, q, count: int, rho: Fraction):
    """What K-SEQ keeps, and the law from which it replaces (negative where rho is too small)."""
    kept, by_token = Fraction(0), [Fraction(0)] * len(p)
    for drawn in itertools.product(range(len(q)), repeat=count):
        weight = math.prod((q[x] for x in drawn), start=Fraction(1))
        for x in drawn:
            if weight == 0:
                break
            keep = min(Fraction(1), p[x] / (rho * q[x]))
            kept += weight * keep
            by_token[x] += weight * keep
            weight *= 1 - keep
    return kept, [a - b for a, b in zip(p, by_token, strict=True)]


@given(pairs_, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_kseq_by_enumeration(pair, count: int):
    p, q = pair
    # A hair above, where rounding cannot have left the float below the root.
    least = Fraction(theory.kseq_rho(p, q, count)) + Fraction(1, 10**12)
    for rho in (least, Fraction(count)):
        kept, rest = kseq(p, q, count, rho)
        assert theory.kseq_acceptance(p, q, count, rho) == kept
        assert min(rest) >= 0


def test_a_rho_below_rho_star_is_biased():
    rho = theory.kseq_rho(EXAMPLE, REVERSED, 3)
    assert 1 < rho < 3
    beta = theory.kseq_beta([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], rho)
    assert 1 - (1 - beta) ** 3 == pytest.approx(rho * beta, abs=1e-14)
    assert min(kseq(EXAMPLE, REVERSED, 3, Fraction(rho))[1]) == pytest.approx(0, abs=1e-14)
    assert min(kseq(EXAMPLE, REVERSED, 3, Fraction(rho) * Fraction(99, 100))[1]) < 0


@pytest.mark.parametrize("r", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_uniform_family(r: int, count: int):
    """SpecTr: q uniform, p uniform on 1 / r of its tokens; all rules keep 1 - (1 - 1/r)^K."""
    p = [Fraction(1, 2)] * 2 + [Fraction(0)] * (2 * r - 2)
    q = [Fraction(1, 2 * r)] * (2 * r)
    kept = 1 - (1 - Fraction(1, r)) ** count
    assert theory.recursive_acceptance_iid(p, q, count) == kept
    assert theory.optimal_acceptance_iid(p, q, count) == kept
    rho = theory.kseq_rho(p, q, count)
    assert rho == pytest.approx(float(r * kept), abs=1e-12)
    assert theory.kseq_acceptance(p, q, count, rho) == pytest.approx(float(kept), abs=1e-12)


# The optimum.


@given(pairs_, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_the_optimum_of_iid_drafts(pair, count: int):
    p, q = pair
    assert theory.optimal_acceptance_iid(p, q, count) == theory.optimal_acceptance(
        p, set_law_iid(q, count)
    )


@given(pairs_, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_the_optimum_without_replacement(pair, count: int):
    p, q = pair
    drafts = set_law_in_order(q, count)
    assert theory.set_law_without(q, count) == drafts
    found = theory.optimal_acceptance_without(p, q, count)
    assert found == theory.optimal_acceptance(p, drafts)
    by_quadrature = theory.optimal_acceptance_without_quadrature(p, q, count)
    assert by_quadrature == pytest.approx(float(found), abs=1e-12)


@given(pairs_, counts_)
@settings(max_examples=40, deadline=None)
def test_the_optimum_by_linear_program(pair, count: int):
    p, q = pair
    for drafts in (set_law_iid(q, count), set_law_in_order(q, count)):
        found = theory.optimal_acceptance(p, drafts)
        assert float(found) == pytest.approx(linear_program(p, drafts), abs=1e-9)


@given(pairs_)
@settings(max_examples=60, deadline=None)
def test_two_drafts_in_closed_form(pair):
    """Khisti et al., ICLR 2025: min over S of p(S) + q(S^c)^2 + 2 q(S) q(S^c)."""
    p, q = pair
    least = Fraction(2)
    for chosen in itertools.product((False, True), repeat=len(p)):
        p_in = sum(a for a, inside in zip(p, chosen, strict=True) if inside)
        q_in = sum(b for b, inside in zip(q, chosen, strict=True) if inside)
        least = min(least, p_in + (1 - q_in) ** 2 + 2 * q_in * (1 - q_in))
    assert theory.optimal_acceptance_iid(p, q, 2) == least


def test_the_order_of_p_over_q_is_the_one_that_counts():
    """Prefixes of the order of q miss the minimum, which is p - q^2 of the first three tokens."""
    by_q = sorted(range(4), key=lambda x: REVERSED[x])
    inside = [by_q[:length] for length in range(5)]
    least = min(sum(EXAMPLE[x] for x in h) - sum(REVERSED[x] for x in h) ** 2 for h in inside)
    assert theory.optimal_acceptance_iid(EXAMPLE, REVERSED, 2) < 1 + least
    assert (
        theory.optimal_acceptance_iid(EXAMPLE, REVERSED, 2)
        == 1 + Fraction(6, 10) - Fraction(9, 10) ** 2
    )


def test_too_many_subsets_are_refused():
    with pytest.raises(InvalidConfig, match="21 tokens"):
        theory.optimal_acceptance([1 / 21] * 21, {frozenset({0}): 1.0})


@pytest.mark.parametrize("sharp", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("count", [2, 3])
def test_quadrature_on_wider_laws(sharp: float, count: int):
    p, q = random_laws(24, sharp, seed=count)
    found = theory.optimal_acceptance_without_quadrature(p, q, count)
    assert found == pytest.approx(theory.optimal_acceptance_without(p, q, count), abs=1e-11)


# The best of K.


@given(pairs_, counts_)
@settings(max_examples=60, deadline=None)
def test_best_of_by_enumeration(pair, count: int):
    p, q = pair

    def worth(x: int):
        return (p[x] / q[x], -x)

    law = [Fraction(0)] * len(q)
    for drawn in itertools.product([x for x in range(len(q)) if q[x] > 0], repeat=count):
        law[max(drawn, key=worth)] += math.prod((q[x] for x in drawn), start=Fraction(1))
    assert theory.best_of_law(p, q, count) == law
    assert theory.best_of_acceptance(p, q, count) == theory.acceptance(p, law)
    kept = [theory.best_of_acceptance(p, q, k + 1) for k in range(count)]
    assert theory.best_of_guard(p, q, count) == theory.BestOf(kept.index(max(kept)) + 1, max(kept))


def test_ties_go_to_the_lowest_id_and_that_costs():
    """p = q: the better of two drafts of a fair coin is heads in three of four cases."""
    fair = (Fraction(1, 2), Fraction(1, 2))
    assert theory.best_of_law(fair, fair, 2) == [Fraction(3, 4), Fraction(1, 4)]
    assert theory.best_of_acceptance(fair, fair, 2) == Fraction(3, 4)
    assert theory.best_of_guard(fair, fair, 2) == theory.BestOf(1, Fraction(1))


def test_the_best_of_many_is_worse_where_the_draft_is_good():
    p = [Fraction(i, 10) for i in (3, 3, 4)]
    q = [Fraction(i, 10) for i in (4, 3, 3)]
    kept = [theory.best_of_acceptance(p, q, count) for count in (1, 2, 4, 8)]
    assert kept[-1] < kept[-2] < kept[-3]
    assert theory.best_of_guard(p, q, 8).num_drafts < 8


# Races on shared noise.


def gumbel_ranks_exactly(p, q):
    """By inclusion and exclusion over who is ahead; exact in fractions, V 2^V terms and more."""
    support = [x for x in range(len(p)) if q[x] > 0]
    rates = [Fraction(0)] * len(support)
    for j in support:
        others = [i for i in support if i != j]
        rate = {i: max(q[i] * p[j] / q[j] - p[i], Fraction(0)) for i in others}
        for size in range(len(others) + 1):
            for ahead in itertools.combinations(others, size):
                behind = sum((rate[i] for i in others if i not in ahead), start=Fraction(0))
                for part in range(size + 1):
                    for late in itertools.combinations(ahead, part):
                        total = 1 + behind + sum((rate[i] for i in late), start=Fraction(0))
                        rates[size] += (-1) ** part * p[j] / total
    return rates


@given(pairs_)
@settings(max_examples=40, deadline=None)
def test_gumbel_ranks_against_exact_values(pair):
    p, q = pair
    exact = [float(rate) for rate in gumbel_ranks_exactly(p, q)]
    ranks = theory.gumbel_rank_rates(p, q, 5)
    assert ranks[: len(exact)] == pytest.approx(exact, abs=1e-11)
    assert ranks[len(exact) :] == pytest.approx([0] * (5 - len(exact)), abs=1e-11)
    assert ranks[0] == pytest.approx(float(theory.gumbel_acceptance(p, q)), abs=1e-11)
    on_support = sum(a for a, b in zip(p, q, strict=True) if b > 0)
    assert theory.gumbel_top_acceptance(p, q, len(p)) == pytest.approx(float(on_support), abs=1e-11)


def test_gumbel_ranks_of_real_races():
    """The exact values again, without their derivation: a million races, five deviations."""
    p, q = random_laws(6, 1.5, seed=4)
    noise = np.random.default_rng(0).exponential(size=(1_000_000, 6))
    chosen = (noise / p).argmin(axis=1)
    key = noise / q
    ranks = (key < key[np.arange(len(key)), chosen][:, None]).sum(axis=1)
    seen = np.bincount(ranks, minlength=6) / len(ranks)
    expected = np.array(theory.gumbel_rank_rates(p, q, 6))
    far = 5 * np.sqrt(expected * (1 - expected) / len(ranks))
    assert (abs(seen - expected) < far).all()
    # As if the two races had their own noise: the formula without "has not arrived yet".
    assert abs(seen[0] - theory.match_acceptance(p, q)) > far[0]


@pytest.mark.parametrize("sharp", [1.0, 6.0])
def test_integrals_do_not_depend_on_their_step(sharp: float, monkeypatch: pytest.MonkeyPatch):
    p, q = random_laws(150, sharp, seed=1)

    def values() -> list[float]:
        return [
            *theory.gumbel_rank_rates(p, q, 3),
            *(theory.optimal_acceptance_without_quadrature(p, q, count) for count in (2, 5, 8)),
        ]

    coarse = values()
    monkeypatch.setattr(races, "STEP", races.STEP / 2)
    monkeypatch.setattr(races, "EARLIEST", races.EARLIEST - 5)
    assert values() == pytest.approx(coarse, abs=1e-11)
    monkeypatch.setattr(races, "STEP", 2.0)
    assert values() != pytest.approx(coarse, abs=1e-4)


def test_no_drafts_keep_nothing():
    for formula in (
        theory.recursive_acceptance_iid,
        theory.recursive_acceptance_without,
        theory.optimal_acceptance_iid,
        theory.optimal_acceptance_without,
        theory.optimal_acceptance_without_quadrature,
        theory.gumbel_top_acceptance,
        theory.hybrid_acceptance,
        theory.top_acceptance,
    ):
        assert formula(EXAMPLE, REVERSED, 0) == pytest.approx(0)
        assert formula(EXAMPLE, REVERSED, 1) > 0


def random_laws(width: int, sharp: float, seed: int) -> tuple[list[float], list[float]]:
    noise = np.random.default_rng(seed).normal(size=(2, width)) * sharp
    rows = np.exp(noise - noise.max(axis=1, keepdims=True))
    rows /= rows.sum(axis=1, keepdims=True)
    return rows[0].tolist(), rows[1].tolist()


# Which is above which.


@given(pairs_, counts_)
@settings(max_examples=150, deadline=None)
def test_inequalities_of_several_drafts(pair, count: int):
    p, q = pair
    close = 1e-11
    alpha = theory.acceptance(p, q)
    gumbel = theory.gumbel_acceptance(p, q)
    iid = theory.recursive_acceptance_iid(p, q, count)
    removed = theory.recursive_acceptance_without(p, q, count)
    best_iid = theory.optimal_acceptance_iid(p, q, count)
    best_removed = theory.optimal_acceptance_without(p, q, count)
    guarded = theory.best_of_guard(p, q, count).acceptance
    assert theory.minhash_acceptance(p, q) <= gumbel <= alpha
    assert alpha <= iid <= best_iid <= best_removed
    assert iid <= removed <= best_removed
    assert alpha <= guarded <= best_iid

    kept = float(theory.kseq_acceptance(p, q, count, theory.kseq_rho(p, q, count)))
    assert float(iid) - close <= kept <= float(best_iid) + close
    assert kept >= (1 - (1 - 1 / count) ** count) * float(best_iid) - close

    top = theory.gumbel_top_acceptance(p, q, count)
    assert float(gumbel) - close <= top <= float(best_removed) + close


@given(pairs_, st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_one_more_draft_never_hurts(pair, count: int):
    for formula in (
        theory.recursive_acceptance_iid,
        theory.recursive_acceptance_without,
        theory.optimal_acceptance_iid,
        theory.optimal_acceptance_without,
    ):
        assert formula(*pair, count) <= formula(*pair, count + 1)


def test_one_draft_is_every_rule_at_once():
    alpha = theory.acceptance(EXAMPLE, REVERSED)
    for formula in (
        theory.recursive_acceptance_iid,
        theory.recursive_acceptance_without,
        theory.optimal_acceptance_iid,
        theory.optimal_acceptance_without,
        theory.hybrid_acceptance,
        theory.best_of_acceptance,
    ):
        assert formula(EXAMPLE, REVERSED, 1) == alpha
    assert theory.kseq_rho(EXAMPLE, REVERSED, 1) == 1


def test_gumbel_children_may_be_kept_less_often_than_recursive_ones():
    """No theorem orders these two: shared noise wins on some pairs and loses on others."""
    p, q = EXAMPLE, REVERSED
    assert theory.gumbel_top_acceptance(p, q, 3) > theory.recursive_acceptance_without(p, q, 3)
    p, q = (Fraction(1, 3), Fraction(2, 3)), (Fraction(2, 3), Fraction(1, 3))
    assert theory.gumbel_top_acceptance(p, q, 1) < theory.recursive_acceptance_without(p, q, 1)
