"""The compiled products of few rows: their numbers, their bits, and where they are kept."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider import LLM, SamplingParams
from outrider.errors import ModelError, OutOfMemory
from outrider.models import packing
from outrider.models import product as module
from outrider.models.attention_own import OwnAttention
from outrider.models.base import Rows
from outrider.models.head import TargetHead
from outrider.models.hf import HuggingFaceTarget
from outrider.models.packing import (
    FewRowsLinear,
    FusedLinear,
    PackedLinear,
    arrange_linears,
    can_pack,
    use_product,
)
from outrider.models.product import LIBRARY, MOST_ROWS, Product, product
from tests.models.families import random_model, random_tokens
from tests.models.variants import refuse, variant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("product")


@pytest.fixture(autouse=True)
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(folder))


@pytest.fixture
def compiled() -> Product:
    made = product(build=True)
    assert made is not None
    return made


@pytest.fixture
def panelled(compiled: Product) -> Product:
    if not compiled.has_panels:
        pytest.skip("this processor does not multiply bfloat16 numbers, or does it by tiles")
    return compiled


def test_it_is_compiled_once_and_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert product(build=False) is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(folder))
    assert product(build=True) is not None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert product(build=False) is product(build=True)
    assert [path.name for path in (folder / "compiled").iterdir()] == [module._key()]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (15, 50), (64, 23), (700, 97), (1024, 200), (2101, 61)]
)
def test_it_is_the_product(compiled: Product, width: int, count: int, threads: int):
    draw, before = torch.Generator().manual_seed(width), torch.get_num_threads()
    weight = torch.randn(count, width, generator=draw)
    bias = torch.randn(count, generator=draw)
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 10), 12, 24, 40):
            inputs = torch.randn(1, rows, width, generator=draw)
            for own in (None, bias):
                wanted = nn.functional.linear(
                    inputs.double(), weight.double(), None if own is None else own.double()
                )
                found = compiled(inputs, weight, own)
                assert found.shape == wanted.shape
                assert (found - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [777, 1100, 2100])
def test_a_row_has_the_same_bits_among_others(compiled: Product, width: int):
    """And torch's products have not, which is why plain and speculative rows differ at all.

    With AVX2 passes of four and six rows that have more than 6,144 numbers go by other tiles: none
    of the first of these widths, of six rows of the second, both of the third.
    """
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(300, width, generator=draw), torch.randn(300, generator=draw)
    inputs = torch.randn(MOST_ROWS, width, generator=draw)
    alone = torch.cat([compiled(row[None], weight, bias) for row in inputs])
    for rows in range(1, MOST_ROWS + 1):
        assert torch.equal(compiled(inputs[:rows], weight, bias), alone[:rows])
    torch_alone = torch.cat([nn.functional.linear(row[None], weight, bias) for row in inputs])
    assert not torch.equal(nn.functional.linear(inputs, weight, bias), torch_alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("width", "count"), [(1, 1), (15, 50), (64, 23), (700, 97), (1024, 200), (2048, 33), (9001, 33)]
)
def test_panels_are_the_product(panelled: Product, width: int, count: int, threads: int):
    """Any number of rows: tiles of every size, more than are summed at once, deep weights."""
    draw, before = torch.Generator().manual_seed(width), torch.get_num_threads()
    weight, bias = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((count, width), (count,))
    )
    panels = panelled.laid_out(weight)
    assert torch.equal(panelled.plain(panels, count, width), weight)
    torch.set_num_threads(threads)
    try:
        for rows in (0, *range(1, 16), 24, 95, 97, 200):
            inputs = torch.randn(1, rows, width, generator=draw).bfloat16()
            for own in (None, bias):
                wanted = nn.functional.linear(
                    inputs.double(), weight.double(), None if own is None else own.double()
                )
                found = panelled.over_panels(inputs, panels, own, count)
                assert found.shape == wanted.shape and found.dtype == torch.bfloat16
                # A number is rounded once, at the end: to 8 bits.
                assert ((found - wanted).abs() <= wanted.abs() / 256 + 1e-4 * width**0.5).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [5000, 2048])
def test_a_row_over_panels_has_the_same_bits_among_any_number(
    panelled: Product, width: int, tmp_path: Path
):
    draw = torch.Generator().manual_seed(1)
    weight, inputs = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((300, width), (130, width))
    )
    panels = panelled.laid_out(weight)

    def kept(by: Product) -> bool:
        alone = torch.cat([by.over_panels(row[None], panels, None, 300) for row in inputs])
        return all(
            torch.equal(by.over_panels(inputs[:rows], panels, None, 300), alone[:rows])
            for rows in (*range(2, 20), 96, 97, 130)
        )

    assert kept(panelled)
    # The negative control: right numbers, but several rows are summed from the end, or the second
    # of a pair first where a pair is two sums.
    order = "for (; at + 2 <= depth; at += 2, next += step) {"
    turned = "if (ROWS > 1) for (long back = depth / 2 * 2; back > 0; at = depth / 2 * 2)"
    pair = "for (int which = 0; which < 2; which++) {"
    second = "for (int i = 0; i < 2; i++) { const int which = ROWS > 1 ? 1 - i : i;"
    changes = (order, f"{turned} add(back -= 2, 2); {order}"), (pair, second)
    wrong = variant(tmp_path, *changes)
    assert not kept(Product(wrong))


def test_memory_that_is_out_for_rows_is_told(panelled: Product, tmp_path: Path):
    if torch.cpu.get_capabilities()["avx512_bf16"] and "-DOUTRIDER_NO_PAIRS" not in module.FLAGS:
        pytest.skip("pairs of bfloat16 numbers are multiplied as they are here")
    made = "if (num_kept < bytes + LINE) {"
    own = Product(variant(tmp_path, (made, f"if (bytes > 2800000) return nullptr; {made}")))
    weight, inputs = torch.randn(33, 9000).bfloat16(), torch.randn(90, 9000).bfloat16()
    panels = own.laid_out(weight)
    assert torch.equal(
        own.over_panels(inputs[:70], panels, None, 33),
        panelled.over_panels(inputs[:70], panels, None, 33),
    )
    with pytest.raises(OutOfMemory, match="rows of 9000 numbers"):
        own.over_panels(inputs, panels, None, 33)


def test_a_packed_layer_changes_its_layout_and_back(panelled: Product):
    draw = torch.Generator().manual_seed(2)
    weight, bias = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((70, 33), (70,)))
    layer, inputs = PackedLinear(weight, bias), torch.randn(3, 33, generator=draw).bfloat16()
    before = layer(inputs)
    layer.lay_out(panelled)
    assert layer.product is panelled and torch.equal(layer.weight, weight)
    assert torch.equal(layer.state_dict()["weight"], weight)
    inside = layer(inputs)
    assert torch.equal(
        inside, panelled.over_panels(inputs, panelled.laid_out(weight), layer.bias, 70)
    )
    assert torch.allclose(inside, before, rtol=1e-2)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.product is panelled and torch.equal(other(inputs), inside)
    layer.lay_out(None)
    assert layer.product is None and torch.equal(layer(inputs), before)
    wide = PackedLinear(weight.float(), None)
    wide.lay_out(panelled)
    assert wide.product is None


def test_panels_take_nothing_but_what_they_can_read(panelled: Product):
    """Anything else goes the way of torch over the plain weight, errors included."""
    weight = torch.randn(70, 33).bfloat16()
    layer = PackedLinear(weight, None)
    layer.lay_out(panelled)
    gaps = torch.randn(5, 66).bfloat16()[:, ::2]
    assert torch.allclose(layer(gaps), nn.functional.linear(gaps, weight), rtol=1e-2, atol=1e-2)
    assert panelled.takes_panels(gaps, 33)
    assert not panelled.takes_panels(gaps, 32)
    assert not panelled.takes_panels(gaps.float(), 33)
    assert not panelled.takes_panels(gaps.to("meta"), 33)
    with FakeTensorMode() as fake:
        assert not panelled.takes_panels(fake.from_tensor(gaps), 33)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(gaps.float())
    with pytest.raises(RuntimeError, match="shapes"):
        layer(gaps[:, :30])
    assert layer(gaps.clone().requires_grad_()).requires_grad
    for bias in (torch.randn(70), torch.randn(140).bfloat16()[::2], torch.randn(1).bfloat16()):
        assert not panelled.lays_out(torch.bfloat16, 70, bias)
    assert panelled.lays_out(torch.bfloat16, 70, torch.randn(70).bfloat16())
    assert not panelled.lays_out(torch.float32, 70, None)


def test_a_processor_with_tiles_keeps_onednns_layout(
    panelled: Product, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "has_tiles", lambda: True)
    own = Product(panelled._library)
    assert not own.has_panels
    layer = PackedLinear(torch.randn(70, 33).bfloat16(), None)
    layer.lay_out(own)
    assert layer.product is None


def test_a_model_in_panels_takes_new_weights(panelled: Product, monkeypatch: pytest.MonkeyPatch):
    """Fused siblings too; and a model that no product is for says so."""
    monkeypatch.setattr(packing, "MIN_PACKED", {torch.bfloat16: 1, torch.float32: 1})
    made, fresh = (
        HuggingFaceTarget(random_model("llama", seed=seed).to(torch.bfloat16)) for seed in (0, 7)
    )
    state = {name: weight.clone() for name, weight in fresh.model.state_dict().items()}
    for target in (made, fresh):
        assert not target.compile(build=False) and target.info()["own_products"]
        linears = [part for part in target.model.modules() if isinstance(part, FusedLinear)]
        assert linears and all(part._fusion.linear.product is panelled for part in linears)
    tokens = random_tokens(9)

    def rows(target: HuggingFaceTarget) -> torch.Tensor:
        seq = target.open(16)
        found = target.score(Rows((seq,), (9,), tokens))
        target.close(seq)
        return found

    assert not torch.equal(rows(made), rows(fresh))
    made.update_weights(state)
    assert made.info()["own_products"] and torch.equal(rows(made), rows(fresh))
    wide = HuggingFaceTarget(random_model("llama"))
    assert not wide.compile(build=False) and not wide.info()["own_products"]


def test_heads_use_what_their_target_uses(panelled: Product):
    llm = LLM.load("bundled", "eagle:bundled", dtype=torch.bfloat16)
    assert llm.info()["own_products"]
    llm.generate("import ", SamplingParams(max_tokens=4, temperature=0))
    (head,) = (part for part in vars(llm.drafter).values() if isinstance(part, TargetHead))
    own = [part for part in head.modules() if isinstance(part, PackedLinear)]
    assert own and all(part.product is panelled for part in own)
    # One of its own: what a body knows of a plan is one cache's.
    target = llm.target
    assert isinstance(target, HuggingFaceTarget)
    bodies = target._body, llm.drafter.model._body
    assert all(isinstance(body, OwnAttention) for body in bodies) and bodies[0] is not bodies[1]


def test_inputs_with_gaps(compiled: Product):
    weight, wide = torch.randn(40, 32), torch.randn(5, 64)
    found = compiled(wide[:, ::2], weight, None)
    assert torch.allclose(found, wide[:, ::2] @ weight.t(), atol=1e-4)


def test_it_takes_nothing_but_what_it_can_read(compiled: Product):
    """It gets addresses: any other tensor goes the way of torch, to the same end."""
    weight, bias = torch.randn(70, 33), torch.randn(70)
    inputs = torch.randn(2, 33)
    assert compiled.takes(inputs, weight, bias) and compiled.takes(inputs, weight, None)
    assert not compiled.takes(inputs.bfloat16(), weight, None)
    assert not compiled.takes(inputs, weight.double(), None)
    assert not compiled.takes(inputs, weight, bias.bfloat16())
    assert not compiled.takes(inputs, weight.t().contiguous().t(), None)
    assert not compiled.takes(inputs, weight, torch.randn(140)[::2])
    assert not compiled.takes(inputs.to("meta"), weight, None)
    assert not compiled.takes(torch.randn(MOST_ROWS + 1, 33), weight, None)
    assert not compiled.takes(torch.randn(0, 33), weight, None)
    assert not compiled.takes(torch.randn(1, 66), weight, None)
    assert not compiled.takes(torch.randn(2, 3), weight, None)
    assert not compiled.takes(inputs, weight, torch.randn(1))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert not compiled.takes(fake.from_tensor(inputs), weight, None)
    layer = FewRowsLinear(nn.Parameter(weight), nn.Parameter(bias))
    layer.product = compiled
    assert layer(inputs).requires_grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(layer(inputs), compiled(inputs, weight, bias))


def test_models_that_use_it_are_copied_and_saved(compiled: Product):
    layer = FewRowsLinear(nn.Parameter(torch.randn(9, 8)), None)
    layer.product = compiled
    assert copy.deepcopy(layer).product is compiled
    assert pickle.loads(pickle.dumps(layer)).product is compiled


class Block(nn.Module):
    """Siblings of one input, and a layer of its own."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, count, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, 9)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.gate_proj(inputs), self.up_proj(inputs), self.down_proj(inputs)
        return torch.cat(parts, -1)


