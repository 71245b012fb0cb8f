"""The two optimisers of a run: Muon for the blocks' matrices, AdamW for the rest."""

from typing import Any

import torch
from torch import Tensor, nn

from outrider.train.muon import Muon
from outrider.train.recipe import TrainRecipe


class Optimisers:
    """Both optimisers behind one step, their rates scaled by the schedule's factor."""

    def __init__(self, model: nn.Module, recipe: TrainRecipe):
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.dim() == 2 and "embed" not in name else vectors).append(
                parameter
            )
        self._muon = Muon(matrices, recipe.matrix_rate, weight_decay=recipe.weight_decay)
        self._adam = torch.optim.AdamW(
            vectors, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._rates = (recipe.matrix_rate, recipe.vector_rate)

    def step(self, factor: float) -> None:
        """One update at `factor` times the full rates; gradients are dropped afterwards."""
        for optimiser, rate in zip((self._muon, self._adam), self._rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What `restore` takes back."""
        return [self._muon.state_dict(), self._adam.state_dict()]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Go on from another object's `state`."""
        self._muon.load_state_dict(states[0])
        self._adam.load_state_dict(states[1])
