"""Gated blocks as one call: the numbers, bits that no other row changes, and which blocks are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from outrider.errors import OutOfMemory
from outrider.models import compiled as compiling
from outrider.models import gates
from outrider.models.hf import HuggingFaceTarget
from outrider.models.packing import PackedLinear
from outrider.models.product import ACTIVATIONS, GELU_TANH, SILU, Panels, Product, product
from tests.models.families import FAMILIES, Family, one_thread, with_weights
from tests.models.variants import refuse, variant

pytestmark = pytest.mark.compiled
INNER = 512
SIZES = {"hidden_size": 128, "intermediate_size": INNER, "head_dim": 32}
# A block is one call where each thread has panels enough.
single = pytest.fixture(scope="module", autouse=True)(one_thread)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own() -> Product:
    made = product(build=True)
    if made is None or not made.has_panels:
        pytest.skip("this processor does not multiply bfloat16 numbers, or does it by tiles")
    return made


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Block:
    """A gated block of random weights, laid out for a product, and as it should be."""

    def __init__(
        self,
        own: Product,
        width: int,
        inner: int,
        count: int,
        *,
        bias: bool = False,
        cancels: bool = False,
    ) -> None:
        draw = torch.Generator().manual_seed(width)
        shapes = (2 * inner, width), (2 * inner,), (count, inner), (count,)
        gates, gates_bias, down, down_bias = (
            torch.randn(*shape, generator=draw).bfloat16() for shape in shapes
        )
        if cancels:
            # Its second half takes back what the first gives: what comes out is what sums lose on
            # their way, in one order this and in another that.
            for part in (*gates.chunk(2), *gates_bias.chunk(2)):
                part[inner // 2 :] = part[: inner // 2]
            down[:, inner // 2 :] = -down[:, : inner // 2]
        self.weights = gates, gates_bias if bias else None, down, down_bias if bias else None
        self.inner = inner
        self.gates = Panels(own.laid_out(gates), self.weights[1], 2 * inner)
        self.down = Panels(own.laid_out(down), self.weights[3], count)
        self.inputs = torch.randn(200, width, generator=draw).bfloat16() / width**0.5

    def wanted(self, act: int) -> tuple[Tensor, Tensor]:
        """What comes out, and how far off what is rounded in the middle and in the end may be."""
        gates, gates_bias, down, down_bias = (
            None if one is None else one.double() for one in self.weights
        )
        assert gates is not None and down is not None
        both = nn.functional.linear(self.inputs.double(), gates, gates_bias)
        between = ACTIVATIONS[act](both[:, : self.inner]) * both[:, self.inner :]
        due = nn.functional.linear(between, down, down_bias)
        # To 8 bits each time.
        return due, (nn.functional.linear(between.abs(), down.abs()) + due.abs()) / 256


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("act", [SILU, GELU_TANH])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width", "inner", "count"),
    [(1, 32, 1), (37, 64, 61), (600, 32, 61), (300, 1120, 200), (130, 9024, 33)],
)
def test_a_block_is_its_parts(
    own: Product, width: int, inner: int, count: int, bias: bool, act: int
) -> None:
    """Any number of rows, panels that threads share unevenly, and fewer panels than threads."""
    block = Block(own, width, inner, count, bias=bias)
    wanted, bound = block.wanted(act)
    for rows in (0, 1, 2, 4, 5, 8, 13, 14, 15, 29, 96, 97, 200):
        found = own.gated(block.inputs[:rows], block.gates, block.down, act)
        assert found.shape == (rows, count) and found.dtype == torch.bfloat16
        assert ((found - wanted[:rows]).abs() <= bound[:rows]).all()


def test_far_gates(own: Product) -> None:
    """Gates for which e to their power overflows, is next to nothing, or is no number."""
    inner, far = 32, torch.tensor([-1e30, -3e4, -200, -90, -1, 0, 1, 90, 200, 1e30])
    width = len(far)
    gates = torch.zeros(2 * inner, width).bfloat16()
    gates[:width].fill_diagonal_(1)
    bias = torch.cat((torch.zeros(inner), torch.ones(inner))).bfloat16()
    down = torch.eye(inner).bfloat16()
    blocks = Panels(own.laid_out(gates), bias, 2 * inner), Panels(own.laid_out(down), None, inner)
    for act, body in enumerate(ACTIVATIONS):
        if act == GELU_TANH:
            far = far.clamp(-1e4, 1e4)  # cubes of larger ones are not finite
        found = own.gated(torch.diag(far).bfloat16(), *blocks, act)
        wanted = body(far.bfloat16().double())
        assert torch.allclose(found.diag().double(), wanted, rtol=1e-2, atol=1e-6), act
    nothing = own.gated(torch.full((1, width), float("nan")).bfloat16(), *blocks, SILU)
    assert nothing.isnan().all()


def kept(own: Product, block: Block) -> bool:
    """Whether rows have the same bits among any number of others."""
    by = [own.gated(row[None], block.gates, block.down, SILU) for row in block.inputs]
    alone = torch.cat(by)
    return all(
        torch.equal(own.gated(block.inputs[:rows], block.gates, block.down, SILU), alone[:rows])
        for rows in (2, 4, 5, 8, 14, 15, 28, 29, 96, 97, 200)
    )


@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_among_any_number(own: Product) -> None:
    assert kept(own, Block(own, 300, 1056, 200, bias=True))
    assert kept(own, Block(own, 300, 1056, 200, cancels=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [3], indirect=True)
def test_parts_that_are_added_from_the_end_are_seen(own: Product, tmp_path: Path) -> None:
    """The negative control: right numbers, in another order where there are several rows."""
    right, wrong = "sums_of(t) + begin", "sums_of(some > 1 ? threads - t : t) + begin"
    block = Block(own, 300, 1056, 200, cancels=True)
    assert not kept(Product(variant(tmp_path, (right, wrong))), block)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "change",
    [
        ("return gate * sigmoid(x) * up;", "return gate * sigmoid(gate) * up;"),
        ("vectors::load(gates_bias + inner + p", "vectors::load(gates_bias + p"),
        ("down_bias ? down_bias + q * PANEL : nullptr", "nullptr"),
        ("for (long at = 0; at < rows; at += MANY_ROWS) {",
         "for (long at = 0; at < rows; at += rows) {"),
    ],
)  # fmt: skip
def test_blocks_that_compute_something_else_are_refused(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    """Another act, another's bias or none, and rows beyond the first round left out."""
    refuse(tmp_path, change)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [3], indirect=True)
