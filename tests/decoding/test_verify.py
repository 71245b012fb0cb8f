"""The public functions: golden noise, semantics at every edge, and one typed error per mistake."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from outrider import errors
from outrider.decoding import (
    accept,
    adjusted_distribution,
    compute_acceptance_probs,
    compute_expected_tokens,
    resample_from_adjusted_target,
    sample_from_logprobs,
    sample_index,
    verify_speculative_tokens,
)

SEED_42 = (0.61295986, 0.46858650, 0.07323170, 0.34086150, 0.98771864, 0.32706332)
INF, NAN = math.inf, math.nan


class Counted:
    """A source that gives what it is told and counts."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.used = 0

    def uniform(self) -> float:
        self.used += 1
        return self.values[(self.used - 1) % len(self.values)]


def softmax(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=chance, dtype=torch.float64), -1).to(dtype)


def two_token_laws(p: float, q: float) -> tuple[list, list]:
    """Laws of two tokens, token 0 at p and q; one drafted, the last row certain of token 1."""
    return [[[q, 1 - q]]], [[[p, 1 - p], [0.0, 1.0]]]


def test_the_flat_stream_decides():
    """B = 2, K = 2: columns 0 and 1 test, column 2 draws; each threshold brackets its uniform."""
    for b in range(2):
        for i in range(2):
            u = SEED_42[3 * b + i]
            for shift, kept in ((1e-6, i + 1), (-1e-6, i)):
                target = torch.ones(2, 3, 2, dtype=torch.float64) / 2
                draft = torch.ones(2, 2, 2, dtype=torch.float64) / 2
                draft[b, i, 0], target[b, i, 0] = 1.0, u + shift
                draft[b, i, 1], target[b, i, 1] = 0.0, 1 - u - shift
                tokens = np.zeros((2, 2), dtype=np.int32)
                v = verify_speculative_tokens(draft, target, tokens, seed=42)
                assert int(v.num_accepted[b]) == (2 if kept > i else i)


def test_the_last_column_draws_the_added_token():
    for b in range(2):
        u = SEED_42[3 * b + 2]
        for shift, token in ((1e-6, 0), (-1e-6, 1)):
            last = torch.tensor([u + shift, 1 - u - shift], dtype=torch.float64)
            target = last.expand(2, 3, 2)
            v = verify_speculative_tokens(None, target, [[0, 0], [0, 0]], seed=42)
            row = verify_speculative_tokens(target[:, :2], target, [[0, 0], [0, 0]], seed=42)[b]
            assert row.num_accepted == 2
            assert row.bonus_token == token
            assert len(v) == 2


def test_the_record_has_four_names():
    draft, target = two_token_laws(0.0, 1.0)
    v = verify_speculative_tokens(draft * 2, target * 2, [[0], [1]], seed=1, draft_lengths=[1, 0])
    assert v.num_accepted.tolist() == [0, 0]
    assert v.num_accepted.dtype == v.bonus_token.dtype == torch.int64
    assert v.bonus_token.tolist() == [1, 1]
    assert v.accepted_tokens == [[], []]
    assert v.first_rejection_pos == [0, None]
    assert (v[0].first_rejection_pos, v[0].accepted_tokens, v[1].bonus_token) == (0, [], 1)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("p", "kept"), [(0.3, 1), (0.0, 0)])
def test_q_zero(rule: str, p: float, kept: int):
    draft, target = two_token_laws(p, 0.0)
    for seed in range(8):
        v = verify_speculative_tokens(draft, target, [[0]], seed=seed, rule=rule)
        assert v.num_accepted.tolist() == [kept]


def test_no_rejection_when_the_laws_are_equal():
    target = softmax(30, 4, 9)
    for rule in ("token", "block"):
        v = verify_speculative_tokens(
            target[:, :3], target, target[:, :3].argmax(-1), seed=5, rule=rule
        )
        assert v.num_accepted.tolist() == [3] * 30
        assert v.first_rejection_pos == [None] * 30


def test_point_masses():
    """None = certain tokens: x stays with probability p(x), else one of the others follows p."""
    target = torch.tensor([0.25, 0.45, 0.3]).expand(20_000, 2, 3)
    v = verify_speculative_tokens(None, target, torch.zeros(20_000, 1, dtype=torch.int64), seed=3)
    one_hot = torch.tensor([1.0, 0, 0]).expand(20_000, 1, 3)
    same = verify_speculative_tokens(
        one_hot, target, torch.zeros(20_000, 1, dtype=torch.int8), seed=3
    )
    assert torch.equal(v.num_accepted, same.num_accepted)
    assert torch.equal(v.bonus_token, same.bonus_token)
    refused = v.num_accepted == 0
    assert float((~refused).double().mean()) == pytest.approx(0.25, abs=0.015)
    assert (v.bonus_token[refused] > 0).all()
    assert float((v.bonus_token[refused] == 1).double().mean()) == pytest.approx(0.6, abs=0.02)


