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
        # A package is for one wanted row at least.
        asked = wanted if len(wanted) else torch.zeros(1, dtype=torch.int64)
        inputs = [tokens_R[None], positions_R[None], asked]
        found = self.package.outputs(inputs if self.entering is None else [*inputs, self.entering])
        if self.part.states:
            self.passed.layers.append(self.part.last - 1)
            self.passed.hidden.append(found[-1])
        return found[0][0, : len(wanted)] if self.part.logits else None


class LayerParts:
    """Runs a target's first layers, the others, or what is behind them all.

    Packages are looked for, or made, here, once: where the target is compiled again afterwards its
    own layers run, as nobody has held other packages against them.

    Args:
        target: whose layers.
        gate: of the target.
        layers: how many are the first ones.
        adapted: whether states are changed before the final norm gets them.
    """

    def __init__(
        self, target: HuggingFaceTarget, gate: LayerGate, layers: int, *, adapted: bool
    ) -> None:
        self._target, self._gate, self._layers = target, gate, layers
        self._made_for = target.compilations
        last, states = gate.num_layers, gate.states
        self._packages: dict[str, RunningPart] = {}
        if states is None:
            # Several streams of states, as Gemma 3n has them.
            return
        self._add("states", 0, layers, states=True, logits=False)
        self._add("rest", layers, last, entering=states)
        if adapted:
            self._add("behind", last, last, entering=states)
        else:
            self._add("first", 0, layers, states=True)

    @property
    def has_ends(self) -> bool:
        """Whether there are packages for the first layers' states and for what is behind all."""
        return self._package("states") is not None and self._package("behind") is not None

    @property
    def folders(self) -> list[str]:
        """Where the packages lie that are used."""
        return [str(found.package.folder) for found in self._packages.values()]

    def forget(self) -> None:
        """Use none of the packages from here on."""
        self._packages.clear()

    def first(self, *, logits: bool) -> AbstractContextManager[Passed]:
        """Let forwards run the first layers alone; the states behind them are noted.

        `logits` says whether any are asked for.
        """
        found = self._package("first" if logits else "states")
        if found is not None:
            return self._target.running_part(RunningPart(found.part, found.package))
        return self._gate.running(0, self._layers, kept=(self._layers - 1,))

    def rest(self, entering: Tensor) -> AbstractContextManager[Passed]:
        """Let forwards run the layers behind the first ones, on these states."""
        found = self._package("rest")
        if found is not None:
            return self._target.running_part(RunningPart(found.part, found.package, entering))
        return self._gate.running(self._layers, self._gate.num_layers, entering=entering)

    @torch.inference_mode()
    def behind(self, states_nD: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """What the final norm and the output layer make of states, where it `has_ends`."""
        found = self._package("behind")
        assert found is not None
        run = RunningPart(found.part, found.package, states_nD[None])
        # Of tokens and positions nothing is left in this package.
        nothing = torch.zeros(len(states_nD), dtype=torch.int64)
        logits = run(nothing, nothing, None)
        assert logits is not None
        return logits

    def _package(self, name: str) -> RunningPart | None:
        found = self._packages.get(name)
        known = found is not None and self._made_for == self._target.compilations
        return found if known and self._target.runs_compiled else None

    def _add(
        self,
        name: str,
        first: int,
        last: int,
        *,
        entering: Tensor | None = None,
        states: bool = False,
        logits: bool = True,
    ) -> None:
        kept = (last - 1,) * states

        @contextmanager
        def running(given: Tensor | None) -> Iterator[Passed]:
            with self._gate.running(first, last, entering=given, kept=kept) as passed:
                yield passed

        part = Part(first, last, entering, states, logits, running)
        package = self._target.compiled_part(part)
        if package is not None:
            self._packages[name] = RunningPart(part, package)