def test_no_more_threads_than_panels(own: Product, tmp_path: Path) -> None:
    """The negative control: a thread without a panel leaves its sums as they lie in memory."""
    block, other = (Block(own, 600, num * own.panel, 61) for num in (1, 3))
    wanted, bound = block.wanted(SILU)
    clamp = "if (threads > own.panels()) threads = own.panels();"
    # With vectors of eight numbers the sums of no numbers are written, as zeros.
    harmless = own.panel == 16
    for by, right in ((own, True), (Product(variant(tmp_path, (clamp, ""))), harmless)):
        # What lies there are another block's, of rows that are no numbers.
        noise = torch.full((200, 600), float("nan")).bfloat16()
        by.gated(noise, other.gates, other.down, SILU)
        found = by.gated(block.inputs, block.gates, block.down, SILU)
        assert bool(((found - wanted).abs() <= bound).all()) is right


def test_memory_that_is_out_between_is_told(own: Product, tmp_path: Path) -> None:
    made = "if (num_kept < bytes + LINE) {"
    full = Product(variant(tmp_path, (made, f"if (bytes > 1650000) return nullptr; {made}")))
    block = Block(own, 37, 9024, 61)
    few = full.gated(block.inputs[:3], block.gates, block.down, SILU)
    assert torch.equal(few, own.gated(block.inputs[:3], block.gates, block.down, SILU))
    with pytest.raises(OutOfMemory, match="rows of 9024 numbers"):
        full.gated(block.inputs, block.gates, block.down, SILU)


Between = Callable[[Tensor], Sequence[Tensor]]


class Traced(nn.Module):
    """One block as a family may write it; its layers are called as packages call them.

    `between` gives what the second layer reads, and what is read beside.
    """

    def __init__(self, between: Between) -> None:
        super().__init__()
        self._between = between

    def forward(self, given: Tensor) -> Tensor:
        x = given + 1
        both = torch.ops.outrider.own_linear(x, 0, 2 * INNER)
        x.mul_(2)
        between, *others = self._between(both)
        out = torch.ops.outrider.own_linear(between, 1, 16) + x
        return out + sum(other.sum(-1, keepdim=True) for other in others)


silu, gelu = nn.functional.silu, nn.functional.gelu


def halves(of: Callable[[Tensor, Tensor], Tensor]) -> Between:
    return lambda both: (of(*both.chunk(2, -1)),)


def fused(both: Tensor) -> tuple[Tensor]:
    gate, up = both.split([INNER, INNER], -1)
    return (silu(gate) * up,)


def unequal(both: Tensor) -> tuple[Tensor]:
    gate, up, _ = both.split([INNER - 16, INNER - 16, 32], -1)
    return (silu(gate) * up,)


