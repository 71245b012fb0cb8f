"""A model's forward as machine code: one package, made ahead of time, for any number of rows.

The family's own forward is traced once. Attention, the arranged linear layers and blocks of two of
them (`gates`) stay calls of Outrider's, as opaque operators, so that no length of the cache and no
layout of a weight is in the package; what lies between them (norms, rotations, sums) becomes a few
fused loops without Python. The operators are called without it, too, where Outrider's own products
and attention compute them (`calls`). Weights are not in a package either: they are bound when it is
loaded. Packages are kept in a folder of the user's own and read from nowhere else.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import ModelError, UnsupportedModel
from outrider.models.attention_op import Forward, Options, current, running, underway
from outrider.models.calls import SHIMS, Times, Told, enter_calls
from outrider.models.doors import Door, InterfaceDoor
from outrider.models.gates import gated, join_gates
from outrider.models.packages import cache_folder, check_owner, first_line, keeping, key_of, making
from outrider.models.packing import (
    FusedLinear,
    OwnLinear,
    PackedLinear,
    arrangement_of,
    joined_linears,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

    from outrider.models.layer_gate import Passed

FORMAT = 7
"""Counts up when what is traced changes, so that older packages are not found."""
PACKAGE, CONSTANTS = "forward.pt2", "constants.safetensors"
MOST_ROWS = 1 << 20
CONFIGS = {
    "aot_inductor.package_constants_in_so": False,
    # Without these two short weights would become numbers in the code.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}
SHORT, SHORTEST = 1 << 16, 1 << 9
"""Loops between products run in one thread where five rows are less than so many numbers, and each
thread had at least so many: threads meet in the products, and meeting takes longer than these."""
# Tracing and compiling change what is global in torch.
building = threading.Lock()

_linears: ContextVar[Sequence[OwnLinear]] = ContextVar("outrider_linears")
_failures: ContextVar[list[BaseException]] = ContextVar("outrider_failures")
_library = torch.library.Library("outrider", "FRAGMENT")
_library.define(
    "own_attention(Tensor query, Tensor keys, Tensor values, int layer, float scaling, "
    "float? softcap, Tensor? sinks) -> Tensor"
)
_library.define("own_linear(Tensor inputs, int which, int out_features) -> Tensor")
_library.define(
    "own_gated(Tensor inputs, int gates, int down, int act, int out_features) -> Tensor"
)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    options = Options(scaling, softcap, sinks)
    if not (failures := _failures.get()):
        try:
            return current().attend(layer, query, keys, values, options)
        except BaseException as error:
            # Machine code would make a RuntimeError of it: it is raised behind that.
            failures.append(error)
    return _attended(query, keys, values).zero_()


def _attended(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3])


def _linear(inputs: Tensor, which: int, out_features: int) -> Tensor:
    if not (failures := _failures.get()):
        try:
            return _linears.get()[which].forward(inputs).contiguous()
        except BaseException as error:
            failures.append(error)
    return _product(inputs, out_features).zero_()


def _gated(inputs: Tensor, gates: int, down: int, act: int, out_features: int) -> Tensor:
    if not (failures := _failures.get()):
        try:
            linears = _linears.get()
            return gated(linears[gates], linears[down], inputs, act).contiguous()
        except BaseException as error:
            failures.append(error)
    return _product(inputs, out_features).zero_()


def _product(inputs: Tensor, *given: int) -> Tensor:
    """Rows of as many numbers as an operator's last argument says."""
    return inputs.new_empty(*inputs.shape[:-1], given[-1])


for _name, _body, _shape in (
    ("own_attention", _attend, _attended),
    ("own_linear", _linear, _product),
    ("own_gated", _gated, _product),
):
    _library.impl(_name, _body, "CPU")
    torch.library.register_fake(f"outrider::{_name}", _shape, lib=_library)
# On a GPU linear layers are the model's own.
_library.impl("own_attention", _attend, "CUDA")


@contextmanager
def raising() -> Iterator[None]:
    """Raises behind compiled code what an operator that it called has failed with."""
    failures: list[BaseException] = []
    failed = _failures.set(failures)
    try:
        yield
    finally:
        _failures.reset(failed)
    if failures:
        raise failures[0]


