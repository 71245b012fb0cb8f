"""Rows one after another through machine code: those that `score` gives, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.cache import BLOCK_SLOTS
from outrider.drafters import ModelDrafter
from outrider.models.base import Rows
from outrider.models.chain import PackageChain
from outrider.models.hf import HuggingFaceTarget
from tests.models.families import Family, one_thread, random_tokens, with_weights
from tests.models.test_families import PARENTS, ancestors_of, read

pytestmark = pytest.mark.compiled
single = pytest.fixture(scope="module", autouse=True)(one_thread)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
WINDOWS = Family(
    "gemma2", {**SIZES, "sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 4}
)
TOKENS = random_tokens(6, 5).tolist()


@pytest.fixture(scope="module", autouse=True)
def folder(packages: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(packages))
        yield


def compiled(family: Family, dtype: torch.dtype) -> HuggingFaceTarget:
    made = HuggingFaceTarget(with_weights(family.config(), "eager", 0).to(dtype))
    assert made.compile()
    return made


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return compiled(Family("llama", SIZES), torch.bfloat16)


def by_score(target: HuggingFaceTarget, seq: int, tokens: list[int]) -> Tensor:
    """One forward for each token; nothing stays staged."""
    before = target.num_staged(seq)
    rows = [target.score(Rows((seq,), (1,), torch.tensor([token]))).clone() for token in tokens]
    assert target.num_staged(seq) == before + len(tokens)
    target.discard(seq)
    return torch.cat(rows)


def by_chain(target: HuggingFaceTarget, seq: int, tokens: list[int]) -> Tensor:
    chain = target.chain(seq, len(tokens) + 1)
    assert isinstance(chain, PackageChain)
    before = target.num_staged(seq)
    rows = torch.cat([chain(token).clone() for token in tokens])
    assert target.num_staged(seq) == before, "they are staged together"
    chain.stage(tokens)
    assert target.num_staged(seq) == before + len(tokens)
    return rows


@pytest.mark.parametrize("length", [3, BLOCK_SLOTS - 2, BLOCK_SLOTS, 2 * BLOCK_SLOTS - 5])
@pytest.mark.parametrize("neighbours", [False, True], ids=["run", "table"])
def test_rows_are_those_of_one_forward_each(
    target: HuggingFaceTarget, length: int, neighbours: bool
) -> None:
    seqs = target.open(8), target.open(8)
    others: list[int] = []
    for first in range(0, length, 16):
        for seq in seqs:
            target.read(seq, random_tokens(length, 3)[first : first + 16].tolist())
        if neighbours:
            # Blocks lie between others'.
            others.append(target.open(8))
            target.read(others[-1], random_tokens(BLOCK_SLOTS + 1, first).tolist())
    for num in (6, 3):
        tokens = TOKENS[:num]
        due, got = by_score(target, seqs[0], tokens), by_chain(target, seqs[1], tokens)
        assert torch.equal(got, due)
        # What was staged is what `score` would have staged: it can be kept, and is gone on from.
        for token in tokens:
            target.score(Rows(seqs[:1], (1,), torch.tensor([token])))
        for seq in seqs:
            target.commit(seq, num - 1)
    assert target.length(seqs[0]) == target.length(seqs[1]) == length + 7
    for seq in (*seqs, *others):
        target.close(seq)


def test_rows_behind_staged_ones_see_these(target: HuggingFaceTarget) -> None:
    seq = read(target, random_tokens(5))
    first = Rows((seq,), (2,), random_tokens(2, 8))
    target.score(first)
    due = by_score(target, seq, TOKENS)
    target.score(first)
    assert torch.equal(by_chain(target, seq, TOKENS), due)
    target.discard(seq)
    # Without these it is another text.
    assert not torch.equal(by_chain(target, seq, TOKENS), due)
    target.close(seq)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_windows_move_along(dtype: torch.dtype) -> None:
    made = compiled(WINDOWS, dtype)
    seq = read(made, random_tokens(30))
    due = by_score(made, seq, TOKENS)
    assert torch.equal(by_chain(made, seq, TOKENS), due)


def test_where_score_does_as_well_there_is_none(target: HuggingFaceTarget) -> None:
    seq = read(target, random_tokens(5))
    with target.uncompiled():
        assert target.chain(seq, 2) is None
    with target.tapping((1,)):
        assert target.chain(seq, 2) is None
    assert target.max_length is not None
    assert target.chain(seq, target.max_length) is None
    target.limit_cache(target.block_bytes * target._cache.num_blocks)
    assert target.chain(seq, BLOCK_SLOTS * (1 + target._cache.num_blocks)) is None, "no room"
    target.limit_cache(None)
    target.score(Rows((seq,), (2,), random_tokens(2, 8), ancestors_of(PARENTS[:2])))
    assert target.chain(seq, 2) is None, "a tree is staged"
    target.close(seq)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_a_draft_model_drafts_the_same_with_and_without(
    target: HuggingFaceTarget,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    confidence: float,
) -> None:
    asked: list[int] = []

    def texts(seen: bool) -> list[list[int]]:
        chain = HuggingFaceTarget.chain

        def counted(self: HuggingFaceTarget, seq: int, most: int) -> PackageChain | None:
            found = chain(self, seq, most) if seen else None
            if found is not None:
                asked.append(most)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(HuggingFaceTarget, "chain", counted)
            drafter = ModelDrafter(target, confidence=confidence)
            config = SpeculativeDecoderConfig(k=4, sampling=SamplingParams(temperature=temperature))
            decoder = SpeculativeDecoder(drafter, target, config)
            found = [
                decoder.generate(random_tokens(5, seed).tolist(), 24, seed=3) for seed in range(3)
            ]
            found.append([decoder.metrics.drafted, decoder.metrics.accepted])
            found += decoder.generate_batch([[5, 6, 7], [8, 9]], 12, seed=4)
        return found

    with_chain = texts(True)
    assert asked and max(asked) <= 3, "the first of four is read with what is pending"
    assert with_chain == texts(False)
    assert with_chain[3][0] > 0


def test_an_error_in_the_midst_of_a_chain_leaves_nothing_behind(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SpeculativeDecoderConfig(k=4, sampling=SamplingParams(temperature=0.0))
    decoder = SpeculativeDecoder(ModelDrafter(target), target, config)
    prompt = random_tokens(5).tolist()
    due = decoder.generate(prompt, 16)
    call, done = PackageChain.__call__, list[int]()

    def ends(self: PackageChain, token: int) -> Tensor:
        done.append(token)
        if len(done) == 2:
            raise RuntimeError("in the midst")
        return call(self, token)

    with monkeypatch.context() as patch:
        patch.setattr(PackageChain, "__call__", ends)
        with pytest.raises(Exception, match="in the midst"):
            decoder.generate(prompt, 16)
    assert decoder.generate(prompt, 16) == due
