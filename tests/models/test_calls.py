"""What packages call without Python: the same bits, and Python for all that is not told."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.cache import manager
from outrider.errors import ModelError, OutOfMemory
from outrider.models import calls
from outrider.models.attention_op import Forward
from outrider.models.base import Rows
from outrider.models.compiled import CompiledForward
from outrider.models.hf import HuggingFaceTarget
from outrider.models.packing import FewRowsLinear, OwnLinear, PackedLinear
from outrider.models.product import MOST_ROWS, Product
from tests.models.families import FAMILIES, Family, one_thread, random_tokens, with_weights
from tests.models.test_families import PARENTS, ancestors_of, read

pytestmark = pytest.mark.compiled
single = pytest.fixture(scope="module", autouse=True)(one_thread)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FAMILY = Family("llama", SIZES)
WINDOW = 40
CAPPED, SINKS = (
    Family(known.model_type, {**known.options, **SIZES, "sliding_window": WINDOW})
    for known in (FAMILIES["gemma2"], FAMILIES["gpt-oss"])
)


@pytest.fixture(scope="module", autouse=True)
def folder(packages: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(packages))
        yield


def compiled(family: Family, dtype: torch.dtype) -> HuggingFaceTarget:
    made = HuggingFaceTarget(with_weights(family.config(), "eager", 0).to(dtype))
    assert made.compile()
    if not (made.info()["own_products"] and made.info()["own_attention"]):
        pytest.skip("this processor has no products or attention of Outrider's own")
    return made


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    return compiled(FAMILY, torch.float32)


@pytest.fixture(scope="module")
def half() -> HuggingFaceTarget:
    return compiled(FAMILY, torch.bfloat16)


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often Python computed a layer or attention."""
    found: Counter[str] = Counter()
    for owner, name in (
        (FewRowsLinear, "forward"),
        (PackedLinear, "forward"),
        (Product, "gated"),
        (Forward, "attend"),
    ):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name), found, name))
    return found


def counting(call, found, name):  # type: ignore[no-untyped-def]
    def counted(*given):  # type: ignore[no-untyped-def]
        found[name] += 1
        return call(*given)

    return counted


def package_of(target: HuggingFaceTarget) -> CompiledForward:
    [found] = target.packages
    return found


def rows_of(
    target: HuggingFaceTarget,
    counts: tuple[int, ...],
    *,
    tree: bool,
    python: Counter[str] | None = None,
) -> Tensor:
    """Logits of a ragged batch behind texts that are longer than a window.

    `python` counts what it does for these rows alone.
    """
    texts = [random_tokens(WINDOW + 9 * seed, seed) for seed in range(len(counts))]
    seqs = tuple(read(target, text) for text in texts)
    ancestors = None
    if tree:
        ancestors = torch.cat([ancestors_of(PARENTS[:count]) for count in counts])
    if python is not None:
        python.clear()
    try:
        return target.score(Rows(seqs, counts, random_tokens(sum(counts), 77), ancestors)).clone()
    finally:
        for seq in seqs:
            target.close(seq)


def by_python(target: HuggingFaceTarget, counts: tuple[int, ...], *, tree: bool) -> Tensor:
    """The same rows where nothing is told."""
    package = package_of(target)
    told, package._told = package._told, None
    try:
        return rows_of(target, counts, tree=tree)
    finally:
        package._told = told


CASES = [((1,), False), ((5,), False), ((8, 1, 3), False), ((8,), True), ((3, 8, 2), True)]


@pytest.mark.parametrize(("counts", "tree"), CASES)
@pytest.mark.parametrize("which", ["target", "half"])
def test_a_forward_of_few_rows_passes_no_python_and_has_the_same_bits(
    request: pytest.FixtureRequest,
    python: Counter[str],
    which: str,
    counts: tuple[int, ...],
    tree: bool,
) -> None:
    made: HuggingFaceTarget = request.getfixturevalue(which)
    due = by_python(made, counts, tree=tree)
    assert python["forward"] and python["attend"]
    assert bool(python["gated"]) == (which == "half")
    assert torch.equal(rows_of(made, counts, tree=tree, python=python), due)
    assert not python


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(CAPPED, torch.bfloat16, id="caps"),
        pytest.param(SINKS, torch.float32, id="sinks"),
        pytest.param(CAPPED, torch.float32, id="caps, float32", marks=pytest.mark.slow),
        pytest.param(SINKS, torch.bfloat16, id="sinks, bfloat16", marks=pytest.mark.slow),
    ],
)
def test_windows_caps_and_sinks_are_told_too(
    family: Family, dtype: torch.dtype, python: Counter[str]
) -> None:
    made = compiled(family, dtype)
    for counts, tree in CASES:
        due = by_python(made, counts, tree=tree)
        got = rows_of(made, counts, tree=tree, python=python)
        assert not python["attend"]
        assert torch.equal(got, due)


