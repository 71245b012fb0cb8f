"""What a package of machine code calls without Python: its products, and attention over the pools.

A package calls `calls.cpp`, by way of the names in `names.cpp`. Before each forward that is told,
in its thread, where the weights of its layers are, where each layer's keys and values, and what the
rows see. What is not told goes to Python: layers that compute otherwise, more rows than a product
takes, pools that are still to be made. A package runs one forward at a time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from outrider.errors import ModelError, OutOfMemory
from outrider.models.attention_op import Forward
from outrider.models.attention_own import LANES, OwnAttention
from outrider.models.packages import first_line
from outrider.models.packing import OwnLinear
from outrider.models.product import Direct, compiled_library

if TYPE_CHECKING:
    from outrider.cache import CacheManager, LayerPool
    from outrider.models.reach import Reach

LIBRARIES = {"names.so": ("names.cpp",), "calls.so": ("calls.cpp", "attention.h")}
SHIMS = {
    "own_linear": "AOTITorchError aoti_torch_cpu_own_linear(AtenTensorHandle inputs, "
    "int64_t which, int64_t out_features, AtenTensorHandle* out)",
    "own_gated": "AOTITorchError aoti_torch_cpu_own_gated(AtenTensorHandle inputs, int64_t gates, "
    "int64_t down, int64_t act, int64_t out_features, AtenTensorHandle* out)",
    "own_attention": "AOTITorchError aoti_torch_cpu_own_attention(AtenTensorHandle query, "
    "AtenTensorHandle keys, AtenTensorHandle values, int64_t layer, double scaling, "
    "double* softcap, AtenTensorHandle* sinks, AtenTensorHandle* out)",
}
"""What stands for the operators in a package, by their names."""
DTYPES = {torch.float32: 6, torch.bfloat16: 15}
"""torch's numbers of them."""
Enter = Callable[[int | None], int | None]
_entered: dict[str, Enter] = {}


class _Linear(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("run", "run_gated", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("width", "count", "most_rows")),
        *((name, ctypes.c_int32) for name in ("dtype", "alone")),
    ]


class _Pool(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_head", "value_head", "groups", "width")),
        *((name, ctypes.c_int64) for name in ("value_width", "reach")),
    ]


class _Spans(ctypes.Structure):
    _fields_: ClassVar = [
        ("table", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("count", "rows", "scores")),
    ]


class _Time(ctypes.Structure):
    _fields_: ClassVar = [("nanoseconds", ctypes.c_int64), ("calls", ctypes.c_int64)]


class _Call(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("linears", "pools", "spans", "attend", "times")),
        *((name, ctypes.c_int64) for name in ("num_linears", "num_pools")),
        *((name, ctypes.c_int32) for name in ("dtype", "bfloat16", "threads", "failed")),
    ]


class Times:
    """What the calls of a package took while somebody asked.

    Args:
        num_linears: its linear layers.
    """

    def __init__(self, num_linears: int) -> None:
        self.table = (_Time * (num_linears + 1))()

    def taken(self) -> list[tuple[float, int]]:
        """Seconds and calls of each linear layer, then of attention, since it was asked last."""
        found = [(1e-9 * one.nanoseconds, one.calls) for one in self.table]
        ctypes.memset(self.table, 0, ctypes.sizeof(self.table))
        return found


