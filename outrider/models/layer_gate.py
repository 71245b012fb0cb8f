"""A model's own forward with some of its decoder layers left out; no modelling code is copied.

For the time of one forward a layer that is not to run hands on what it gets. Which modules are the
decoder layers, a trial decides: the list whose members a forward calls once each, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.base import Rows

if TYPE_CHECKING:
    from outrider.models.hf import HuggingFaceTarget
    from outrider.models.recurrent import RecurrentTarget

Forward = Callable[..., Any]


@dataclass(slots=True)
class Passed:
    """The layers that ran in a forward, in the order of their calls, and what each gave."""

    layers: list[int] = field(default_factory=list[int])
    hidden: list[Tensor] = field(default_factory=list[Tensor])


class LayerGate:
    """Lets the forwards of a target run some of its decoder layers only.

    Hidden states are `[..., R, D]`, in most families `[1, R, D]`.

    Raises:
        UnsupportedModel: the decoder layers cannot be told by a forward's calls.
    """

    def __init__(self, target: HuggingFaceTarget | RecurrentTarget) -> None:
        text = target.model.config.get_text_config()
        self.num_layers = int(text.num_hidden_layers)
        self._target = target
        # What a layer returns beside the hidden states; None where it returns them alone.
        self._beside: int | None = None
        # One row's states, `[1, 1, D]`, as layers hand them on; None where there are several.
        self.states: Tensor | None = None
        for layers in _lists(target.model, self.num_layers):
            self._layers: Sequence[nn.Module] = layers
            passed = self._tried(target)
            if passed.layers == list(range(self.num_layers)):
                hidden = passed.hidden[0]
                if hidden.dim() == 3 and len(hidden) == 1:
                    self.states = hidden[:, :1].clone()
                return
        raise UnsupportedModel(
            f"the {self.num_layers} layers of the {target.model.config.model_type} model "
            f"{type(target.model).__name__} are no list that a forward calls in order, so that "
            "none can be left out or looked behind; use another drafter, such as 'ngram'"
        )

    def _tried(self, target: HuggingFaceTarget | RecurrentTarget) -> Passed:
        seq = target.open(2)
        try:
            with self.running(0, self.num_layers, kept=range(self.num_layers)) as passed:
                target.score(Rows((seq,), (2,), torch.tensor([1, 2]) % target.vocab_size))
        finally:
            target.close(seq)
        return passed

    def check(self, layers: Sequence[int]) -> None:
        """Refuse numbers of layers that are none.

        Raises:
            InvalidConfig: naming them.
        """
        depth = self.num_layers
        if list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= depth:
            raise InvalidConfig(
                f"hidden states behind layers {tuple(layers)} of the "
                f"{self._target.model.config.model_type} model with {depth} layers; give numbers "
                f"from 1 to {depth}, ascending"
            )

    @contextmanager
    def running(
        self,
        first: int,
        last: int,
        *,
        entering: Tensor | None = None,
        leaving: Callable[[Tensor], Tensor] | None = None,
        kept: Sequence[int] = (),
    ) -> Iterator[Passed]:
        """Let forwards run layers `first..last-1` alone.

        `entering` `[..., r, D]` are the hidden states that layer `first` gets for the forward's
        first r rows, zeros for those that only pad it; None leaves them the model's own. What
        leaves layer `last - 1` passes `leaving` on its way to the final norm. What the layers
        `kept` give is noted.
        """
        passed = Passed()
        forwards: dict[int, Forward] = {}
        for i, layer in enumerate(self._layers):
            if not first <= i < last:
                forwards[i] = self._handing_on(
                    entering if i == first - 1 else None, leaving if i == last else None
                )
            elif i in kept:
                forwards[i] = self._noting(i, layer.forward, passed)
        with self._exchanged(forwards), self._target.uncompiled():
            yield passed

    @contextmanager
    def noting(self, kept: Sequence[int]) -> Iterator[Passed]:
        """Note what the layers `kept` give, and change nothing."""
        passed = Passed()
        forwards = {i: self._noting(i, self._layers[i].forward, passed) for i in kept}
        with self._exchanged(forwards):
            yield passed

    @contextmanager
    def _exchanged(self, forwards: Mapping[int, Forward]) -> Iterator[None]:
        own = {i: vars(self._layers[i]).get("forward") for i in forwards}
        try:
            for i, forward in forwards.items():
                vars(self._layers[i])["forward"] = forward
            yield
        finally:
            for i, forward in own.items():
                if forward is None:
                    vars(self._layers[i]).pop("forward", None)
                else:
                    vars(self._layers[i])["forward"] = forward

    def _handing_on(
        self, entering: Tensor | None, changed: Callable[[Tensor], Tensor] | None
    ) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            if entering is not None:
                missing = hidden.shape[-2] - entering.shape[-2]
                hidden = nn.functional.pad(entering, (0, 0, 0, missing))
            if changed is not None:
                hidden = changed(hidden)
            return hidden if self._beside is None else (hidden, *[None] * self._beside)

        return forward

    def _noting(self, layer: int, own: Forward, passed: Passed) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = own(*args, **kwargs)
            several = isinstance(given, tuple)
            self._beside = len(given) - 1 if several else None
            passed.layers.append(layer)
            passed.hidden.append(given[0] if several else given)
            return given

        return forward


def _lists(model: nn.Module, num_layers: int) -> Iterator[Sequence[nn.Module]]:
    """Lists of as many modules as the model has layers, outer ones first."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            yield list(module)
