"""Outrider's own products under libllama: their numbers, bits, and the weights they take."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidConfig, ModelError
from outrider.models.base import Rows
from outrider.models.bundled import bundled_path
from outrider.models.libllama import LibllamaTarget, ModelFile
from outrider.models.libllama import products as module
from outrider.models.libllama.products import STORED, Products, products, why_not
from outrider.models.product import FLAGS
from outrider.models.text import TextTokenizer
from tests.models.families import ancestors_of, one_thread, random_tokens, relative_error
from tests.models.libllama_models import bundled_file, needs_libllama, quantised_file
from tests.models.variants import changed

pytestmark = [needs_libllama, pytest.mark.compiled]
single = pytest.fixture(scope="module", autouse=True)(one_thread)

KINDS = ("BF16", "F16", "Q8_0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(autouse=True)
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(folder))


@pytest.fixture
def own() -> Products:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made = products(build=True)
    assert made is not None
    return made


def needed(own: Products, kind: str) -> Any:
    if kind not in own.kinds:
        pytest.skip(f"this processor has no instructions for {kind}")
    return own.kinds[kind]


def file_of(kind: str) -> Path:
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16}
    return bundled_file("target", dtypes[kind]) if kind in dtypes else quantised_file(kind)


def logits(target: LibllamaTarget, tokens: torch.Tensor) -> torch.Tensor:
    seq = target.open(len(tokens))
    try:
        return target.score(Rows((seq,), (len(tokens),), tokens))
    finally:
        target.close(seq)


def test_it_is_compiled_once_and_found_again(
    own: Products, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert products(build=False) is products(build=True) is own
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert products(build=False) is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"'no-such-compiler' cannot compile device\.cpp"):
        products(build=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("width", "count"), [(32, 1), (96, 33), (2080, 70), (4128, 300)])
def test_it_is_the_product(own: Products, kind: str, width: int, count: int, threads: int):
    run = needed(own, kind)
    draw = torch.Generator().manual_seed(width)
    stored, weight = STORED[kind](torch.randn(count, width, generator=draw))
    inputs = torch.randn(97, width, generator=draw)
    wanted = STORED[kind](inputs)[1].double() @ weight.double().T
    for rows in (*range(1, 14), 17, 97):
        found = run(stored, inputs[:rows], count, threads)
        assert relative_error(found, wanted[:rows].float()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_its_bits_whatever_goes_along(own: Products, kind: str):
    run = needed(own, kind)
    draw = torch.Generator().manual_seed(1)
    stored, _ = STORED[kind](torch.randn(70, 2560, generator=draw))
    inputs = torch.randn(130, 2560, generator=draw)
    alone = torch.cat([run(stored, row, 70, 1) for row in inputs.split(1)])
    for rows in (*range(2, 15), 40, 130):
        assert torch.equal(run(stored, inputs[:rows], 70, 2), alone[:rows])
    assert torch.equal(run(stored, inputs.repeat(1, 2)[:, :2560], 70), alone), "rows with gaps"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_numbers_of_any_size_come_through(own: Products, kind: str):
    run = needed(own, kind)
    stored, _ = STORED[kind](torch.eye(64))
    inputs = torch.stack([torch.full((64,), size) for size in (0.0, 3e4, -1e-3)])
    found = run(stored, inputs, 64)
    torch.testing.assert_close(found, inputs, rtol=1e-2, atol=0.0)
    assert torch.equal(run(stored, inputs[:0], 64), inputs[:0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 17, 63])
def test_what_is_no_number_stays_none(own: Products, kind: str, wrong: float, at: int):
    run = needed(own, kind)
    stored, _ = STORED[kind](torch.randn(40, 64))
    inputs = torch.randn(3, 64)
    inputs[1, at] = wrong
    found = run(stored, inputs, 40)
    assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


class Graph:
    """A graph of ggml's over one weight that lies in the device's memory, split as libllama does.

    Args:
        kind: GGML_TYPE of the weight.
        stored: the weight `[count, width]`, as a file stores it.
    """

    TYPES: ClassVar = {"BF16": 30, "F16": 1, "Q8_0": 8}
    F32, I32, CPU, WEIGHTS = 0, 26, 0, 1

    def __init__(self, own: Products, kind: str, stored: torch.Tensor, count: int, width: int):
        self._device = own._own.outrider_device
        self._type = own._own.outrider_buffer_type
        self._device.restype = self._type.restype = ctypes.c_void_p
        self.weights, self.context = self._room(), self._room()
        self.weight = self("new_tensor_2d", self.weights, self.TYPES[kind], count=(width, count))
        buffer = self("backend_alloc_ctx_tensors_from_buft", self.weights, self._type())
        self("backend_buffer_set_usage", buffer, self.WEIGHTS)
        self._stored, self._inputs, self._outs = stored.contiguous(), [], []
        self._set(self.weight, self._stored)

    def __call__(self, name: str, *arguments: Any, count: tuple[int, ...] = ()) -> Any:
        """One of ggml's functions; pointers and small numbers, then sizes in 64 bits."""
        function = getattr(module.ggml(), f"ggml_{name}")
        function.restype = ctypes.c_void_p
        wrapped = [ctypes.c_void_p(a) if isinstance(a, int) and a > 99 else a for a in arguments]
        return function(*wrapped, *map(ctypes.c_int64, count))

    def _room(self) -> Any:
        class Room(ctypes.Structure):
            _fields_ = (
                ("size", ctypes.c_size_t),
                ("buffer", ctypes.c_void_p),
                ("empty", ctypes.c_bool),
            )

        return self("init", Room(1 << 20, None, True))

    def _set(self, tensor: int, values: torch.Tensor) -> None:
        size = values.numel() * values.element_size()
        self("backend_tensor_set", tensor, values.data_ptr(), count=(0, size))

    def inputs(self, values: torch.Tensor) -> int:
        """Rows of float32, or numbers of rows, as a tensor of the graph."""
        sizes = tuple(reversed((*[1] * (3 - values.dim()), *values.shape)))
        kind = self.F32 if values.is_floating_point() else self.I32
        tensor = self("new_tensor_3d", self.context, kind, count=sizes)
        self("set_input", tensor)
        self._inputs.append((tensor, values.contiguous()))
        return tensor

    def computed(self, *outs: tuple[int, tuple[int, ...]]) -> list[torch.Tensor]:
        """What comes out, in the shapes given."""
        graph = self("new_graph", self.context)
        for tensor, _ in outs:
            self("set_output", tensor)
            self("build_forward_expand", graph, tensor)
        backends = (ctypes.c_void_p * 2)(
            self("backend_dev_init", self._device(), None),
            self("backend_init_by_type", self.CPU, None),
        )
        sched = self("backend_sched_new", backends, None, 2, ctypes.c_size_t(64), False, False)
        self("backend_sched_alloc_graph", sched, graph)
        for tensor, values in self._inputs:
            self._set(tensor, values)
        assert not self("backend_sched_graph_compute", sched, graph)
        self.ran_here = [
            self("backend_sched_get_tensor_backend", sched, tensor) == backends[0]
            for tensor, _ in outs
        ]
        found = [torch.empty(shape) for _, shape in outs]
        for (tensor, _), out in zip(outs, found, strict=True):
            self("backend_tensor_get", tensor, out.data_ptr(), count=(0, 4 * out.numel()))
        return found


