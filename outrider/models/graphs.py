"""Forwards of few rows as CUDA graphs: what a GPU is to do is sent once, and replayed.

A graph is one forward over buffers that stay where they are: tokens, positions, and what the rows
see as numbers (`tables`), so that no length of a text is in it. Rows are padded up to a few widths.
Where there is no CUDA, under `host.as_on_gpu`, replaying is running the same over again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider import host
from outrider.cache import CacheManager
from outrider.errors import OutriderError, UnsupportedModel, warn
from outrider.models.ahead import Begun
from outrider.models.attention_op import Forward, PoolBody, current, running
from outrider.models.attention_trial import errors_over_pools
from outrider.models.compiled import Tapped, why_not_anywhere
from outrider.models.doors import Door, InterfaceDoor
from outrider.models.inductor import FusedForward, fused_forward, named_weights
from outrider.models.packages import first_line
from outrider.models.packing import arrangement_of
from outrider.models.plan import Plan
from outrider.models.reach import Reach
from outrider.models.tables import (
    IntArray,
    Layout,
    Table,
    Tables,
    power_of_two,
    rows_per_tile,
    write_each,
    write_numbers,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

WIDTHS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows that forwards are padded up to."""
LEAST_BLOCKS = 1024
"""Blocks of all texts of a forward that the smallest tables have room for."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""How far Triton's attention may be off, as a share of the largest number."""

Outputs = tuple[Tensor, Tensor | None]
"""Logits `[1, R, V]` of all rows, and their hidden states side by side."""


class BodyMaker(Protocol):
    """Makes attention that looks rows up in tables; None: in its own, of each forward."""

    def __call__(self, tables: Tables | None = None) -> PoolBody:
        """The body."""
        ...


def triton_body(device: torch.device, dtype: torch.dtype) -> BodyMaker | None:
    """What makes Triton's attention; None where it is not to be had there.

    It was held against the plain body there, once; where it is off, that is warned of.
    """
    if find_spec("triton") is None or dtype not in BOUNDS:
        return None
    if _why_no_triton(device, dtype) is not None:
        return None
    from outrider.models.triton_attention import TritonAttention

    return TritonAttention


@cache
def _why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    from outrider.models.triton_attention import TritonAttention

    try:
        error = errors_over_pools(TritonAttention().over_pool, (dtype,), device)[dtype]
        reason = f"it is off by {error:.1e} of the largest number"
        reason = None if error < BOUNDS[dtype] else reason
    except Exception as error:
        reason = first_line(error)
    if reason is not None:
        warn(f"Triton's attention is not used on {device} in {dtype}: {reason}")
    return reason


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is bound to: rows, texts and rows of one text at most, room for blocks."""

    width: int
    spans: int
    longest: int
    blocks: int

    @classmethod
    def of(cls, plan: Plan, rows: int) -> Shape:
        """The smallest that a plan fits into."""
        width = next(width for width in WIDTHS if width >= rows)
        blocks = sum(len(span.slots.blocks) for span in plan.spans)
        return cls(
            width,
            min(width, power_of_two(len(plan.spans))),
            power_of_two(max(span.num_rows for span in plan.spans)),
            max(LEAST_BLOCKS, power_of_two(blocks)),
        )

    def layout(self, per_group: int) -> Layout:
        """Rows, and as many tiles as so many rows of so many texts have at most."""
        per_tile = rows_per_tile(self.longest, per_group)
        return Layout(self.width, (self.width - self.spans) // per_tile + self.spans, per_tile)

    def size(self, layout: Layout) -> int:
        """Numbers of a table."""
        return layout.size + self.blocks


class HeldTables(Tables):
    """Tables that stay where they are; each forward writes their numbers anew.

    A first forward tells which ones there are. They are its own until `settle` has them stand one
    behind another.
    """

    def __init__(self, shape: Shape, plan: Plan) -> None:
        self._shape, self._plan = shape, plan
        self._made: dict[tuple[Reach | None, int, torch.device], Table] = {}

    def of(
        self, plan: Plan, reach: Reach | None, rows: int, per_group: int, device: torch.device
    ) -> Table:
        """The table; where it is asked for first, of the plan that all began with."""
        found = self._made.get((reach, per_group, device))
        if found is None:
            layout = self._shape.layout(per_group)
            numbers = np.zeros(self._shape.size(layout), np.int64)
            write_numbers(numbers, self._plan, reach, layout)
            found = Table(host.send(torch.from_numpy(numbers), device), layout)
            self._made[reach, per_group, device] = found
        return found

    @property
    def size(self) -> int:
        """Numbers of all tables."""
        return sum(len(table.numbers) for table in self._made.values())

    def settle(self, numbers: Tensor) -> None:
        """From now on they stand in `numbers`, of which there are `size`."""
        first = 0
        for key, table in self._made.items():
            last = first + len(table.numbers)
            self._made[key] = Table(numbers[first:last], table.layout)
            first = last

    def write(self, out: IntArray, plan: Plan) -> int:
        """Writes a plan's numbers, as they are to stand; returns up to where there are any."""
        first = end = 0
        for (reach, _, _), table in self._made.items():
            end = first + write_numbers(out[first:], plan, reach, table.layout)
            first += len(table.numbers)
        return end

    def write_each(self, out_Kn: IntArray, plan: Plan) -> int:
        """Those of K rows in a chain, each alone; the last is the plan's."""
        first = end = 0
        for (reach, _, _), table in self._made.items():
            end = first + write_each(out_Kn[:, first:], plan, reach, table.layout)
            first += len(table.numbers)
        return end


