"""Linear layers arranged so that a few rows cost little more than one row on a processor.

`FewRowsLinear` keeps the plain weight and picks, by the number of rows, the product that streams it
best. `PackedLinear` lays a weight out once, for oneDNN or for Outrider's own product; that replaces
the plain weight, so memory is not doubled (only a matrix shared with the embedding is kept twice).
oneDNN's layout uses two private operators of torch (`mkldnn._reorder_linear_weight`,
`mkldnn._linear_pointwise`) behind a probe.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from outrider.models.product import Direct, Panels, Product

MIN_PACKED = {torch.float32: 1 << 22, torch.bfloat16: 1 << 14}
"""Weights from which packing pays. One row of a packed float32 matrix takes from a third (Zen 5) to
1.1 (Cascade Lake) of the plain one's time, five rows half or less; in small ones a
packed call's own 40 microseconds weigh more on the latter. In bfloat16 a packed matrix is the
faster one from 128 x 128 on (Zen 4)."""

ROWS_HINT = 8
"""Rows the packed layout is chosen for; measured best or equal from 1 to 16 rows."""

PLAIN_ROWS, BLOCK_ROWS, TURNED_ROWS = 3, 12, 48
"""Up to so many rows the plain, the blocked and the turned product are the fastest in float32."""

BLOCK_WEIGHTS = 1 << 16
"""Weights of one block of the blocked product: 256 kB of float32, within a core's second cache."""

FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling layers by name that read the same input in one product."""


class OwnLinear(nn.Module):
    """A linear layer of Outrider's: a compiled forward calls it as it is."""

    in_features: int
    out_features: int
    bias: Tensor | None

    def direct(self) -> Direct | None:
        """How machine code computes it by itself, as it stands; None: Python does."""
        return None

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` prints them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class FewRowsLinear(OwnLinear):
    """A linear layer `[..., in_features] -> [..., out_features]` in float32 over a plain weight.

    torch's product of 4 to 48 rows reads the weight several times over; two other forms of the same
    product do not: blocks of outputs as a batch, and the transposed product. `product`, where it is
    given, does as many rows as it `takes`.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.product: Product | None = None
        self._block = _block(self.out_features, self.in_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`."""
        product, rows = self.product, inputs.numel() // self.in_features
        if product is not None and product.takes(inputs, self.weight, self.bias):
            return product(inputs, self.weight, self.bias)
        if rows <= PLAIN_ROWS or rows > TURNED_ROWS or not rows:
            return nn.functional.linear(inputs, self.weight, self.bias)
        flat = inputs.reshape(rows, self.in_features)
        if rows > BLOCK_ROWS or self._block is None:
            out = torch.mm(self.weight, flat.t()).t()
        else:
            blocks = self.weight.view(-1, self._block, self.in_features).transpose(1, 2)
            out = torch.bmm(flat.expand(blocks.shape[0], -1, -1), blocks).transpose(0, 1)
        out = out.reshape(*inputs.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)

    def direct(self) -> Direct | None:
        """By its product, where it has one that takes its weight."""
        return None if self.product is None else self.product.direct(self.weight, self.bias)


def _block(out_features: int, in_features: int) -> int | None:
    """Return the outputs of one block, None where they do not divide."""
    for block in (64, 48, 32, 16, 8):
        if out_features % block == 0 and block * in_features <= BLOCK_WEIGHTS:
            return block
    return 8 if out_features % 8 == 0 else None


class PackedLinear(OwnLinear):
    """A linear layer `[..., in_features] -> [..., out_features]` over a packed weight.

    `weight` unpacks a copy on each access, bit for bit the original; `state_dict` holds that copy,
    so a packed model saves as it was loaded. `was_unpacked` says whether it was ever asked for. The
    weight is packed for oneDNN, if that can, or, where `product` is given by `lay_out`, for that.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.dtype = weight.dtype
        self.product: Product | None = None
        self._packed = self._laid_out(weight.detach(), None)
        self.was_unpacked = False

    def lay_out(self, product: Product | None) -> None:
        """Pack a bfloat16 weight for `product`, if that has panels; None = for oneDNN again."""
        bias = self.bias
        if product is not None and not product.lays_out(self.dtype, self.out_features, bias):
            product = None
        if product is not self.product:
            packed = self._laid_out(self._plain_weight(), product)
            self._packed, self.product = packed, product

    @torch.inference_mode()
    def _laid_out(self, weight: Tensor, product: Product | None) -> Tensor:
        if product is not None:
            return product.laid_out(weight)
        return _reordered(weight) if can_pack(weight.device, weight.dtype) else weight

    def _plain_weight(self) -> Tensor:
        if self.product is not None:
            return self.product.plain(self._packed, self.out_features, self.in_features)
        return self._packed.to_dense() if self._packed.is_mkldnn else self._packed

    @property
    def weight(self) -> Tensor:
        """The plain weight `[out_features, in_features]`, unpacked anew."""
        self.was_unpacked = True
        return self._plain_weight()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`."""
        if (product := self.product) is None:
            linear = _over_reordered if self._packed.is_mkldnn else nn.functional.linear
            return linear(inputs, self._packed, self.bias)
        if not product.takes_panels(inputs, self.in_features):
            return nn.functional.linear(inputs, self._plain_weight(), self.bias)
        return product.over_panels(inputs, self._packed, self.bias, self.out_features)

    @property
    def panels(self) -> Panels:
        """The weight as it was laid out for its product."""
        return Panels(self._packed, self.bias, self.out_features)

    def direct(self) -> Direct | None:
        """By the product that its weight is laid out for."""
        if self.product is None:
            return None
        size = self.out_features, self.in_features
        return self.product.direct_over(self._packed, self.bias, *size)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class JoinedLinear(OwnLinear):
    """A linear layer `[..., in_features] -> [..., out_features]` over a plain weight, anywhere."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`."""
        return nn.functional.linear(inputs, self.weight, self.bias)


class _Fusion:
    """One product for sibling layers: the first sibling computes it, the others take their columns.

    Right whatever the order of calls: columns are taken only for the very same input object.
    """

    def __init__(
        self, linear: "PackedLinear | FewRowsLinear | JoinedLinear", sizes: list[int]
    ) -> None:
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
    """One of several layers that share an input: a slice of one product."""

    def __init__(self, fusion: _Fusion, which: int, first: int, last: int) -> None:
        super().__init__()
        self._fusion, self._which, self._rows = fusion, which, slice(first, last)
        self.in_features, self.out_features = fusion.linear.in_features, last - first

    @property
    def weight(self) -> Tensor:
        """The layer's own weight `[out_features, in_features]`."""
        return self._fusion.linear.weight[self._rows]

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias."""
        bias = self._fusion.linear.bias
        return None if bias is None else bias[self._rows]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T + bias`; a strided view of the shared product."""
        return self._fusion.part(inputs, self._which)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The shared layer is nobody's child, so that it has no name in a state_dict.
        if self._which == 0 and not isinstance(self._fusion.linear, PackedLinear):
            self._fusion.linear._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.weight.clone()
        if (bias := self.bias) is not None:
            destination[prefix + "bias"] = bias


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What was replaced: layers whose weight is packed or to be laid out, and plain ones."""

    num_packed: int
    num_plain: int


@cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's private packing operators exist here and compute as `linear`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        noise = torch.Generator().manual_seed(0)
        weight = torch.randn(48, 32, generator=noise).to(dtype)
        inputs = torch.randn(1, 3, 32, generator=noise).to(dtype)
        with torch.inference_mode():
            packed = _reordered(weight)
            found, wanted = _over_reordered(inputs, packed), nn.functional.linear(inputs, weight)
            close = torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
            return close and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _reordered(weight: Tensor) -> Tensor:
    """A weight in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


