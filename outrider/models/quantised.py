"""A model's own weights in eight bits: a second target over them, cheaper to read, to draft with.

Weights are quantised row by row, activations tensor by tensor as they come (W8A8), by torch's
quantised CPU operators: about one per cent of error in each product, so that it drafts and never
decides. Those operators are on their way out of torch and appear here alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModel
from outrider.models.hf import HuggingFaceTarget
from outrider.models.packing import FewRowsLinear, FusedLinear, OwnLinear, PackedLinear, _Fusion
from outrider.models.strict import AnyLinear, SlabLinear

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
"""Quantised engines of torch, the fastest first: x86 streams 2 to 3.6 times as many weights as
packed bfloat16 does."""

MIN_QUANTISED = 1 << 12
"""Weights below which a layer stays as it is: a call's own cost would be all of it."""


class Int8Linear(OwnLinear):
    """A linear layer `[..., in_features] -> [..., out_features]` over a weight in eight bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with torch.no_grad(), _engine():
            wide = weight.detach().float()
            scale = (wide.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            whole = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            rows = _rows(whole, scale)
            wide_bias = None if bias is None else bias.detach().float()
            self._packed = torch.ops.quantized.linear_prepack(rows, wide_bias)
        # Without these instructions sums of two products of eight bits may pass sixteen.
        self._reduce_range = not torch.cpu.get_capabilities().get("avx512_vnni", False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return about `inputs @ weight.T + bias`, in the inputs' dtype."""
        out = torch.ops.quantized.linear_dynamic(inputs.float(), self._packed, self._reduce_range)
        return out.to(inputs.dtype)

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` prints them."""
        return f"{self.in_features}, {self.out_features}"


@cache
def quantised_engine() -> str | None:
    """The engine of this machine's torch, tried out; None where there is none that works."""
    for name in ENGINES:
        if name not in torch.backends.quantized.supported_engines:
            continue
        try:
            with _using(name), torch.inference_mode():
                rows = _rows(torch.eye(16, dtype=torch.int8), torch.ones(16))
                packed = torch.ops.quantized.linear_prepack(rows, None)
                out = torch.ops.quantized.linear_dynamic(torch.eye(16), packed)
                if torch.allclose(out, torch.eye(16), atol=0.02):
                    return name
        except (AttributeError, RuntimeError, NotImplementedError):
            continue
    return None


def quantised(target: HuggingFaceTarget) -> HuggingFaceTarget:
    """A target over a copy of the model with its linear layers in eight bits.

    Everything else, the embedding and the norms, is the same memory. The given target stays as it
    is.

    Raises:
        UnsupportedModel: a device other than the CPU, a torch without quantised operators, a model
            whose weights are for the most part no linear layers.
    """
    name = target.model.config.model_type
    if target.device.type != "cpu":
        raise UnsupportedModel(
            f"drafter='int8' quantises for the CPU, and the {name} model is on {target.device}; "
            "load it with device='cpu', or choose another drafter"
        )
    if quantised_engine() is None:
        raise UnsupportedModel(
            "drafter='int8' needs one of torch's quantised engines "
            f"({', '.join(ENGINES)}), and this torch has none that works here; choose another "
            "drafter"
        )
    own = HuggingFaceTarget(_sharing_copy(target), pack=False)
    swapped = {id(new): size for new, size in _swap(own.model)}
    inner = sum(swapped.values()) - swapped.get(id(own.model.get_output_embeddings()), 0)
    embedding = cast(Tensor, own.model.get_input_embeddings().weight)
    tied = own.model.config.get_text_config().tie_word_embeddings
    if 2 * inner < target.num_parameters - embedding.numel() * (1 if tied else 2):
        raise UnsupportedModel(
            f"drafter='int8' cannot quantise the {name} model: its weights are not plain linear "
            f"layers of at least {MIN_QUANTISED} weights (mixtures of experts and convolutions are "
            "not); choose another drafter"
        )
    return own


def quantised_anew(old: HuggingFaceTarget, target: HuggingFaceTarget) -> HuggingFaceTarget:
    """What takes the place of `old` when the target it was made from has new weights."""
    own = quantised(target)
    own.limit_cache(old.cache_plan()["max_bytes"])
    return own


def _sharing_copy(target: HuggingFaceTarget) -> PreTrainedModel:
    """A copy of the model's modules over the same tensors and the same linear layers."""
    model = target.model
    shared = [*model.parameters(), *model.buffers()]
    linears = [child for child in model.modules() if isinstance(child, (AnyLinear, SlabLinear))]
    return copy.deepcopy(model, {id(one): one for one in (*shared, *linears)})


def _swap(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Puts layers in eight bits in place; yields each and its number of weights."""
    # Siblings of a fused product stay one product.
    fusions: dict[int, Any] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            layer = child.inner if isinstance(child, SlabLinear) else child
            if isinstance(layer, FusedLinear):
                old = layer._fusion
                if id(old) not in fusions:
                    linear: Any = Int8Linear(old.linear.weight, old.linear.bias)
                    fusions[id(old)] = _Fusion(linear, old._sizes)
                rows = layer._rows
                new: nn.Module = FusedLinear(fusions[id(old)], layer._which, rows.start, rows.stop)
            elif type(layer) is nn.Linear or isinstance(layer, (FewRowsLinear, PackedLinear)):
                if layer.in_features * layer.out_features < MIN_QUANTISED:
                    continue
                new = Int8Linear(layer.weight, layer.bias)
            else:
                continue
            setattr(parent, name, new)
            yield new, layer.in_features * layer.out_features


def _rows(whole: Tensor, scale: Tensor) -> Tensor:
    """A quantised tensor whose rows have a scale each."""
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
        make: Any = getattr(torch, "_make_per_channel_quantized_tensor")  # noqa: B009
        return make(whole, scale.double(), zeros, 0)


@contextmanager
def _engine() -> Iterator[None]:
    name = quantised_engine()
    assert name is not None
    with _using(name):
        yield


@contextmanager
def _using(engine: str) -> Iterator[None]:
    """Torch's engine is one for the process: a packed weight keeps the one it was made with."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
