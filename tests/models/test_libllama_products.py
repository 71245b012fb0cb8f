"""Outrider's own products under libllama: their numbers, their bits, and which weights they take."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import InvalidConfig, ModelError
from outrider.models.base import Rows
from outrider.models.libllama import LibllamaTarget, ModelFile
from outrider.models.libllama import products as module
from outrider.models.libllama.products import STORED, Products, products, why_not
from outrider.models.product import FLAGS
from tests.models.families import ancestors_of, one_thread, random_tokens, relative_error
from tests.models.libllama_models import bundled_file, needs_libllama, quantised_file

pytestmark = needs_libllama
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
    with pytest.raises(ModelError, match="'no-such-compiler' cannot compile device.cpp"):
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
    inputs = torch.stack([torch.zeros(64), torch.full((64,), 3e4), torch.full((64,), -1e-4)])
    assert relative_error(run(stored, inputs, 64), inputs) < 1e-2
    assert torch.equal(run(stored, inputs, 64)[0], torch.zeros(64))


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
    tokens = random_tokens(16) * 40
    assert relative_error(logits(target, tokens), logits(plain, tokens)) < 2e-2


def test_models_loaded_otherwise_are_left_alone(own: Products):
    file = ModelFile(file_of("Q8_0"))
    assert file.laid_out_bytes == 0 and file.products is None
    LibllamaTarget(file_of("Q8_0"), products=own)
    assert ModelFile(file_of("Q8_0")).laid_out_bytes == 0


def test_a_family_that_wants_its_weights_as_they_are_gets_them(
    own: Products, monkeypatch: pytest.MonkeyPatch
):
    needed(own, "Q8_0")
    monkeypatch.setattr(Products, "misused", lambda _: True)
    target = LibllamaTarget(file_of("Q8_0"), products=own)
    assert not target.info()["own_products"] and target.file.products is None
    assert logits(target, random_tokens(4)).isfinite().all()


def broken(tmp_path: Path, right: str, wrong: str) -> Path:
    """The device with a wrong line in it."""
    texts = {source.name: source.read_text() for source in module.SOURCES}
    assert sum(text.count(right) for text in texts.values()) == 1, right
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(right, wrong))
    path = tmp_path / module.LIBRARY
    sources = [str(tmp_path / name) for name in texts if name.endswith(".cpp")]
    flags = [*FLAGS, *module.flags()]
    subprocess.run(["g++", *flags, *sources, "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("offs[b] = -128 *", "offs[b] = -127 *"),
        ("^ 0x80;", "^ 0x81;"),
        ("to[i / 2 * 2 * lanes + 2 * o + i % 2]", "to[i / 2 * 2 * lanes + 2 * o + 1 - i % 2]"),
        ("std::min(Kind::DEPTH, units - at)", "std::min(Kind::DEPTH, units - at - 1)"),
        ("to[i * PANEL + o] = output", "to[i * PANEL + (o ^ 1)] = output"),
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
    """Behind a tree a text's cells are in another order, which moves rows of Q8_0 by more than ties."""
    needed(own, kind)
    file, draft = file_of(kind), bundled_file("draft", torch.bfloat16)
    shapes = [{"k": 4}] if kind == "Q8_0" else [{"k": 4}, {"k": 4, "width": 3, "nodes": 8}]
    plain = LLM.load(file, "none", compile=True)
    drafting = [LLM.load(file, f"draft:{draft}", compile=True, **shape) for shape in shapes]
    assert all(llm.info()["own_products"] for llm in (plain, *drafting))
    prompts = ["def mean(values):\n", "class Stack:\n    "]
    for chance in ({"temperature": 0.0}, {"seed": 5}):
        params = SamplingParams(max_tokens=32, **chance)
        want = [done.token_ids for done in plain.generate(prompts, params)]
        for llm in drafting:
            found = llm.generate(prompts, params)
            assert [done.token_ids for done in found] == want
            assert sum(done.stats.accepted for done in found) > 0


def test_they_are_used_where_they_were_made_and_wanted(own: Products):
    needed(own, "Q8_0")
    file = file_of("Q8_0")
    used = {
        ask: LLM.load(file, "none", compile=ask).info()["own_products"] for ask in ("auto", False)
    }
    assert used == {"auto": True, False: False}