class _Graph:
    """One forward over numbers that stay where they are, and what runs it again.

    The numbers are tokens, positions, and what the rows see; the host sends them with one copy.
    """

    replay: Callable[[], Outputs]

    def __init__(self, shape: Shape, tables: HeldTables, device: torch.device) -> None:
        self._width, self._tables = shape.width, tables
        self._box = host.Mailbox(2 * shape.width + tables.size, device)
        # A sequence, the place of a row of it, and what that and those behind it are filled with.
        self._kept: tuple[int, int, Int64[Tensor, "K n"]] | None = None
        own_1n = self._box.numbers[None]
        self.tokens_1W, self.positions_1W = own_1n[:, : 2 * shape.width].chunk(2, 1)
        tables.settle(own_1n[0, 2 * shape.width :])

    def fill(self, tokens_R: Tensor, plan: Plan) -> None:
        """Takes a forward; its tokens may be there already."""
        # Behind them stay rows of an earlier forward: they have no slot, and nobody sees them.
        numbers, rows = self._box.open(), len(tokens_R)
        here = not tokens_R.is_cuda
        if here:
            numbers[:rows] = tokens_R.numpy()
        self._box.send(0 if here else self._width, self._write(numbers, plan))
        if not here:
            self.tokens_1W[0, :rows].copy_(tokens_R)

    def keep(self, seq: int, first: Plan, last: Plan) -> None:
        """Keeps what one row is filled with at each of a sequence's places, but for its token.

        They go from the first plan's to the last one's. Where a token lies stays while a sequence
        is open.
        """
        begin, end = (plan.spans[0].slots.count for plan in (first, last))
        numbers_Kn = np.empty((end - begin + 1, 1 + self._tables.size), np.int64)
        numbers_Kn[:, 0] = np.arange(begin - 1, end)
        size = 1 + self._tables.write_each(numbers_Kn[:, 1:], last)
        sent = torch.from_numpy(numbers_Kn[:, :size].copy())
        self._kept = seq, begin - 1, host.send(sent, self._box.numbers.device)

    def kept(self, seq: int, places: range) -> Int64[Tensor, "K n"] | None:
        """What is kept of a sequence's places, if all of them are."""
        if self._kept is None or self._kept[0] != seq:
            return None
        _, first, rows_Kn = self._kept
        if not first <= places.start <= places.stop <= first + len(rows_Kn):
            return None
        return rows_Kn[places.start - first :]

    def take(self, token: int | Tensor, numbers_n: Tensor) -> None:
        """Takes a row: its token, maybe where the graph is, and what is kept of its place."""
        if isinstance(token, int):
            self._box.numbers[:1].fill_(token)
        else:
            self._box.numbers[:1].copy_(token)
        self._box.numbers[1 : 1 + len(numbers_n)].copy_(numbers_n)

    def _write(self, numbers: IntArray, plan: Plan) -> int:
        first = self._width
        numbers[first : first + len(plan.positions)] = plan.positions.numpy()
        return 2 * first + self._tables.write(numbers[2 * first :], plan)


