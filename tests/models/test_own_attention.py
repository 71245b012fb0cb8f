"""Outrider's own attention: its bits, what it takes, and what is refused when it is loaded.

Its numbers are tested beside those of the other bodies, in test_attention.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.cache import CacheManager
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Forward, Options
from outrider.models.attention_own import OwnAttention
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from outrider.models.plan import make_plan
from outrider.models.product import Product
from tests.models.families import random_model, random_tokens
from tests.models.variants import refuse, variant

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH, VALUES = 6, 2, 32, 96
LENGTH, NEW = 300, 11


def text_of(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of a whole text."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES)
    query, keys, values = (
        torch.randn(1, heads, LENGTH + NEW, width, generator=draw).to(dtype)
        for heads, width in shapes
    )
    return query, keys, values


def attended(
    body: OwnAttention, texts: list[tuple[Tensor, Tensor, Tensor]], steps: list[int]
) -> Tensor:
    """The attention of the texts' last rows, read in so many at a time, all texts together."""
    cache = CacheManager(share_prefixes=False)
    seqs = tuple(cache.open(1) for _ in texts)
    parts: list[Tensor] = []
    start = 0
    for count in (LENGTH, *steps):
        tokens = torch.zeros(count * len(texts), dtype=torch.int64)
        plan = make_plan(cache, Rows(seqs, (count,) * len(texts), tokens), CPU)
        upto = start + count
        rows = [torch.cat([t[:, :, start:upto] for t in of], 2) for of in zip(*texts, strict=True)]
        out = Forward(cache, plan, body).attend(0, *rows, Options(0.3, 4.0))
        parts.append(out[0].unflatten(0, (len(texts), count)))
        for seq in seqs:
            cache.stage(seq, count)
            cache.commit(seq, count)
        start = upto
    return torch.cat(parts[1:], 1)


def keeps_bits(body: OwnAttention, dtype: torch.dtype) -> bool:
    """Whether rows are the same alone, in chains, and beside other texts."""
    texts = [text_of(seed, dtype) for seed in range(3)]
    alone = torch.cat([attended(body, [text], [1] * NEW) for text in texts])
    return all(
        torch.equal(attended(body, texts, steps), alone) for steps in ([NEW], [5, 4, 2], [1] * NEW)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_whatever_goes_along(
    own_attention: OwnAttention, tmp_path: Path, dtype: torch.dtype
):
    assert keeps_bits(own_attention, dtype)
    # The negative control: right numbers, but of which several queries at a time are rounded.
    weight = "_mm512_set1_ps(weights[q * stride + t])"
    wrong = variant(
        tmp_path, weight, "_mm512_set1_ps(weights[q * stride + t] * (1 + QUERIES * 1e-6f))"
    )
    body = Product(wrong).attention()
    assert body is not None and not keeps_bits(body, dtype)


def test_threads_change_no_bit(own_attention: OwnAttention):
    texts, before = [text_of(seed, torch.bfloat16) for seed in range(2)], torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(attended(own_attention, texts, [5, 6]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_what_is_no_number_stays_none(own_attention: OwnAttention):
    query, keys, values = text_of(0, torch.float32)
    keys[..., LENGTH // 2, 0] = float("nan")
    out = attended(own_attention, [(query, keys, values)], [NEW])
    assert not out.isfinite().all(-1).any()


def test_other_widths_and_dtypes_are_left_to_the_other_body(own_attention: OwnAttention):
    for dtype, width in ((torch.float32, 12), (torch.float16, 32), (torch.float64, 32)):
        both = []
        for body in (own_attention, attend_cpu):
            draw, cache = torch.Generator().manual_seed(0), CacheManager()
            seq = cache.open(4)
            plan = make_plan(cache, Rows((seq,), (3,), torch.zeros(3, dtype=torch.int64)), CPU)
            rows = [torch.randn(1, 2, 3, width, generator=draw).to(dtype) for _ in range(3)]
            both.append(Forward(cache, plan, body).attend(0, *rows, Options(0.3)))
        assert torch.equal(*both)


def test_a_target_says_whose_attention_it_is(own_products: Product, own_attention: OwnAttention):
    target, tokens = HuggingFaceTarget(random_model("llama")), random_tokens(40)
    before = target.score(Rows((target.open(64),), (40,), tokens))
    assert not target.info()["own_attention"]
    target._use_product(own_products)
    assert target.info()["own_attention"] and isinstance(target.new_body(), OwnAttention)
    after = target.score(Rows((target.open(64),), (40,), tokens))
    assert torch.allclose(before, after, atol=1e-4)
    target._use_product(None)
    assert not target.info()["own_attention"] and target.new_body() is attend_cpu


@pytest.mark.usefixtures("own_attention")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (hidden[t]) last[t] = lowest;", ";"),
        ("for (int64_t t = count; t < whole; t++) own[t] = lowest;", ""),
        ("if (layer.softcap)", "if (false)"),
        ("_mm512_reduce_add_ps(total) + sunk", "_mm512_reduce_add_ps(total)"),
        ("values + row * layer.value_row, layer.value_width", "values, layer.value_width"),
        ("e += wide ? VECTORS * LANES : LANES", "e += VECTORS * LANES"),
    ],
)  # fmt: skip
def test_what_computes_something_else_is_refused(tmp_path: Path, right: str, wrong: str):
    """Hidden keys, keys beyond the last, the cap, the sink, rows of values, some of the values."""
    refuse(tmp_path, right, wrong)
