"""Compiled forwards: the same rows for any number of them, and packages that can be trusted."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from outrider import LLM, SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.drafters import ModelDrafter
from outrider.errors import (
    InvalidConfig,
    ModelError,
    OutOfMemory,
    OutriderWarning,
    UnsupportedModel,
)
from outrider.llm.load import Placement
from outrider.models import compiled, packing, product
from outrider.models.base import Rows
from outrider.models.bundled import bundled_path
from outrider.models.capability import row_errors
from outrider.models.hf import HuggingFaceTarget
from outrider.models.product import Direct
from tests.models.families import (
    FAMILIES,
    Family,
    one_thread,
    random_model,
    random_tokens,
    relative_error,
    with_weights,
)
from tests.models.test_families import PARENTS, ancestors_of, read

pytestmark = pytest.mark.compiled
single = pytest.fixture(scope="module", autouse=True)(one_thread)
SHORT = Family("qwen3", {"head_dim": 8})
"""Its norms of queries and keys are so short that a compiler takes them for constants."""


def tiny() -> PreTrainedModel:
    """The model of most tests."""
    return with_weights(SHORT.config(), "eager", 0)


EVERY = [name for name, family in FAMILIES.items() if family.path == "outrider"]
"""Those whose attention goes through transformers' interface."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of packages for this file; what is compiled once is taken from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    """Compiled here, once."""
    made = HuggingFaceTarget(tiny())
    assert not made.compile(build=False), "nothing was compiled before"
    assert not made.info()["compiled"]
    assert made.compile() and made.info()["compiled"]
    return made


@pytest.fixture
def package(target: HuggingFaceTarget) -> Path:
    """The folder of its package."""
    assert target._compiled is not None
    return target._compiled.folder


def rows_of(target: HuggingFaceTarget, counts: tuple[int, ...], *, tree: bool) -> torch.Tensor:
    """The logits of a ragged batch behind five tokens each, chains or one tree per text."""
    texts = [random_tokens(5, seed) for seed in range(len(counts))]
    seqs = tuple(read(target, text) for text in texts)
    ancestors = None
    if tree:
        ancestors = torch.cat([ancestors_of(PARENTS[:count]) for count in counts])
    tokens = random_tokens(sum(counts), 77)
    try:
        return target.score(Rows(seqs, counts, tokens, ancestors)).clone()
    finally:
        for seq in seqs:
            target.close(seq)


def own_rows(target: HuggingFaceTarget, counts: tuple[int, ...], *, tree: bool) -> torch.Tensor:
    """The same from the model's own forward."""
    with target.uncompiled():
        return rows_of(target, counts, tree=tree)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in EVERY if name not in ("llama", "llama4")])
def test_other_families_are_compiled_too(family: str) -> None:
    made = HuggingFaceTarget(random_model(family))
    assert made.compile()
    got = rows_of(made, (8, 1, 3), tree=True)
    assert relative_error(got, own_rows(made, (8, 1, 3), tree=True)) < 1e-5


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("counts", [(1,), (2,), (8,), (1, 1), (8, 1, 3, 5, 2)])
def test_one_package_does_for_any_rows(
    target: HuggingFaceTarget, counts: tuple[int, ...], tree: bool
) -> None:
    got, own = rows_of(target, counts, tree=tree), own_rows(target, counts, tree=tree)
    assert relative_error(got, own) < 1e-5


def test_some_rows_alone_and_none(target: HuggingFaceTarget) -> None:
    seq, tokens = target.open(16), random_tokens(6, 3)
    whole = target.score(Rows((seq,), (6,), tokens))
    target.discard(seq)
    some = target.score(Rows((seq,), (6,), tokens, None, torch.tensor([4, 1])))
    target.discard(seq)
    assert torch.allclose(some, whole[[4, 1]], atol=1e-5)
    none = torch.empty(0, dtype=torch.int64)
    assert target.score(Rows((seq,), (6,), tokens, None, none)).shape == (0, target.vocab_size)
    target.close(seq)


