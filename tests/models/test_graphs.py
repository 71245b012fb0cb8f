"""Forwards of few rows as graphs; where there is no CUDA, replaying is running the same again."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig, host
from outrider.cache import Slots
from outrider.errors import UnsupportedModel
from outrider.models import graphs, inductor
from outrider.models.attention_op import Forward
from outrider.models.base import Rows
from outrider.models.chain import GraphChain
from outrider.models.graphs import WIDTHS, GraphedForward, Shape, _Graph
from outrider.models.hf import HuggingFaceTarget
from outrider.models.inductor import FusedForward
from outrider.models.packages import cache_folder, is_own
from outrider.models.packing import joined_linears, restore_linears
from outrider.models.plan import Plan, Span, make_plan
from outrider.models.reach import Chunk, Reach, Window
from outrider.models.tables import Layout, write_each, write_numbers
from tests.models.families import (
    SHAPE,
    ancestors_of,
    random_model,
    random_tokens,
    relative_error,
    with_weights,
)

pytest.importorskip("triton")

from outrider.models.triton_attention import TritonAttention

pytestmark = pytest.mark.compiled
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = 1e-4
TREE = [-1, 0, 0, 1, 2]


@pytest.fixture(autouse=True)
def _way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        # It takes the interpreter six seconds, and test_triton_attention.py goes further.
        monkeypatch.setattr(graphs, "_why_no_triton", lambda device, dtype: None)
    with host.as_on_gpu():
        yield


def target_of(family: str | None = None) -> HuggingFaceTarget:
    """A target of a family; None: a Llama of few heads, as each costs the interpreter its time."""
    if family is not None:
        return HuggingFaceTarget(random_model(family).to(DEVICE))
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = with_weights(LlamaConfig(**{**SHAPE, **few}))
    return HuggingFaceTarget(model.to(DEVICE))


def graphed(target: HuggingFaceTarget) -> GraphedForward:
    """The target's forward from here on, with nothing captured."""
    made = graphs.graphed_forward(target.model, target._door, TritonAttention)
    target._compiled, target._gpu_body, target._builds = made, TritonAttention, True
    return made


def rows_of(
    seqs: tuple[int, ...],
    counts: tuple[int, ...],
    *,
    parents: list[int] | None = None,
    wanted: list[int] | None = None,
    seed: int = 1,
) -> Rows:
    masks = None if parents is None else torch.cat([ancestors_of(parents)] * len(seqs))
    tokens = random_tokens(sum(counts), seed)
    return Rows(
        seqs, counts, tokens, masks, None if wanted is None else torch.tensor(wanted).long()
    )


def both(target: HuggingFaceTarget, rows: Rows) -> tuple[Tensor, Tensor]:
    """Logits by graphs and by the model's own forward; the rows stay staged."""
    with target.uncompiled():
        own = target.score(rows)
    for seq in rows.seqs:
        target.discard(seq)
    return target.score(rows), own


def open_at(target: HuggingFaceTarget, *lengths: int) -> tuple[int, ...]:
    seqs = tuple(target.open(1) for _ in lengths)
    with target.uncompiled():
        for seq, length in zip(seqs, lengths, strict=True):
            target.read(seq, random_tokens(length, seq).tolist())
    return seqs


def test_rows_are_those_of_the_models_own_forward():
    """Padded widths, wanted rows, trees, two texts; no graph anew for what was seen."""
    target = target_of()
    made, seqs = graphed(target), open_at(target, 70, 9)
    steps = [
        rows_of(seqs[:1], (1,)),
        rows_of(seqs[:1], (5,), wanted=[0, 4]),
        rows_of(seqs, (4, 6), wanted=[9]),
        rows_of(seqs, (5, 5), parents=TREE),
        rows_of(seqs[1:], (5,), parents=TREE, wanted=[1, 2]),
    ]
    for again in range(2):
        for rows in steps:
            found, own = both(target, rows)
            assert found.shape == own.shape and relative_error(found, own) < BOUND
            for seq in rows.seqs:
                target.commit(seq, 1)
        # Chains and trees of one width are one graph.
        assert made.captures == 3, again
    assert {shape.width for shape in made._graphs} == {1, 5, 12}


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        pytest.param(
            "gpt-oss",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    DEVICE.type == "cuda",
                    reason="its experts' float32 products are sized by the host",
                ),
            ],
        ),
        "llama4",
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot be fused")
def test_families_have_the_same_rows(family: str):
    """Windows of some layers and not of others, sinks, chunks, rows that are counted."""
    target = target_of(family)
    graphed(target)
    seqs = open_at(target, 20, 3)
    for seed in range(2):
        found, own = both(target, rows_of(seqs, (5, 5), parents=TREE, seed=seed))
        assert relative_error(found, own) < BOUND
        for seq in seqs:
            target.commit(seq, [0, 2, 4])