@torch.inference_mode()
def test_layers_of_a_plain_weight_use_it(compiled: Product):
    """A packed one stays what it is."""
    width = 1 << 8
    block = Block(width, (1 << 22) // width // 2).eval()
    few, many = torch.randn(MOST_ROWS, width), torch.randn(MOST_ROWS + 1, width)
    wanted = [block(rows) for rows in (few, many)]
    arrange_linears(block)
    gate, down = block.gate_proj, block.down_proj
    packs = can_pack(torch.device("cpu"), torch.float32)
    assert isinstance(gate, FusedLinear) and isinstance(down, FewRowsLinear)
    assert isinstance(gate._fusion.linear, PackedLinear) == packs
    counted = Counted(compiled)
    use_product(block, counted)
    for rows, right in zip((few, many), wanted, strict=True):
        assert torch.allclose(block(rows), right, atol=1e-4)
    # Of the few rows alone: the siblings once, where they are not packed, and the other layer.
    assert counted.calls == 2 - packs
    use_product(block, None)
    assert torch.allclose(block(few), wanted[0], atol=1e-4)
    assert counted.calls == 2 - packs


class Counted(Product):
    """The product, and how often it was called."""

    def __init__(self, own: Product) -> None:
        self._run, self.has_panels, self.calls = own._run, False, 0

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self.calls += 1
        return super().__call__(inputs, weight, bias)


def test_what_cannot_be_compiled_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"no-such-compiler.*leave it out"):
        product(build=True)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ModelError, match=r"'false' cannot compile product\.cpp"):
        product(build=True)
    assert not list((tmp_path / "compiled").iterdir())