class GraphedForward:
    """A model's forwards of few rows as graphs, each captured when it is first asked for.

    With taps it gives the hidden states behind their layers too, side by side.

    Args:
        model: as it is; its attention is Outrider's.
        door: the way in.
        body: makes attention that reads tables.
        tapped: which hidden states are to come out too.
        fused: the forward in few kernels; None: the model's own runs.

    Attributes:
        captures: graphs that were made so far.
    """

    most_rows = WIDTHS[-1]
    remedy = "leave compile out"

    def __init__(
        self,
        model: PreTrainedModel,
        door: InterfaceDoor,
        body: BodyMaker,
        tapped: Tapped | None = None,
        fused: FusedForward | None = None,
    ) -> None:
        self._model, self._door, self._body, self._tapped = model, door, body, tapped
        self._fused = fused
        self._graphs: dict[Shape, _Graph] = {}
        self._pools_made = 0
        self._side = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self.captures = 0
        self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self._memory = _memory(self._model.device)
        self._places = _places(self._model)
        self._arrangement = arrangement_of(self._model)
        self._fits = self._fused is not None and self._fused.fits()

    def bind(self) -> None:
        """Takes the weights the model has now: graphs go where one lies elsewhere."""
        if self._places != _places(self._model):
            self._forget()

    def __call__(
        self, tokens_R: Int64[Tensor, " R"], plan: Plan, wanted_K: Int64[Tensor, " K"] | None
    ) -> tuple[Float[Tensor, "1 K V"], Float[Tensor, "1 R F"] | None]:
        """The logits of some rows of a forward in progress, None = all; hidden states of all.

        Tokens, the plan's positions and what is wanted are the host's.

        Raises:
            UnsupportedModel: the forward cannot be captured.
        """
        rows = len(tokens_R)
        graph = self._found(Shape.of(plan, rows), current().cache, tokens_R, plan)
        graph.fill(tokens_R, plan)
        logits, hidden = graph.replay()
        # Copies: the next replay writes over both.
        if wanted_K is None:
            picked = logits[:, :rows].clone()
        else:
            picked = logits.index_select(1, host.send(wanted_K, logits.device))
        return picked, None if hidden is None else hidden[:, :rows].clone()

    def row_by_row(
        self, cache: CacheManager, seq: int, places: range, plans: Callable[[], tuple[Plan, Plan]]
    ) -> Callable[[int, int | Tensor], Float[Tensor, "1 V"]]:
        """What scores one row at each of a sequence's places.

        `plans` gives those of a row at the first of them, and at the last that may be kept. It is
        given which place, and the token, which may be on the GPU.

        Raises:
            UnsupportedModel: the forward cannot be captured.
        """
        found = self._keeping(cache, seq, places)
        if found is None:
            first, last = plans()
            graph = self._found(Shape.of(last, 1), cache, torch.zeros(1, dtype=torch.int64), first)
            graph.keep(seq, first, last)
            found = self._keeping(cache, seq, places)
            assert found is not None
        graph, rows_Kn = found

        def row(at: int, token: int | Tensor) -> Tensor:
            graph.take(token, rows_Kn[at])
            return graph.replay()[0][0].clone()

        return row

    def begun(
        self, cache: CacheManager, seq: int, places: range, at_1: Tensor, token_1: Tensor
    ) -> Begun | None:
        """A sequence's row at one of some places; which, and its token, are on the GPU.

        None: its graph is to be made, or told where the places are.
        """
        found = self._keeping(cache, seq, places)
        if found is None:
            return None
        graph, rows_Kn = found
        told = host.Reading((at_1, token_1))
        graph.take(token_1, rows_Kn.index_select(0, at_1)[0])
        return Begun(seq, places, told, graph.replay()[0][0].clone())

    def _keeping(
        self, cache: CacheManager, seq: int, places: range
    ) -> tuple[_Graph, Int64[Tensor, "K n"]] | None:
        """A graph that knows what its row is filled with at all these places."""
        if self._is_bound(cache):
            for graph in self._graphs.values():
                rows_Kn = graph.kept(seq, places)
                if rows_Kn is not None:
                    return graph, rows_Kn
        return None

    def ahead(
        self, cache: CacheManager, plan: Plan, tokens_R: Int64[Tensor, " R"]
    ) -> Float[Tensor, "R V"] | None:
        """Logits of all rows of a forward whose tokens are there; None: its graph is to be made."""
        graph = self._graphs.get(Shape.of(plan, len(tokens_R)))
        if graph is None or not self._is_bound(cache):
            return None
        graph.fill(tokens_R, plan)
        return graph.replay()[0][0, : len(tokens_R)].clone()

    def _is_bound(self, cache: CacheManager) -> bool:
        """Whether pools are where they were, and nobody took layers apart: both are read."""
        bound = self._pools_made, self._arrangement
        return bound == (cache.pools_made, arrangement_of(self._model))

    def _found(self, shape: Shape, cache: CacheManager, tokens_R: Tensor, plan: Plan) -> _Graph:
        """The graph of a shape; captured where there is none yet, with a forward as example."""
        if not self._is_bound(cache):
            self._forget()
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._captured(shape, cache, tokens_R, plan)
            self._pools_made = cache.pools_made
        return graph

    def _captured(self, shape: Shape, cache: CacheManager, tokens_R: Tensor, first: Plan) -> _Graph:
        tables, device = HeldTables(shape, first), self._model.device
        body = self._body(tables)

        def run() -> Outputs:
            plan = Plan((), graph.positions_1W[0])
            with running(Forward(cache, plan, body, self._door.reaches)):
                found = self._outputs(graph.tokens_1W, graph.positions_1W)
            if not body.takes_all:
                raise UnsupportedModel(
                    f"{_refused(self._model)} (Triton's attention does not take its heads); "
                    f"{self.remedy}"
                )
            return found

        try:
            # Compiles kernels, and makes pools and tables, as may not be done while it is captured.
            graph = _Graph(shape, tables, device)
            graph.fill(tokens_R, first)
            _tried(run, device, self._side)
            graph = _Graph(shape, tables, device)
            graph.fill(tokens_R, first)
            graph.replay = _recorded(run, device, self._memory, self._side)
        except (MemoryError, torch.OutOfMemoryError, OutriderError):
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"{_refused(self._model)} ({first_line(error)}); {self.remedy}"
            ) from error
        self.captures += 1
        return graph

    def _outputs(self, tokens_1W: Tensor, positions_1W: Tensor) -> Outputs:
        if self._fused is not None and self._fits:
            return self._fused(tokens_1W, positions_1W)
        inputs: dict[str, Any] = {"input_ids": tokens_1W, "position_ids": positions_1W}
        inputs |= self._door.given(positions_1W[0])
        if self._tapped is None:
            return self._model(**inputs).logits, None
        with self._tapped.noting() as passed:
            logits = self._model(**inputs).logits
        return logits, torch.cat(passed.hidden, -1)


