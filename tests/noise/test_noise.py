"""Philox known answers, the address plan, and the ledger that catches a second use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import noise

ZEROS = (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
ONES = (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
PI = (
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    (0xA4093822, 0x299F31D0),
    (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
)
SEED_42 = (0.61295986, 0.46858650, 0.07323170, 0.34086150, 0.98771864, 0.32706332)


def words_of(text: torch.Tensor) -> list[int]:
    return text.flatten().tolist()


@pytest.mark.parametrize(("counter", "key", "answer"), [ZEROS, ONES, PI])
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]):
    out = noise.philox4x32(torch.tensor(counter), torch.tensor(key))
    assert tuple(words_of(out)) == answer
    on_device = noise._tensor_rounds(*torch.tensor(counter), *torch.tensor(key))
    assert tuple(int(word) for word in on_device) == answer
    many = noise.philox4x32(torch.tensor(counter).repeat(3, 50, 1), torch.tensor(key))
    assert many.shape == (3, 50, 4)
    assert (many == torch.tensor(answer)).all()


def test_a_changed_round_count_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "_NUM_ROUNDS", 9)
    counter, key, answer = PI
    assert words_of(noise.philox4x32(torch.tensor(counter), torch.tensor(key))) != list(answer)


def test_flat_stream_of_seed_42():
    drawn = noise.uniforms(42, 0, noise.STREAM_VERIFY, 0, torch.arange(6))
    assert drawn.tolist() == pytest.approx(SEED_42, abs=5e-9)


@given(
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 4),
    anchor=st.integers(0, 2**32 - 1),
    draw=st.integers(0, 2**34 - 1),
)
def test_address_plan(seed: int, sample: int, stream: int, anchor: int, draw: int):
    """Key (seed low, high), counter (block, sample, anchor, stream), word draw mod 4."""
    counter = torch.tensor([draw // 4, sample, anchor, stream])
    key = torch.tensor([seed & 0xFFFFFFFF, seed >> 32])
    block = words_of(noise.philox4x32(counter, key))
    assert noise.words(seed, sample, stream, anchor, draw).item() == block[draw % 4]
    low_draws = noise.words(noise.as_key([seed]), sample, stream, anchor, torch.tensor([draw]))
    assert low_draws.tolist() == [block[draw % 4]]


@given(st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_few_equal_many(seed: int, anchor: int):
    """The Python path for few addresses and the tensor path for many agree bit for bit."""
    many = torch.arange(100)
    address = noise.as_key([seed])[:, None], torch.tensor([[3]]), noise.STREAM_EXTRA, anchor
    for draw_many in (noise.words, noise.uniforms, noise.uniforms53):
        whole = draw_many(*address, many)
        parts = [draw_many(*address, part) for part in many.split(7)]
        assert whole.shape == (1, 100)
        assert torch.equal(whole, torch.cat(parts, 1))


def test_arrays_and_tensors_compute_the_same_words():
    """The path of CPU arrays and the one of other devices, on random and extreme words."""
    chance = torch.Generator().manual_seed(0)
    parts = torch.randint(0, 2**32, (6, 500), generator=chance)
    parts[:, :2] = torch.tensor([0, 2**32 - 1])
    for counter_and_key in (parts, parts[:, :1], parts[:, 0]):
        arrays, tensors = (
            torch.stack(made(*counter_and_key)) for made in (noise._rounds, noise._tensor_rounds)
        )
        assert torch.equal(arrays, tensors)


def test_uniforms53_are_made_of_two_draws():
    index = torch.arange(40)
    address = 7, 1, noise.STREAM_EXTRA, 5
    high, low = noise.words(*address, 2 * index), noise.words(*address, 2 * index + 1)
    exact = [
        ((h << 21 | w >> 11) + 0.5) / 2**53
        for h, w in zip(high.tolist(), low.tolist(), strict=True)
    ]
    assert noise.uniforms53(*address, index).tolist() == exact


def test_uniforms53_never_reach_the_ends():
    top, zero = torch.tensor([2**32 - 1]), torch.tensor([0])
    assert 0.0 < noise._uniform53(zero, zero).item() < 1e-15
    assert noise._uniform53(top, top).item() == 1.0 - 2.0**-53


def test_gumbels_are_logarithms_of_uniforms():
    u53 = noise.uniforms53(1, 0, noise.STREAM_TARGET, 9, torch.arange(77))
    drawn = noise.gumbels(1, 0, 9, torch.arange(77))
    torch.testing.assert_close(drawn, -torch.log(-torch.log(u53)), rtol=1e-15, atol=1e-15)


def test_gumbel_rows_are_the_gumbels():
    key, sample, anchor = noise.as_key([1, 2**64 - 1]), torch.tensor([0, 4]), torch.tensor([9, 2])
    for vocab_size in (1, 6, 77):
        rows = noise.gumbel_rows(key, sample, anchor, vocab_size)
        one = noise.gumbels(
            key[:, None], sample[:, None], anchor[:, None], torch.arange(vocab_size)
        )
        torch.testing.assert_close(rows, one, rtol=1e-15, atol=1e-15)


def test_uniform_and_independent_enough():
    """Chi-square of pairs on 16 x 16 cells over 200,000 draws; a stuck stream fails."""
    drawn = noise.uniforms(
        3, 0, noise.STREAM_ACCEPT, torch.arange(50_000)[:, None], torch.arange(4)
    )

    def statistic(left: torch.Tensor, right: torch.Tensor) -> float:
        cells = torch.bincount((left * 16).long() * 16 + (right * 16).long(), minlength=256)
        expected = left.numel() / 256
        return float(((cells - expected) ** 2 / expected).sum())

    limit = 255 + 5 * (2 * 255) ** 0.5
    assert statistic(drawn[:, 0], drawn[:, 1]) < limit
    assert statistic(drawn[:-1, 3], drawn[1:, 3]) < limit
    assert statistic(drawn[:, 0], drawn[:, 0]) > limit


def test_the_ledger_names_a_second_use():
    with noise.NoiseLedger() as ledger:
        noise.uniforms(5, 0, noise.STREAM_ACCEPT, 8, torch.arange(4))
        noise.uniforms53(5, 0, noise.STREAM_EXTRA, 8, 0)
        noise.uniforms(5, 0, noise.STREAM_ACCEPT, 9, torch.arange(4))
        with pytest.raises(AssertionError, match="stream ACCEPT, anchor 8, draw 3"):
            noise.uniforms(5, 0, noise.STREAM_ACCEPT, 8, 3)
        with pytest.raises(AssertionError, match="stream EXTRA, anchor 8, draw 1"):
            noise.words(5, 0, noise.STREAM_EXTRA, 8, 1)
    assert (5, 0, noise.STREAM_EXTRA, 8, 1) in ledger.addresses
    assert len(ledger.addresses) == 10
    noise.uniforms(5, 0, noise.STREAM_ACCEPT, 8, 3)


def test_the_target_stream_may_be_shared():
    with noise.NoiseLedger() as ledger:
        for _ in range(2):
            noise.gumbels(2**64 - 1, 0, 3, torch.arange(5))
            noise.gumbel_rows(noise.as_key([1]), torch.tensor([0]), torch.tensor([3]), 5)
    assert len(ledger.addresses) == 20
    assert {address[0] for address in ledger.addresses} == {1, 2**64 - 1}


def test_fresh_seeds_differ():
    seeds = {noise.fresh_seed() for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("num_texts", [0, 1, 3, 40])
@pytest.mark.parametrize("num_tests", [0, 1, 4, 7])
def test_uniforms_of_a_round_are_those_of_their_addresses(num_texts: int, num_tests: int) -> None:
    """Few texts are worked on in Python integers, many in arrays: the addresses are the same."""
    seed_B = torch.arange(num_texts) * -(2**61) + 5
    sample_B, anchor_B = torch.arange(num_texts), torch.arange(num_texts) * 977 + 2**31
    tests_BN, extra_B = noise.round_uniforms(seed_B, sample_B, anchor_B, num_tests)
    address = seed_B[:, None], sample_B[:, None], noise.STREAM_ACCEPT, anchor_B[:, None]
    assert tests_BN.shape == (num_texts, num_tests)
    assert extra_B.shape == (num_texts,)
    if num_texts * num_tests:
        assert torch.equal(tests_BN, noise.uniforms(*address, torch.arange(num_tests)))
    if num_texts:
        wanted = noise.uniforms53(seed_B, sample_B, noise.STREAM_EXTRA, anchor_B, 0)
        assert torch.equal(extra_B, wanted)