def test_rows_left_over_from_a_wider_forward_change_nothing():
    target = target_of()
    made, seqs = graphed(target), open_at(target, 9)
    target.score(rows_of(seqs, (12,)))
    target.discard(seqs[0])
    found, own = both(target, rows_of(seqs, (10,), seed=3))
    assert made.captures == 1 and relative_error(found, own) < BOUND


def test_what_came_out_is_not_written_over():
    target = target_of()
    graphed(target)
    seqs = open_at(target, 9)
    first = target.score(rows_of(seqs, (2,)))
    before = first.clone()
    target.discard(seqs[0])
    target.score(rows_of(seqs, (2,), seed=5))
    assert torch.equal(first, before)


def test_graphs_go_when_the_pools_do():
    target = target_of()
    made, seqs = graphed(target), open_at(target, 60)
    target.score(rows_of(seqs, (2,)))
    target.commit(seqs[0], 2)
    kept = list(made._graphs.values())
    target.score(rows_of(seqs, (2,)))
    assert made.captures == 1 and list(made._graphs.values()) == kept
    target.commit(seqs[0], 2)
    more = open_at(target, 200)
    found, own = both(target, rows_of(seqs, (2,)))
    assert made.captures == 2 and relative_error(found, own) < BOUND
    for seq in (*seqs, *more):
        target.close(seq)
    target.limit_cache(None)
    found, own = both(target, rows_of(open_at(target, 3), (2,)))
    assert made.captures == 3 and relative_error(found, own) < BOUND


def test_hidden_states_come_out_of_graphs_of_their_own():
    target, layers = target_of(), (1, 2)
    graphed(target)
    seqs = open_at(target, 9, 4)
    rows = rows_of(seqs, (2, 3), wanted=[4])
    with target.uncompiled(), target.tapping(layers) as own:
        due = target.score(rows)
    for seq in seqs:
        target.discard(seq)
    with target.tapping(layers) as taps:
        logits = target.score(rows)
    made = target._compiled_taps[layers]
    assert isinstance(made, GraphedForward) and made.captures
    assert relative_error(logits, due) < BOUND
    for seq in seqs:
        assert taps.of(seq).shape == own.of(seq).shape
        assert relative_error(taps.of(seq), own.of(seq)) < BOUND


def test_many_rows_are_the_models_own():
    target = target_of()
    made, seqs = graphed(target), open_at(target, 3)
    assert target.score(rows_of(seqs, (WIDTHS[-1] + 1,), wanted=[1])).shape[0] == 1
    assert made.captures == 0


def test_prompts_rest_is_replayed_too():
    """Rows that nobody asks logits of, and more than a tree has, which another text's are among."""
    target = target_of()
    made, seqs = graphed(target), open_at(target, 3, 9)
    found, own = both(target, rows_of(seqs, (90, 6), wanted=[88, 95]))
    assert relative_error(found, own) < BOUND
    for seq in seqs:
        target.commit(seq, 2)
    assert target.score(rows_of(seqs, (70, 1), wanted=[])).shape == (0, target.vocab_size)
    assert made.captures == 1
    for seq, count in zip(seqs, (70, 1), strict=True):
        target.commit(seq, count)
    found, own = both(target, rows_of(seqs, (1, 2)))
    assert relative_error(found, own) < BOUND


def test_compile_makes_graphs_and_auto_the_attention_alone():
    target = target_of()
    assert not target.compile(build=False) and not target.info()["compiled"]
    assert isinstance(target._body, TritonAttention) and target.info()["own_attention"]
    assert target._cache.gives_back
    assert target.compile() and target.info()["compiled"] and target.info()["own_attention"]
    assert not target._cache.gives_back, "graphs are bound to where pools lie"
    with target.compiled(build=True):
        assert target.runs_compiled
    assert not target.runs_compiled and not target.info()["own_attention"]
    assert target._cache.gives_back


