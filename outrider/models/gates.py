"""Gated blocks of a traced forward, `down(act(gate(x)) * up(x))`, as one call each.

They are found in the graph itself, whatever a family calls its parts: an arranged layer that gives
gate and up side by side, one of `ACTIVATIONS`, a product of both, another arranged layer, and none
else reads what lies between. Where the layers lie in panels, Outrider's own product does the
whole block (`gated.cpp`). Where they no longer do, its parts are computed one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

from outrider.models.packing import OwnLinear, PackedLinear
from outrider.models.product import ACTIVATIONS, GELU_TANH, SILU, Product

PANELS_EACH = 8
"""Panels of inner numbers that each thread has at least of a block that is one call."""
_HALVES = {
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.chunk.default,
}


def product_of(gates: OwnLinear, down: OwnLinear) -> Product | None:
    """The product that does the block of two layers; None without."""
    if not (isinstance(gates, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    product, inner = gates.product, down.in_features
    fits = gates.out_features == 2 * inner and down.product is product
    return product if product is not None and fits and product.gates(inner) else None


def gated(gates: OwnLinear, down: OwnLinear, inputs: Tensor, act: int) -> Tensor:
    """`down(act(gate) * up)`, where `gates` gives gate and up side by side.

    `act` says which of `ACTIVATIONS` is the gate's.
    """
    product = product_of(gates, down)
    if product is not None and product.takes_panels(inputs, gates.in_features):
        first, second = cast(PackedLinear, gates), cast(PackedLinear, down)
        return product.gated(inputs, first.panels, second.panels, act)
    gate, up = gates(inputs).chunk(2, -1)
    return down(ACTIVATIONS[act](gate) * up)


def join_gates(graph: fx.Graph, linears: Sequence[OwnLinear]) -> None:
    """Makes one call of each gated block whose layers' product does it.

    Where threads would have few panels each it stays in parts: shares would be uneven, and their
    sums many beside the weights.
    """
    one, whole = torch.ops.outrider.own_linear.default, torch.ops.outrider.own_gated.default
    least, joined = PANELS_EACH * torch.get_num_threads(), False
    for node in list(graph.nodes):
        if node.target is not one:
            continue
        between, down, out_features = _args(node)
        found = _gates_of(between)
        if found is None or found[0].target is not one:
            continue
        first, act = found
        inputs, gates, _ = _args(first)
        product = product_of(linears[gates], linears[down])
        if product is None or linears[down].in_features < least * product.panel:
            continue
        if any(user.op == "output" for user in node.users):
            # Its name is in the program's signature.
            continue
        # Where its input is what the gates read.
        with graph.inserting_before(first):
            call = graph.call_function(whole, (inputs, gates, down, act, out_features))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        joined = True
    if joined:
        graph.eliminate_dead_code()


def _gates_of(between: fx.Node) -> tuple[fx.Node, int] | None:
    """The node whose halves are gate and up of what is between, and the act; None without."""
    if between.target is not torch.ops.aten.mul.Tensor or len(between.users) != 1:
        return None
    for acted, up in (_args(between), _args(between)[::-1]):
        act = _act_of(acted)
        if act is None or len(acted.users) != 1 or not isinstance(up, fx.Node):
            continue
        (source, first), other = _half_of(_args(acted)[0]), _half_of(up)
        if source is not None and first == 0 and other == (source, 1):
            return source, act
    return None


def _args(node: fx.Node) -> Any:
    return node.args


def _act_of(node: Any) -> int | None:
    """Which of `ACTIVATIONS` a node is."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is torch.ops.aten.silu.default:
        return SILU
    tanh = node.kwargs.get("approximate") == "tanh"
    return GELU_TANH if node.target is torch.ops.aten.gelu.default and tanh else None


def _half_of(node: fx.Node) -> tuple[fx.Node | None, int]:
    """Whose half a node is, which nobody else reads, and which one."""
    nobody = None, -1
    if node.target is not getitem or len(node.users) != 1:
        return nobody
    split, which = _args(node)
    if split.target not in _HALVES:
        return nobody
    source = _args(split)[0]
    if len(source.users) != 1:
        return nobody
    whole, half = source.meta["val"].shape, node.meta["val"].shape
    same = len(whole) == len(half) and whole[-1] == 2 * half[-1]
    return (source, which) if same else nobody
