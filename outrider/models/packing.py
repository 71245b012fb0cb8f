"""Linear layers laid out once for oneDNN, so that a few rows cost what one row costs on a processor.

Uses two private operators of torch (`mkldnn._reorder_linear_weight`, `mkldnn._linear_pointwise`), behind a
probe: where they are missing or wrong, the plain layers stay. The packed weight replaces the plain one, so
memory is not doubled; only a matrix shared with the embedding is kept twice, plain for look-ups.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MIN_ELEMENTS = 1 << 17
"""Smaller matrices stay plain: packing saves less than the packed call's own 40 microseconds."""

ROWS_HINT = 8
"""Rows the layout is chosen for; measured best or equal from 1 to 16 rows."""

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling layers by name that read the same input in one product."""


class PackedLinear(nn.Module):
    """A linear layer `[..., in_features] -> [..., out_features]` over a packed weight; inference only.

    `weight` unpacks a copy on each access, bit for bit the original; `state_dict` holds that copy, so a
    packed model saves as it was loaded.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        with torch.inference_mode():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    @property
    def weight(self) -> Tensor:
        """The plain weight `[out_features, in_features]`, unpacked anew."""
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Fusion:
    """One product for sibling layers: the first sibling computes it, the others take their columns.

    Right whatever the order of calls: columns are taken only for the very same input object.
    """

    def __init__(self, linear: PackedLinear, sizes: list[int]) -> None:
        self.linear = linear
        self._sizes = sizes
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, inputs: Tensor, which: int) -> Tensor:
        if self._input is not inputs or self._parts[which] is None:
            self._input, self._parts = inputs, list(self.linear(inputs).split(self._sizes, -1))
        part = self._parts[which]
        self._parts[which] = None
        if not any(p is not None for p in self._parts):
            self._input = None
        assert part is not None
        return part


class FusedLinear(nn.Module):
    """One of several layers that share an input: a slice of one packed product."""

    def __init__(self, fusion: _Fusion, which: int, first: int, last: int) -> None:
        super().__init__()
        self._fusion, self._which, self._rows = fusion, which, slice(first, last)
        self.in_features, self.out_features = fusion.linear.in_features, last - first

    @property
    def weight(self) -> Tensor:
        """The layer's own weight `[out_features, in_features]`, unpacked anew."""
        return self._fusion.linear.weight[self._rows]

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias."""
        bias = self._fusion.linear.bias
        return None if bias is None else bias[self._rows]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`; a strided view of the shared product."""
        return self._fusion.part(inputs, self._which)

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.clone()
        if (bias := self.bias) is not None:
            destination[prefix + "bias"] = bias


@dataclass(frozen=True, slots=True)
class Packing:
    """What was packed: layers replaced, bytes of their weights."""

    num_layers: int
    weight_bytes: int


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's private packing operators exist here and compute what `linear` computes."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        noise = torch.Generator().manual_seed(0)
        weight = torch.randn(48, 32, generator=noise).to(dtype)
        inputs = torch.randn(1, 3, 32, generator=noise).to(dtype)
        with torch.inference_mode():
            layer = PackedLinear(weight, None)
            wanted = nn.functional.linear(inputs, weight)
            close = torch.allclose(layer(inputs).float(), wanted.float(), rtol=2e-2, atol=2e-2)
            return close and torch.equal(layer.weight, weight)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def pack_linears(model: nn.Module, min_elements: int = MIN_ELEMENTS, fuse: bool = True) -> Packing:
    """Replace the model's plain linear layers of at least `min_elements` weights by packed ones, in place.

    Siblings of `FUSED_GROUPS` become one product; `fuse=False` leaves them apart.
    """
    num_layers = weight_bytes = 0
    for parent, names in list(_groups(model, fuse)):
        layers = [getattr(parent, name) for name in names]
        size = sum(layer.weight.nbytes for layer in layers)
        if size // layers[0].weight.element_size() < min_elements:
            continue
        for name, packed in zip(names, _packed(layers), strict=True):
            setattr(parent, name, packed)
        num_layers, weight_bytes = num_layers + len(layers), weight_bytes + size
    return Packing(num_layers, weight_bytes)


def _packed(layers: list[nn.Linear]) -> list[nn.Module]:
    if len(layers) == 1:
        return [PackedLinear(layers[0].weight, layers[0].bias)]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    linear = PackedLinear(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(biases) if biases else None)
    sizes = [layer.out_features for layer in layers]
    fusion, parts, first = _Fusion(linear, sizes), [], 0
    for which, size in enumerate(sizes):
        parts.append(FusedLinear(fusion, which, first, first + size))
        first += size
    return parts


def _groups(model: nn.Module, fuse: bool) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    for parent in model.modules():
        children = {name: child for name, child in parent.named_children() if _is_plain(child)}
        for group in FUSED_GROUPS if fuse else ():
            layers = [children.get(name) for name in group]
            if all(layers) and _fit(layers):
                yield parent, group
                for name in group:
                    del children[name]
        for name in children:
            yield parent, (name,)


def _fit(layers: list[nn.Linear]) -> bool:
    alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(alike) == 1


def _is_plain(module: nn.Module) -> bool:
    # Exactly nn.Linear: a subclass may compute something else, and a hook must keep firing.
    return (
        type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
    )


