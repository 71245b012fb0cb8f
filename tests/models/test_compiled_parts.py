"""Early exit over compiled forwards: packages of first layers, of the rest, of what is behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.drafters import EarlyExitDrafter, NoDrafter
from outrider.errors import OutriderWarning
from outrider.models.base import Rows
from outrider.models.compiled import CompiledForward, Part
from outrider.models.early_exit import EarlyExit
from outrider.models.exit_head import ExitHead, ExitShape
from outrider.models.hf import HuggingFaceTarget
from tests.drafters.serving import RAGGED, laws, served, texts
from tests.drafters.test_exit_head import random_exit_head
from tests.models.families import (
    ancestors_of,
    one_thread,
    random_model,
    random_tokens,
    relative_error,
)

pytestmark = pytest.mark.compiled
single = pytest.fixture(scope="module", autouse=True)(one_thread)
PARENTS = [-1, 0, 0, 1, 1, 2]
WHOLE = {"plain": "first", "with a head": "behind"}
HEADS = list(WHOLE)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of packages for this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def target() -> HuggingFaceTarget:
    made = HuggingFaceTarget(random_model("llama"))
    assert made.compile()
    return made


def head_of(target: HuggingFaceTarget, kind: str) -> ExitHead | None:
    width = target.model.config.hidden_size
    return random_exit_head(ExitShape(target.vocab_size, width, 1, 4)) if kind != "plain" else None


def begun(early: EarlyExit) -> int:
    """A text of six tokens."""
    seq = early.open(40)
    early.read_all({seq: random_tokens(24).tolist()[:6]})
    return seq


def rounds(early: EarlyExit, seq: int | None = None) -> list[torch.Tensor]:
    """What two rounds give, a chain's and a tree's: guesses, and the rows of all layers."""
    tokens, found = random_tokens(24).tolist(), []
    seq = begun(early) if seq is None else seq
    for token in tokens[6:9]:
        guess = early.guess(Rows((seq,), (1,), torch.tensor([token])))
        found += [guess.logits_nV, guess.hidden_nD]
    found.append(early.score(Rows((seq,), (4,), torch.tensor(tokens[6:10]))))
    early.commit(seq, 3)
    ancestors = ancestors_of(PARENTS)
    nodes = torch.tensor(tokens[10:16])
    drafted = Rows((seq,), (3,), nodes[:3], ancestors[:3], torch.tensor([0, 2]))
    guess = early.guess(drafted)
    found += [guess.logits_nV, guess.hidden_nD]
    found.append(early.score(Rows((seq,), (6,), nodes, ancestors)))
    early.commit(seq, [0, 2, 5])
    early.close(seq)
    return found


@pytest.mark.parametrize("kind", HEADS)
def test_rows_are_those_of_the_models_own_layers(target: HuggingFaceTarget, kind: str):
    early = EarlyExit(target, 1, head_of(target, kind))
    assert set(early._parts._packages) == {"states", "rest", WHOLE[kind]}
    with target.uncompiled():
        want = rounds(early)
    seq = begun(early)
    with pytest.MonkeyPatch.context() as patch:

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("the model's own layers run")

        for layer in early.gate._layers:
            patch.setattr(layer, "forward", never)
        found = rounds(early, seq)
    for ours, due in zip(found, want, strict=True):
        assert ours.shape == due.shape and relative_error(ours, due) < 1e-4


@pytest.mark.parametrize("name", ["first", "rest"])
def test_packages_that_give_other_rows_are_not_used(target: HuggingFaceTarget, name: str):
    """What is wrong with a package shows in guesses, or in the rows of all layers."""
    compiled_part = target.compiled_part
    number = 0 if name == "first" else 1

    def bent(part: Part) -> CompiledForward | None:
        found = compiled_part(part)
        if found is not None and (part.first, part.logits) == (number, True):
            outputs = found.outputs
            found.outputs = lambda inputs: [out * 1.5 for out in outputs(inputs)]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "compiled_part", bent)
        with pytest.warns(OutriderWarning, match="the model's own layers run: packages.*remove"):
            early = EarlyExit(target, 1)
    assert not early._parts.folders
    right = rounds(EarlyExit(target, 1))
    for ours, due in zip(rounds(early), right, strict=True):
        assert relative_error(ours, due) < 1e-4


def test_what_is_compiled_anew_is_not_used_unseen(target: HuggingFaceTarget):
    early = EarlyExit(target, 1)
    right = rounds(early)
    assert early._parts._package("rest") is not None
    target.compile()
    assert early._parts._package("rest") is None
    for ours, due in zip(rounds(early), right, strict=True):
        assert relative_error(ours, due) < 1e-4


def test_new_weights_are_those_of_packages(target: HuggingFaceTarget):
    early = EarlyExit(target, 1)
    name = "model.layers.2.mlp.down_proj.weight"
    before = target.model.state_dict()[name].clone()
    right = rounds(early)
    target.update_weights({name: 2 * before})
    try:
        changed = rounds(early)
        with target.uncompiled():
            want = rounds(early)
    finally:
        target.update_weights({name: before})
    for ours, due in zip(changed, want, strict=True):
        assert relative_error(ours, due) < 1e-4
    assert max(relative_error(a, b) for a, b in zip(changed, right, strict=True)) > 1e-2


def test_a_guess_that_fails_leaves_nothing(target: HuggingFaceTarget, monkeypatch):
    early = EarlyExit(target, 1, head_of(target, "with a head"))
    seq = begun(early)

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(early._parts, "behind", fails)
    with pytest.raises(MemoryError):
        early.guess(Rows((seq,), (1,), torch.tensor([5])))
    assert early.num_staged(seq) == 0 and target._part is None
    early.close(seq)


@pytest.mark.parametrize("kind", HEADS)
def test_texts_are_plain_decodings(target: HuggingFaceTarget, kind: str):
    head = head_of(target, kind)
    drafting = served(target, EarlyExitDrafter(1, head=head))
    for name in ("greedy", "coupled"):
        law = laws(12)[name]
        assert texts(drafting, law, RAGGED) == texts(served(target, NoDrafter()), law, RAGGED)


def test_without_packages_the_models_own_layers_run(target: HuggingFaceTarget):
    made = HuggingFaceTarget(random_model("llama"))
    assert made.compile(build=False)
    early = EarlyExit(made, 2)
    assert not early._parts.folders, "nobody made these"
    with made.uncompiled():
        want = rounds(early)
    for ours, due in zip(rounds(early), want, strict=True):
        assert relative_error(ours, due) < 1e-6
