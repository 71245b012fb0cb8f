"""The shape contracts are really checked in this run, and cost nothing outside tests."""

from __future__ import annotations

import sys
import types

import jaxtyping
import pytest
import torch

from outrider.decoding import check_logits, processed_probs
from outrider.noise import philox4x32
from tests import shapes

TOY = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
from torch import Tensor
if TYPE_CHECKING:
    from jaxtyping import Float

def same_width(p_BV: Float[Tensor, "B V"], q_BV: Float[Tensor, "B V"]) -> Float[Tensor, "B"]:
    return p_BV[:, 0]

def lies(p_BV: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    return p_BV.sum(1)

@dataclass(frozen=True, slots=True)
class Pair:
    p_V: Float[Tensor, "V"]
    q_V: Float[Tensor, "V"]

    def dot(self, r_V: Float[Tensor, "V"]) -> Float[Tensor, ""]:
        return (self.p_V * r_V).sum()

    @classmethod
    def of(cls, p_V: Float[Tensor, "V"]) -> Pair:
        return cls(p_V, p_V)
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("toy")
    monkeypatch.setitem(sys.modules, "toy", module)
    exec(compile(TOY, "toy.py", "exec"), module.__dict__)
    shapes.check_module(module, TOY)
    return module


def test_right_shapes_pass(toy: types.ModuleType) -> None:
    assert toy.same_width(torch.ones(2, 3), torch.ones(2, 3)).shape == (2,)
    assert toy.Pair.of(torch.ones(3)).dot(torch.ones(3)) == 3


def test_wrong_shapes_are_caught(toy: types.ModuleType) -> None:
    wrong = [
        lambda: toy.same_width(torch.ones(2, 3), torch.ones(2, 4)),
        lambda: toy.same_width(torch.ones(2, 3).long(), torch.ones(2, 3)),
        lambda: toy.lies(torch.ones(2, 3)),
        lambda: toy.Pair(torch.ones(2), torch.ones(3)),
        lambda: toy.Pair.of(torch.ones(2, 2)),
    ]
    for call in wrong:
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


def test_the_package_is_checked() -> None:
    assert "processed_probs" in shapes.checked["outrider.decoding.laws"]
    assert "philox4x32" in shapes.checked["outrider.noise"]
    with pytest.raises(jaxtyping.TypeCheckError):
        check_logits(torch.ones(2, 3, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        processed_probs(torch.ones(5), 1.0)
    with pytest.raises(jaxtyping.TypeCheckError):
        philox4x32(torch.zeros(4), torch.zeros(2))


def test_right_calls_pass_the_checks() -> None:
    assert check_logits(torch.ones(2, 3)).tolist() == [True, True]
    assert processed_probs(torch.zeros(2, 4), 1.0).tolist() == [[0.25] * 4] * 2
