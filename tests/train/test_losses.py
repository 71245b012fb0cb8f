"""Losses of heads fall, and the chain's is what block verification refuses, by enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from outrider.decoding.theory import block_expected_accepted, token_expected_accepted
from outrider.train.losses import block_shortfall, distance, divergence
from outrider.train.recipe import LOSSES

VOCAB, DEPTH = 3, 3


def test_every_loss_falls_and_is_zero_at_the_target() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    following = torch.tensor([0, 6, -100, 3, 2])
    for loss in (name for name in LOSSES if name != "block"):
        other = (logits * 0.5).requires_grad_()
        value = distance(loss, logits, other.log_softmax(-1), following)
        value.backward()
        assert other.grad is not None
        moved = (other - 0.1 * other.grad).log_softmax(-1)
        assert distance(loss, logits, moved, following) < value
        if loss != "ce":
            assert distance(loss, logits, logits.log_softmax(-1), following) < 1e-6 < value
    nowhere = torch.full((5,), -100)
    assert distance("ce", logits, logits.log_softmax(-1), nowhere) == 0
    p, q = logits.softmax(-1), (logits * 0.5).softmax(-1)
    due = 1 - torch.minimum(p, q).sum(-1).mean()
    assert distance("tv", logits, q.log(), following) == pytest.approx(float(due), abs=1e-6)


def test_the_divergence_and_its_gradient_are_those_of_autograd() -> None:
    draw = torch.Generator().manual_seed(3)
    log_p = torch.randn(6, 9, generator=draw, dtype=torch.float64).log_softmax(-1)[:, :7]
    logits = torch.randn(6, 7, generator=draw, dtype=torch.float64)
    found: list[tuple[Tensor, Tensor]] = []
    for own in (True, False):
        x = logits.clone().requires_grad_()
        if own:
            value = divergence(log_p, x)
        else:
            pair = x.log_softmax(-1), log_p.log_softmax(-1)
            value = nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
        (3 * value).backward()
        assert x.grad is not None
        found.append((value.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])
    given = log_p, logits.log_softmax(-1), torch.zeros(6, dtype=torch.int64)
    torch.testing.assert_close(distance("kl", *given), found[0][0])


class Tabular:
    """Logits after every prefix of up to DEPTH - 1 tokens."""

    def __init__(self, seed: int, flat: Tensor | None = None) -> None:
        self.prefixes = [
            prefix
            for length in range(DEPTH)
            for prefix in itertools.product(range(VOCAB), repeat=length)
        ]
        draw = torch.Generator().manual_seed(seed)
        size = len(self.prefixes) * VOCAB
        self.flat = torch.randn(size, generator=draw, dtype=torch.float64) if flat is None else flat
        self.rows = dict(zip(self.prefixes, self.flat.view(-1, VOCAB).log_softmax(-1), strict=True))

    def law(self, prefix: tuple[int, ...]) -> list[float]:
        return self.rows[tuple(prefix)].exp().tolist()


def kept(p: Tabular, q: Tabular) -> Tensor:
    """DEPTH less the shortfall, its mean over the paths of p."""
    total = torch.zeros((), dtype=torch.float64)
    for path in itertools.product(range(VOCAB), repeat=DEPTH):
        log_p = [p.rows[path[:i]][None] for i in range(DEPTH)]
        log_q = [q.rows[path[:i]][None] for i in range(DEPTH)]
        chance = sum(log_p[i][0, x] for i, x in enumerate(path)).exp()
        tokens = [torch.tensor([x]) for x in path]
        total = total + chance * (DEPTH - block_shortfall(log_p, log_q, tokens))
    return total


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_chains_loss_is_what_block_verification_refuses(seed: int) -> None:
    p, q = Tabular(seed), Tabular(seed + 10)
    due = float(block_expected_accepted(p.law, q.law, DEPTH))
    assert float(kept(p, q)) == pytest.approx(due, abs=1e-12)
    assert due > float(token_expected_accepted(p.law, q.law, DEPTH)) + 1e-3
    assert float(kept(p, p)) == pytest.approx(DEPTH, abs=1e-12)
    # It can fail: the two laws do not change places.
    assert abs(float(kept(q, p)) - due) > 1e-3


def test_its_gradient_is_that_of_the_enumerated_length() -> None:
    p = Tabular(1)
    flat = Tabular(11).flat.requires_grad_()
    kept(p, Tabular(0, flat)).backward()
    assert flat.grad is not None
    step = 1e-6
    for i in range(0, len(flat), 5):
        moved = [flat.detach().clone() for _ in range(2)]
        moved[0][i] += step
        moved[1][i] -= step
        more, less = (block_expected_accepted(p.law, Tabular(0, m).law, DEPTH) for m in moved)
        assert float(flat.grad[i]) == pytest.approx(
            (float(more) - float(less)) / (2 * step), abs=1e-6
        )
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = logits.log_softmax(-1).unbind()
    paths = [torch.tensor([0, 4, -100, 2]), torch.tensor([1, -100, 3, 3])]

    def of(other: Tensor) -> Tensor:
        return block_shortfall(own, other.log_softmax(-1).unbind(), paths)

    assert torch.autograd.gradcheck(of, (logits.flip(0).requires_grad_(),))


def test_of_one_token_it_is_the_total_variation_and_a_path_may_leave_the_draft_vocabulary() -> None:
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    p, q = logits.log_softmax(-1), (0.5 * logits).log_softmax(-1)
    tokens = torch.tensor([0, 1, 2, 3, 4, -100])
    one = block_shortfall([p], [q], [tokens])
    assert one == pytest.approx(float(distance("tv", logits, q, tokens)), abs=1e-6)
    nowhere = torch.full((6,), -100)
    assert block_shortfall([p, p], [q, q], [nowhere, nowhere]) == pytest.approx(float(one) + 1)


class Hole(Tabular):
    """A head that guesses all tokens but the last: its law has a hole there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for prefix, row in self.rows.items():
            self.rows[prefix] = torch.cat((row[:-1].log_softmax(-1), torch.tensor([-torch.inf])))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_the_target_has_outside_the_draft_vocabulary_is_lost(seed: int) -> None:
    """By enumeration, the head seeing no more of either law than the tokens it can guess."""
    p, q = Tabular(seed), Hole(seed + 10)
    total = torch.zeros((), dtype=torch.float64)
    for path in itertools.product(range(VOCAB), repeat=DEPTH):
        log_p = [p.rows[path[:i]][None] for i in range(DEPTH)]
        log_q = [q.rows[path[:i]][None, :-1] for i in range(DEPTH)]
        tokens = [torch.tensor([x if x < VOCAB - 1 else -100]) for x in path]
        chance = sum(log_p[i][0, x] for i, x in enumerate(path)).exp()
        own = [row[:, :-1] for row in log_p]
        total = total + chance * (DEPTH - block_shortfall(own, log_q, tokens))
        first = distance("tv", own[0], log_q[0], tokens[0])
    due = float(block_expected_accepted(p.law, q.law, DEPTH))
    assert float(total) == pytest.approx(due, abs=1e-12)
    alone = float(token_expected_accepted(p.law, q.law, 1))
    assert 1 - float(first) == pytest.approx(alone, abs=1e-12)
    within = own[0].log_softmax(-1)
    assert abs(float(distance("tv", within, log_q[0], tokens[0]) - first)) > 1e-3


def test_half_of_the_target_outside_is_half_of_the_guesses() -> None:
    log_q = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_p, tokens = log_q + torch.tensor(0.5).log(), torch.full((4,), -100)
    assert distance("tv", log_p, log_q, tokens) == pytest.approx(0.5)
    assert block_shortfall([log_p], [log_q], [tokens]) == pytest.approx(0.5)
    for loss in ("kl", "reverse-kl"):
        assert distance(loss, log_p, log_q, tokens) == pytest.approx(0.0, abs=1e-6)