def test_greedy_walks_the_argmax():
    target = torch.eye(4)[torch.tensor([[2, 0, 1]])]
    v = verify_speculative_tokens(None, target, [[2, 3]], seed=0, rule="greedy")
    assert (v.num_accepted.tolist(), v.bonus_token.tolist(), v.first_rejection_pos) == (
        [1],
        [0],
        [1],
    )
    softer = verify_speculative_tokens(None, (target + 0.1) / 1.4, [[2, 0]], seed=0, rule="greedy")
    assert (softer.num_accepted.tolist(), softer.bonus_token.tolist()) == ([2], [1])


def test_nothing_drafted_and_nothing_at_all():
    target = softmax(5, 1, 6)
    v = verify_speculative_tokens(None, target, torch.zeros(5, 0, dtype=torch.int64), seed=42)
    assert v.num_accepted.tolist() == [0] * 5
    assert v.first_rejection_pos == [None] * 5
    expected = [
        int((row.double().cumsum(0) > u).byte().argmax())
        for row, u in zip(target[:, 0], SEED_42, strict=False)
    ]
    assert v.bonus_token.tolist() == expected
    listed = verify_speculative_tokens(None, target[:1], [[]], seed=42)
    assert listed.bonus_token.tolist() == expected[:1]
    none = verify_speculative_tokens(None, target[:0], np.zeros((0, 0), dtype=np.int64), seed=1)
    assert len(none) == 0
    assert none.num_accepted.shape == none.bonus_token.shape == (0,)
    some = verify_speculative_tokens(
        torch.zeros(0, 2, 6), torch.zeros(0, 3, 6), torch.zeros(0, 2, dtype=torch.int64), seed=1
    )
    assert some.accepted_tokens == []


