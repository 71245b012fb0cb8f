"""Some of a model's layers at a time, by packages of their own where its forwards are compiled.

Without packages the model's own forward runs, with the other layers left out (`layer_gate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models.compiled import CompiledForward, Part
from outrider.models.layer_gate import LayerGate, Passed

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.hf import HuggingFaceTarget


@dataclass(slots=True)
class RunningPart:
    """A package of some layers, in the place of a target's forward.

    Attributes:
        entering: the states `[1, R, D]` that it is given, of a package that takes any.
        passed: gets the states behind its last layer, of a package that gives them.
    """

    part: Part
    package: CompiledForward
    entering: Tensor | None = None
    passed: Passed = field(default_factory=Passed)

    def __call__(
        self, tokens_R: Tensor, positions_R: Tensor, wanted: Tensor | None
    ) -> Float[Tensor, "wanted V"] | None:
        """The wanted rows' logits; None of a package without."""
        if wanted is None:
            wanted = torch.arange(len(tokens_R))
        inputs = [tokens_R[None], positions_R[None], wanted]
        found = self.package.outputs(inputs if self.entering is None else [*inputs, self.entering])
        if self.part.states:
            self.passed.layers.append(self.part.last - 1)
            self.passed.hidden.append(found[-1])
        return found[0][0] if self.part.logits else None


class LayerParts:
    """Runs a target's first layers, the others, or what is behind them all.

    Args:
        target: whose layers.
        gate: of the target.
    """

    def __init__(self, target: HuggingFaceTarget, gate: LayerGate) -> None:
        self._target, self._gate = target, gate

    def first(self, layers: int, *, logits: bool) -> AbstractContextManager[Passed]:
        """Let forwards run the first layers alone; the states behind them are noted.

        `logits` says whether any are asked for.
        """
        found = self._running(0, layers, states=True, logits=logits)
        if found is not None:
            return self._target.running_part(found)
        return self._gate.running(0, layers, kept=(layers - 1,))

    def rest(self, layers: int, entering: Tensor) -> AbstractContextManager[Passed]:
        """Let forwards run the layers behind the first ones, on these states."""
        last = self._gate.num_layers
        found = self._running(layers, last, entering, logits=True)
        if found is not None:
            return self._target.running_part(found)
        return self._gate.running(layers, last, entering=entering)

    def has_ends(self, layers: int) -> bool:
        """Whether there are packages for the first layers' states, and for what is behind all."""
        whole = self._target.model.config.get_text_config().hidden_size
        ends = torch.empty(1, 1, whole)
        last = self._gate.num_layers
        return (
            self._running(0, layers, states=True, logits=False) is not None
            and self._running(last, last, ends, logits=True) is not None
        )

    @torch.inference_mode()
    def behind(self, states_nD: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """What the final norm and the output layer make of states, where it `has_ends`."""
        last = self._gate.num_layers
        found = self._running(last, last, states_nD[None], logits=True)
        assert found is not None
        # Of tokens and positions nothing is left in this package.
        nothing = torch.zeros(len(states_nD), dtype=torch.int64)
        logits = found(nothing, nothing, None)
        assert logits is not None
        return logits

    def _running(
        self,
        first: int,
        last: int,
        entering: Tensor | None = None,
        *,
        states: bool = False,
        logits: bool,
    ) -> RunningPart | None:
        if entering is not None and entering.dim() != 3:
            return None
        width, kept = (0 if entering is None else entering.shape[-1]), (last - 1,) * states

        @contextmanager
        def running(given: Tensor | None) -> Iterator[Passed]:
            with self._gate.running(first, last, entering=given, kept=kept) as passed:
                yield passed

        part = Part(first, last, width, states, logits, running)
        package = self._target.compiled_part(part)
        return None if package is None else RunningPart(part, package, entering)