def test_the_compiler_is_not_told_what_is_for_the_linker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    noted, compiler = tmp_path / "told", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nexit 1\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"cannot compile product\.cpp"):
        product(build=True)
    told = [line.split() for line in noted.read_text().splitlines()]
    assert told and all("-c" in line and "-shared" not in line for line in told)


def test_no_compiler_is_left_at_work_where_another_failed(tmp_path: Path):
    note = tmp_path / "pid"
    fails = ["sh", "-c", f"until [ -s {note} ]; do sleep 0.01; done; exit 3"]
    goes_on = ["sh", "-c", f"echo $$ > {note}; exec sleep 600"]
    with pytest.raises(subprocess.CalledProcessError):
        module._run([fails, goes_on])
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_what_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    place = tmp_path / "compiled" / module._key()
    place.mkdir(parents=True)
    (place / LIBRARY).write_bytes(b"")
    (place / LIBRARY).chmod(0o666)
    with pytest.raises(ModelError, match="others may write to"):
        product(build=False)


def test_a_broken_library_is_told(tmp_path: Path):
    library = tmp_path / LIBRARY
    library.write_text("nothing")
    with pytest.raises(ModelError, match=r"cannot be used.*remove that folder"):
        Product(library)


def test_one_that_computes_something_else_is_refused(tmp_path: Path):
    """The negative control of the check at load: a sum that leaves the last numbers out."""
    refuse(
        tmp_path, ("rest = __builtin_fmaf(w[o * width + i], x[r * width + i], rest)", "rest = 0")
    )