@pytest.mark.parametrize("rule", ["token", "block", "greedy"])
def test_ragged_rows_do_not_read_their_padding(rule: str):
    draft, target = softmax(4, 3, 5, seed=1), softmax(4, 4, 5, seed=2)
    tokens, lengths = draft.argmax(-1), torch.tensor([0, 1, 2, 3])
    v = verify_speculative_tokens(draft, target, tokens, seed=7, rule=rule, draft_lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        draft[b, n:], target[b, n + 1 :], tokens[b, n:] = NAN, -INF, -1
        assert v[b].num_accepted <= n
        assert v[b].first_rejection_pos == (v[b].num_accepted if v[b].num_accepted < n else None)
    again = verify_speculative_tokens(
        draft, target, tokens, seed=7, rule=rule, draft_lengths=lengths
    )
    assert again.accepted_tokens == v.accepted_tokens
    assert torch.equal(again.bonus_token, v.bonus_token)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("integer", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_any_dtype(dtype: torch.dtype, integer: torch.dtype):
    """The same decisions as float64 makes of the same numbers, but for a few within rounding."""
    num = 300
    chance = torch.Generator().manual_seed(3)
    target, draft = (softmax(num, t, 4, seed=t, dtype=dtype) for t in (3, 2))
    tokens = torch.multinomial(draft.double().flatten(0, 1), 1, generator=chance).view(num, 2)
    tokens = tokens.to(integer)
    seed = 2**64 - 1
    v = verify_speculative_tokens(draft, target, tokens, seed=seed)
    exact = verify_speculative_tokens(draft.double(), target.double(), tokens, seed=np.uint64(seed))
    assert set(exact.num_accepted.tolist()) == {0, 1, 2}
    differ = (v.num_accepted != exact.num_accepted) | (v.bonus_token != exact.bonus_token)
    # The tests' uniforms meet float32 numbers: of 900 decisions none lies within 1e-6, say one.
    assert int(differ.sum()) <= 1
    with_numpy = verify_speculative_tokens(
        draft.double().numpy(), target.double().numpy().tolist(), tokens.numpy(), seed=seed
    )
    assert torch.equal(with_numpy.num_accepted, exact.num_accepted)
    assert torch.equal(with_numpy.bonus_token, exact.bonus_token)


def test_a_seed_is_reproducible_and_matters():
    draft, target = softmax(64, 3, 5, seed=1), softmax(64, 4, 5, seed=2)
    tokens = draft.argmax(-1)
    a, b, c = (verify_speculative_tokens(draft, target, tokens, seed=s) for s in (1, 1, 2))
    assert a.accepted_tokens == b.accepted_tokens
    assert torch.equal(a.bonus_token, b.bonus_token)
    assert a.accepted_tokens != c.accepted_tokens


P, Q, X = softmax(2, 3, 4, seed=1), softmax(2, 2, 4, seed=2), torch.ones(2, 2, dtype=torch.int64)


def spoiled(rows: torch.Tensor, value: float) -> torch.Tensor:
    out = rows.clone()
    out[0, 0, 1] = value
    return out


MISTAKES = [
    ("DraftShapeMismatch", {"draft_probs": Q[0]}, "[2, 2, 4] is due"),
    ("DraftShapeMismatch", {"draft_probs": Q[:1]}, "[2, 2, 4] is due"),
    ("DistributionWidthMismatch", {"draft_probs": Q[:, :, :3]}, "covers 3 tokens, target_probs 4"),
    ("TargetShapeMismatch", {"target_probs": P[0]}, "[2, 3, V] is due"),
    ("TargetShapeMismatch", {"target_probs": P[:, :2]}, "[2, 3, V] is due"),
    ("TargetShapeMismatch", {"target_probs": P[:1]}, "[2, 3, V] is due"),
    ("DraftShapeMismatch", {"draft_tokens": X[0]}, "[B, K] is due"),
    ("DraftShapeMismatch", {"draft_lengths": [1]}, "[2] is due"),
    ("DraftShapeMismatch", {"draft_lengths": [1, 3]}, "0..2"),
    ("TokenOutOfRange", {"draft_tokens": X * 4}, "0..3"),
    ("TokenOutOfRange", {"draft_tokens": -X}, "0..3"),
    ("NonFinite", {"target_probs": spoiled(P, NAN)}, "target_probs"),
    ("NonFinite", {"target_probs": spoiled(P, INF)}, "target_probs"),
    ("NonFinite", {"draft_probs": spoiled(Q, NAN)}, "draft_probs"),
    ("InvalidConfig", {"draft_probs": spoiled(Q, -0.5)}, "-0.5"),
    ("DegenerateDistribution", {"target_probs": P * torch.tensor([1.0, 0, 1])[:, None]}, "mass 0;"),
    ("DegenerateDistribution", {"draft_probs": Q * 3}, "draft_probs row (0, 0) has mass 3; a law"),
    ("DegenerateDistribution", {"target_probs": spoiled(P, 2.0)}, "target_probs row (0, 0) has"),
    ("DegenerateDistribution", {"target_probs": P[:, :, :0], "draft_probs": None}, "vocabulary"),
    ("InvalidConfig", {"target_probs": P.to(torch.int64)}, "dtype"),
    ("InvalidConfig", {"draft_tokens": X.float()}, "dtype"),
    ("InvalidConfig", {"draft_tokens": X.bool()}, "dtype"),
    ("InvalidConfig", {"draft_tokens": [[1], [1, 2]]}, "draft_tokens"),
    ("InvalidConfig", {"rule": "typical"}, "'typical'"),
    ("InvalidConfig", {"rule": "coupled"}, "token, block, greedy"),
    ("InvalidConfig", {"seed": -1}, "seed=-1"),
    ("InvalidConfig", {"seed": 2**64}, "[0, 2**64)"),
    ("InvalidConfig", {"seed": 1.5}, "seed=1.5"),
    ("InvalidConfig", {"seed": True}, "seed=True"),
]


@pytest.mark.parametrize(("name", "change", "said"), MISTAKES)
def test_mistakes_are_typed(name: str, change: dict, said: str):
    good = {"draft_probs": Q, "target_probs": P, "draft_tokens": X, "seed": 1}
    verify_speculative_tokens(**good)
    with pytest.raises(getattr(errors, name)) as caught:
        verify_speculative_tokens(**{**good, **change})
    assert type(caught.value).__name__ == name
    assert said in str(caught.value)


def test_acceptance_probs():
    q = [[[0.5, 0.5, 0.0, 0.0]], [[0.1, 0.2, 0.3, 0.4]]]
    p = [[[0.25, 0.5, 0.25, 0.0]], [[0.4, 0.3, 0.2, 0.1]]]
    acceptance, residual = compute_acceptance_probs(q, p)
    assert acceptance[0, 0].tolist() == [0.5, 1.0, 1.0, 0.0]
    torch.testing.assert_close(acceptance[1, 0], torch.tensor([1, 1, 2 / 3, 0.25]).double())
    torch.testing.assert_close(residual[0, 0], torch.tensor([0, 0, 0.25, 0]).double())
    torch.testing.assert_close(residual[1, 0], torch.tensor([0.3, 0.1, 0, 0]).double())
    assert compute_acceptance_probs(P.half(), P.half())[0].dtype == torch.float32
    assert compute_acceptance_probs(P[:0], P[:0])[1].shape == (0, 3, 4)
    with pytest.raises(errors.TargetShapeMismatch, match="last row"):
        compute_acceptance_probs(Q, P)
    with pytest.raises(errors.DraftShapeMismatch):
        compute_acceptance_probs(Q[0], Q[0])
    with pytest.raises(errors.NonFinite):
        compute_acceptance_probs(spoiled(Q, NAN), Q)


def test_expected_tokens():
    rates = torch.tensor([[0.8, 0.8], [0.5, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(compute_expected_tokens(rates), torch.tensor([2.44, 1.5, 3.0]))
    assert compute_expected_tokens(np.zeros((3, 0))).tolist() == [1.0] * 3
    for bad, error in (
        ([0.5], errors.InvalidConfig),
        ([[1.5]], errors.InvalidConfig),
        ([[-0.1]], errors.InvalidConfig),
        ([[NAN]], errors.NonFinite),
    ):
        with pytest.raises(error):
            compute_expected_tokens(bad)


@pytest.mark.parametrize(
    ("q", "p", "u", "stays"),
    [
        (-1.0, -1.0, 0.9999, True),
        (-1.0, -0.5, 0.9999, True),
        (math.log(0.8), math.log(0.4), 0.499999, True),
        (math.log(0.8), math.log(0.4), 0.500001, False),
        (-INF, -3.0, 0.9, True),
        (-3.0, -INF, 0.0, False),
        (-INF, -INF, 0.0, False),
    ],
)
def test_accept(q: float, p: float, u: float, stays: bool):
    rng = Counted(u)
    assert accept(q, p, rng) is stays
    assert rng.used == 1


@pytest.mark.parametrize(("q", "p"), [(NAN, -1.0), (-1.0, NAN), (INF, -1.0), (-1.0, INF)])
def test_accept_refuses_what_is_no_logprob(q: float, p: float):
    with pytest.raises(errors.NonFinite):
        accept(q, p, Counted(0.5))


def test_adjusted_distribution():
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    adjusted = adjusted_distribution(p, q)
    assert adjusted.dtype == torch.float64
    torch.testing.assert_close(adjusted, torch.tensor([1.0, 0, 0]).double())
    torch.testing.assert_close(adjusted_distribution(p, p).exp(), torch.tensor(np.exp(np.exp(p))))
    torch.testing.assert_close(
        adjusted_distribution([-INF, 0.0], [0.0, -INF]), torch.tensor([0.0, 1.0]).double()
    )
    with pytest.raises(errors.DistributionWidthMismatch, match="3 entries, draft_logprobs 2"):
        adjusted_distribution(p, q[:2])
    with pytest.raises(errors.DegenerateDistribution):
        adjusted_distribution([-INF, -INF], [-1.0, -1.0])
    for bad in (NAN, INF):
        with pytest.raises(errors.NonFinite):
            adjusted_distribution([bad, 0.0], [0.0, 0.0])


def test_resampling_and_sampling_take_one_draw():
    rng = Counted(0.3)
    assert resample_from_adjusted_target(np.log([0.5, 0.5]), np.log([0.9, 0.1]), rng) == 1
    assert sample_from_logprobs([math.log(0.25) + 5, math.log(0.75) + 5], rng) == 1
    assert sample_from_logprobs([-2000.0, -2000.0], rng) == 0
    assert sample_index([0.2, 0.0, 0.8], rng) == 2
    assert rng.used == 4


def test_sample_index_edges():
    assert sample_index([0.0, 1.0, 0.0], Counted(0.0)) == 1
    assert sample_index([0.5, 0.5, 0.0], Counted(1.0 - 2.0**-53)) == 1
    assert sample_index(torch.tensor([3.0, 1.0]), Counted(0.76)) == 1
    for bad, error in (
        ([], errors.DegenerateDistribution),
        ([0.0, 0.0], errors.DegenerateDistribution),
        ([NAN, 1.0], errors.NonFinite),
        ([-1.0, 2.0], errors.InvalidConfig),
        ([[0.5, 0.5]], errors.InvalidConfig),
    ):
        with pytest.raises(error):
            sample_index(bad, Counted(0.5))
    for bad, error in (
        ([], errors.DegenerateDistribution),
        ([-INF, -INF], errors.DegenerateDistribution),
        ([NAN, -1.0], errors.NonFinite),
        ([INF, -1.0], errors.NonFinite),
    ):
        with pytest.raises(error):
            sample_from_logprobs(bad, Counted(0.5))


def test_importing_needs_torch_and_numpy_only():
    """No other third-party package, and nothing of the package to its right."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import outrider.decoding; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names))); "
        "print(sorted(n for n in sys.modules if n.startswith('outrider.')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign, ours = out.stdout.splitlines()
    assert set(eval(foreign)) <= {"numpy", "outrider", "torch"}
    assert all(
        name.split(".")[1] in {"decoding", "host", "noise", "errors", "types", "config", "tree"}
        for name in eval(ours)
    )