def test_a_package_holds_no_weights(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model of the same shape takes it as it is, and gives rows of its own."""
    monkeypatch.setattr(compiled, "_build", None)
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    other = HuggingFaceTarget(model)
    assert other.compile(build=False)
    got = rows_of(other, (4,), tree=False)
    assert relative_error(got, own_rows(other, (4,), tree=False)) < 1e-5
    assert relative_error(got, rows_of(target, (4,), tree=False)) > 1e-3


def few_rows(target: HuggingFaceTarget) -> list[packing.FewRowsLinear]:
    """Linear layers that may use the product of few rows."""
    linears = compiled._opaque_linears(target.model)
    return [linear for linear in linears if isinstance(linear, packing.FewRowsLinear)]


def test_new_weights_are_bound(target: HuggingFaceTarget) -> None:
    made = HuggingFaceTarget(tiny())
    assert not any(linear.product for linear in few_rows(made))
    assert made.compile(build=False)
    assert few_rows(made) and all(linear.product for linear in few_rows(made))
    before = rows_of(made, (4,), tree=False)
    state = {name: value * 0.9 for name, value in made.model.state_dict().items()}
    made.update_weights(state)
    assert all(linear.product for linear in few_rows(made))
    after = rows_of(made, (4,), tree=False)
    assert relative_error(after, own_rows(made, (4,), tree=False)) < 1e-5
    assert relative_error(after, before) > 1e-3


def short_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New values for those."""
    return {name: value + 0.5 for name, value in state.items() if "q_norm" in name}


def test_new_weights_of_few_numbers_are_bound(target: HuggingFaceTarget) -> None:
    made = HuggingFaceTarget(tiny())
    assert made.compile(build=False)
    before = rows_of(made, (4,), tree=False)
    made.update_weights(short_weights(made.model.state_dict()))
    after = rows_of(made, (4,), tree=False)
    assert relative_error(after, own_rows(made, (4,), tree=False)) < 1e-5
    assert relative_error(after, before) > 1e-3


def test_a_model_wrapped_twice_has_new_weights_in_both(target: HuggingFaceTarget) -> None:
    model = tiny()
    one, two = HuggingFaceTarget(model), HuggingFaceTarget(model)
    assert one.compile(build=False) and two.compile(build=False)
    one.update_weights({name: value * 0.7 for name, value in model.state_dict().items()})
    assert relative_error(rows_of(two, (4,), tree=False), own_rows(two, (4,), tree=False)) < 1e-5


def test_weights_are_let_go(target: HuggingFaceTarget) -> None:
    made = HuggingFaceTarget(tiny())
    assert made.compile(build=False) and made._compiled is not None
    bound = list(made._compiled._bound.values())
    assert all(tensor.numel() for tensor in bound)
    del made
    gc.collect()
    assert not any(tensor.numel() for tensor in bound)


def test_nothing_is_made_again_while_texts_are_made(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of texts, rows and cached tokens, chains and trees: one package, bound once."""
    draft = HuggingFaceTarget(tiny())
    assert draft.compile(build=False)
    made: list[str] = []

    def noting(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            return call(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (compiled, "_build"),
        (compiled.CompiledForward, "__init__"),
        (compiled.CompiledForward, "bind"),
        (torch, "compile"),
        (torch.export, "export"),
        (torch._inductor, "aoti_compile_and_package"),
    ):
        noting(owner, name)
    frames = dict(torch._dynamo.utils.counters["frames"])

    def decode(width: int) -> None:
        config = SpeculativeDecoderConfig(
            k=3, width=width, sampling=SamplingParams(temperature=0, max_tokens=9)
        )
        decoder = SpeculativeDecoder(ModelDrafter(draft), target, config)
        for lengths in ((1,), (3, 40, 7), (5, 6)):
            decoder.generate_batch([random_tokens(n, n).tolist() for n in lengths])

    decode(1)
    decode(2)
    assert made == [] and torch._dynamo.utils.counters["frames"] == frames
    packing._note_arrangement(target.model)
    decode(1)
    assert made == ["bind"], "what is noted here is noticed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfMemory], ids=lambda e: e.__name__)
def test_what_is_raised_inside_comes_out_as_it_is(
    target: HuggingFaceTarget,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []
    own = packing.FewRowsLinear.forward

    def failing(self: packing.FewRowsLinear, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return own(self, inputs)

    seq = target.open(8)
    with monkeypatch.context() as patch:
        patch.setattr(target._compiled, "_told", None)
        patch.setattr(packing.FewRowsLinear, "forward", failing)
        with pytest.raises(error):
            target.score(Rows((seq,), (2,), torch.tensor([1, 2])))
    assert len(calls) == 3, "what comes behind is left out"
    assert target.num_staged(seq) == 0 and not capfd.readouterr().err
    target.close(seq)


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_package_that_computes_something_else_is_refused(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """Be it for batches and trees alone, in what Python computes for it."""
    own = packing.FewRowsLinear.forward
    made = HuggingFaceTarget(tiny())

    def off(self: packing.FewRowsLinear, inputs: torch.Tensor) -> torch.Tensor:
        out = own(self, inputs)
        return out * wrong if made._compiled is not None and inputs.shape[-2] > 1 else out

    monkeypatch.setattr(compiled, "enter_calls", lambda: None)
    monkeypatch.setattr(packing.FewRowsLinear, "forward", off)
    with pytest.raises(UnsupportedModel, match="differ from its own by"):
        made.compile(build=False)
    assert not made.info()["compiled"]


def test_a_package_that_is_told_other_weights_is_refused(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what it computes without Python."""
    own = packing.FewRowsLinear.direct
    made = HuggingFaceTarget(tiny())
    if not target.info()["own_products"] or target._compiled is None or not target._compiled._told:
        pytest.skip("packages compute nothing without Python here")

    def off(self: packing.FewRowsLinear) -> Direct | None:
        found = own(self)
        return found and replace(found, weight=1.01 * found.weight)

    monkeypatch.setattr(packing.FewRowsLinear, "direct", off)
    with pytest.raises(UnsupportedModel, match="differ from its own by"):
        made.compile(build=False)
    assert not made.info()["compiled"]


def test_a_trial_that_fails_leaves_the_own_forward(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = HuggingFaceTarget(tiny())

    def failing(*_: Any) -> None:
        if made._compiled is not None:
            raise OutOfMemory("no room")

    monkeypatch.setattr(made._cache, "reserve", _before(made._cache.reserve, failing))
    with pytest.raises(OutOfMemory):
        made.compile(build=False)
    assert not made.info()["compiled"]


def _before(function: Any, first: Any) -> Any:
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return both


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    for family, reason in {
        "falcon": "keeps its own attention",
        "llama4": "Constraints violated",
    }.items():
        made = HuggingFaceTarget(random_model(family))
        with pytest.raises(UnsupportedModel, match=reason):
            made.compile()
        assert not made.info()["compiled"]


def test_frequencies_that_follow_the_longest_row_are_refused() -> None:
    made = HuggingFaceTarget(tiny())
    for part in made.model.modules():
        if hasattr(part, "rope_type"):
            vars(part)["rope_type"] = "dynamic"
    with pytest.raises(UnsupportedModel, match="rotary frequencies"):
        made.compile()


def test_strict_excludes_it() -> None:
    with pytest.raises(InvalidConfig, match="strict=True exclude"):
        HuggingFaceTarget(tiny(), strict=True).compile()
    with pytest.raises(InvalidConfig, match="strict=True exclude"):
        Placement(strict=True, compile=True)
    with pytest.raises(InvalidConfig, match="compile='yes'"):
        Placement(compile="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="compile=1"):
        Placement(compile=1)  # type: ignore[arg-type]


def test_an_interrupted_build_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))

    def interrupted(traced: Any, folder: Path, scratch: Path) -> None:
        (folder / compiled.PACKAGE).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "_make", interrupted)
    made = HuggingFaceTarget(tiny())
    with pytest.raises(KeyboardInterrupt):
        made.compile()
    (left,) = compiled.cache_folder().iterdir()
    assert [file.name for file in left.iterdir()] == [product.LIBRARY]
    assert not any(linear.product for linear in few_rows(made))
    assert not made.info()["own_products"]


def test_products_that_are_there_are_used_without_a_package(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By any model, one that is never compiled too; not where nothing compiled is wanted."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    tokens = random_tokens(6)
    made, plain = HuggingFaceTarget(tiny()), HuggingFaceTarget(tiny())
    assert not made.compile(build=False) and not made.info()["own_products"]
    assert product.product(build=True) is not None
    assert not made.compile(build=False) and not made.info()["compiled"]
    assert made.info()["own_products"] and all(linear.product for linear in few_rows(made))
    assert not Placement(compile=False).compiled(plain).info()["own_products"]
    ours, theirs = (
        one.score(Rows((one.open(8),), (6,), tokens)) for one in (made, plain)
    )  # fmt: skip
    assert float(row_errors(ours, theirs).max()) < 1e-5
    monkeypatch.setattr(compiled, "why_not", lambda *_: "is not to be")
    with pytest.raises(UnsupportedModel, match="is not to be"):
        made.compile()
    assert not made.info()["own_products"]
    assert Placement().compiled(made).info()["own_products"]


def test_models_are_compiled_one_after_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiling changes what is global in torch; the second finds what the first has made."""
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    made, at_once = [HuggingFaceTarget(tiny()) for _ in range(2)], []
    gate = threading.Semaphore(1)

    def making(traced: Any, folder: Path, scratch: Path) -> None:
        at_once.append(gate.acquire(blocking=False))
        time.sleep(0.3)
        (folder / compiled.PACKAGE).write_bytes(b"no package")
        gate.release()

    monkeypatch.setattr(compiled, "_make", making)

    def one(target: HuggingFaceTarget) -> None:
        with pytest.raises(ModelError, match="cannot be loaded"):
            target.compile()

    threads = [threading.Thread(target=one, args=(target,)) for target in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [True]


class TestFolders:
    """Packages are code: nobody else's is run, and a broken one is told."""

    def test_one_that_others_may_write_to(self, package: Path) -> None:
        made = HuggingFaceTarget(tiny())
        package.chmod(0o777)
        try:
            with pytest.raises(ModelError, match="others may write to"):
                made.compile(build=False)
            with pytest.warns(OutriderWarning, match="others may write to"):
                assert Placement().compiled(made) is made
        finally:
            package.chmod(0o700)
        assert not made.info()["compiled"]
        assert Placement().compiled(made).info()["compiled"]
        assert (
            not Placement(compile=False).compiled(HuggingFaceTarget(made.model)).info()["compiled"]
        )

    def test_links_and_files_that_others_may_write_to(
        self, package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made = HuggingFaceTarget(tiny())
        file = package / compiled.PACKAGE
        file.chmod(0o666)
        try:
            with pytest.raises(ModelError, match="others may write to"):
                made.compile(build=False)
        finally:
            file.chmod(0o600)
        monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
        compiled.cache_folder().mkdir(mode=0o700)
        (compiled.cache_folder() / package.name).symlink_to(package)
        with pytest.raises(ModelError, match="or a link"):
            made.compile(build=False)

    def test_no_folder_can_be_made(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(ModelError, match="OUTRIDER_CACHE_DIR"):
            HuggingFaceTarget(tiny()).compile()

    def test_a_broken_package(
        self, package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
        broken = compiled.cache_folder() / package.name
        broken.mkdir(parents=True, mode=0o700)
        (broken / compiled.PACKAGE).write_bytes(b"no package")
        with pytest.raises(ModelError, match="cannot be loaded"):
            HuggingFaceTarget(tiny()).compile()


@pytest.mark.slow
def test_hidden_states_come_out_of_a_package_of_their_own(target: HuggingFaceTarget) -> None:
    layers, tokens = (1, 3), random_tokens(6)
    seq = target.open(8)
    read = Rows((seq,), (6,), tokens)
    with target.uncompiled(), target.tapping(layers) as own:
        due = target.score(read)
    assert layers not in target._compiled_taps
    target.discard(seq)
    with target.tapping(layers) as taps:
        logits = target.score(read)
    assert target._compiled_taps[layers] is not None
    assert relative_error(logits, due) < 1e-4
    assert relative_error(taps.of(seq), own.of(seq)) < 1e-4
    target.close(seq)


def test_a_copy_in_eight_bits_guesses_for_a_compiled_target(tmp_path: Path):
    """Its weights cannot be traced: compile=True is the target's, and no error."""
    shape = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with_weights(LlamaConfig(**shape), "eager", 0).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("target") / name, tmp_path)
    options = {"dtype": "float32", "pack": False}
    plain, drafting = (
        LLM.load(tmp_path, drafter, compile=True, **options) for drafter in ("none", "int8")
    )
    assert plain.info()["compiled"] and drafting.info()["compiled"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [llm.generate("import os\n", params)[0] for llm in (plain, drafting)]
    assert texts[0].token_ids == texts[1].token_ids and texts[1].stats.accepted > 0
