"""Outrider's own attention: its bits, what it takes, and what is refused when it is loaded.

Its numbers are tested beside those of the other bodies, in test_attention.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.cache import CacheManager
from outrider.errors import OutOfMemory, UnsupportedModel
from outrider.models import attention_own
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, Options
from outrider.models.attention_own import LANES, OwnAttention
from outrider.models.base import Rows
from outrider.models.capability import row_errors
from outrider.models.hf import HuggingFaceTarget
from outrider.models.plan import Plan, make_plan
from outrider.models.product import FLAGS, Product
from outrider.models.reach import Chunk, Reach, Window
from outrider.models.trial import trial_rows, trial_texts
from tests.models.families import FAMILIES, ancestors_of, random_model, random_tokens
from tests.models.variants import refuse, variant

pytestmark = pytest.mark.compiled
CPU = torch.device("cpu")
WIDTHS = {
    name: getattr(family.config().get_text_config(), "head_dim", None) or 1
    for name, family in FAMILIES.items()
    if family.path == "outrider"
}
OWN_WIDTHS = [name for name, width in WIDTHS.items() if width % LANES == 0]
"""Families whose heads are as wide as it wants them."""
OTHER_WIDTHS = [name for name in WIDTHS if name not in OWN_WIDTHS]
PAIRS = torch.cpu.get_capabilities().get("avx512_bf16") and "-DOUTRIDER_NO_PAIRS" not in FLAGS
"""Whether attention in bfloat16 multiplies pairs of numbers."""
HEADS, GROUPS, WIDTH, VALUES = 6, 2, 32, 96
LENGTH, NEW = 300, 11
TextOf = Callable[[int, torch.dtype], tuple[Tensor, Tensor, Tensor]]
"""Query, keys and values of a whole text, drawn with a seed."""


def text_of(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A text of random numbers."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUES)
    query, keys, values = (
        torch.randn(1, heads, LENGTH + NEW, width, generator=draw).to(dtype)
        for heads, width in shapes
    )
    return query, keys, values


def in_order(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """One whose keys weigh the same and whose larger values cancel: what was summed when shows."""
    query, keys, values = text_of(seed, dtype)
    values[..., 0::4, :], values[..., 2::4, :] = 2.0**16, -(2.0**16)
    return query * 0, keys, values


def attended(
    body: Body,
    texts: list[tuple[Tensor, Tensor, Tensor]],
    steps: list[int],
    reach: Reach | None = None,
) -> Tensor:
    """The attention of the texts' rows, the last ones read so many at a time, texts together."""
    cache = CacheManager(share_prefixes=False)
    seqs = tuple(cache.open(1) for _ in texts)
    parts: list[Tensor] = []
    start = 0
    for count in (LENGTH, *steps):
        tokens = torch.zeros(count * len(texts), dtype=torch.int64)
        plan = make_plan(cache, Rows(seqs, (count,) * len(texts), tokens), CPU)
        upto = start + count
        rows = [torch.cat([t[:, :, start:upto] for t in of], 2) for of in zip(*texts, strict=True)]
        out = Forward(cache, plan, body, {0: reach}).attend(0, *rows, Options(0.3, 4.0))
        parts.append(out[0].unflatten(0, (len(texts), count)))
        for seq in seqs:
            cache.stage(seq, count)
            cache.commit(seq, count)
        start = upto
    return torch.cat(parts, 1)


def keeps_bits(
    body: OwnAttention, dtype: torch.dtype, reach: Reach | None, text: TextOf = text_of
) -> bool:
    """Whether rows are the same alone, in chains, and beside other texts."""
    texts = [text(seed, dtype) for seed in range(3)]
    alone = torch.cat([attended(body, [text], [1] * NEW, reach) for text in texts])
    return all(
        torch.equal(attended(body, texts, steps, reach), alone)
        for steps in ([NEW], [5, 4, 2], [1] * NEW)
    )


