"""The Triton bodies against the plain ones, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from outrider import host, noise
from outrider.decoding import RULES, Draft, Law, RoundNoise, TargetLogits, laws, sampling

pytest.importorskip("triton")

from outrider.decoding import triton_race, triton_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = [5, 2048, 5001]


def table(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_probabilities_of_tokens(width: int, dtype: torch.dtype, temperature: float | None):
    logits = table(2, 3, width).to(dtype)
    logits[1, :, : width // 2] = -torch.inf
    at, tokens = torch.tensor([0, 5, 3]), torch.tensor([1, width - 1, 0])
    heat = None if temperature is None else torch.tensor([1.0, temperature])
    wanted = TargetLogits(logits, heat).prob_of(at, tokens)
    heat_n = None if heat is None else heat[at // 3].to(DEVICE)
    got = triton_rows.prob_of(
        logits.flatten(0, 1).to(DEVICE), at.to(DEVICE), tokens.to(DEVICE), heat_n
    ).cpu()
    torch.testing.assert_close(got, wanted, rtol=5e-6, atol=0)
    assert got[2] == 0 < got[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_mass_beyond_a_law(width: int):
    logits, law = table(4, width), torch.softmax(table(6, width, seed=1), -1)
    at, rows = torch.tensor([3, 0, 0]), torch.tensor([5, 2, 0])
    scale = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    parts = (part.to(DEVICE) for part in (scale, law, rows))
    got = triton_rows.excess_mass(logits.to(DEVICE), at.to(DEVICE), None, *parts).cpu()
    probs = TargetLogits(logits[None]).probs(at)
    wanted = Law.dense(law).excess_mass_at(rows, probs, scale)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert got[2] == 0 < got[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_one_law_less_child_after_child(width: int):
    """Three refusals in a row, as a law-per-child rule has them."""
    left, laws = torch.softmax(table(5, width), -1), torch.softmax(table(4, width, seed=1), -1)
    plain = left
    rows, scale = torch.tensor([3, 0, 1, 1, 2]), torch.ones(5)
    for step in range(3):
        at = (rows + step) % 4
        left, mass = (
            part.cpu()
            for part in triton_rows.less_law(
                left.to(DEVICE), scale.to(DEVICE), laws.to(DEVICE), at.to(DEVICE)
            )
        )
        plain = Law.dense(laws).excess_at(at, plain, scale)
        torch.testing.assert_close(left, plain, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(mass, plain.sum(-1), rtol=1e-5, atol=1e-7)
        scale = 1 / plain.sum(-1)
    assert not torch.equal(left, torch.softmax(table(5, width), -1))


@pytest.mark.parametrize("width", [1, 7, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_race_has_the_same_winner(width: int, dtype: torch.dtype):
    probs = torch.softmax(table(40, width), -1).to(dtype)
    probs[::3, width // 2 + 1 :] = 0
    seeds = noise.as_key([2**64 - 1 - i for i in range(40)])
    address = seeds, torch.arange(40) % 3, torch.arange(40)
    wanted = sampling.gumbel_race(probs, None, *address)
    got = triton_race.race(probs.to(DEVICE), *(part.to(DEVICE) for part in address)).cpu()
    assert torch.equal(got, wanted)
    if width > 1:
        other = triton_race.race(
            probs.to(DEVICE), *(part.to(DEVICE) for part in (seeds + 1, *address[1:]))
        )
        assert not torch.equal(other.cpu(), wanted)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("heat", [None, torch.linspace(0.5, 2, 12)])
def test_rules_decide_alike_through_the_fused_bodies(
    rule: str, heat: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
):
    """The way of a GPU, walked on the CPU where there is none."""
    target = table(12, 4, 700).to(DEVICE)
    heat = None if heat is None else heat.to(DEVICE)
    scaled = target if heat is None else target / heat[:, None, None]
    q = torch.softmax(scaled[:, :3] + table(12, 3, 700, seed=1).to(DEVICE) / 4, -1).flatten(0, 1)
    chance = RoundNoise(
        noise.as_key(range(12)), torch.zeros(12, dtype=torch.int64), torch.arange(12)
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(q.cpu(), 1, generator=generator).view(12, 3)
    draft = Draft.chain(tokens, torch.arange(12) % 3 + 1, Law.dense(q))
    plain = RULES[rule].verify(draft, TargetLogits(target, heat), chance)
    monkeypatch.setattr(host, "reads_free", lambda device: False)
    monkeypatch.setattr(laws, "fused", lambda device: True)
    asked: list[str] = []
    for body in ("prob_of", "excess_mass", "less_law"):
        whole = getattr(triton_rows, body)
        monkeypatch.setattr(
            triton_rows, body, lambda *a, b=body, w=whole: (asked.append(b), w(*a))[1]
        )
    fused = RULES[rule].verify(draft, TargetLogits(target, heat), chance)
    assert torch.equal(plain.num_accepted_B, fused.num_accepted_B)
    assert torch.equal(plain.token_B, fused.token_B)
    expected = {"token": {"prob_of", "less_law"}, "coupled": set()}
    assert set(asked) == expected.get(rule, {"prob_of", "less_law", "excess_mass"})
    assert plain.num_accepted_B.any()