class Told:
    """What one package's calls are told.

    Args:
        enter: tells this thread's calls of a table; returns what they were told before.
        linears: the package's linear layers.
        dtype: of the model.
    """

    def __init__(self, enter: Enter, linears: Sequence[OwnLinear], dtype: torch.dtype) -> None:
        self._enter = enter
        # Addresses are of tensors that these hold.
        self._direct = [layer.direct() for layer in linears]
        self._linears = (_Linear * len(linears))()
        for entry, direct in zip(self._linears, self._direct, strict=True):
            if direct is not None:
                _fill(entry, direct)
        self._call = _Call(num_linears=len(linears), dtype=DTYPES.get(dtype, -1))
        self._call.linears = ctypes.addressof(self._linears)
        self._call.bfloat16 = dtype is torch.bfloat16
        self._address = ctypes.addressof(self._call)
        self._dtype = dtype
        self._of: tuple[CacheManager, int, object] | None = None
        self._reaches: list[Reach | None] = []
        self._body: OwnAttention | None = None

    def enter(self, forward: Forward | None, times: Times | None) -> int | None:
        """Tells this thread's calls of a forward, and where to note what they take.

        Without a forward they are told of the layers alone. Returns what `leave` is to bring back.
        """
        call = self._call
        self._tell_pools(forward)
        call.threads, call.failed = torch.get_num_threads(), 0
        fits = times is not None and len(times.table) == len(self._linears) + 1
        call.times = ctypes.addressof(times.table) if times is not None and fits else None
        return self._enter(self._address)

    def leave(self, before: int | None) -> None:
        """Tells them what they were told before."""
        self._enter(before)

    def check(self) -> None:
        """Looks at how the calls of the last forward went.

        Raises:
            OutOfMemory: one found no memory.
        """
        if self._call.failed:
            raise OutOfMemory("there is no memory for the rows of a forward; free some")

    def _tell_pools(self, forward: Forward | None) -> None:
        of = None if forward is None else (forward.cache, forward.cache.pools_made, forward.body)
        if self._of != of:
            self._of, self._body, self._call.attend = None, None, None
            if forward is not None:
                self._find_pools(forward)
            self._of = of
        if forward is not None and (body := self._body) is not None:
            for entry, reach in zip(self._spans, self._reaches, strict=True):
                spans = body.spans(forward.plan, reach)
                entry.table, entry.count = spans.table, spans.count
                entry.rows, entry.scores = spans.rows, spans.scores

    def _find_pools(self, forward: Forward) -> None:
        """Where each layer's keys and values are, for attention of Outrider's own."""
        call, body, pools = self._call, forward.body, forward.cache.pools
        if not (isinstance(body, OwnAttention) and self._dtype in body.dtypes and pools):
            return
        self._reaches = list(dict.fromkeys(forward.reaches.get(layer) for layer in pools))
        self._pools = (_Pool * (1 + max(pools)))()
        self._spans = (_Spans * len(self._reaches))()
        for layer, pool in pools.items():
            entry = self._pools[layer]
            if _lies_open(pool, self._dtype):
                entry.keys, entry.values = pool.keys.data_ptr(), pool.values.data_ptr()
            entry.key_head, entry.value_head = pool.keys.stride(0), pool.values.stride(0)
            entry.groups, _, entry.width = pool.keys.shape
            entry.value_width = pool.values.shape[2]
            entry.reach = self._reaches.index(forward.reaches.get(layer))
        call.pools, call.num_pools = ctypes.addressof(self._pools), len(self._pools)
        call.spans = ctypes.addressof(self._spans)
        # Last: what is told counts from here on, and nothing does where this is broken off.
        call.attend, self._body = body.address, body


def _fill(entry: _Linear, direct: Direct) -> None:
    entry.run, entry.run_gated = direct.run, direct.run_gated
    entry.weight = direct.weight.data_ptr()
    entry.bias = None if direct.bias is None else direct.bias.data_ptr()
    entry.width, entry.count, entry.most_rows = direct.width, direct.count, direct.most_rows
    entry.dtype, entry.alone = DTYPES[direct.dtype], direct.alone


def _lies_open(pool: LayerPool, dtype: torch.dtype) -> bool:
    """Whether attention of Outrider's own reads a pool; as its own look at one, in `_takes`."""
    sides = pool.keys, pool.values
    return all(
        one.dtype is dtype and one.is_cpu and one.shape[2] % LANES == 0 and one.is_contiguous()
        for one in sides
    )


def enter_calls() -> Enter | None:
    """How packages are told, by a library that is compiled where it was not before.

    Packages that are loaded afterwards find what they call by name. None on anything but Linux,
    where names are looked up otherwise, and without torch's headers.

    Raises:
        ModelError: as for `product`.
    """
    flags = _flags()
    if flags is None:
        return None
    paths: list[Path] = []
    for name, sources in LIBRARIES.items():
        texts = [Path(__file__).with_name(source) for source in sources]
        path = compiled_library(name, texts, build=True, flags=flags[name])
        assert path is not None
        paths.append(path)
    # A name means one thing in a process: what was loaded first, wherever it was.
    key = paths[-1].parent.name
    if key not in _entered:
        _entered[key] = _loaded(*paths)
    return _entered[key]


def _flags() -> dict[str, tuple[str, ...]] | None:
    """The compiler's for each library: where torch's headers and its own are; None without."""
    if sys.platform != "linux":
        return None
    root = Path(torch.__file__).parent
    if not (root / "include" / "torch" / "csrc" / "inductor" / "aoti_torch").is_dir():
        return None
    torch_s = f"-I{root / 'include'}", f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"
    return {"names.so": ("-fno-openmp", "-Wl,--as-needed"), "calls.so": ("-fno-openmp", *torch_s)}


def _loaded(names: Path, calls: Path) -> Enter:
    try:
        # The names alone are for everybody: with the calls all of torch's would be.
        known = ctypes.CDLL(str(names), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(calls))
        for name in ("outrider_linear", "outrider_gated", "outrider_attention"):
            address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p)
            ctypes.c_void_p.in_dll(known, f"{name}_call").value = address.value
        enter = loaded.outrider_enter
    except (OSError, AttributeError, ValueError) as error:
        raise ModelError(
            f"the compiled calls in {str(calls.parent)!r} and {str(names.parent)!r} cannot be used "
            f"({first_line(error)}); remove these folders and compile again"
        ) from error
    enter.argtypes, enter.restype = [ctypes.c_void_p], ctypes.c_void_p
    return enter
