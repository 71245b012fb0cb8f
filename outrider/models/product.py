"""Outrider's own product of few rows with a float32 weight: `product.cpp`, compiled where it runs.

torch's products of few rows read a weight in one stream or several times over. This one reads it
once, where it lies, in several streams; and what a row becomes does not depend, to the bit, on how
many rows there are. It is compiled beside compiled forwards, and like them read from the user's own
folder alone.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.models.packages import cache_folder, check_owner, first_line, keeping, key_of, making

if TYPE_CHECKING:
    from jaxtyping import Float

SOURCE = Path(__file__).with_name("product.cpp")
LIBRARY = "product.so"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
MOST_ROWS = 24
"""Rows up to which it is the fastest over a plain weight; of more, arithmetic outlasts reading."""
ALONE = 1 << 15
"""Numbers in a weight up to which one thread is as fast as several."""


class Product:
    """The compiled product.

    Args:
        library: where it is.

    Raises:
        ModelError: it cannot be loaded, or does not compute what it should.
    """

    def __init__(self, library: Path) -> None:
        self._library = library
        try:
            self._run: Any = ctypes.CDLL(str(library)).outrider_product
        except (OSError, AttributeError) as error:
            raise _broken(library, first_line(error)) from error
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._run.argtypes = [*[pointer] * 4, *[number] * 3, ctypes.c_int]
        self._run.restype = None
        error = self._error()
        if not error < 1e-5:
            raise _broken(library, f"it is off by {error:.1e} of the largest number")

    def __reduce__(self) -> tuple[Any, ...]:
        # Models are copied and saved whole; the library is found again where it was.
        return _loaded, (self._library,)

    def __deepcopy__(self, _: Any) -> Product:
        return self

    def takes(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether it may be asked: it gets addresses, and looks at nothing behind them."""
        tensors = (inputs, weight) if bias is None else (inputs, weight, bias)
        return (
            0 < inputs.numel() <= MOST_ROWS * weight.shape[1]
            and all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)
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
        inputs = inputs.contiguous()
        count, width = weight.shape
        out = inputs.new_empty(*inputs.shape[:-1], count)
        self._run(
            inputs.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            inputs.numel() // width,
            width,
            count,
            torch.get_num_threads() if count * width > ALONE else 1,
        )
        return out

    def _error(self) -> float:
        """The largest error over all tile sizes, as a share of the largest number."""
        draw, worst = torch.Generator().manual_seed(0), 0.0
        for width, count in ((37, 61), (512, 130)):
            weight = torch.randn(count, width, generator=draw)
            bias = torch.randn(count, generator=draw)
            for rows in range(1, MOST_ROWS + 1):
                inputs = torch.randn(rows, width, generator=draw)
                wanted = nn.functional.linear(inputs.double(), weight.double(), bias.double())
                off = (self(inputs, weight, bias) - wanted).abs().max() / wanted.abs().max()
                worst = max(worst, float(off)) if off.isfinite() else float("inf")
        return worst


def product(*, build: bool) -> Product | None:
    """The product, compiled now or before; None where it was not and `build` is False.

    None on anything but Linux too, where compilers may lack OpenMP.

    Raises:
        ModelError: no C++ compiler, a folder that others may write to, or a broken library.
    """
    if sys.platform != "linux":
        return None
    with keeping():
        folder = cache_folder() / _key()
        if not (folder / LIBRARY).is_file():
            if not build:
                return None
            _build(folder)
        for path in (folder.parent, folder, folder / LIBRARY):
            check_owner(path)
    return _loaded(folder / LIBRARY)


@cache
def _loaded(library: Path) -> Product:
    return Product(library)


def _key() -> str:
    return key_of({"source": SOURCE.read_text(), "flags": FLAGS})


def _build(folder: Path) -> None:
    """Compiles into a folder."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    with making(folder, LIBRARY) as new:
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(new / LIBRARY)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise ModelError(
                f"compile=True: {shlex.join(compiler)!r} cannot compile {SOURCE.name} "
                f"({said.strip()[:300]}); it takes a C++ compiler; leave it out"
            ) from error


def _broken(library: Path, why: str) -> ModelError:
    return ModelError(
        f"the compiled product in {str(library)!r} cannot be used ({why}); remove that folder and "
        "compile again"
    )
