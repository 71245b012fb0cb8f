"""Triton's attention against the plain bodies, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider import host
from outrider.cache import CacheManager, LayerPool
from outrider.models import graphs
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Body, Forward, Options
from outrider.models.attention_reference import attend_reference
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from outrider.models.plan import Plan, make_plan
from outrider.models.reach import Chunk, Reach, Window
from outrider.models.tables import FreshTables, Table, layout_of, write_numbers
from outrider.models.trial import trial_rows, trial_texts
from tests.models.families import ancestors_of, random_model, relative_error

pytest.importorskip("triton")

from outrider.models import triton_attention
from outrider.models.triton_attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREE = [-1, 0, 0, 1, 1, 2, 5, 3]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _way_of_a_gpu() -> Iterator[None]:
    with host.as_on_gpu():
        yield


def attended(
    body: Body,
    *,
    heads: tuple[int, int] = (6, 2),
    widths: tuple[int, int] = (12, 20),
    trees: tuple[list[int], ...] = ([], TREE),
    lengths: tuple[int, ...] = (67, 130),
    reach: Reach | None = None,
    options: Options | None = None,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
) -> Tensor:
    """The attention of rows behind texts whose blocks lie in turn; an empty tree is a chain of 5.

    Chains go as they do in a round: their last rows are staged behind others that are staged.
    """
    draw, cache = torch.Generator().manual_seed(0), CacheManager(share_prefixes=False)
    seqs = tuple(cache.open(1) for _ in lengths)
    forward_options = options or Options(0.3)

    def rows(count: int) -> list[Tensor]:
        shapes = (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])
        drawn = [torch.randn(1, count, num, wide, generator=draw) for num, wide in shapes]
        return [each.to(DEVICE, dtype).transpose(1, 2) for each in drawn]

    def attend(seqs: tuple[int, ...], counts: tuple[int, ...], masks: Tensor | None, pad: int):
        total = sum(counts)
        plan = make_plan(
            cache, Rows(seqs, counts, torch.zeros(total).long(), masks), DEVICE, pad=pad
        )
        out = Forward(cache, plan, used, {0: reach}).attend(0, *rows(total + pad), forward_options)
        for seq, span in zip(seqs, plan.spans, strict=True):
            cache.stage(seq, span.num_rows, span.ancestors)
        return out

    # What is written before is the same of all bodies.
    used: Body = attend_cpu
    for first in range(0, max(lengths), 64):
        for seq, length in zip(seqs, lengths, strict=True):
            if (count := min(64, length - first)) > 0:
                attend((seq,), (count,), None, 0)
                cache.commit(seq, count)
    used = body
    masks = torch.cat([ancestors_of(tree or list(range(-1, 4))) for tree in trees])
    counts = tuple(len(tree) or 5 for tree in trees)
    attend(seqs, counts, masks if any(trees) else None, pad)
    # A second step of rows behind the staged ones: in trees the children of their last nodes.
    if any(trees):
        later = [ancestors_of([*(t or range(-1, 4)), (len(t) or 5) - 1])[-1:] for t in trees]
        return attend(seqs, (1,) * len(seqs), torch.cat(later), pad)
    return attend(seqs, (2,) * len(seqs), None, pad)


def same(dtype: torch.dtype = torch.float32, **case: object) -> bool:
    """Whether Triton's attention is the reference's, nothing being left to another body."""
    body = TritonAttention()
    found = attended(body, dtype=dtype, **case).float()  # type: ignore[arg-type]
    wanted = attended(attend_reference, dtype=dtype, **case).float()  # type: ignore[arg-type]
    assert body.takes_all
    return float((found - wanted).abs().max()) < BOUNDS[dtype] * float(wanted.abs().max())


@pytest.mark.parametrize("reach", [None, Window(5), Window(70), Chunk(40)], ids=str)
@pytest.mark.parametrize("trees", [([], []), ([], TREE)], ids=["chains", "trees"])
def test_it_equals_the_reference(reach: Reach | None, trees: tuple[list[int], ...]):
    sinks = torch.linspace(-2, 2, 6, device=DEVICE)
    assert same(reach=reach, trees=trees, options=Options(0.3, 2.0, sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_equals_the_reference_in_sixteen_bits(dtype: torch.dtype):
    assert same(dtype, reach=Window(70))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (40, 1)], ids=str)
def test_any_number_of_heads(heads: tuple[int, int]):
    assert same(heads=heads, lengths=(70,), trees=(TREE,))


def test_equal_widths_and_plain_options():
    assert same(widths=(16, 16), lengths=(3, 66), reach=Chunk(8))


def test_scores_of_any_size_are_capped():
    assert same(lengths=(66,), trees=([],), options=Options(300.0, 2.0))


def test_sixty_four_nodes():
    assert same(lengths=(9,), trees=(list(range(-1, 62)),), reach=Window(20))


def test_rows_that_pad_get_zeros():
    case = {"pad": 3, "lengths": (70,), "trees": ([],)}
    out = attended(TritonAttention(), **case)  # type: ignore[arg-type]
    assert out.shape[1] == 5 and (out[0, 2:] == 0).all() and (out[0, :2] != 0).any()
    assert same(**case)


@pytest.mark.parametrize("part", ["upto", "lowest", "bits", "block"])
def test_a_table_that_is_off_by_one_is_found(part: str, monkeypatch: pytest.MonkeyPatch):
    """The negative control: one number of one row, and one block in the place of another."""
    of = FreshTables.of

    def wrong(self: FreshTables, *args: object) -> Table:
        table = of(self, *args)  # type: ignore[arg-type]
        numbers, rows = table.numbers.clone(), table.layout.rows
        if part == "block":
            numbers[[-1, -2]] = numbers[[-2, -1]]
        elif part == "bits":
            numbers[4 * rows - 1] ^= 2
        else:
            place, by = {"upto": (rows, -1), "lowest": (2 * rows, 1)}[part]
            numbers[place] += by
        return replace(table, numbers=numbers)

    assert same(reach=Window(50))
    monkeypatch.setattr(FreshTables, "of", wrong)
    assert not same(reach=Window(50))


def test_tables_are_made_once_for_all_layers():
    cache, tables = CacheManager(), FreshTables()
    rows = Rows((cache.open(4),), (3,), torch.zeros(3).long())
    plan, other = (make_plan(cache, rows, DEVICE) for _ in range(2))
    first = tables.of(plan, None, 3, 4, DEVICE)
    assert tables.of(plan, None, 3, 4, DEVICE) is first
    assert tables.of(plan, Window(2), 3, 4, DEVICE) is not first
    assert tables.of(other, None, 3, 4, DEVICE) is not first


def test_a_table_spelt_out():
    """Two rows of a chain behind 64 tokens, whose window begins in the first block."""
    cache = CacheManager()
    seq = cache.open(130)
    for count in (64, 2):
        plan = make_plan(cache, Rows((seq,), (count,), torch.zeros(count).long()), DEVICE)
        cache.stage(seq, count)
        if count == 64:
            cache.commit(seq, count)
    layout = layout_of(plan, 3, 4)
    slots, upto, lowest, bits = [64, 65, -1], [65, 66, 0], [55, 56, 0], [0, 0, 0]
    wanted = [*slots, *upto, *lowest, *bits, 0, 2, 0, 55, 66, 0, 1]
    numbers = np.full(layout.size + 3, 99)
    end = write_numbers(numbers, plan, Window(10), layout)
    assert [*numbers[:end]] == wanted and (numbers[end:] == 99).all()


def test_what_it_does_not_take_is_left_to_the_other_body():
    for dtype, options in (
        (torch.float64, None),
        (torch.float32, Options(0.3, None, torch.ones(5))),
    ):
        body = TritonAttention()
        try:
            attended(body, dtype=dtype, options=options, lengths=(0,), trees=([],))
        except RuntimeError:
            # Sinks of another number of heads fit nobody.
            assert options is not None
        assert not body.takes_all


def test_off_a_gpu_nothing_is_taken():
    body = TritonAttention()
    token = host._AS_ON_GPU.set(False)
    try:
        if DEVICE.type == "cpu":
            attended(body, lengths=(3,), trees=([],))
            assert not body.takes_all
    finally:
        host._AS_ON_GPU.reset(token)


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gpt-oss", "minicpm3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "llama4")),
    ],
)
def test_families_have_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    """Windows, chunks, soft caps, sinks, scalings and widths as families ask for them."""
    target = HuggingFaceTarget(random_model(name).to(DEVICE))
    texts = trial_texts(target.vocab_size, target.device)
    before = trial_rows(target, texts)
    target._body = body = TritonAttention()
    # Nothing of it is left to the other body.
    monkeypatch.setattr(TritonAttention, "__call__", None)
    assert relative_error(trial_rows(target, texts), before) < 1e-4
    assert body.takes_all


def test_it_is_held_against_the_plain_body_first(monkeypatch: pytest.MonkeyPatch):
    graphs._why_no_triton.cache_clear()
    assert graphs.triton_body(DEVICE, torch.bfloat16) is TritonAttention
    assert graphs.triton_body(DEVICE, torch.float64) is None

    def off(body: TritonAttention, pool: LayerPool, plan: Plan, rows: list[Tensor], *_: object):
        return rows[0].new_ones(1, rows[0].shape[1], len(rows[0]), rows[2].shape[2])

    monkeypatch.setattr(TritonAttention, "over_pool", off)
    with pytest.warns(UserWarning, match=r"not used on .* in torch.float32: it is off by"):
        assert graphs.triton_body(DEVICE, torch.float32) is None
    # Warned of once.
    assert graphs.triton_body(DEVICE, torch.float32) is None
    monkeypatch.setattr(TritonAttention, "over_pool", None)
    with pytest.warns(UserWarning, match="not callable"):
        assert graphs.triton_body(DEVICE, torch.float16) is None
    graphs._why_no_triton.cache_clear()


def test_shares_follow_the_processors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_attention, "_processors", lambda device: 132)
    shares = [triton_attention._shares(torch.device("cuda"), n) for n in (1, 8, 64, 2000)]
    assert shares == [32, 32, 4, 1]
