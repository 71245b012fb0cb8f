"""Language modelling with layer dropout and early exits: every depth learns to predict."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.train import forward
from outrider.train.chance import generator
from outrider.train.recipe import Recipe
from outrider.train.schedule import context_at, depth_at
from outrider.train.stream import TokenStream
from outrider.train.together import ALONE, Together

PERPLEXITY_TOKENS = 16_384


class LanguageModelling:
    """Mean negative log-likelihood of the next token, in nats, also through one early exit."""

    figure = "held-out perplexity"

    def __init__(
        self,
        recipe: Recipe,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        end_id: int,
    ):
        self._recipe = recipe
        self._stream = TokenStream(train, end_id, recipe.seed)
        self._held_out = TokenStream(held_out, end_id, recipe.seed)

    def backward(self, model: Any, step: int, together: Together = ALONE) -> float:
        """Add one step's gradients; the loss returned is that without the early exit."""
        run = self._recipe.train
        context = context_at(step, run)
        device = model.lm_head.weight.device
        inputs_BT, targets_BT = self._stream.rows(step, run.batch_tokens, context)
        rows = max(1, run.micro_tokens // context)
        micro = list(zip(inputs_BT.split(rows), targets_BT.split(rows), strict=True))
        layers = len(model.model.layers)
        chance = forward.dropout_probabilities(layers, run.layer_dropout)
        draw = generator(self._recipe.seed, "layers", step)
        depth = depth_at(step, run, layers)
        total = 0.0
        own = {i for i, _ in together.share([x_BT for x_BT, _ in micro])}
        for i, (x_BT, y_BT) in enumerate(micro):
            skipped = [
                u < p
                for u, p in zip(torch.rand(layers, generator=draw).tolist(), chance, strict=True)
            ]
            skipped[depth:] = [True] * (layers - depth)
            # One exit, in one micro-batch of the step: a head over every exit would cost more than
            # the layers.
            exit_layer = int(torch.randint(1, layers, (), generator=draw)) if layers > 1 else 1
            if i not in own:
                continue
            with_exit = i == 0 and run.exit_weight > 0 and depth == layers > 1
            with forward.mixed(run, device):
                h_BTD, early_BTD = forward.hidden_states(
                    model,
                    x_BT.to(device),
                    skipped=skipped,
                    exit_layer=exit_layer if with_exit else None,
                )
                loss = next_token_loss(model, h_BTD, y_BT)
                total += loss.item() / len(micro)
                if early_BTD is not None:
                    loss = loss + run.exit_weight * next_token_loss(model, early_BTD, y_BT)
            (loss / len(micro)).backward()
        return total

    def held_out(self, model: Any) -> float:
        """Perplexity of the first held-out tokens, read in rows of the training context."""
        return held_out_perplexity(model, self._held_out, self._recipe.train.context)

    def state(self) -> dict[str, Tensor]:
        """Nothing: what a step reads and draws follows from its number."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Nothing to take back."""


def next_token_loss(model: Any, h_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats of the targets under the head's law."""
    logits_RV = forward.logits(model, h_BTD).flatten(0, 1)
    return F.cross_entropy(logits_RV, targets_BT.flatten().to(logits_RV.device))


def held_out_perplexity(model: Any, held_out: TokenStream, context: int) -> float:
    """Perplexity of the first held-out tokens, in rows of `context`."""
    count = min(PERPLEXITY_TOKENS, held_out.epoch_tokens) // context * context
    return perplexity(model, *held_out.rows(0, max(context, count), context))


@torch.no_grad()
def perplexity(model: Any, inputs_BT: Tensor, targets_BT: Tensor) -> float:
    """Exp of the mean negative log-likelihood of the targets."""
    device = model.lm_head.weight.device
    losses = [
        next_token_loss(model, forward.hidden_states(model, x_BT.to(device))[0], y_BT)
        for x_BT, y_BT in zip(inputs_BT.split(4), targets_BT.split(4), strict=True)
    ]
    sizes = [len(x_BT) for x_BT in inputs_BT.split(4)]
    return math.exp(sum(x.item() * n for x, n in zip(losses, sizes, strict=True)) / sum(sizes))