def read_beside(which: int) -> Between:
    """A part that somebody else reads too."""

    def between(both: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = both.chunk(2, -1)
        acted = silu(gate)
        product = acted * up
        return product, (both, gate, up, acted, product)[which]

    return between


def graph_of(between: Between) -> fx.Graph:
    rows = torch.zeros(1, 5, 16, dtype=torch.bfloat16)
    shapes = ({1: torch.export.Dim("rows", min=1, max=64)},)
    return torch.export.export(Traced(between), (rows,), dynamic_shapes=shapes).graph


def layers(own: Product | None) -> list[PackedLinear]:
    made = [
        PackedLinear(torch.randn(*size).bfloat16(), None) for size in ((2 * INNER, 16), (16, INNER))
    ]
    for layer in made:
        layer.lay_out(own)
    return made


def count(graph: fx.Graph, name: str) -> int:
    op = getattr(torch.ops.outrider, name).default
    return sum(node.target is op for node in graph.nodes)


@pytest.mark.parametrize(
    ("between", "act"),
    [
        (fused, SILU),
        (halves(lambda g, u: u * silu(g)), SILU),
        (halves(lambda g, u: gelu(g, approximate="tanh") * u), GELU_TANH),
        (halves(lambda g, u: gelu(g) * u), None),
        (halves(lambda g, u: silu(u) * g), None),
        (halves(lambda g, u: silu(g) * g * u), None),
        (halves(lambda g, u: silu(g) + u), None),
        (halves(lambda g, u: silu(g) * torch.relu(u)), None),
        (halves(lambda g, u: silu(g) * 2), None),
        (halves(lambda g, u: silu(g) * u + g), None),
        (lambda both: fused(torch.relu(both)), None),
        (unequal, None),
        *((read_beside(which), None) for which in range(5)),
    ],
)  # fmt: skip
def test_blocks_are_found_and_nothing_else(own: Product, between: Between, act: int | None) -> None:
    graph = graph_of(between)
    gates.join_gates(graph, layers(own))
    found = [n for n in graph.nodes if n.target is torch.ops.outrider.own_gated.default]
    assert len(found) == (act is not None)
    if act is not None:
        assert found[0].args[1:] == (0, 1, act, 16) and count(graph, "own_linear") == 0
        graph.lint()
        # It reads its input where the gates did: behind them that is another.
        order = [str(node.target) for node in graph.nodes]
        assert order.index("outrider.own_gated.default") < order.index("aten.mul_.Tensor")
    else:
        assert count(graph, "own_linear") == 2


def test_layers_that_no_product_does_and_few_panels_stay_what_they_are(
    own: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = graph_of(fused)
    gates.join_gates(plain, layers(None))
    assert count(plain, "own_gated") == 0
    for more, joined in ((1, 0), (0, 1)):
        threads = INNER // own.panel // gates.PANELS_EACH + more
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        gates.join_gates(plain, layers(own))
        assert count(plain, "own_gated") == joined


def test_a_block_that_comes_out_of_a_forward_keeps_its_name(own: Product) -> None:
    class Bare(Traced):
        """Nothing behind the block."""

        def forward(self, given: Tensor) -> Tensor:
            both = torch.ops.outrider.own_linear(given, 0, 2 * INNER)
            return torch.ops.outrider.own_linear(fused(both)[0], 1, 16)

    rows = torch.zeros(1, 5, 16, dtype=torch.bfloat16)
    graph = torch.export.export(Bare(fused), (rows,)).graph
    gates.join_gates(graph, layers(own))
    assert count(graph, "own_gated") == 0 and count(graph, "own_linear") == 2


@pytest.mark.parametrize("act", [SILU, GELU_TANH])
def test_layers_that_are_laid_out_otherwise_are_computed_apart(own: Product, act: int) -> None:
    first, second = layers(own)
    inputs = torch.randn(1, 3, 16).bfloat16()
    whole = gates.gated(first, second, inputs, act)
    assert gates.gated(first, second, inputs.clone().requires_grad_(), act).requires_grad
    due = own.gated(inputs, first.panels, second.panels, act)
    assert torch.equal(whole, due), "the bits of the product"
    for other in ((None, None), (own, None), (None, own)):
        for layer, product_ in zip((first, second), other, strict=True):
            layer.lay_out(product_)
        assert gates.product_of(first, second) is None
        apart = gates.gated(first, second, inputs, act)
        gate, up = first(inputs).chunk(2, -1)
        assert torch.equal(apart, second(ACTIVATIONS[act](gate) * up))
        assert (apart - whole).abs().max() < 0.02 * whole.abs().max()


def test_layers_of_other_sizes_are_no_block(own: Product) -> None:
    def of(outputs: int, inner: int) -> bool:
        made = [
            PackedLinear(torch.randn(*s).bfloat16(), None) for s in ((outputs, 16), (16, inner))
        ]
        for layer in made:
            layer.lay_out(own)
        return gates.product_of(*made) is own

    odd = INNER + own.panel // 2
    assert of(2 * INNER, INNER) and not of(3 * INNER, INNER) and not of(2 * odd, odd)


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "glm"))],
)
def test_families_have_their_blocks_joined(
    own: Product, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what their forward does, in bfloat16; a compiled forward is held to the model's own."""
    graphs: list[fx.Graph] = []
    join = gates.join_gates

    def joined(graph: fx.Graph, linears: list[PackedLinear]) -> None:
        join(graph, linears)
        graphs.append(graph)

    monkeypatch.setattr(compiling, "join_gates", joined)
    known = FAMILIES[family]
    model = with_weights(Family(known.model_type, {**known.options, **SIZES}).config(), "eager", 0)
    target = HuggingFaceTarget(model.to(torch.bfloat16))
    assert target.compile() and target.info()["own_products"]
    assert count(graphs[0], "own_gated") == model.config.num_hidden_layers