class CompiledForward:
    """A package bound to the weights of a model.

    With taps it gives the hidden states behind their layers too, side by side.

    Args:
        model: as it is: its linear layers arranged, its attention Outrider's.
        folder: where the package is.

    Raises:
        ModelError: files that are no package for this model.
    """

    most_rows = MOST_ROWS

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._bound: dict[str, Tensor] = {}
        self._freed: Any = None
        self.times: Times | None = None
        # Before the package, which looks for what it calls when it is loaded.
        self._enter = enter_calls()
        try:
            # torch's own aoti_load_package asks a compiler which instructions there are, by way of
            # a folder that anybody may have made. The key has the processor.
            aoti: Any = getattr(torch._C, "_aoti")  # noqa: B009
            path = str(folder / PACKAGE)
            self._loader: Any = aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
            self.bind()
        except Exception as error:
            raise ModelError(
                f"the compiled forward in {str(folder)!r} cannot be loaded ({first_line(error)}); "
                "remove that folder and compile again; it is unpacked below TMPDIR, which must "
                "have room and let code run"
            ) from error

    @contextmanager
    def timed(self) -> Iterator[Times]:
        """A time in which its calls note what they take."""
        before, self.times = self.times, Times(len(self._linears))
        try:
            yield self.times
        finally:
            self.times = before

    @property
    def linears(self) -> Sequence[nn.Module]:
        """The linear layers that it calls, in the order of their times."""
        return self._linears

    @property
    def remedy(self) -> str:
        """What to do where it does not compute what the model does."""
        return f"leave it out, and remove {str(self.folder)!r}"

    def bind(self) -> None:
        """Takes the weights the model has now."""
        self._linears = _opaque_linears(self.model)
        self._arrangement = arrangement_of(self.model)
        enter = self._enter
        self._told = None if enter is None else Told(enter, self._linears, self.model.dtype)
        held = state_of(Traced(self.model, None))
        extra = self.folder / CONSTANTS
        if extra.is_file():
            held |= load_file(extra)
        names: list[str] = self._loader.get_constant_fqns()
        # The package reads these tensors where they are and never gives one back: it gets others
        # of the same memory, which are let go here.
        bound = {name: held[name].detach() for name in names}
        inactive, copied, all_of_them, by_reference = False, False, True, True
        self._loader.load_constants(bound, inactive, all_of_them, by_reference, copied)
        _let_go(self._bound)
        self._bound = bound
        if self._freed is not None:
            self._freed.detach()
        self._freed = weakref.finalize(self, _let_go, bound)

    def __call__(
        self,
        tokens_1R: Int64[Tensor, "1 R"],
        positions_1R: Int64[Tensor, "1 R"],
        wanted_K: Int64[Tensor, " K"],
    ) -> tuple[Float[Tensor, "1 K V"], Float[Tensor, "1 R F"] | None]:
        """The logits of some rows of a forward in progress; hidden states of all its rows."""
        logits, *hidden = self.outputs([tokens_1R, positions_1R, wanted_K])
        return logits, hidden[0] if hidden else None

    def outputs(self, inputs: list[Tensor]) -> list[Tensor]:
        """What comes out of a forward in progress: logits, hidden states, or both."""
        if self._arrangement != arrangement_of(self.model):
            self.bind()
        linears = _linears.set(self._linears)
        try:
            with raising(), self._telling() as told:
                # torch's own way there would parse descriptions of these tensors at every call.
                found: list[Tensor] = self._loader.boxed_run(inputs)
        finally:
            _linears.reset(linears)
        if told is not None:
            told.check()
        return found

    @contextmanager
    def _telling(self) -> Iterator[Told | None]:
        """A time in which calls know of the forward in progress; None: they go to Python."""
        # Under autocast layers compute in another precision than they are laid out for.
        told = None if torch.is_autocast_enabled("cpu") else self._told
        if told is None:
            yield None
            return
        before = told.enter(underway(), self.times)
        try:
            yield told
        finally:
            told.leave(before)

    def forget(self) -> None:
        """Lets go of where layers and caches are: it is not to be used as things stand."""
        self._told = None
        self._arrangement = -1


def _let_go(bound: dict[str, Tensor]) -> None:
    """Frees what a package would hold on to."""
    for tensor in bound.values():
        tensor.data = tensor.new_empty(0)


def compiled_forward(
    model: PreTrainedModel, door: Door, *, build: bool, tapped: Tapped | Part | None = None
) -> CompiledForward | None:
    """The model's compiled forward; None where none was made before and `build` is False.

    `tapped` says which hidden states are to come out too, or which of the layers are to run.
    Making one takes half a minute for a small model on two slow cores.

    Raises:
        UnsupportedModel: a model that cannot be compiled, with the reason; no C++ compiler.
        ModelError: a folder for packages that others may write to, or a broken package.
    """
    reason = why_not(model, door)
    if reason is not None:
        raise UnsupportedModel(f"compile=True: {reason}; leave it out")
    assert isinstance(door, InterfaceDoor)
    with keeping():
        folder = cache_folder() / _key(model, {} if tapped is None else tapped.facts)
        if not (folder / PACKAGE).is_file():
            if not build:
                return None
            with building:
                _build(Traced(model, door, tapped), folder)
        for path in (folder.parent, folder, *folder.iterdir()):
            check_owner(path)
    return CompiledForward(model, folder)