@pytest.mark.usefixtures("panelled")
@pytest.mark.parametrize(
    "changes",
    [
        (("if (at < depth) add(at, 1)", "if (at < at) add(at, 1)"),
         ("at + 1 < width ?", "at + 2 < width ?")),
        (("vectors::load(sums + r * PANEL + o) + vectors::load(added + o)",
          "vectors::load(sums + r * PANEL + o)"),),
        (("for (long from = 0; from < rows; from += MANY_ROWS) {",
          "for (long from = 0; from < rows; from += rows) {"),),
    ],
)  # fmt: skip
def test_panels_that_compute_something_else_are_refused(
    tmp_path: Path, changes: tuple[tuple[str, str], ...]
):
    """The last of an odd number of inputs, the bias, and rows beyond the first round left out.

    The first takes a change for processors that multiply bfloat16 numbers, and one for others.
    """
    refuse(tmp_path, *changes)


@pytest.mark.parametrize(
    ("vendor", "told"),
    [
        ("GenuineIntel", True),
        ("AuthenticAMD", False),
        (None, False),
    ],
)
def test_pairs_of_numbers_are_multiplied_where_that_is_fast(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str | None,
    told: bool,
) -> None:
    info = tmp_path / "cpuinfo"
    if vendor is not None:
        info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(module, "CPUINFO", info)
    assert ("-DOUTRIDER_NO_PAIRS" in module.machine_flags()) is told


@pytest.mark.parametrize(
    ("vendor", "capability", "rows"),
    [
        ("AuthenticAMD", "AVX2", 48),
        ("AuthenticAMD", "AVX512", 24),
        ("GenuineIntel", "AVX2", 24),
        ("GenuineIntel", "AVX512", 24),
        ("SomebodyElse", "AVX2", 24),
    ],
)
def test_it_takes_as_many_rows_as_it_is_the_fastest_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str, rows: int
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(module, "CPUINFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert module.most_rows() == rows
