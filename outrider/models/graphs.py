"""Forwards of few rows as CUDA graphs: what a GPU is to do is sent once, and replayed.

A graph is one forward over buffers that stay where they are: tokens, positions, and what the rows
see as numbers (`tables`), so that no length of a text is in it. Rows are padded up to a few widths.
Where there is no CUDA, under `host.as_on_gpu`, replaying is running the same over again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.cache import CacheManager
from outrider.decoding import host
from outrider.errors import OutriderError, UnsupportedModel, warn
from outrider.models.attention_op import Forward, PoolBody, current, running
from outrider.models.attention_trial import errors_over_pools
from outrider.models.compiled import Tapped, why_not_anywhere
from outrider.models.doors import Door, InterfaceDoor
from outrider.models.packages import first_line
from outrider.models.plan import Plan
from outrider.models.reach import Reach
from outrider.models.tables import Layout, Table, Tables, numbers_of, power_of_two, rows_per_tile

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

WIDTHS = (*range(1, 9), 12, 16, 24, 32, 48, 64)
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


class HeldTables(Tables):
    """Tables that stay where they are; each forward fills them anew, all with one copy."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._plan: Plan | None = None
        self._made: dict[tuple[Reach | None, int, torch.device], Table] = {}

    def fill(self, plan: Plan) -> None:
        """Take the numbers of a plan."""
        self._plan = plan
        for (reach, _, _), table in self._made.items():
            self._write(table, reach)

    def of(
        self, plan: Plan, reach: Reach | None, rows: int, per_group: int, device: torch.device
    ) -> Table:
        """The table of the plan that was filled in."""
        found = self._made.get((reach, per_group, device))
        if found is None:
            layout = self._shape.layout(per_group)
            size = 4 * layout.rows + 5 * layout.tiles + self._shape.blocks
            found = Table(torch.zeros(size, dtype=torch.int64, device=device), layout)
            self._made[reach, per_group, device] = found
            self._write(found, reach)
        return found

    def _write(self, table: Table, reach: Reach | None) -> None:
        assert self._plan is not None
        numbers = torch.tensor(numbers_of(self._plan, reach, table.layout))
        goal = table.numbers[: len(numbers)]
        goal.copy_(host.send(numbers, goal.device))


@dataclass(slots=True)
class _Graph:
    """One forward over buffers of its own, and what runs it again."""

    tokens_1W: Tensor
    positions_1W: Tensor
    tables: HeldTables
    replay: Callable[[], Outputs] = field(init=False)

    def fill(self, tokens_1R: Tensor, positions_1R: Tensor, plan: Plan) -> None:
        # Behind them stay rows of an earlier forward: they have no slot, and nobody sees them.
        rows = tokens_1R.shape[1]
        self.tokens_1W[:, :rows] = tokens_1R
        self.positions_1W[:, :rows] = positions_1R
        self.tables.fill(plan)


class GraphedForward:
    """A model's forwards of few rows as graphs, each captured when it is first asked for.

    With taps it gives the hidden states behind their layers too, side by side.

    Args:
        model: as it is; its attention is Outrider's.
        door: the way in.
        body: makes attention that reads tables.
        tapped: which hidden states are to come out too.

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
    ) -> None:
        self._model, self._door, self._body, self._tapped = model, door, body, tapped
        self._graphs: dict[Shape, _Graph] = {}
        self._pools_made = 0
        self.captures = 0
        self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self._memory = _memory(self._model.device)
        self._places = _places(self._model)

    def bind(self) -> None:
        """Takes the weights the model has now: graphs go where one lies elsewhere."""
        if self._places != _places(self._model):
            self._forget()

    def __call__(
        self,
        tokens_1R: Int64[Tensor, "1 R"],
        positions_1R: Int64[Tensor, "1 R"],
        wanted_K: Int64[Tensor, " K"],
    ) -> tuple[Float[Tensor, "1 K V"], Float[Tensor, "1 R F"] | None]:
        """The logits of some rows of a forward in progress; hidden states of all its rows.

        Raises:
            UnsupportedModel: the forward cannot be captured.
        """
        forward, rows = current(), tokens_1R.shape[1]
        if self._pools_made != forward.cache.pools_made:
            self._forget()
        shape = Shape.of(forward.plan, rows)
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._captured(shape, forward.cache, (tokens_1R, positions_1R, forward.plan))
            self._graphs[shape] = graph
            self._pools_made = forward.cache.pools_made
        else:
            graph.fill(tokens_1R, positions_1R, forward.plan)
        logits, hidden = graph.replay()
        # Copies: the next replay writes over both.
        picked = logits.index_select(1, host.send(wanted_K, logits.device))
        return picked, None if hidden is None else hidden[:, :rows].clone()

    def _captured(
        self, shape: Shape, cache: CacheManager, first: tuple[Tensor, Tensor, Plan]
    ) -> _Graph:
        tokens_1R, positions_1R, _ = first
        tables = HeldTables(shape)
        body = self._body(tables)
        graph = _Graph(_buffer(tokens_1R, shape), _buffer(positions_1R, shape), tables)
        graph.fill(*first)
        plan = Plan((), graph.positions_1W[0])

        def run() -> Outputs:
            with running(Forward(cache, plan, body, self._door.reaches)):
                found = self._outputs(graph.tokens_1W, graph.positions_1W)
            if not body.takes_all:
                raise UnsupportedModel(
                    f"{_refused(self._model)} (Triton's attention does not take its heads); "
                    f"{self.remedy}"
                )
            return found

        try:
            graph.replay = _recorded(run, self._model.device, self._memory)
        except (torch.OutOfMemoryError, OutriderError):
            raise
        except RuntimeError as error:
            raise UnsupportedModel(
                f"{_refused(self._model)} ({first_line(error)}); {self.remedy}"
            ) from error
        self.captures += 1
        return graph

    def _outputs(self, tokens_1W: Tensor, positions_1W: Tensor) -> Outputs:
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
    return GraphedForward(model, door, body, tapped)


def _recorded(
    run: Callable[[], Outputs], device: torch.device, memory: Any
) -> Callable[[], Outputs]:
    """What runs a forward again over the same buffers, and gives what comes out."""
    if device.type != "cuda":
        return run
    side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        # Compiles kernels, and makes pools and tables, as may not be done while it is captured.
        run()
    here.wait_stream(side)
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


def _places(model: nn.Module) -> tuple[int, ...]:
    """Where a model's weights lie."""
    return tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))


def _buffer(like_1R: Tensor, shape: Shape) -> Tensor:
    return like_1R.new_zeros(1, shape.width)


def _refused(model: PreTrainedModel) -> str:
    return f"compile=True: a forward of the {model.config.model_type} model cannot be a graph"
