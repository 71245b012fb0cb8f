"""Outrider's own products under libllama: a device of ggml's, compiled where it runs.

ggml reads a weight at half the speed of memory for one row, and twice as slowly again for five.
With this device bfloat16, float16 and Q8_0 weights are laid out in panels when a file is loaded,
and read once for all rows of a pass (`device.cpp`, `rows.cpp`, `../product.cpp`); the rest of one
stays ggml's. Like everything that is compiled it is kept in the user's own folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.libllama.library import CHANGING, library
from outrider.models.packages import first_line
from outrider.models.product import compiled_library, has_tiles

if TYPE_CHECKING:
    from jaxtyping import Float

SOURCES = (
    *(Path(__file__).with_name(name) for name in ("device.cpp", "rows.cpp", "rows.h")),
    *(
        Path(__file__).parent.with_name(name)
        for name in ("product.cpp", "panels.cpp", "panels.h", "vectors.h")
    ),
)
LIBRARY = "device.so"
GGML = ("0.25.3",)
"""Releases of ggml whose inner records of a device are those that `device.cpp` declares."""
HEADERS = ("ggml.h", "ggml-backend.h")
ERROR = 1e-5
"""Of the largest number, that a product may be off what it should be in exact arithmetic."""


class Products:
    """The compiled device, known to ggml from here on.

    Args:
        path: where it is.

    Raises:
        ModelError: it cannot be loaded, or does not compute what it should.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._own = ctypes.CDLL(str(path))
            self._own.outrider_load.argtypes = []
            self._own.outrider_loaded.restype = ctypes.c_size_t
            self.kinds = {
                kind: _Kind(self._own, name)
                for kind, name in (("BF16", "panels"), ("F16", "halves"), ("Q8_0", "blocks"))
                if getattr(self._own, f"outrider_has_{name}")()
            }
            self._own.outrider_load.restype = None
        except (OSError, AttributeError) as error:
            raise self._broken(first_line(error)) from error
        for kind, error in self.errors().items():
            if not error < ERROR:
                raise self._broken(f"{kind} is off by {error:.1e} of the largest number")
        load = ggml().ggml_backend_load
        load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        with CHANGING:
            # Processors without instructions for any kind do without the device.
            if self.kinds and not load(os.fsencode(path)):
                raise self._broken("ggml takes no such device")

    def load(self, load: Callable[[], Any]) -> tuple[Any, int]:
        """What `load` makes, and how many bytes of weights it laid out for the device."""
        self._own.outrider_load()
        try:
            made = load()
        finally:
            laid_out = int(self._own.outrider_loaded())
        return made, laid_out

    def errors(self) -> dict[str, float]:
        """By kind of weight, the largest error as a share of the largest number."""
        draw = torch.Generator().manual_seed(0)
        found: dict[str, float] = {}
        for kind, product in self.kinds.items():
            found[kind] = 0.0
            for width, count in ((64, 61), (2528, 130), (2080, 33)):
                stored, weight = STORED[kind](torch.randn(count, width, generator=draw))
                inputs = torch.randn(100, width, generator=draw)
                wanted = STORED[kind](inputs)[1].double() @ weight.double().T
                for rows in (*range(1, 14), len(inputs)):
                    out = product(stored, inputs[:rows], count)
                    off = (out - wanted[:rows]).abs().max() / wanted.abs().max()
                    found[kind] = max(found[kind], float(off) if off.isfinite() else float("inf"))
        return found

    def _broken(self, why: str) -> ModelError:
        return ModelError(
            f"the compiled device in {str(self._path)!r} cannot be used ({why}); remove that "
            "folder and compile again"
        )