def test_more_rows_than_a_product_takes_are_python_s(
    target: HuggingFaceTarget, half: HuggingFaceTarget, python: Counter[str]
) -> None:
    for made, none in ((target, False), (half, True)):
        rows_of(made, (MOST_ROWS + 1,), tree=False, python=python)
        assert (python["forward"] == 0) is none
        assert not python["attend"]


def test_pools_that_were_made_anew_are_found(half: HuggingFaceTarget, python: Counter[str]) -> None:
    seq, tokens = half.open(8), random_tokens(400)
    pieces = [tokens[i : i + 8] for i in range(0, 400, 8)]
    half._cache._drop_pools()
    made = half._cache.pools_made
    got = [half.score(Rows((seq,), (8,), piece)).clone() for piece in pieces]
    half.close(seq)
    assert half._cache.pools_made > made + half.model.config.num_hidden_layers, "they have grown"
    assert python["attend"] == half.model.config.num_hidden_layers, "pools that are to be made"
    package = package_of(half)
    told, package._told = package._told, None
    seq = half.open(8)
    due = [half.score(Rows((seq,), (8,), piece)).clone() for piece in pieces]
    half.close(seq)
    package._told = told
    assert torch.equal(torch.cat(got), torch.cat(due))


def test_layers_that_change_are_told_anew(half: HuggingFaceTarget, python: Counter[str]) -> None:
    before = rows_of(half, (3,), tree=False)
    state = {name: value.clone() for name, value in half.model.state_dict().items()}
    half.update_weights({name: 0.5 * value for name, value in state.items()})
    assert not torch.equal(rows_of(half, (3,), tree=False), before)
    half.update_weights(state)
    assert torch.equal(rows_of(half, (3,), tree=False, python=python), before)
    assert not python
    # A weight that is laid out in another way is not the one that was told.
    own = half._product
    half._use_product(None)
    assert rows_of(half, (3,), tree=False, python=python).isfinite().all() and python["forward"]
    half._use_product(own)
    assert torch.equal(rows_of(half, (3,), tree=False), before)


def test_under_autocast_layers_are_python_s(half: HuggingFaceTarget, python: Counter[str]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        rows_of(half, (1,), tree=False, python=python)
    assert python["forward"] and python["attend"]


def test_calls_say_what_they_take_where_somebody_asks(half: HuggingFaceTarget) -> None:
    seq, package = read(half, random_tokens(5)), package_of(half)
    rows = Rows((seq,), (1,), random_tokens(1))
    with package.timed() as times:
        half.score(rows)
        *linears, attention = times.taken()
        assert len(linears) == len(package.linears) > 1
        assert all(seconds > 0 and count == 1 for seconds, count in linears)
        assert attention[0] > 0 and attention[1] == half.model.config.num_hidden_layers
        assert not any(count for _, count in times.taken()), "each is told once"
    half.score(rows)
    assert not any(count for _, count in times.taken()), "nobody asks any more"
    half.close(seq)


def test_without_a_forward_nobody_attends_over_the_last_one_s_pools(
    half: HuggingFaceTarget,
) -> None:
    seq, package = read(half, random_tokens(5)), package_of(half)
    half.score(Rows((seq,), (1,), random_tokens(1)))
    pools = half._cache.pools.values()
    before = [(pool.keys.clone(), pool.values.clone()) for pool in pools]
    with pytest.raises(AssertionError):
        package.outputs([torch.tensor([[3]]), torch.tensor([[5]]), torch.tensor([0])])
    for (keys, values), pool in zip(before, pools, strict=True):
        assert torch.equal(keys, pool.keys) and torch.equal(values, pool.values)
    half.close(seq)


def test_where_memory_is_out_the_forward_says_so(half: HuggingFaceTarget) -> None:
    seq, package = read(half, random_tokens(5)), package_of(half)
    rows = Rows((seq,), (1,), random_tokens(1))
    due = half.score(rows).clone()
    half.discard(seq)
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int64, *[ctypes.c_int] * 2
    )
    full = kind(lambda *_: 1)
    assert package._told is not None
    call = package._told._call
    known, call.attend = call.attend, ctypes.cast(full, ctypes.c_void_p).value
    try:
        with pytest.raises(OutOfMemory, match="no memory"):
            half.score(rows)
    finally:
        call.attend = known
    half.discard(seq)
    assert torch.equal(half.score(rows), due)
    half.close(seq)