@pytest.mark.parametrize("width", [64, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_ggml_multiplies_by_it_and_has_the_weight_back(own: Products, kind: str, width: int):
    """Rows in three dimensions, with gaps; rows of the weight, and a view of it, copied back."""
    needed(own, kind)
    if width % 32 and kind == "Q8_0":
        pytest.skip("blocks are of 32")
    draw = torch.Generator().manual_seed(7)
    stored, weight = STORED[kind](torch.randn(70, width, generator=draw))
    rows = torch.randn(2, 3, width, generator=draw)
    graph = Graph(own, kind, stored, 70, width)
    x = graph.inputs(rows)
    whole = graph("mul_mat", graph.context, graph.weight, x)
    turned = graph("permute", graph.context, x, 0, 2, 1, 3)
    other_way = graph("mul_mat", graph.context, graph.weight, turned)
    ids = torch.tensor([69, 0, 33], dtype=torch.int32)
    some = graph("get_rows", graph.context, graph.weight, graph.inputs(ids))
    stride = stored.numel() * stored.element_size() // 70
    view = graph("view_2d", graph.context, graph.weight, count=(width, 20, stride, 10 * stride))
    part = graph("mul_mat", graph.context, view, x)
    found = graph.computed(
        (whole, (2, 3, 70)), (other_way, (3, 2, 70)), (some, (3, width)), (part, (2, 3, 20))
    )
    assert graph.ran_here == [True, True, False, False]
    want = STORED[kind](rows)[1] @ weight.T
    assert relative_error(found[0].flatten(0, 1), want.flatten(0, 1)) < 1e-5
    assert relative_error(found[1], want.transpose(0, 1)) < 1e-5
    assert torch.equal(found[2], weight[[69, 0, 33]])
    assert relative_error(found[3], want[..., 10:30]) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_libllama_alone(own: Products, kind: str):
    """Within what another order of sums does; a product of other numbers is far off."""
    needed(own, kind)
    plain, target = (LibllamaTarget(file_of(kind), products=made) for made in (None, own))
    assert not plain.info()["own_products"] and target.info()["own_products"]
    assert target.file.laid_out_bytes > 0.6 * file_of(kind).stat().st_size
    tokens = random_tokens(48, 3) * 40
    want = logits(plain, tokens)
    # Sums of libllama's own move quantised rows as much, as their inputs are rounded to 8 bits.
    assert relative_error(logits(target, tokens), want) < (2e-2 if kind == "Q8_0" else 1e-2)
    assert relative_error(logits(target, tokens.flip(0)), want) > 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_scored_and_committed(own: Products, kind: str):
    needed(own, kind)
    target = LibllamaTarget(file_of(kind), products=own)
    text, nodes, parents = random_tokens(20) * 40, random_tokens(4, 5) * 40, [-1, 0, 0, 2]
    seq = target.open(64)
    target.score(Rows((seq,), (20,), text))
    target.commit(seq, 20)
    tree = target.score(Rows((seq,), (4,), nodes, ancestors_of(parents)))
    target.commit(seq, [0, 2, 3])
    path = logits(target, torch.cat([text, nodes[[0, 2, 3]]]))
    assert relative_error(tree[[0, 2, 3]], path[20:]) < 2e-2
    assert target.length(seq) == 23


def test_other_kinds_are_left_to_libllama(own: Products):
    file = quantised_file("Q4_0")
    plain, target = LibllamaTarget(file), LibllamaTarget(file, products=own)
    mostly = target.file.laid_out_bytes / file.stat().st_size
    assert mostly < 0.5, "at most an output layer of another kind"
    with pytest.warns(UserWarning, match=r"has no weights that Outrider has products for"):
        LLM.load(bundled_file("target", torch.float32), "none", compile=True)
    tokens = random_tokens(16) * 40
    assert relative_error(logits(target, tokens), logits(plain, tokens)) < 2e-2


def test_a_file_for_which_there_is_no_room_stays_a_file(own: Products, monkeypatch, tmp_path):
    needed(own, "Q8_0")
    assert module.fits(file_of("Q8_0"))
    monkeypatch.setattr("outrider.llm.load.fits", lambda file: False)
    with pytest.warns(UserWarning, match="no room for a copy"):
        llm = LLM.load(file_of("Q8_0"), "none", compile=True)
    assert not llm.info()["own_products"]
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 43)
    assert not module.fits(tmp_path / "a-00001-of-00002.gguf")


def test_models_loaded_otherwise_are_left_alone(own: Products):
    needed(own, "Q8_0")
    file = ModelFile(file_of("Q8_0"))
    assert file.laid_out_bytes == 0 and file.products is None
    LibllamaTarget(file_of("Q8_0"), products=own)
    assert ModelFile(file_of("Q8_0")).laid_out_bytes == 0


def broken(tmp_path: Path, right: str, wrong: str) -> Path:
    """The device with a wrong line in it."""
    flags = [*FLAGS, *module.flags()]
    return changed(tmp_path / module.LIBRARY, module.SOURCES, flags, (right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("offs[b] = -128 *", "offs[b] = -127 *"),
        ("from->numbers[i] : 0) ^ 0x80", "from->numbers[i] : 0) ^ 0x81"),
        ("2 * o + i % 2);", "2 * o + 1 - i % 2);"),
        ("std::min(Kind::DEPTH, units - at)", "std::min(Kind::DEPTH, units - at - 1)"),
        ("(panel * width + i) * PANEL + o", "(panel * width + i) * PANEL + (o ^ 1)"),
        # Within tiles: an input of another row, factors of other outputs, a vector left out.
        ("numbers[r * width + i]);", "numbers[i]);"),
        ("(w + v * 2 * LANES)));\n#pragma", "(w)));\n#pragma"),
        ("numbers[r] + b * BLOCK + 4 * four", "numbers[0] + b * BLOCK + 4 * four"),
    ],
)
def test_broken_products_are_refused_when_loaded(
    own: Products, tmp_path: Path, right: str, wrong: str
):
    if len(own.kinds) < len(KINDS):
        pytest.skip("this processor has not all of them")
    with pytest.raises(ModelError, match="is off by"):
        Products(broken(tmp_path, right, wrong))


def test_another_ggml_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    if why_not() is not None:
        pytest.skip("there is none here anyway")
    file = bundled_file("target")
    monkeypatch.setattr(module, "GGML", ("9.9",))
    why_not.cache_clear()
    try:
        assert products(build=True) is None
        with pytest.raises(
            InvalidConfig, match=r"compile=True cannot be had.*written for ggml 9.9"
        ):
            LLM.load(file, "none", compile=True)
        assert LLM.load(file, "none").info()["own_products"] is False
    finally:
        why_not.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same_whoever_drafts(own: Products, kind: str):
    needed(own, kind)
    file, draft = file_of(kind), bundled_file("draft", torch.bfloat16)
    plain = LLM.load(file, "none", compile=True)
    drafting = [LLM.load(file, f"draft:{draft}", compile=True, k=k) for k in (1, 4)]
    assert all(llm.info()["own_products"] for llm in (plain, *drafting))
    prompts = ["def mean(values):\n", "class Stack:\n    "]
    for chance in ({"temperature": 0.0}, {"seed": 5}):
        params = SamplingParams(max_tokens=32, **chance)
        want = [done.token_ids for done in plain.generate(prompts, params)]
        for llm in drafting:
            found = llm.generate(prompts, params)
            assert [done.token_ids for done in found] == want
            assert sum(done.stats.accepted for done in found) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ask", [True, False])
def test_trees_part_at_near_ties_alone(own: Products, kind: str, ask: bool):
    """Behind a tree cells are in another order, which moves rows, libllama's own as well."""
    needed(own, kind)
    file, draft = file_of(kind), bundled_file("draft", torch.bfloat16)
    # Of the largest logit, twice what rows move by.
    bound = 0.04 if kind == "Q8_0" else 0.01
    plain = LLM.load(file, "none", compile=ask)
    trees = LLM.load(file, f"draft:{draft}", k=4, width=3, nodes=8, compile=ask)
    params, parted = SamplingParams(max_tokens=32, temperature=0.0), 0
    tokenizer = TextTokenizer(bundled_path("target"))
    for text in ("def mean(values):\n", "class Stack:\n    ", "import os\n"):
        prompt = tokenizer.encode(text)
        one, other = (llm.generate([prompt], params)[0].token_ids for llm in (plain, trees))
        pairs = zip(one, other, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            parted += 1
            row = logits(plain.target, torch.tensor([*prompt, *one[:at]]))[-1]
            assert abs(row[one[at]] - row[other[at]]) < bound * row.abs().max()
    assert parted < 3


def test_they_are_used_where_they_were_made_and_wanted(own: Products):
    needed(own, "Q8_0")
    file = file_of("Q8_0")
    used = {
        ask: LLM.load(file, "none", compile=ask).info()["own_products"] for ask in ("auto", False)
    }
    assert used == {"auto": True, False: False}