def keeps_bits_in_trees(body: OwnAttention, dtype: torch.dtype, text_of: TextOf = text_of) -> bool:
    """Whether rows of a tree are those of the chain of their ancestors."""
    text = text_of(0, dtype)
    path, tree = [0, 2, 5], ancestors_of([-1, 0, 0, 1, 1, 2, 5, 3])
    cache = CacheManager(share_prefixes=False)
    found = []
    for places, masks in ((list(range(8)), tree), (path, None)):
        seq = cache.open(1)
        for first, many, mask in ((0, list(range(LENGTH)), None), (LENGTH, places, masks)):
            tokens = torch.zeros(len(many), dtype=torch.int64)
            plan = make_plan(cache, Rows((seq,), (len(many),), tokens, mask), CPU)
            rows = [t[:, :, [first + j if first else j for j in many]] for t in text]
            out = Forward(cache, plan, body).attend(0, *rows, Options(0.3))
            cache.stage(seq, len(many), plan.spans[0].ancestors)
            if not first:
                cache.commit(seq, len(many))
        found.append(out[0])
    return torch.equal(found[0][path], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_whatever_goes_along(
    own_attention: OwnAttention, tmp_path: Path, dtype: torch.dtype
):
    # A chunk begins among the new rows.
    for text in (text_of, in_order):
        for reach in (None, Window(72), Chunk(61)):
            assert keeps_bits(own_attention, dtype, reach, text), (text, reach)
        assert keeps_bits_in_trees(own_attention, dtype, text), text
    # The negative control: right numbers, but of which several queries at a time are rounded.
    stored = "store(out + q * value_width + v * LANES, sums[q][v]"
    wrong = variant(
        tmp_path, (stored, f"{stored} * all(1 + QUERIES * (LANES == 16 ? 1e-6f : 4e-7f))")
    )
    body = Product(wrong).attention()
    assert body is not None and not keeps_bits(body, dtype, None)


def test_bits_that_follow_where_a_row_begins_are_found(own_attention: OwnAttention, tmp_path: Path):
    """The negative control for windows, chunks and trees: a key's weight follows its place."""
    weight = "all(weights[q * stride + t / PAIR<T>]"
    placed = f"{weight} * (PAIR<T> == 2 ? 1 : 1 + t % 16 * 2e-7f)"
    body = Product(variant(tmp_path, (weight, placed))).attention()
    assert body is not None and keeps_bits(body, torch.float32, None)
    assert not keeps_bits(body, torch.float32, Window(70))
    assert not keeps_bits(body, torch.float32, Chunk(61))
    assert not keeps_bits_in_trees(body, torch.float32)


@pytest.mark.skipif(not PAIRS, reason="this processor weighs no pairs of bfloat16 numbers")
def test_pairs_of_keys_in_another_order_are_found(own_attention: OwnAttention, tmp_path: Path):
    """The negative control for pairs: their sums are right, and in the order of no text's keys."""
    weights, values = "_mm256_rol_epi32(pairs, 16)", "const Bfloat16* first, const Bfloat16* second"
    exchanged = (weights, "pairs"), (values, "const Bfloat16* second, const Bfloat16* first")
    body = Product(variant(tmp_path, *exchanged)).attention()
    texts = [text_of(0, torch.bfloat16)]
    ours, theirs = (attended(one, texts, [NEW]).float() for one in (body, own_attention))
    assert float((ours - theirs).abs().max()) < 2e-2 * float(theirs.abs().max())
    assert not keeps_bits(body, torch.bfloat16, Window(72), in_order)
    assert not keeps_bits_in_trees(body, torch.bfloat16, in_order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_and_steps_are_those_of_the_other_body(
    own_attention: OwnAttention, dtype: torch.dtype
):
    """The prompt's queries are worked on in several parts."""
    texts = [text_of(seed, dtype) for seed in range(2)]
    ours, theirs = (attended(body, texts, [5, 6]).float() for body in (own_attention, attend_cpu))
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    assert float((ours - theirs).abs().max()) < bound * float(theirs.abs().max())


def test_sums_over_many_keys_stay_near(own_attention: OwnAttention):
    """The weights of 20,000 keys all but equal: the longest sums there are."""
    draw, cache = torch.Generator().manual_seed(0), CacheManager()
    seq = cache.open(20_000)
    tokens = torch.zeros(20_000, dtype=torch.int64)
    plan = make_plan(cache, Rows((seq,), (20_000,), tokens), CPU)
    query = torch.zeros(1, 1, 20_000, 16)
    keys, values = (torch.randn(1, 1, 20_000, 16, generator=draw) for _ in range(2))
    values += 1.0
    pool = cache.pool(0, keys[0], values[0])
    pool.keys[:, : len(tokens)], pool.values[:, : len(tokens)] = keys[0], values[0]
    cache.stage(seq, 19_999)
    cache.commit(seq, 19_999)
    plan = make_plan(cache, Rows((seq,), (1,), tokens[:1]), CPU)
    last = [t[:, :, -1:] for t in (query, keys, values)]
    found = Forward(cache, plan, own_attention).attend(0, *last, Options(1.0))
    wanted = values.double().mean(2)
    assert float((found[0, 0].double() - wanted[0]).abs().max()) < 1e-4


def test_rows_that_do_not_fit_the_pool_are_refused(own_attention: OwnAttention):
    """As they are by the other body: nothing is written where it has no place."""
    cache = CacheManager()
    seq = cache.open(4)
    cache.pool(0, torch.zeros(2, 3, 32), torch.zeros(2, 3, 32))
    plan = make_plan(cache, Rows((seq,), (3,), torch.zeros(3, dtype=torch.int64)), CPU)
    fits = {"query": (8, 3, 32), "keys": (2, 3, 32), "values": (2, 3, 32)}
    for wrong in (
        {"keys": (8, 3, 32), "values": (8, 3, 32)},
        {name: (*shape[:2], 64) for name, shape in fits.items()},
        {name: (shape[0], 2, 32) for name, shape in fits.items()},
        {"keys": (2, 3, 64)},
        {"keys": (2, 2, 32)},
        {"values": (2, 2, 32)},
        {"query": (8, 3, 64), "keys": (2, 3, 64)},
        {"query": (7, 3, 32)},
    ):
        given = [torch.zeros(1, *shape) for shape in (fits | wrong).values()]
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            Forward(cache, plan, own_attention).attend(0, *given, Options(0.3))


def test_copies_compute_the_same(own_attention: OwnAttention):
    texts = [text_of(0, torch.float32)]
    before = attended(own_attention, texts, [NEW])
    for other in (copy.deepcopy(own_attention), pickle.loads(pickle.dumps(own_attention))):
        assert other._known == (None, {}), "addresses are not copied"
        assert torch.equal(attended(other, texts, [NEW]), before)


def same_by_any_threads(body: OwnAttention, dtype: torch.dtype) -> bool:
    """Whether the number of threads changes no bit."""
    texts, before = [text_of(seed, dtype) for seed in range(2)], torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(attended(body, texts, [5, 6]))
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(one, found[0]) for one in found)


def test_threads_change_no_bit(own_attention: OwnAttention, tmp_path: Path):
    assert same_by_any_threads(own_attention, torch.bfloat16)
    assert same_by_any_threads(own_attention, torch.float32)
    # The negative control: right numbers, rounded by how a thread's queries begin.
    scale = "words, layer.scaling,"
    wrong = variant(tmp_path, (scale, "words, layer.scaling * (1 + from % 7 * 2e-7f),"))
    body = Product(wrong).attention()
    assert body is not None
    assert not same_by_any_threads(body, torch.float32)
    assert not same_by_any_threads(body, torch.bfloat16)


def test_memory_that_is_out_is_told(own_attention: OwnAttention, tmp_path: Path):
    made = "scratch = std::vector<float>(needed);"
    wrong = variant(tmp_path, (made, f"if (needed > 50000) throw std::bad_alloc(); {made}"))
    body = Product(wrong).attention()
    assert body is not None
    with pytest.raises(OutOfMemory, match="no memory for the scores"):
        attended(body, [text_of(0, torch.float32)], [NEW])


@pytest.mark.parametrize("name", OWN_WIDTHS)
def test_families_have_the_same_rows(own_attention: OwnAttention, name: str):
    """Windows, chunks, soft caps, sinks, scalings and padded rows as families ask for them."""
    target = HuggingFaceTarget(random_model(name))
    texts = trial_texts(target.vocab_size, target.device)
    before = trial_rows(target, texts)
    target._body = body = copy.copy(own_attention)
    assert float(row_errors(trial_rows(target, texts), before).max()) < 1e-4
    assert body.takes_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
def test_what_is_no_number_stays_none(own_attention: OwnAttention, dtype: torch.dtype, which: int):
    text = text_of(0, dtype)
    text[which][..., LENGTH // 2, :] = float("nan")
    out = attended(own_attention, [text], [NEW])
    assert not out[:, LENGTH:].isfinite().any()


@pytest.mark.parametrize("num", [1, 2], ids=["alone", "beside another"])
def test_rows_without_a_text_get_zeros(own_attention: OwnAttention, num: int):
    cache = CacheManager(share_prefixes=False)
    texts, counts = tuple(cache.open(4) for _ in range(num)), (3,) * num
    plan = make_plan(cache, Rows(texts, counts, torch.zeros(3 * num).long()), CPU, pad=2)
    # What memory held before is found where it is not overwritten.
    given = [torch.full((1, 2, 3 * num + 2, 32), 7.0) for _ in range(3)]
    body = copy.copy(own_attention)
    out = Forward(cache, plan, body).attend(0, *given, Options(0.3))
    assert body.takes_all
    assert torch.equal(out[0, -2:], torch.zeros(2, 2, 32)) and (out[0, :-2] == 7).all()


def test_other_widths_and_dtypes_are_left_to_the_other_body(own_attention: OwnAttention):
    for dtype, width, value_width in (
        (torch.float32, 12, 12),
        (torch.float32, 12, 32),
        (torch.float32, 32, 12),
        (torch.float16, 32, 32),
        (torch.float64, 32, 32),
    ):
        both = []
        for body in (own_attention, attend_cpu):
            draw, cache = torch.Generator().manual_seed(0), CacheManager()
            seq = cache.open(4)
            plan = make_plan(cache, Rows((seq,), (3,), torch.zeros(3, dtype=torch.int64)), CPU)
            widths = width, width, value_width
            rows = [torch.randn(1, 2, 3, wide, generator=draw).to(dtype) for wide in widths]
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
    half = HuggingFaceTarget(random_model("llama").to(torch.float16))
    half._use_product(own_products)
    assert not half.info()["own_attention"]
    target._use_product(None)
    assert not target.info()["own_attention"] and target.new_body() is attend_cpu
    # Heads of another width: what it left to the other body it says once it has left it.
    odd = HuggingFaceTarget(random_model(OTHER_WIDTHS[0]))
    odd._use_product(own_products)
    odd.score(Rows((odd.open(64),), (40,), tokens))
    assert not odd.info()["own_attention"]


@pytest.mark.usefixtures("own_attention")
def test_a_compiled_forward_is_held_to_the_other_body(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """So that attention which is off in a model is refused, though all its ways agree."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    made, spans_of = HuggingFaceTarget(random_model("llama")), attention_own.spans_of
    assert made.compile() and made.info()["own_attention"]

    def off(plan: Plan, reach: Reach | None) -> attention_own.Spans:
        found = spans_of(plan, reach)
        spans = [list(span) for span in attention_own._SPAN.iter_unpack(found.table)]
        for span in spans:
            # A token less is seen, where there is one before the rows.
            span[2] += span[2] < span[4]
        table = b"".join(attention_own._SPAN.pack(*span) for span in spans)
        return replace(found, table=table)

    monkeypatch.setattr(attention_own, "spans_of", off)
    # The library is loaded once, and was checked then.
    with pytest.raises(UnsupportedModel, match="differ from its own by"):
        made.compile(build=False)


@pytest.mark.usefixtures("own_attention")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if (hidden[t]) last[t] = lowest;", ";"),
        ("if (layer.softcap)", "if (false)"),
        ("totals[q] = first(exponential", "totals[q] = 0; (void)(exponential"),
        ("float* last = own + span.masked - span.first", "float* last = own + span.masked"),
        ("const int64_t* places = span.places + span.first", "const int64_t* places = span.places"),
        ("+ row * layer.query_row", "+ row * layer.width"),
        ("values + row * layer.value_row, layer.value_width", "values, layer.value_width"),
        ("for (int64_t e = 0; e < value_width;)", "for (int64_t e = 0; e < value_width - WIDTH;)"),
    ],
)  # fmt: skip
def test_what_computes_something_else_is_refused(tmp_path: Path, right: str, wrong: str):
    """Hidden keys, the cap, the sink, windows, strides, rows of values, some of the values."""
    refuse(tmp_path, (right, wrong))
