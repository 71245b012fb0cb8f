"""Early exit over compiled forwards: packages of first layers, of the rest, of what is behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.drafters import EarlyExitDrafter, NoDrafter
from outrider.models.base import Rows
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

single = pytest.fixture(scope="module", autouse=True)(one_thread)
PARENTS = [-1, 0, 0, 1, 1, 2]
HEADS = ["plain", "with a head"]


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
    parts = {(p.first, p.last, p.states, p.logits) for p in target._compiled_parts}
    assert {(0, 1, True, False), (1, 3, False, True)} < parts
    assert ((0, 1, True, True) if kind == "plain" else (3, 3, False, True)) in parts
    assert all(target._compiled_parts.values())
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


def test_a_package_of_other_layers_shows(target: HuggingFaceTarget):
    """The bound means something: layers that are left out exceed it by far."""
    early = EarlyExit(target, 1)
    right = rounds(early)
    wrong = next(p for p in target._compiled_parts if (p.first, p.last) == (3, 3))
    rest = next(p for p in target._compiled_parts if p.first == 1)
    before = target._compiled_parts[rest]
    target._compiled_parts[rest] = target._compiled_parts[wrong]
    try:
        found = rounds(early)
    finally:
        target._compiled_parts[rest] = before
    assert max(relative_error(a, b) for a, b in zip(found, right, strict=True)) > 1e-2


@pytest.mark.parametrize("kind", HEADS)
def test_texts_are_plain_decodings(target: HuggingFaceTarget, kind: str):
    head = head_of(target, kind)
    drafting = served(target, EarlyExitDrafter(1, head=head))
    for name in ("greedy", "coupled"):
        law = laws(12)[name]
        assert texts(drafting, law, RAGGED) == texts(served(target, NoDrafter()), law, RAGGED)


def test_without_packages_the_models_own_layers_run():
    target = HuggingFaceTarget(random_model("llama"))
    assert target.compile(build=False)
    EarlyExit(target, 2)
    assert target._compiled_parts and not any(target._compiled_parts.values())
    EarlyExit(target, 1)
    assert any(target._compiled_parts.values()), "an earlier test made these"
