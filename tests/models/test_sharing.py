"""Shared beginnings in real forwards: the same logits, bit for bit in strict, and read once."""

from __future__ import annotations

import random

import pytest
import torch
from families import VOCAB, random_model

from outrider import SamplingParams
from outrider.certify.bitwise import compare, record
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models import HuggingFaceTarget
from outrider.models.base import Rows
from outrider.types import Request


def tokens_of(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


class Counted(HuggingFaceTarget):
    """Counts the rows it reads."""

    rows = 0

    def score(self, rows: Rows) -> torch.Tensor:
        self.rows += len(rows.tokens_R)
        return super().score(rows)


def served(target, drafter=None, **options) -> Requests:
    engine = Engine(target, drafter or NoDrafter(), Emitter(None), **options)
    return Requests(engine, depth=3, end_tokens=frozenset())


SYSTEM = tokens_of(1, 150)
PROMPTS = [SYSTEM + tokens_of(10 + i, 20 + 17 * i) for i in range(5)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2"])
def pair(request) -> tuple[Counted, HuggingFaceTarget]:
    """One model twice, with sharing and without."""
    return (
        Counted(random_model(request.param)),
        HuggingFaceTarget(random_model(request.param), share_prefixes=False),
    )


def test_a_shared_beginning_gives_the_logits_of_ones_own(pair) -> None:
    shared, own = pair
    reader = shared.open_for(PROMPTS[0], 300)
    shared.read(reader, PROMPTS[0][:-1])
    for prompt in PROMPTS:
        seq, other = shared.open_for(prompt, 300), own.open_for(prompt, 300)
        known = shared.length(seq)
        assert known == 128 and own.length(other) == 0
        rest = prompt[known:]
        ours = shared.score(Rows((seq,), (len(rest),), torch.tensor(rest)))
        theirs = own.score(Rows((other,), (len(prompt),), torch.tensor(prompt)))
        torch.testing.assert_close(ours, theirs[known:], rtol=1e-4, atol=1e-4)
        for target, handle in ((shared, seq), (own, other)):
            target.discard(handle)
            target.close(handle)
    shared.close(reader)


def test_another_beginning_gives_other_logits(pair) -> None:
    """The negative control: were blocks of other tokens taken, the test above would see it."""
    shared, _ = pair
    one, other = (shared.open(300) for _ in range(2))
    shared.read(one, PROMPTS[0][:128])
    shared.read(other, [*PROMPTS[0][:63], (PROMPTS[0][63] + 1) % VOCAB, *PROMPTS[0][64:128]])
    rest = torch.tensor(PROMPTS[0][128:])
    rows = [shared.score(Rows((seq,), (len(rest),), rest)) for seq in (one, other)]
    assert (rows[0] - rows[1]).abs().max() > 1e-2
    for seq in (one, other):
        shared.close(seq)


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "draft"])
def test_samples_of_one_prompt_read_it_once(drafted: bool) -> None:
    target, draft = Counted(random_model("llama")), Counted(random_model("llama", seed=1))
    prompt = tuple(tokens_of(3, 600))
    params = SamplingParams(max_tokens=6, seed=5)
    several = [Request(prompt, params, sample=i) for i in range(4)]
    target.rows = draft.rows = 0
    requests = served(target, ModelDrafter(draft) if drafted else None)
    together = requests.complete(several)
    most = 600 + 3 * (600 % 64) + 4 * 6 * 4
    assert 600 <= target.rows <= most and draft.rows <= most
    assert drafted == (draft.rows >= 600)
    alone = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    for request, done in zip(several, together, strict=True):
        assert served(alone).complete([request])[0].token_ids == done.token_ids
    assert len({done.token_ids for done in together}) == 4


def test_a_long_prompts_samples_join_as_soon_as_they_can_share() -> None:
    """Held back while the first reads what they share, chunk by chunk."""
    target = Counted(random_model("llama"))
    prompt = tuple(tokens_of(4, 640))
    requests = served(target, chunk=128)
    params = SamplingParams(max_tokens=40, seed=5)
    several = [Request((*prompt[:-1], i), params, sample=i) for i in range(3)]
    with requests.running([*several, Request((1, 2), params)]) as texts:
        for _ in range(4):
            requests.engine.step()
            assert [text.handle is None for text in texts] == [False, True, True, True]
        while not all(text.num_output for text in texts):
            requests.engine.step()
        assert target.rows < 640 + 3 * 64 + 40


@pytest.mark.parametrize(
    "blocks",
    [6, pytest.param(12, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.slow)],
)
def test_texts_with_a_common_beginning_come_out_as_alone_under_a_tight_bound(blocks: int) -> None:
    alone = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    params = [
        SamplingParams(max_tokens=15, seed=i, temperature=0.0 if i % 2 else 1.0) for i in range(10)
    ]
    several = [Request(tuple(PROMPTS[i % 5]), params[i]) for i in range(10)]
    wanted = [served(alone).complete([request])[0].token_ids for request in several]
    block = HuggingFaceTarget(random_model("llama")).block_bytes
    target = Counted(random_model("llama"), cache_bytes=blocks * block)
    draft = HuggingFaceTarget(random_model("llama", seed=1), cache_bytes=blocks * block)
    for _ in range(2):
        done = served(target, ModelDrafter(draft), chunk=64).complete(several)
        assert [one.token_ids for one in done] == wanted, blocks
        assert target._cache.cache_bytes <= blocks * block
    cache = target._cache
    assert cache.num_free_blocks + cache.num_idle_blocks == cache.num_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_in_strict_sharing_changes_no_bit(dtype) -> None:
    off = HuggingFaceTarget(random_model("llama").to(dtype), strict=True, share_prefixes=False)
    on = Counted(random_model("llama").to(dtype), strict=True)
    draft = HuggingFaceTarget(random_model("llama", seed=1).to(dtype))
    for sampling in (
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, seed=3),
    ):
        plain = record(off, NoDrafter(), PROMPTS, sampling, depth=3, batch=1)
        for drafter, batch in ((NoDrafter(), 1), (ModelDrafter(draft), 5), (NoDrafter(), 5)):
            on.rows = 0
            run = record(on, drafter, PROMPTS, sampling, depth=3, batch=batch)
            assert compare(run, plain).equal
            assert on.rows < sum(map(len, PROMPTS))


def test_without_strict_the_bits_of_a_shared_beginning_may_differ() -> None:
    """The negative control: read in other company, the same tokens have other last bits."""
    off = HuggingFaceTarget(random_model("llama"), share_prefixes=False)
    on = HuggingFaceTarget(random_model("llama"))
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    plain = record(off, NoDrafter(), PROMPTS, sampling, depth=3, batch=1)
    run = record(on, NoDrafter(), PROMPTS, sampling, depth=3, batch=5)
    assert not compare(run, plain).equal
