"""Outrider's own products of few rows with a weight, compiled where they run.

torch's products of few rows read a float32 weight in one stream or several times over, and oneDNN's
of a packed bfloat16 one reach half of what memory gives; without instructions for bfloat16 there is
no packed one, and torch's own takes ten times as long and more. These read a weight once: float32
where it lies, in several streams, bfloat16 laid out in panels (`product.cpp`), of whole gated
blocks too (`gated.cpp`). What a row becomes does not depend, to the bit, on how many rows there
are. They are compiled beside compiled forwards, and like them read from the user's own folder
alone; `attention.cpp` goes along.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, OutOfMemory
from outrider.models.attention_own import OwnAttention, errors_of
from outrider.models.packages import cache_folder, check_owner, first_line, keeping, key_of, making

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float, Int32

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        *("product.cpp", "panels.cpp", "gated.cpp", "attention.cpp"),
        *("panels.h", "vectors.h", "attention.h"),
    )
)
LIBRARY = "product.so"
CPUINFO = Path("/proc/cpuinfo")


def made_by(vendor: str) -> bool:
    """Whether the processor says that it is of this maker."""
    try:
        return vendor in CPUINFO.read_text("ascii", "replace")
    except OSError:
        return False


def machine_flags() -> tuple[str, ...]:
    """What the compiler is told of the processor.

    Intel's take two cycles for a product of pairs of bfloat16 numbers, and one for two products of
    as many float32 numbers: more than two rows are faster as float32, as are prompts.
    """
    slow = made_by("GenuineIntel")
    return ("-march=native", "-DOUTRIDER_NO_PAIRS") if slow else ("-march=native",)


def most_rows() -> int:
    """Rows up to which the product is taken over a plain weight.

    On AMD's processors with AVX2 alone MKL's takes up to twice the time of this one for 25 to 47
    rows; on others of so many arithmetic outlasts reading.
    """
    avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return 48 if avx2 and made_by("AuthenticAMD") else 24


FLAGS = ("-std=c++17", "-O3", *machine_flags(), "-fopenmp", "-shared", "-fPIC")
MOST_ROWS = most_rows()
PLAIN = (Tensor, nn.Parameter)
"""Types with numbers behind their address; a subclass may have none."""
ALONE = 1 << 15
"""Numbers in a weight up to which one thread is as fast as several."""


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.functional.silu,
    partial(nn.functional.gelu, approximate="tanh"),
)
"""What a gated block may do with its gate; gated.cpp has them in this order."""
SILU, GELU_TANH = range(len(ACTIVATIONS))


@dataclass(frozen=True, slots=True)
class Panels:
    """A linear layer of `count` outputs that was laid out in panels."""

    weight: Int32[Tensor, "P J L"]
    bias: BFloat16[Tensor, " O"] | None
    count: int


@dataclass(frozen=True, slots=True)
class Direct:
    """A linear layer as machine code may compute it by itself.

    Attributes:
        run: the product's address.
        weight, bias: as the product reads them, and held: their addresses are handed on.
        dtype: of rows and of what comes out.
        width, count: inputs and outputs.
        most_rows: of one call.
        alone: whether one thread is as fast as several.
        run_gated: the address of what does a gated block over weights laid out so; 0: nothing does.
    """

    run: int
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    width: int
    count: int
    most_rows: int
    alone: bool
    run_gated: int = 0


class Product:
    """The compiled products.

    `has_panels` says whether there is one of bfloat16 numbers, and attention: the processor has to
    have AVX2 with FMA, or AVX-512. One with tiles for bfloat16 (AMX), which oneDNN uses, has
    attention alone. `panel` is how many outputs' weights lie together.

    Args:
        library: where it is.

    Raises:
        ModelError: it cannot be loaded, or does not compute what it should.
    """

    def __init__(self, library: Path) -> None:
        self._library = library
        try:
            loaded = ctypes.CDLL(str(library))
            self._run = _declared(loaded.outrider_product)
        except (OSError, AttributeError) as error:
            raise _broken(library, first_line(error)) from error
        self.has_panels = hasattr(loaded, "outrider_panels") and not has_tiles()
        self._run_panels = _declared(loaded.outrider_panels) if self.has_panels else None
        self._run_gated: Any = loaded.outrider_gated_panels if self.has_panels else None
        if self.has_panels:
            kinds = ((ctypes.c_void_p, 6), (ctypes.c_long, 4), (ctypes.c_int, 2))
            self._run_gated.argtypes = [kind for kind, count in kinds for _ in range(count)]
        self.panel = ctypes.c_long.in_dll(loaded, "outrider_panel").value if self.has_panels else 1
        self.run_attention: Any = getattr(loaded, "outrider_attend", None)
        if self.run_attention is not None:
            arguments = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int
            self.run_attention.argtypes = arguments
        errors = [(self._error(), 1e-5), (self._panels_error(), 1e-2), (self._gated_error(), 1e-2)]
        if (attention := self.attention()) is not None:
            found = errors_of(attention)
            errors += [(found[torch.float32], 1e-5), (found[torch.bfloat16], 2e-2)]
        for error, bound in errors:
            if not error < bound:
                raise _broken(library, f"it is off by {error:.1e} of the largest number")

    def __reduce__(self) -> tuple[Any, ...]:
        # Models are copied and saved whole; the library is found again where it was.
        return _loaded, (self._library,)

    def __deepcopy__(self, _: Any) -> Product:
        return self

    def attention(self) -> OwnAttention | None:
        """Attention for the forwards of one model; None where there is none."""
        return None if self.run_attention is None else OwnAttention(self)

    def takes(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether it may be asked: it gets addresses, and looks at nothing behind them."""
        tensors = (inputs, weight) if bias is None else (inputs, weight, bias)
        return (
            0 < inputs.numel() <= MOST_ROWS * weight.shape[1]
            and inputs.shape[-1] == weight.shape[1]
            and (bias is None or bias.shape == weight.shape[:1])
            and all(
                type(t) in PLAIN and t.dtype is torch.float32 and t.device.type == "cpu"
                for t in tensors
            )
            and all(t.is_contiguous() for t in tensors[1:])
            and not torch.is_autocast_enabled("cpu")
            and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        )

    def __call__(
        self,
        inputs: Float[Tensor, "... I"],
        weight: Float[Tensor, "O I"],
        bias: Float[Tensor, " O"] | None,
    ) -> Float[Tensor, "... O"]:
        """`inputs @ weight.T + bias` of tensors that it `takes`."""
        out = inputs.new_empty(*inputs.shape[:-1], len(weight))
        _compute(self._run, out, inputs, weight, bias)
        return out

    def direct(self, weight: Tensor, bias: Tensor | None) -> Direct | None:
        """How machine code computes what `self(inputs, weight, bias)` does; None: it may not."""
        count, width = weight.shape
        weight, bias = weight.detach(), _detached(bias)
        with torch.autocast("cpu", enabled=False):
            if not self.takes(weight.new_empty(1, width), weight, bias):
                return None
        run, alone = _address(self._run), count * width <= ALONE
        return Direct(run, weight, bias, torch.float32, width, count, MOST_ROWS, alone)

    def direct_over(
        self, panels: Int32[Tensor, "P J L"], bias: Tensor | None, count: int, width: int
    ) -> Direct:
        """The same of `over_panels`, of a layer that `lays_out`."""
        return Direct(
            run=_address(self._run_panels),
            weight=panels,
            bias=_detached(bias),
            dtype=torch.bfloat16,
            width=width,
            count=count,
            most_rows=sys.maxsize,
            alone=count * width <= ALONE,
            run_gated=_address(self._run_gated),
        )

    def laid_out(self, weight: BFloat16[Tensor, "O I"]) -> Int32[Tensor, "P J L"]:
        """The weight in panels of L outputs, two inputs in a number; zeros where there is none."""
        count, width = weight.shape
        panels = -(-count // self.panel)
        more = 0, width % 2, 0, panels * self.panel - count
        whole = nn.functional.pad(weight, more).contiguous()
        return whole.view(torch.int32).view(panels, self.panel, -1).transpose(1, 2).contiguous()

    def plain(
        self, panels: Int32[Tensor, "P J L"], count: int, width: int
    ) -> BFloat16[Tensor, "O I"]:
        """The weight `[count, width]` that was laid out, bit for bit."""
        whole = panels.transpose(1, 2).flatten(0, 1).contiguous().view(torch.bfloat16)
        return whole[:count, :width].contiguous()

    def lays_out(self, dtype: torch.dtype, count: int, bias: Tensor | None) -> bool:
        """Whether a weight of `count` outputs can be laid out and used with its bias."""
        return (
            self.has_panels
            and dtype is torch.bfloat16
            and (bias is None or (bias.dtype is dtype and bias.shape == (count,)))
            and (bias is None or bias.is_contiguous())
        )

    def takes_panels(self, inputs: Tensor, width: int) -> bool:
        """Whether `over_panels` may be asked; it looks at nothing behind an address."""
        return (
            type(inputs) in PLAIN
            and inputs.dtype is torch.bfloat16
            and inputs.shape[-1] == width
            and inputs.device.type == "cpu"
            and not torch.is_autocast_enabled("cpu")
            and not (inputs.requires_grad and torch.is_grad_enabled())
        )

    def over_panels(
        self,
        inputs: BFloat16[Tensor, "... I"],
        panels: Int32[Tensor, "P J L"],
        bias: BFloat16[Tensor, " O"] | None,
        count: int,
    ) -> BFloat16[Tensor, "... O"]:
        """`inputs @ weight.T + bias` of inputs that `takes_panels`, however many rows.

        Raises:
            OutOfMemory: there is none for the rows as float32.
        """
        out = inputs.new_empty(*inputs.shape[:-1], count)
        if _compute(self._run_panels, out, inputs, panels, bias):
            raise OutOfMemory(
                f"there is no memory for rows of {inputs.shape[-1]} numbers; free some"
            )
        return out

    def gates(self, inner: int) -> bool:
        """Whether `gated` does a block of so many inner numbers."""
        return self.has_panels and inner % self.panel == 0

    def gated(
        self, inputs: BFloat16[Tensor, "... I"], gates: Panels, down: Panels, act: int
    ) -> BFloat16[Tensor, "... O"]:
        """`down(act(gate) * up)` of inputs that `takes_panels`, where it `gates` as many numbers.

        `gates` gives gate and up side by side, `act` says which of `ACTIVATIONS` is the gate's.
        What lies between is rounded when gate and up are one. The bits of a row depend on how many
        threads there are, and not on the rows beside it.

        Raises:
            OutOfMemory: there is none for what lies between.
        """
        out = inputs.new_empty(*inputs.shape[:-1], down.count)
        if self._compute_gated(out, inputs, gates, down, act):
            inner = gates.count // 2
            raise OutOfMemory(f"there is no memory for rows of {inner} numbers; free some")
        return out

    def _compute_gated(
        self, out: Tensor, inputs: Tensor, gates: Panels, down: Panels, act: int
    ) -> int:
        """Fills `out`; 0, or 1 where memory is out."""
        inputs = inputs.contiguous()
        width = inputs.shape[-1]
        tensors = inputs, gates.weight, gates.bias, down.weight, down.bias, out
        return self._run_gated(
            *(None if one is None else one.data_ptr() for one in tensors),
            *(inputs.numel() // width, width, gates.count // 2, down.count),
            act,
            torch.get_num_threads() if gates.count * width > ALONE else 1,
        )

    def _error(self) -> float:
        """The largest error over all tile sizes, as a share of the largest number."""
        draw, worst = torch.Generator().manual_seed(0), 0.0
        for width, count in ((37, 61), (512, 130), (2101, 33)):
            weight = torch.randn(count, width, generator=draw)
            bias = torch.randn(count, generator=draw)
            for rows in (*range(1, 25), MOST_ROWS):
                inputs = torch.randn(rows, width, generator=draw)
                wanted = nn.functional.linear(inputs.double(), weight.double(), bias.double())
                out = torch.full((rows, count), float("nan"))
                _compute(self._run, out, inputs, weight, bias)
                worst = max(worst, _off(out, wanted))
        return worst

    def _panels_error(self) -> float:
        """The same of the product over panels; 0 where there is none."""
        draw, worst = torch.Generator().manual_seed(0), 0.0
        for width, count in ((37, 61), (512, 130), (4131, 33)) if self.has_panels else ():
            weight, bias, inputs = (
                torch.randn(*shape, generator=draw).bfloat16()
                for shape in ((count, width), (count,), (100, width))
            )
            panels = self.laid_out(weight)
            wanted = nn.functional.linear(inputs.double(), weight.double(), bias.double())
            for rows in (*range(1, 18), len(inputs)):
                out = torch.full((rows, count), float("nan"), dtype=torch.bfloat16)
                _compute(self._run_panels, out, inputs[:rows], panels, bias)
                worst = max(worst, _off(out, wanted[:rows]))
        return worst

    def _gated_error(self) -> float:
        """The same of gated blocks."""
        draw, worst = torch.Generator().manual_seed(0), 0.0
        for width, count in ((37, 61), (400, 70)) if self.has_panels else ():
            inner = 3 * self.panel
            shapes = (2 * inner, width), (2 * inner,), (count, inner), (count,), (100, width)
            gates, gates_bias, down, down_bias, inputs = (
                torch.randn(*shape, generator=draw).bfloat16() for shape in shapes
            )
            inputs /= width**0.5  # so that biases are not lost among larger numbers
            first = Panels(self.laid_out(gates), gates_bias, 2 * inner)
            second = Panels(self.laid_out(down), down_bias, count)
            both = nn.functional.linear(inputs.double(), gates.double(), gates_bias.double())
            for act, body in enumerate(ACTIVATIONS):
                between = body(both[:, :inner]) * both[:, inner:]
                wanted = nn.functional.linear(between, down.double(), down_bias.double())
                for rows in (*range(1, 16), len(inputs)):
                    out = torch.full((rows, count), float("nan"), dtype=torch.bfloat16)
                    self._compute_gated(out, inputs[:rows], first, second, act)
                    worst = max(worst, _off(out, wanted[:rows]))
        return worst


def _off(found: Tensor, wanted: Tensor) -> float:
    """The largest error, as a share of the largest number; endless where nothing was written."""
    off = (found - wanted).abs().max() / wanted.abs().max()
    return float(off) if off.isfinite() else float("inf")


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _address(run: Any) -> int:
    return ctypes.cast(run, ctypes.c_void_p).value or 0


def _declared(run: Any) -> Any:
    """A function of the library with its arguments: x, w, bias, y, rows, width, count, threads."""
    run.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3, ctypes.c_int]
    return run


def _compute(run: Any, out: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """Fills `out` by one of the products; 0, or 1 where memory is out."""
    inputs = inputs.contiguous()
    width, count = inputs.shape[-1], out.shape[-1]
    return run(
        inputs.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        inputs.numel() // width,
        width,
        count,
        torch.get_num_threads() if count * width > ALONE else 1,
    )


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def product(*, build: bool) -> Product | None:
    """The products, compiled now or before; None where they were not and `build` is False.

    None on anything but Linux too, where compilers may lack OpenMP.

    Raises:
        ModelError: no C++ compiler, a folder that others may write to, or a broken library.
    """
    if sys.platform != "linux":
        return None
    path = compiled_library(LIBRARY, SOURCES, build=build)
    return None if path is None else _loaded(path)


@cache
def _loaded(library: Path) -> Product:
    return Product(library)


def compiled_library(
    name: str, sources: Sequence[Path], *, build: bool, flags: Sequence[str] = (), **facts: str
) -> Path | None:
    """A library of these sources, compiled now or before; None as for `product`.

    `facts` are what it depends on beside them and torch; `flags` the compiler's, beside FLAGS.

    Raises:
        ModelError: as for `product`, but for a broken library.
    """
    with keeping():
        folder = cache_folder() / _key(sources, flags, **facts)
        if not (folder / name).is_file():
            if not build:
                return None
            _build(folder, name, sources, flags)
        for path in (folder.parent, folder, folder / name):
            check_owner(path)
    return folder / name


def _key(sources: Sequence[Path] = SOURCES, flags: Sequence[str] = (), **facts: str) -> str:
    texts = [source.read_text() for source in sources]
    return key_of({"sources": texts, "flags": [*FLAGS, *flags], **facts})


def _build(folder: Path, name: str, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Compiles into a folder, file by file side by side."""
    compiler, every = shlex.split(os.environ.get("CXX") or "g++"), (*FLAGS, *flags)
    command = [*compiler, *(flag for flag in every if not _links(flag)), "-c"]
    with making(folder, name) as new:
        files = [str(source) for source in sources if source.suffix == ".cpp"]
        parts = [str(new.parent / f"{number}.o") for number in range(len(files))]
        try:
            _run([[*command, file, "-o", part] for file, part in zip(files, parts, strict=True)])
            _run([[*compiler, *every, *parts, "-o", str(new / name)]])
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            names = " and ".join(source.name for source in sources if source.suffix == ".cpp")
            raise ModelError(
                f"compile=True: {shlex.join(compiler)!r} cannot compile {names} "
                f"({said.strip()[:300]}); it takes a C++ compiler; leave it out"
            ) from error


def _links(flag: str) -> bool:
    """Whether it tells the linker something, and a compiler nothing."""
    return not flag.startswith("-") or flag.startswith(("-shared", "-Wl,", "-l", "-L"))


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Runs them side by side; none is left behind.

    Raises:
        OSError, CalledProcessError: of the first that fails.
    """
    begun: list[subprocess.Popen[str]] = []
    try:
        for one in commands:
            begun.append(subprocess.Popen(one, stdout=PIPE, stderr=PIPE, text=True))
        for process in begun:
            out, err = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
    finally:
        for process in begun:
            with process:
                process.kill()


def _broken(library: Path, why: str) -> ModelError:
    return ModelError(
        f"the compiled product in {str(library)!r} cannot be used ({why}); remove that folder and "
        "compile again"
    )
