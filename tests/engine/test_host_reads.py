"""On an accelerator the host waits for what it reads: between the target's forward and the verdict
it reads nothing, and of a draft each drafted token once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from outrider import SamplingParams, host
from outrider.decoding import RULES, Rule
from outrider.drafters import ModelDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.group import Scores
from outrider.models.base import Target
from outrider.models.protocol import ProtocolTarget
from outrider.types import Request
from tests.engine.toys import blurred, markov

VOCAB, DEPTH = 11, 3
TARGET = markov(VOCAB, 1, seed=8)
DRAFT = blurred(TARGET, 9, 0.3)
READS = {
    *(
        getattr(torch.Tensor, f"__{name}__")
        for name in ("bool", "contains", "float", "index", "int")
    ),
    *(getattr(torch.Tensor, name) for name in ("allclose", "argwhere", "cpu", "equal", "item")),
    *(getattr(torch.Tensor, name) for name in ("is_nonzero", "masked_select", "nonzero", "numpy")),
    *(torch.Tensor.tolist, torch.Tensor.unique, torch.nonzero, torch.masked_select, torch.equal),
}


class Elsewhere(TorchFunctionMode):
    """Counts what the host reads of logits, and of all that is made from them."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = ""
        self.reads: Counter[str] = Counter()
        # Kept alive, so that no other tensor takes the place of one.
        self._there: dict[int, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """From here on the tensor is on the accelerator."""
        self._there[id(tensor)] = tensor
        return tensor

    def has(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self.has, value))
        return isinstance(value, torch.Tensor) and id(value) in self._there

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        values = (*args, *(kwargs or {}).values())
        there = any(map(self.has, values))
        chosen = func is torch.Tensor.__getitem__ and self.has(args[1])
        shaped = chosen and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if (func in READS and there) or shaped:
            self.reads[self.stage] += 1
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if there and isinstance(one, torch.Tensor):
                self.send(one)
        return found


def watched(target: Target, draft: Target, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Tells the mode which stage a round is in, and sends all logits elsewhere."""
    mode = Elsewhere()

    def within(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **named: Any) -> Any:
            before, mode.stage = mode.stage, stage
            try:
                return call(*arguments, **named)
            finally:
                mode.stage = before

        return calling

    for model in (target, draft):
        score = model.score
        monkeypatch.setattr(model, "score", lambda rows, s=score: mode.send(s(rows)))
    for owner, name, stage in (
        (ModelDrafter, "propose", "draft"),
        (Scores, "__init__", "decide"),
        (Scores, "laws", "decide"),
        *((type(rule), "verify", "decide") for rule in RULES.values()),
    ):
        monkeypatch.setattr(owner, name, within(stage, getattr(owner, name)))
    return mode


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that is taken where the host does not read for free."""
    monkeypatch.setattr(host, "reads_free", lambda device: False)


def reads_of(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], list[int]]:
    """What was read in each stage of three texts' rounds, and the tokens made."""
    target, draft = ProtocolTarget(TARGET), ProtocolTarget(DRAFT)
    mode = watched(target, draft, monkeypatch)
    engine = Engine(target, ModelDrafter(draft), Emitter(None))
    params = SamplingParams(temperature=0 if rule.name == "greedy" else 1, seed=5, max_tokens=24)
    requests = [Request((1 + i,), params, rule=rule.name) for i in range(3)]
    with mode:
        done = Requests(engine, depth=DEPTH, end_tokens=frozenset()).complete(requests)
    tokens = [token for completion in done for token in completion.token_ids]
    return mode.reads, tokens


@pytest.mark.parametrize("name", ["greedy", "coupled", "block", "token", "match"])
def test_the_host_reads_nothing_from_forward_to_verdict(
    name: str, accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, tokens = reads_of(RULES[name], monkeypatch)
    assert len(tokens) == 72
    assert reads["decide"] == 0
    assert reads["draft"] > 0, "a drafted token is read to be drafted on from"
    assert reads[""] > 0, "and so is the verdict"


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_a_processor_reads_and_makes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read there leaves work out here: the check can fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "reads_free", lambda device: False)
        _, elsewhere = reads_of(RULES[name], patch)
    reads, tokens = reads_of(RULES[name], monkeypatch)
    assert tokens == elsewhere
    assert reads["decide"] > 0
