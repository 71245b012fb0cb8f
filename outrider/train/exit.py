"""What an early-exit head learns: its target's laws behind the first layers, and when it misses.

A row's adapted state passes the target's own final norm and output layer, which do not change; the
confidence learns the chance that a guess of the exit's law stays, sum min(p, q), beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafters import Drafter, EarlyExitDrafter
from outrider.models.exit_head import ExitHead, ExitShape
from outrider.models.hf import HuggingFaceTarget
from outrider.train.chance import generator
from outrider.train.head import HeadObjective
from outrider.train.losses import text_distance
from outrider.train.parts import differentiable
from outrider.train.recipe import ExitRecipe, HeadRecipe
from outrider.types import Compile


class ExitTraining(HeadObjective):
    """An early-exit head's loss: distance of the laws, and cross entropy of the confidence."""

    def __init__(
        self,
        recipe: HeadRecipe,
        target: HuggingFaceTarget,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        end_id: int,
        compile: Compile = False,
    ) -> None:
        super().__init__(recipe, target, train, held_out, end_id, compile)
        self._parts = differentiable(target, target.dtype)

    def loss(self, model: ExitHead, tokens_BT: Tensor, whole_BT: Tensor, step: int) -> Tensor:
        """The loss on rows of text, each place drafted from once.

        It guesses every token, so that no row has more to learn from than another.
        """
        recipe = self._recipe.head
        assert isinstance(recipe, ExitRecipe)
        states_BTD, log_p_BTV = self._read(tokens_BT, model.taps)
        adapted_BTD = model(states_BTD.to(model.dtype))
        normed_BTD = self._parts.norm(adapted_BTD.to(self._target.dtype))
        guessed_BTV = self._parts.output(normed_BTD).float()
        tokens_BT = tokens_BT.to(guessed_BTV.device)
        return exit_loss(model, recipe, tokens_BT, (adapted_BTD, guessed_BTV), log_p_BTV)

    def drafter(self, model: ExitHead) -> Drafter:
        """A drafter that never stops early, so that all its guesses are measured."""
        head = model.copied().requires_grad_(False)
        return EarlyExitDrafter(head.shape.layers, head=head, exit_threshold=0.0)


def exit_loss(
    head: ExitHead,
    recipe: ExitRecipe,
    tokens_BT: Tensor,
    guessed: tuple[Tensor, Tensor],
    log_p_BTV: Tensor,
) -> Tensor:
    """Distance of the laws `[B, T, V]` in nats (`tv`, `block`: tokens), and of the confidence.

    `guessed` are the adapted states and the logits they give, `log_p_BTV` the target's law.
    """
    adapted_BTD, guessed_BTV = guessed
    log_q_BTV = guessed_BTV.log_softmax(-1)
    lost = text_distance(recipe.loss, log_p_BTV, log_q_BTV, tokens_BT, recipe.steps)
    with torch.no_grad():
        stays_BT = torch.minimum(log_p_BTV, log_q_BTV).exp().sum(-1).clamp(max=1.0)
    # It judges the guesses as they are, and does not change them.
    flat_RD, flat_RV = adapted_BTD.detach().flatten(0, 1), guessed_BTV.detach().flatten(0, 1)
    told_R = head.confidence_logits(flat_RD, flat_RV)
    missed = F.binary_cross_entropy_with_logits(told_R, stays_BT.flatten())
    return lost + recipe.confidence_weight * missed


def exit_layers(recipe: ExitRecipe, target: HuggingFaceTarget) -> int:
    """Behind how many layers the head reads: the recipe's number, or a third of them."""
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    return recipe.layers or max(1, depth // 3)


def new_exit_head(recipe: HeadRecipe, target: HuggingFaceTarget) -> ExitHead:
    """A head of the target's width, in float32, that changes nothing yet."""
    assert recipe.exit is not None
    config, recipe_of = target.model.config.get_text_config(), recipe.exit
    width = int(config.hidden_size)
    head = ExitHead(
        ExitShape(
            target.vocab_size,
            width,
            exit_layers(recipe_of, target),
            recipe_of.rank,
            recipe_of.exit_threshold,
            int(config.num_hidden_layers),
        )
    )
    draw = generator(recipe.seed, "weights")
    with torch.no_grad():
        head.down.weight.normal_(0.0, width**-0.5, generator=draw)
    return head
