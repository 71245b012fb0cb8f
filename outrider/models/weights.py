"""What a model's weights are called and how large they are: new ones must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.config import nearest
from outrider.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names and shapes of a model's `state_dict()`, and which of them are one and the same."""

    shapes: dict[str, torch.Size]
    tied: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> WeightNames:
        """The names of a model whose layers are its own still."""
        state = model.state_dict()
        places: dict[tuple[int, torch.Size], list[str]] = {}
        for name, weight in state.items():
            places.setdefault((weight.data_ptr(), weight.shape), []).append(name)
        shapes = {name: weight.shape for name, weight in state.items()}
        return cls(shapes, tuple(tuple(names) for names in places.values() if len(names) > 1))

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Refuse weights that the model has not.

        Raises:
            InvalidConfig: an unknown name, another shape, no tensor of numbers, or two values for
                weights that are one.
        """
        for name, weight in state.items():
            self._check_one(name, weight)
        for names in self.tied:
            given = [state[name] for name in names if name in state]
            if any(not torch.equal(one.to(given[0]), given[0]) for one in given[1:]):
                raise InvalidConfig(
                    f"weights {' and '.join(names)} are one in this model and come with different "
                    "values; give one of them"
                )

    def _check_one(self, name: str, weight: Tensor) -> None:
        if name not in self.shapes:
            raise InvalidConfig(
                f"weight {name!r} does not exist in the model; give names of its state_dict()"
                + nearest(str(name), self.shapes)
            )
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise InvalidConfig(f"weight {name!r} is {kind}; a tensor of real numbers is due")
        if weight.shape != self.shapes[name]:
            raise InvalidConfig(
                f"weight {name!r} has shape {tuple(weight.shape)} and the model's "
                f"{tuple(self.shapes[name])}; give weights of the same architecture and size"
            )
