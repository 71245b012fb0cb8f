"""The two optimisers of a run: Muon for the blocks' matrices, AdamW for the rest."""

from typing import Any

import torch
from torch import Tensor

from outrider.train.muon import Muon
from outrider.train.recipe import TrainRecipe


class Optimisers:
    """Both optimisers behind one step, their rates scaled by the schedule's factor."""

    def __init__(self, model: Any, recipe: TrainRecipe):
        matrices: list[Tensor] = []
        embeddings: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            embeds = "embed" in name
            tied = embeds and model.config.tie_word_embeddings
            # A matrix of one row is a vector.
            if parameter.dim() < 2 or len(parameter) == 1 or "lm_head" in name or tied:
                vectors.append(parameter)
            else:
                (embeddings if embeds else matrices).append(parameter)
        muon = Muon(
            matrices,
            recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            dtype=getattr(torch, recipe.precision),
        )
        groups = [(vectors, recipe.vector_rate), (embeddings, recipe.embedding_rate)]
        adam = torch.optim.AdamW(
            [{"params": p, "lr": rate} for p, rate in groups if p],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )
        self._both = (muon, adam)
        self._rates = [[g["lr"] for g in optimiser.param_groups] for optimiser in self._both]

    def step(self, factor: float) -> None:
        """One update at `factor` times the full rates; gradients are dropped afterwards."""
        for optimiser, rates in zip(self._both, self._rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """What `restore` takes back."""
        return [optimiser.state_dict() for optimiser in self._both]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """Go on from another object's `state`."""
        for optimiser, state in zip(self._both, states, strict=True):
            optimiser.load_state_dict(state)