def test_weights_that_lie_elsewhere_drop_the_graphs():
    target = target_of()
    made, seqs = graphed(target), open_at(target, 5)
    target.score(rows_of(seqs, (1,)))
    target.close(seqs[0])
    name = "model.layers.0.mlp.up_proj.weight"
    target.update_weights({name: target.model.state_dict()[name] * 1.5})
    # Joined layers were taken apart for it and joined anew, be it where they lay.
    assert made._places == graphs._places(target.model)
    found, own = both(target, rows_of(open_at(target, 5), (1,)))
    assert relative_error(found, own) < BOUND
    made.bind()
    assert made._graphs
    layer = target.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)
    made.bind()
    assert not made._graphs


class Unread(TorchDispatchMode):
    """Fails where the host reads numbers of a tensor that is not known to be the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        self.reads += any(name in str(func) for name in waits)
        return func(*args, **(kwargs or {}))


def test_a_replay_is_filled_without_reading_the_device(monkeypatch: pytest.MonkeyPatch):
    """The plan is the host's; what a replay is filled with and gives is not looked at."""
    target = target_of()
    made, seqs = graphed(target), open_at(target, 70, 9)
    rows = rows_of(seqs, (5, 5), parents=TREE, wanted=[0, 4])
    target.score(rows)
    assert made.captures == 1
    for seq in seqs:
        target.discard(seq)
    # The kernels of the interpreter are no tensor operations: what they read is not seen.
    call, seen = GraphedForward.__call__, []

    def watched(self: GraphedForward, *given: Tensor) -> Any:
        with Unread() as mode:
            found = call(self, *given)
        seen.append(mode.reads)
        return found

    monkeypatch.setattr(GraphedForward, "__call__", watched)
    target.score(rows)
    assert seen == [0]
    with Unread() as mode:
        assert bool(torch.ones(1) > 0)
    assert mode.reads == 1, "a read must be seen"


def test_refusals_name_the_model_and_the_remedy(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedModel, match=r"falcon model keeps its own.*leave compile out"):
        target_of("falcon").compile()
    target = target_of()
    target.model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(UnsupportedModel, match="spread over several devices"):
        target.compile()
    del target.model.hf_device_map

    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_recorded", fails)
        with pytest.raises(UnsupportedModel, match=r"llama model cannot be a graph.*not permitted"):
            target.compile()
    assert not target.runs_compiled and not target.info()["own_attention"]
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "find_spec", lambda name: None)
        assert not target.compile(build=False)
        with pytest.raises(UnsupportedModel, match="Triton's attention is not to be had"):
            target.compile()


def test_graphs_that_are_off_are_refused(monkeypatch: pytest.MonkeyPatch):
    fill = _Graph.fill
    monkeypatch.setattr(_Graph, "fill", lambda graph, tokens, plan: fill(graph, tokens ^ 1, plan))
    with pytest.raises(UnsupportedModel, match=r"differ from its own by.*leave compile out"):
        target_of().compile()


def test_attention_that_is_off_is_warned_of_and_not_used(monkeypatch: pytest.MonkeyPatch):
    over_pool = TritonAttention.over_pool
    monkeypatch.setattr(TritonAttention, "over_pool", lambda *given: over_pool(*given) * 1.1)
    target = target_of()
    with pytest.warns(UserWarning, match="not used for the llama model: rows differ"):
        assert not target.compile(build=False)
    assert not target.info()["own_attention"]