def graphed_forward(
    model: PreTrainedModel,
    door: Door,
    body: BodyMaker | None,
    tapped: Tapped | None = None,
) -> GraphedForward:
    """The model's forwards as graphs.

    Raises:
        UnsupportedModel: a model of which there can be none, with the reason.
    """
    reason = why_not_anywhere(model, door)
    if reason is None and body is None:
        reason = f"Triton's attention is not to be had on {model.device}"
    if reason is not None:
        raise UnsupportedModel(f"compile=True: {reason}; {GraphedForward.remedy}")
    assert isinstance(door, InterfaceDoor) and body is not None
    fused = fused_forward(model, door, WIDTHS[-1], tapped) if fuses(model.device) else None
    return GraphedForward(model, door, body, tapped, fused)


def fuses(device: torch.device) -> bool:
    """Whether kernels are made of forwards there: elsewhere graphs are only tried out."""
    return device.type == "cuda"


def _tried(run: Callable[[], Outputs], device: torch.device, side: Any) -> None:
    """Runs a forward where it is going to be captured."""
    if device.type != "cuda":
        run()
        return
    here = torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        run()
    here.wait_stream(side)


def _recorded(
    run: Callable[[], Outputs], device: torch.device, memory: Any, side: Any
) -> Callable[[], Outputs]:
    """What runs a forward again over the same numbers, and gives what comes out."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, stream=side, capture_error_mode="thread_local"):
        found = run()

    def replayed() -> Outputs:
        graph.replay()
        return found

    return replayed


def _memory(device: torch.device) -> Any:
    """What all graphs of a model put their numbers into."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _places(model: PreTrainedModel) -> tuple[int, ...]:
    """Where a model's weights lie."""
    return tuple(t.data_ptr() for t in named_weights(model).values())


def _refused(model: PreTrainedModel) -> str:
    return f"compile=True: a forward of the {model.config.model_type} model cannot be a graph"