def why_not(model: PreTrainedModel, door: Door) -> str | None:
    """Why a model is not compiled; None where it may be."""
    name = f"the {model.config.model_type} model"
    if model.device.type != "cpu":
        return f"{name} is on {model.device}, and machine code is made for processors"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return f"{name} cannot give the logits of some rows alone"
    return why_not_anywhere(model, door)


def why_not_anywhere(model: PreTrainedModel, door: Door) -> str | None:
    """Why no forward can be kept for use again, neither as machine code nor as a graph."""
    name = f"the {model.config.model_type} model"
    if not isinstance(door, InterfaceDoor):
        return f"{name} keeps its own attention, over lengths that would be built in"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return f"{name} is spread over several devices"
    if any(_follows_rows(getattr(part, "rope_type", None)) for part in model.modules()):
        return f"{name} has rotary frequencies that depend on the rows of a forward"
    return None


def _follows_rows(rope_type: Any) -> bool:
    """Whether rotary frequencies of a type, or of one per kind of layer, follow the longest row."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(kind in ("dynamic", "longrope") for kind in kinds)


@dataclass(frozen=True, slots=True)
class Tapped:
    """Hidden states that a forward is to give too: behind which layers, and who notes them."""

    layers: tuple[int, ...]
    noting: Callable[[], AbstractContextManager[Passed]]

    @property
    def facts(self) -> dict[str, Any]:
        """What tells its packages from others."""
        return {"taps": self.layers}


@dataclass(frozen=True, slots=True)
class Part:
    """Layers `first..last-1` of a model.

    Attributes:
        entering: an example, `[1, 1, D]`, of the states that the forward is given in place of those
            that would come to layer `first`; None: it begins with its tokens.
        states: whether the states behind layer `last - 1` come out.
        logits: whether logits do: what the final norm and the output layer make of these states.
        running: lets forwards run these layers alone, with these states.
    """

    first: int
    last: int
    entering: Tensor | None
    states: bool
    logits: bool
    running: Callable[[Tensor | None], AbstractContextManager[Passed]]

    @property
    def facts(self) -> dict[str, Any]:
        """What tells its packages from others."""
        given = self.entering
        enters = None if given is None else (given.shape[-1], str(given.dtype))
        return {"part": (self.first, self.last, enters, self.states, self.logits)}


class Traced(nn.Module):
    """What is traced: tokens, positions and wanted rows in, logits and hidden states out.

    Without wanted rows the logits are those of all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        door: InterfaceDoor | None,
        tapped: Tapped | Part | None = None,
    ) -> None:
        super().__init__()
        self.whole = model
        # The weights of layers that became one are no part of the model's own.
        self.joined = nn.ModuleList(joined_linears(model))
        self._door, self._tapped = door, tapped

    @property
    def entering(self) -> Tensor | None:
        """An example of the states it is given beside; None where it is given none."""
        return self._tapped.entering if isinstance(self._tapped, Part) else None

    def forward(
        self,
        tokens_1R: Tensor,
        positions_1R: Tensor,
        wanted_K: Tensor | None = None,
        entering_1RD: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits and hidden states, as many of them as are to come out."""
        part = self._tapped
        if part is None:
            return (self._logits(tokens_1R, positions_1R, wanted_K),)
        of_all = isinstance(part, Tapped)
        with part.noting() if of_all else part.running(entering_1RD) as passed:
            logits = self._logits(tokens_1R, positions_1R, wanted_K)
        found = [logits] if of_all or part.logits else []
        # Whatever nothing that comes out needs is not in the package, such as the output layer.
        return (*found, torch.cat(passed.hidden, -1)) if of_all or part.states else (*found,)

    def _logits(self, tokens_1R: Tensor, positions_1R: Tensor, wanted_K: Tensor | None) -> Tensor:
        assert self._door is not None
        given = self._door.given(positions_1R[0])
        if wanted_K is not None:
            given = {**given, "logits_to_keep": wanted_K}
        return self.whole(input_ids=tokens_1R, position_ids=positions_1R, **given).logits


class Opaque:
    """Stands where a forward in progress would, and leaves attention to the operator."""

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """The operator's."""
        op = torch.ops.outrider.own_attention
        return op(
            query, keys, values, layer, float(options.scaling), options.softcap, options.sinks
        )


def _configs() -> dict[str, Any]:
    """What the compiler is asked for. It decides about threads by the rows of the example."""
    return {**CONFIGS, "cpp.min_chunk_size": max(SHORTEST, SHORT // torch.get_num_threads())}


def _shims() -> dict[Any, list[str]]:
    """What packages call in the place of the operators, where that can be."""
    if enter_calls() is None:
        return {}
    return {getattr(torch.ops.outrider, name).default: [shim] for name, shim in SHIMS.items()}


def _build(traced: Traced, folder: Path) -> None:
    """Traces and compiles into a folder."""
    if (folder / PACKAGE).is_file():
        return
    with making(folder, PACKAGE) as new:
        try:
            _make(traced, new, new.parent)
        except Exception as error:
            raise UnsupportedModel(
                f"compile=True: the {traced.whole.config.model_type} model cannot be compiled here "
                f"({first_line(error)}); it takes a C++ compiler and a forward without choices by "
                "value; leave it out"
            ) from error


def _make(traced: Traced, folder: Path, scratch: Path) -> None:
    from torch._inductor.utils import fresh_cache
    from torch.export.graph_signature import InputKind

    rows, kept = (torch.export.Dim(name, min=1, max=MOST_ROWS) for name in ("rows", "kept"))
    # Not of length 1 or 2: lengths of the example are never taken for a constant.
    example = torch.arange(5)[None], torch.arange(5)[None], torch.arange(3)
    shapes: tuple[dict[int, Any], ...] = {1: rows}, {1: rows}, {0: kept}
    if traced.entering is not None:
        example = *example, traced.entering.expand(1, 5, -1).contiguous()
        shapes = *shapes, {1: rows}
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        _tracing(traced.whole),
        quiet(),
        fresh_cache(dir=str(scratch)),
    ):
        warnings.simplefilter("ignore")
        program = torch.export.export(traced, example, dynamic_shapes=shapes, strict=False)
        if enter_calls() is not None:
            join_gates(program.graph, _opaque_linears(traced.whole))
            program.graph_module.recompile()
        # A number written into a forward would come back under a name of the compiler's; a buffer
        # keeps its own.
        for given in program.graph_signature.input_specs:
            if given.kind == InputKind.CONSTANT_TENSOR:
                given.kind, given.persistent = InputKind.BUFFER, False
        own = state_of(traced)
        extra = {
            name: value.contiguous()
            for name, value in program.constants.items()
            if isinstance(value, Tensor) and name not in own
        }
        if extra:
            save_file(extra, folder / CONSTANTS)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(folder / PACKAGE),
            inductor_configs={**_configs(), "aot_inductor.custom_ops_to_c_shims": _shims()},
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's notes on files that are gone afterwards."""
    logger = logging.getLogger("torch._inductor.utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _tracing(model: nn.Module) -> Iterator[None]:
    """Makes attention and arranged linear layers calls of the operators."""
    linears = _opaque_linears(model)
    try:
        for which, linear in enumerate(linears):
            vars(linear)["forward"] = _calling(which, linear.out_features)
        with running(cast(Forward, Opaque())):
            yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


def _calling(which: int, out_features: int) -> Any:
    def forward(inputs: Tensor) -> Tensor:
        return torch.ops.outrider.own_linear(inputs, which, out_features)

    return forward


def _opaque_linears(model: nn.Module) -> list[OwnLinear]:
    """The linear layers that a package calls, each once, in the order of the model's modules."""
    found: dict[int, OwnLinear] = {}
    for module in model.modules():
        layer = module._fusion.linear if isinstance(module, FusedLinear) else module
        if isinstance(layer, OwnLinear):
            found.setdefault(id(layer), layer)
    return list(found.values())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by every name they have."""
    named = module.named_parameters(remove_duplicate=False)
    return {**dict(named), **dict(module.named_buffers(remove_duplicate=False))}


def _key(model: PreTrainedModel, shown: dict[str, Any]) -> str:
    """A hash of all that is in a package: code, shapes, versions, processor; no weight is."""
    config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    own_linears = _opaque_linears(model)
    linears = [(type(m).__name__, m.extra_repr(), _panel_of(m)) for m in own_linears]
    own = state_of(model)
    first = {id(tensor): name for name, tensor in reversed(own.items())}
    tensors = [(n, t.shape, t.stride(), str(t.dtype), first[id(t)]) for n, t in own.items()]
    facts: dict[str, Any] = {
        "format": FORMAT,
        "transformers": transformers.__version__,
        "source": _source(model),
        "class": type(model).__qualname__,
        "config": config,
        "linears": linears,
        "calls": SHIMS,
        "configs": _configs(),
        "tensors": tensors,
        "threads": torch.get_num_threads(),
        **shown,
    }
    return key_of(facts)


def _panel_of(linear: OwnLinear) -> int | None:
    """Outputs of a panel of a layer that lies in such: of those blocks are made."""
    product = linear.product if isinstance(linear, PackedLinear) else None
    return None if product is None else product.panel


def _source(model: PreTrainedModel) -> str:
    """The text of the family's own code."""
    module = sys.modules[type(model).__module__]
    try:
        return inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise UnsupportedModel(
            f"compile=True: the code of the {model.config.model_type} model in {module.__name__} "
            "cannot be read, so that its packages could not be told apart; leave it out"
        ) from error