def test_a_shape_has_room_for_every_way_its_rows_may_lie():
    for counts in ((1,) * 7, (5, 2), (2, 5), (7,), (3, 3, 1)):
        cache = target_of()._cache
        seqs = tuple(cache.open(1) for _ in counts)
        plan = make_plan(cache, rows_of(seqs, counts), DEVICE)
        shape = Shape.of(plan, 7)
        for per_group in (1, 8, 16, 32, 64):
            layout = shape.layout(per_group)
            tiles = sum(-(-count // layout.per_tile) for count in counts)
            assert shape.width == layout.rows == 7 and tiles <= layout.tiles <= 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_the_plain_way(temperature: float):
    """Prompt, drafts, verification and commits, all by the way of a GPU."""
    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    config = SpeculativeDecoderConfig(k=3, sampling=sampling)
    prompts = [random_tokens(5).tolist(), random_tokens(66, 2).tolist()]

    def texts(target: HuggingFaceTarget) -> list[list[int]]:
        decoder = SpeculativeDecoder(target_of(), target, config)
        return decoder.generate_batch(prompts, 6, seed=7)

    target = target_of()
    made = graphed(target)
    found = texts(target)
    assert made.captures and [len(text) for text in found] == [6, 6]
    token = host._AS_ON_GPU.set(DEVICE.type == "cuda")
    try:
        assert texts(target_of()) == found
    finally:
        host._AS_ON_GPU.reset(token)


def test_rows_one_after_another_are_those_of_one_forward():
    """A chain over several blocks, as long as it was meant to be and shorter; then the next one."""
    target = target_of()
    made, seqs = graphed(target), open_at(target, 62, 9)
    for seq, length in ((seqs[0], 5), (seqs[1], 3), (seqs[0], 4)):
        tokens = random_tokens(length, length).tolist()
        with target.uncompiled():
            own = target.score(Rows((seq,), (length,), torch.tensor(tokens)))
        target.discard(seq)
        chain = target.chain(seq, length + 1)
        assert isinstance(chain, GraphChain)
        found = torch.cat([chain(token) for token in tokens])
        assert relative_error(found, own) < BOUND
        chain.stage(tokens)
        assert target.num_staged(seq) == length
        # What the rows left behind is what a forward goes on from.
        found, own = (target.score(rows_of((seq,), (2,))), own)
        target.discard(seq)
        with target.uncompiled():
            target.score(Rows((seq,), (length,), torch.tensor(tokens)))
            assert relative_error(found, target.score(rows_of((seq,), (2,)))) < BOUND
        target.commit(seq, length)
    assert made.captures == 2


def test_what_rows_are_filled_with_is_sent_once_for_many_chains(monkeypatch: pytest.MonkeyPatch):
    """A text that goes on, one in between, rows taken back, and the end of a block."""
    target = target_of()
    graphed(target)
    seqs, sent = open_at(target, 40, 70), list[int]()
    keep = _Graph.keep

    def noted(graph: _Graph, seq: int, first: Plan, last: Plan) -> None:
        sent.append(seq)
        keep(graph, seq, first, last)

    monkeypatch.setattr(_Graph, "keep", noted)

    def chained(seq: int, length: int, kept: int) -> None:
        tokens = random_tokens(length, target.length(seq)).tolist()
        with target.uncompiled():
            own = target.score(Rows((seq,), (length,), torch.tensor(tokens)))
        target.discard(seq)
        chain = target.chain(seq, length)
        assert chain is not None
        assert relative_error(torch.cat([chain(token) for token in tokens]), own) < BOUND
        chain.stage(tokens)
        target.commit(seq, kept)

    for length, kept in ((3, 1), (4, 4), (5, 0), (2, 2)):
        chained(seqs[0], length, kept)
    assert sent == [seqs[0]]
    chained(seqs[1], 2, 2)
    chained(seqs[0], 6, 6)
    assert sent == [*seqs, seqs[0]]
    # The eleventh row from here lies in another block.
    chained(seqs[0], 11, 5)
    assert sent == [*seqs, seqs[0]]
    chained(seqs[0], 11, 11)
    chained(seqs[0], 40, 2)
    assert sent == [*seqs, seqs[0], seqs[0]]


@pytest.mark.parametrize("reach", [None, Window(5), Chunk(8)])
def test_rows_that_are_written_together_are_those_written_one_by_one(reach: Reach | None):
    """Over blocks in order and in disorder, to the last number."""
    layout = Layout(1, 1, 1)
    for slots in (Slots(150, 64, ()), Slots(150, None, (7, 2, 5))):
        size = layout.size + len(slots.blocks)
        together_Kn = np.full((90, size), -1)
        last = Plan((Span(0, 1, 60, slots, None, None, 1),), torch.tensor([149]))
        assert write_each(together_Kn, last, reach, layout) == size
        for numbers_n, count in zip(together_Kn, range(61, 151), strict=True):
            alone_n, place = np.zeros(size, np.int64), torch.tensor([count - 1])
            span = Span(0, 1, count - 1, replace(slots, count=count), None, None, 1)
            end = write_numbers(alone_n, Plan((span,), place), reach, layout)
            assert numbers_n[:end].tolist() == alone_n[:end].tolist(), count


def test_a_chain_that_counts_its_rows_wrongly_is_found(monkeypatch: pytest.MonkeyPatch):
    target = target_of()
    graphed(target)
    (seq,) = open_at(target, 9)
    with target.uncompiled():
        own = target.score(rows_of((seq,), (3,)))
    target.discard(seq)
    kept = _Graph.kept

    def one_before(graph: _Graph, seq: int, places: range) -> Tensor | None:
        rows_Kn = kept(graph, seq, places)
        return None if rows_Kn is None else torch.cat((rows_Kn[:1], rows_Kn[:-1]))

    monkeypatch.setattr(_Graph, "kept", one_before)
    chain = target.chain(seq, 3)
    assert chain is not None
    found = torch.cat([chain(token) for token in random_tokens(3).tolist()])
    assert relative_error(found, own) > 100 * BOUND


def test_kernels_are_made_of_a_forward(monkeypatch: pytest.MonkeyPatch):
    """Inductor's forward is the model's own, with hidden states, under weights that change."""
    monkeypatch.setattr(graphs, "fuses", lambda device: True)
    target = target_of()
    made = graphed(target)
    assert joined_linears(target.model) and isinstance(made._fused, FusedForward)
    (seq,) = open_at(target, 70)
    steps = [rows_of((seq,), (1,)), rows_of((seq,), (5,), parents=TREE), rows_of((seq,), (12,))]
    for _ in range(2):
        for rows in steps:
            found, own = both(target, rows)
            assert relative_error(found, own) < BOUND
            target.discard(seq)
        with torch.no_grad():
            joined_linears(target.model)[0].weight.mul_(1.5)
            target.model.model.norm.weight.mul_(0.5)
    before = made._fused
    # Weights that lie elsewhere: graphs are captured anew, over the same kernels.
    target.model.lm_head.weight = nn.Parameter(target.model.lm_head.weight * 2)
    made.bind()
    found, own = both(target, steps[0])
    assert relative_error(found, own) < BOUND and made._fused is before
    kernels = cache_folder() / "kernels"
    assert is_own(kernels) and any(kernels.iterdir())
    # What compiled code would swallow is raised behind it.
    monkeypatch.setattr(Forward, "attend", lambda *_: (_ for _ in ()).throw(MemoryError("seen")))
    with pytest.raises(MemoryError, match="seen"):
        # Not captured yet.
        target.score(rows_of((seq,), (2,)))


def test_a_forward_that_cannot_be_fused_runs_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(graphs, "fuses", lambda device: True)
    monkeypatch.setattr(torch.export, "export", refuse)
    target = target_of()
    with pytest.warns(UserWarning, match="cannot be fused .*no kernel"):
        made = graphed(target)
    assert made._fused is None
    (seq,) = open_at(target, 9)
    found, own = both(target, rows_of((seq,), (2,)))
    assert relative_error(found, own) < BOUND


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_graphs_give_the_same_rows(dtype: torch.dtype):
    """On a GPU alone: what is captured is replayed, over caches that grow."""
    target = HuggingFaceTarget(random_model("llama").to("cuda", dtype))
    assert target.compile()
    assert isinstance(target._compiled, GraphedForward)
    seqs = open_at(target, 70, 9)
    bound = BOUND if dtype is torch.float32 else 0.1
    for seed in range(3):
        for rows in (rows_of(seqs[:1], (3,), seed=seed), rows_of(seqs, (5, 5), parents=TREE)):
            found, own = both(target, rows)
            assert relative_error(found.float(), own.float()) < bound
            for seq in rows.seqs:
                target.commit(seq, 1)
    captures = target._compiled.captures
    try:
        with warnings.catch_warnings():
            # That it does not see every wait yet.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        target.score(rows_of(seqs[:1], (3,)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert target._compiled.captures == captures


@pytest.mark.parametrize("fused", [False, True])
def test_layers_that_others_take_apart_drop_the_graphs(
    fused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(graphs, "fuses", lambda device: fused)
    target = target_of()
    made, (seq,) = graphed(target), open_at(target, 5)
    assert made._fits == fused
    target.score(rows_of((seq,), (1,)))
    target.discard(seq)
    restore_linears(target.model)
    found, own = both(target, rows_of((seq,), (1,)))
    assert not made._fits
    assert made.captures == 2 and relative_error(found, own) < BOUND


def test_the_folder_of_kernels_is_ones_own_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    before = os.umask(0o002)
    try:
        with inductor._compiling():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
            os.environ["OUTRIDER_SEEN_MEANWHILE"] = "yes"
        assert os.environ.pop("OUTRIDER_SEEN_MEANWHILE") == "yes"
    finally:
        os.umask(before)
    assert os.environ["TRITON_CACHE_DIR"] == "kept"
    assert is_own(tmp_path / "new" / "compiled") and is_own(cache_folder() / "kernels")