def test_pools_that_grew_in_part_are_found(
    half: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, done = half._cache, list[int]()
    seq = read(half, random_tokens(5))
    rows = Rows((seq,), (1,), random_tokens(1))
    due = half.score(rows).clone()
    half.discard(seq)
    grown = manager._grown

    def ends(pool: Tensor, num_blocks: int) -> Tensor:
        done.append(num_blocks)
        if len(done) > 3:
            raise RuntimeError("can't allocate memory")
        return grown(pool, num_blocks)

    told = package_of(half)._told
    assert told is not None
    before = [entry.keys for entry in told._pools]
    monkeypatch.setattr(manager, "_grown", ends)
    with pytest.raises(RuntimeError, match="allocate"):
        cache._grow(2 * cache.num_blocks)
    assert torch.equal(half.score(rows), due)
    places = [cache.pools[layer].keys.data_ptr() for layer in range(len(before))]
    assert [entry.keys for entry in told._pools] == places != before
    # What has grown already does for less, too.
    done.clear()
    monkeypatch.setattr(manager, "_grown", grown)
    half.discard(seq)
    cache._grow(cache.num_blocks + 1)
    assert torch.equal(half.score(rows), due)
    half.close(seq)


def test_a_library_of_calls_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "calls.so"
    broken.write_text("nothing")
    with pytest.raises(ModelError, match=r"cannot be used.*compile again"):
        calls._loaded(broken, broken)


def test_a_failure_of_python_s_is_not_masked(
    half: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, package = read(half, random_tokens(5)), package_of(half)
    rows = Rows((seq,), (1,), random_tokens(1))
    due = half.score(rows).clone()
    half.discard(seq)

    def fails(*_: object) -> Tensor:
        raise KeyError("own")

    told = package._told
    with monkeypatch.context() as patch:
        patch.setattr(package, "_told", None)
        patch.setattr(Forward, "attend", fails)
        with pytest.raises(KeyError, match="own"):
            half.score(rows)
    with monkeypatch.context() as patch:
        patch.setattr(calls.Told, "enter", fails)
        with pytest.raises(KeyError, match="own"):
            half.score(rows)
    assert package._told is told
    assert torch.equal(half.score(rows), due)
    half.close(seq)


def test_what_is_not_used_as_things_stand_holds_no_weights(python: Counter[str]) -> None:
    made = HuggingFaceTarget(with_weights(FAMILY.config(), "eager", 0).to(torch.bfloat16))
    with made.compiled(build=True):
        package = package_of(made)
        assert package._told is not None
        due = rows_of(made, (2,), tree=False)
    assert package._told is None
    with made._running(package):
        # As things stand now, layers are laid out otherwise, and are Python's.
        got = rows_of(made, (2,), tree=False, python=python)
    assert python["forward"]
    assert float((got - due).abs().max()) < 0.1 * float(due.abs().max())


def test_pools_that_cannot_be_told_leave_nothing_told(
    target: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, told = rows_of(target, (2,), tree=False), package_of(target)._told
    assert told is not None and told._call.attend
    told._of = None

    def broken(*_: object) -> bool:
        raise IndexError("a pool of another shape")

    with monkeypatch.context() as patch:
        patch.setattr(calls, "_lies_open", broken)
        with pytest.raises(IndexError, match="another shape"):
            rows_of(target, (2,), tree=False)
    assert not told._call.attend and told._body is None
    assert torch.equal(rows_of(target, (2,), tree=False), due)
    assert told._call.attend


def test_only_names_are_for_the_whole_process() -> None:
    assert calls.enter_calls() is not None
    everybody = ctypes.CDLL(None)
    assert hasattr(everybody, "aoti_torch_cpu_own_linear")
    assert not hasattr(everybody, "outrider_linear")
    assert not hasattr(everybody, "aoti_torch_call_dispatcher"), "torch's own are not"


def test_another_folder_is_told_by_the_library_that_packages_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = calls.enter_calls()
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert calls.enter_calls() is known
    monkeypatch.setattr(sys, "platform", "darwin")
    assert calls.enter_calls() is None


def test_what_is_no_product_s_is_not_told() -> None:
    class Other(OwnLinear):
        """A layer that says nothing of how it computes."""

    assert Other().direct() is None
    layer = FewRowsLinear(torch.nn.Parameter(torch.ones(8, 4)), None)
    assert layer.direct() is None, "it has no product"
    assert PackedLinear(torch.ones(8, 4), None).direct() is None


def test_numbers_of_dtypes_are_torch_s() -> None:
    loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for dtype, number in calls.DTYPES.items():
        name = str(dtype).removeprefix("torch.")
        assert getattr(loaded, f"aoti_torch_dtype_{name}")() == number
