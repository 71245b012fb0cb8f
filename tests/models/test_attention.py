"""The bodies of the op equal the obvious one: windows, soft caps, sinks, scattered blocks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache import BLOCK_SLOTS, CacheManager
from outrider.errors import InvalidConfig
from outrider.models import attention_cpu
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Forward, Options
from outrider.models.attention_own import OwnAttention
from outrider.models.attention_reference import attend_reference
from outrider.models.attention_strict import STRICT_BLOCK, StrictBody
from outrider.models.base import Rows
from outrider.models.plan import make_plan
from outrider.models.reach import Chunk, Window
from tests.models.families import ancestors_of, one_thread

HEADS, GROUPS, WIDTH, VALUES = 6, 2, 16, 96
CPU = torch.device("cpu")
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]
single = pytest.fixture(scope="module", autouse=True)(one_thread)


def no_attention(query, keys, values, visible, options):
    """Only the keys and values written count."""
    return query.transpose(0, 1)


def rows_of(count, noise, dtype):
    """Return query, keys and values of `count` new rows, as the model's layers give them."""
    query = torch.randn(1, count, HEADS, WIDTH, generator=noise).to(dtype).transpose(1, 2)
    keys = torch.randn(1, GROUPS, count, WIDTH, generator=noise).to(dtype)
    return query, keys, torch.randn(1, GROUPS, count, VALUES, generator=noise).to(dtype)


def run(body, align, lengths, trees, reach, options, dtype=torch.float32, seed=0, scatter=False):
    """Return the op's output for sequences of given lengths and staged trees or chains."""
    noise = torch.Generator().manual_seed(seed)
    reaches = {0: reach}
    cache = CacheManager()
    seqs = [cache.open(1) for _ in lengths]
    # Sequences that grow in turn take blocks in turn: their tables are no runs.
    step = BLOCK_SLOTS if scatter else max(lengths, default=0)
    for first in range(0, max(lengths), step or 1):
        for seq, length in zip(seqs, lengths, strict=True):
            if (count := min(step, length - first)) > 0:
                plan = make_plan(
                    cache, Rows((seq,), (count,), torch.zeros(count).long()), CPU, align=align
                )
                Forward(cache, plan, no_attention, reaches).attend(
                    0, *rows_of(count, noise, dtype), options
                )
                cache.stage(seq, count)
                cache.commit(seq, count)
    counts = tuple(len(tree) if tree else 5 for tree in trees)
    masks = None
    if any(trees):
        masks = torch.cat([ancestors_of(tree or [-1, 0, 1, 2, 3]) for tree in trees])
    flat = Rows(tuple(seqs), counts, torch.zeros(sum(counts)).long(), masks)
    plan = make_plan(cache, flat, CPU, align=align)
    assert not scatter or len(lengths) == 1 or any(span.slots.start is None for span in plan.spans)
    return Forward(cache, plan, body, reaches).attend(
        0, *rows_of(sum(counts), noise, dtype), options
    )


def close(got, want, dtype):
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    return float((got.float() - want.float()).abs().max()) < tolerance * float(
        want.float().abs().max()
    )


@pytest.fixture(params=["whole", "pieces", "own", "strict", "strict slabs"])
def body(request, monkeypatch):
    if request.param == "pieces":
        monkeypatch.setattr(attention_cpu, "PIECE_SCORES", 1)
    if request.param == "own":
        # Nothing of it is left to the other body.
        monkeypatch.setattr(OwnAttention, "__call__", None)
        return request.getfixturevalue("own_attention"), 1
    bodies = {"strict": StrictBody(), "strict slabs": StrictBody(rows_at_once=8, whole=True)}
    body = bodies.get(request.param, attend_cpu)
    return body, STRICT_BLOCK if request.param.startswith("strict") else 1


SINKS = torch.linspace(-2, 2, HEADS)
EVERY_OPTION = [
    Options(0.3),
    Options(0.3, softcap=2.0),
    Options(0.3, sinks=SINKS),
    Options(0.3, 2.0, SINKS),
]


@pytest.mark.parametrize("reach", [None, Window(5), Window(70), Chunk(40)], ids=str)
@pytest.mark.parametrize("options", EVERY_OPTION, ids=["plain", "softcap", "sinks", "both"])
def test_bodies_equal_the_reference(body, reach, options):
    fast, align = body
    for dtype, trees in itertools.product(
        (torch.float32, torch.bfloat16), ([[], []], [PARENTS, []])
    ):
        case = ([270, 3], trees, reach, options, dtype)
        assert close(run(fast, align, *case), run(attend_reference, 1, *case), dtype), (
            dtype,
            trees,
        )


@pytest.mark.parametrize("reach", [None, Window(100), Chunk(64)], ids=str)
def test_scattered_blocks_give_the_same(body, reach):
    fast, align = body
    case = ([200, 130], [PARENTS, []], reach, Options(0.25))
    assert close(
        run(fast, align, *case, scatter=True),
        run(attend_reference, 1, *case, scatter=True),
        torch.float32,
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_trees_and_reaches(own_products, data):
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    trees = []
    for _ in lengths:
        size = data.draw(st.integers(1, 10))
        trees.append([-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, size)])
    kind = data.draw(st.sampled_from([Window, Chunk]))
    reach = data.draw(st.none() | st.integers(1, 40).map(kind))
    case = (lengths, trees, reach, Options(0.3, data.draw(st.none() | st.just(3.0))))
    want = run(attend_reference, 1, *case)
    assert close(run(attend_cpu, 1, *case), want, torch.float32)
    # None on a processor without AVX2.
    own = own_products.attention() or attend_cpu
    assert close(run(own, 1, *case), want, torch.float32)
    assert close(run(StrictBody(), STRICT_BLOCK, *case), want, torch.float32)


def test_sixty_four_nodes_fit_and_more_do_not():
    chain = list(range(-1, 63))
    case = ([9], [chain], None, Options(0.3))
    assert close(run(attend_cpu, 1, *case), run(attend_reference, 1, *case), torch.float32)
    with pytest.raises(InvalidConfig, match="at most 64"):
        run(attend_cpu, 1, [9], [[*chain, 63]], None, Options(0.3))


def test_a_row_that_is_not_its_own_ancestor_is_refused():
    cache = CacheManager()
    seq = cache.open(4)
    for bits in ([1, 1], [1, 6], [3, 2]):
        with pytest.raises(InvalidConfig, match="highest bit"):
            make_plan(cache, Rows((seq,), (2,), torch.zeros(2).long(), torch.tensor(bits)), CPU)
    assert cache.num_staged(seq) == 0


def test_rows_that_contradict_each_other_are_refused():
    cache = CacheManager()
    seq = cache.open(4)
    token = torch.zeros(1).long()
    twice = token.repeat(2)
    for rows in (
        Rows((), (), token[:0]),
        Rows((seq,), (2,), token),
        Rows((seq, seq), (1, 1), twice),
        Rows((seq,), (0,), token[:0]),
        Rows((9,), (1,), token),
    ):
        with pytest.raises(InvalidConfig):
            make_plan(cache, rows, CPU)