def _over_reordered(inputs: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")


def arrange_linears(
    model: nn.Module, pack_all: bool = False, fuse: bool = True, pack: bool = True
) -> Arrangement:
    """Replace the model's plain linear layers on the processor by faster ones, in place.

    Large ones are packed (`pack_all`: every one; `pack=False`: none), float32 ones of any other
    size become `FewRowsLinear`. Large bfloat16 ones that oneDNN cannot pack here wait for a product
    of Outrider's own, but where bits depend on it (`pack_all`). Siblings of `FUSED_GROUPS` become
    one product; `fuse=False` leaves them apart.
    """
    _note_arrangement(model)
    num_packed = num_plain = 0
    for parent, names in list(_groups(model, fuse, "cpu")):
        layers: list[nn.Linear] = [getattr(parent, name) for name in names]
        dtype = layers[0].weight.dtype
        size = sum(layer.weight.numel() for layer in layers)
        packed = pack_all or (pack and size >= MIN_PACKED[dtype])
        waits = dtype == torch.bfloat16 and not pack_all
        if packed and (waits or can_pack(layers[0].weight.device, dtype)):
            num_packed += len(layers)
        elif dtype == torch.float32 and not pack_all:
            packed, num_plain = False, num_plain + len(layers)
        else:
            continue
        for name, layer in zip(names, _arranged(layers, packed), strict=True):
            setattr(parent, name, layer)
    return Arrangement(num_packed, num_plain)


def join_linears(model: nn.Module) -> None:
    """Make siblings of `FUSED_GROUPS` one product each, in place: what a GPU gains by.

    One product over all their weights streams them faster than one after another; of few outputs
    it takes a GPU as long to begin as to end.
    """
    _note_arrangement(model)
    for parent, names in list(_groups(model, True, next(model.parameters()).device.type)):
        if len(names) > 1:
            layers: list[nn.Linear] = [getattr(parent, name) for name in names]
            for name, layer in zip(names, _fused(layers, JoinedLinear), strict=True):
                setattr(parent, name, layer)


def joined_linears(model: nn.Module) -> list[JoinedLinear]:
    """The products that siblings were made one, each once, in the order of the model's modules."""
    found = {
        id(module._fusion.linear): module._fusion.linear
        for module in model.modules()
        if isinstance(module, FusedLinear)
    }
    return [layer for layer in found.values() if isinstance(layer, JoinedLinear)]


def use_product(model: nn.Module, product: Product | None) -> None:
    """Let layers compute by `product`; None = by torch and oneDNN again.

    Those of a plain float32 weight do few rows by it, those of a packed bfloat16 one all rows. A
    packed float32 weight, which is laid out for more rows, stays as it is.
    """
    _note_arrangement(model)
    for layer in _arranged_layers(model):
        if isinstance(layer, FewRowsLinear):
            layer.product = product
        else:
            layer.lay_out(product)


def uses_product(model: nn.Module) -> bool:
    """Whether any layer computes by a product of Outrider's own."""
    return any(layer.product is not None for layer in _arranged_layers(model))


def _arranged_layers(model: nn.Module) -> Iterator[FewRowsLinear | PackedLinear]:
    """The layers that were put in place, a fused one once for each of its parts."""
    for module in model.modules():
        layer = module._fusion.linear if isinstance(module, FusedLinear) else module
        if isinstance(layer, (FewRowsLinear, PackedLinear)):
            yield layer


def arrangement_of(model: nn.Module) -> int:
    """A number that changes when the model's linear layers are replaced or laid out anew."""
    return vars(model).get("_outrider_arrangement", 0)


def _note_arrangement(model: nn.Module) -> None:
    vars(model)["_outrider_arrangement"] = arrangement_of(model) + 1


def restore_linears(model: nn.Module) -> None:
    """Put plain linear layers of the same weights where `arrange_linears` replaced them."""
    _note_arrangement(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (FewRowsLinear, PackedLinear, FusedLinear)):
                setattr(parent, name, _plain(child))


def restore_unpacked(model: nn.Module) -> None:
    """Put plain layers where a packed one's weight was asked for: a forward would do so again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear) and child.was_unpacked:
                setattr(parent, name, _plain(child))


def _plain(layer: "FewRowsLinear | PackedLinear | FusedLinear") -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight = _parameter(layer.weight)
    if layer.bias is not None:
        plain.bias = _parameter(layer.bias)
    return plain


def _parameter(values: Tensor) -> nn.Parameter:
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values.clone())


def _arranged(layers: list[nn.Linear], packed: bool) -> Sequence[nn.Module]:
    kind = PackedLinear if packed else FewRowsLinear
    if len(layers) == 1:
        return [kind(cast(nn.Parameter, layers[0].weight), layers[0].bias)]
    return _fused(layers, kind)


def _fused(
    layers: list[nn.Linear], kind: type[PackedLinear | FewRowsLinear | JoinedLinear]
) -> Sequence[nn.Module]:
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weights = torch.cat([layer.weight.detach() for layer in layers])
    weight = nn.Parameter(weights, requires_grad=False)
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    fusion = _Fusion(kind(weight, bias), [layer.out_features for layer in layers])
    parts: list[nn.Module] = []
    first = 0
    for which, layer in enumerate(layers):
        parts.append(FusedLinear(fusion, which, first, first + layer.out_features))
        first += layer.out_features
    return parts


def _groups(
    model: nn.Module, fuse: bool, device: str
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    for parent in model.modules():
        children = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear) and _is_plain(child, device)
        }
        for group in FUSED_GROUPS if fuse else ():
            layers = [children[name] for name in group if name in children]
            if len(layers) == len(group) and _fit(layers):
                yield parent, group
                for name in group:
                    del children[name]
        for name in children:
            yield parent, (name,)


def _fit(layers: list[nn.Linear]) -> bool:
    alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(alike) == 1


def _is_plain(module: nn.Linear, device: str) -> bool:
    # Exactly nn.Linear: a subclass may compute something else, and a hook must keep firing, be it
    # torch's own or a forward put into the instance, as device maps do.
    return (
        type(module) is nn.Linear
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
        and module.weight.device.type == device
        and module.weight.dtype in (torch.float32, torch.bfloat16)
    )