class _Kind:
    """The product over one kind of weight, outside of ggml."""

    def __init__(self, own: Any, name: str) -> None:
        size, work = getattr(own, f"outrider_{name}_bytes"), getattr(own, f"outrider_{name}_work")
        for function in (size, work):
            function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_long] * 2
        lay = getattr(own, f"outrider_lay_out_{name}")
        lay.restype, lay.argtypes = None, [*[ctypes.c_void_p] * 2, *[ctypes.c_long] * 2]
        run = getattr(own, f"outrider_{name}_of_rows")
        run.restype = ctypes.c_bool
        run.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3, ctypes.c_int]
        self._size, self._work, self._lay, self._run = size, work, lay, run

    def __call__(
        self, stored: Tensor, inputs: Float[Tensor, "R I"], count: int, threads: int = 2
    ) -> Float[Tensor, "R O"]:
        """`inputs @ weight.T` of a weight as a file stores it."""
        rows, width = inputs.shape
        laid, work = _aligned(self._size(width, count)), _aligned(self._work(rows, width))
        self._lay(stored.data_ptr(), laid.data_ptr(), width, count)
        out = torch.full((rows, count), float("nan"))
        strided = _Strided(inputs.data_ptr(), (rows, 1, 1), (4 * inputs.stride(0), 0, 0))
        at = ctypes.addressof(strided)
        self._run(at, laid.data_ptr(), out.data_ptr(), work.data_ptr(), rows, width, count, threads)
        return out


class _Strided(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 3),
        ("nb", ctypes.c_size_t * 3),
    )


def _aligned(size: int) -> Tensor:
    room = torch.empty(size + 64, dtype=torch.uint8)
    return room[-room.data_ptr() % 64 :]


def _as(dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda numbers: (numbers.to(dtype), numbers.to(dtype).float())


def _as_q8_0(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a file stores, and what it stands for."""
    factors, numbers = _blocks(weight)
    stored = torch.cat([factors.half().view(torch.uint8), numbers.char().view(torch.uint8)], -1)
    return stored.contiguous(), (factors * numbers).view_as(weight)


def _blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 32 as a factor, rounded to float16, and whole numbers, both in float32."""
    blocks = numbers.unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    # Divided as libllama does it: torch may take a number's reciprocal instead.
    most_number = torch.full_like(most, 127.0)
    return (most / most_number).half().float(), (blocks * (most_number / most)).round()


STORED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "BF16": _as(torch.bfloat16),
    "F16": _as(torch.float16),
    "Q8_0": _as_q8_0,
}
"""What a file stores of some numbers, and what it stands for; rows are rounded alike."""


def products(*, build: bool) -> Products | None:
    """The device, compiled now or before; None where it was not and `build` is False.

    None, too, where it cannot be had: on anything but Linux, on processors that multiply tiles
    (AMX), which ggml uses, and under another release of ggml than it was written for. `why_not`
    says so.

    Raises:
        ModelError: no C++ compiler, a folder that others may write to, or a broken library.
    """
    if why_not() is not None:
        return None
    headers = "".join((_include() / name).read_text() for name in HEADERS)
    facts = {"ggml": _ggml_version(), "headers": headers}
    path = compiled_library(LIBRARY, SOURCES, build=build, flags=flags(), **facts)
    return None if path is None else _loaded(path)


def flags() -> list[str]:
    """What the compiler is told of ggml: its headers, and the library that is loaded already."""
    return [f"-I{_include()}", "-fvisibility=hidden", "-Wl,--no-as-needed", str(_base())]


def fits(file: Path) -> bool:
    """Whether memory has room for a copy of a file, its further parts included."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        room = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return True
    first = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file.name)
    parts = [file] if first is None else file.parent.glob(f"{first[1]}?????{first[2]}")
    return sum(part.stat().st_size for part in parts) < 1024 * room


@cache
def why_not() -> str | None:
    """Why there can be no device here; None where there can."""
    if sys.platform != "linux":
        return "it is for Linux"
    if has_tiles():
        return "libllama uses this processor's tiles (AMX)"
    if _ggml_version() not in GGML:
        return f"it was written for ggml {', '.join(GGML)}, and this is {_ggml_version()}"
    if not all((_include() / name).is_file() for name in HEADERS) or not _base().is_file():
        return "llama-cpp-python was installed without ggml's headers or as one library"
    return None


@cache
def _loaded(path: Path) -> Products:
    return Products(path)


def ggml() -> Any:
    """What libllama computes with; `llama_cpp._ggml` may be another copy of it."""
    return library().llama_cpp._lib


def _ggml_version() -> str:
    version = ggml().ggml_version
    version.restype = ctypes.c_char_p
    return (version() or b"").decode()


def _include() -> Path:
    return Path(library().__file__).parent.parent / "include"


def _base() -> Path:
    return Path(library().__file__).parent / "lib" / "libggml-base.so"
