"""A head's tree from hidden states alone, without an engine around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.config import check_whole
from outrider.decoding import rule_named
from outrider.drafters import EagleDrafter, MedusaDrafter
from outrider.engine.draws import GroupDraws
from outrider.engine.group import Group
from outrider.errors import DraftShapeMismatch, InvalidConfig, TargetShapeMismatch
from outrider.models.base import Target
from outrider.sequence import Sequence
from outrider.tree import TokenTree, TreeBudget
from outrider.types import Request, SamplingParams

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@torch.inference_mode()
def propose_from_hidden(
    drafter: EagleDrafter | MedusaDrafter,
    target: Target,
    hidden_BSD: Float[Tensor, "B S D"],
    tokens_BS: Int64[Tensor, "B S"] | None = None,
    *,
    trees: TreeBudget | None,
    max_depth: int,
) -> TokenTree:
    """The likeliest continuations of B texts, as an engine's round would verify them.

    Args:
        drafter: a head's; it is attached to `target` where it is not yet.
        target: whose hidden states these are.
        hidden_BSD: the states of S tokens of each text, side by side as the drafter's `taps` say.
        tokens_BS: the token behind each state; None is the target's own likeliest, which its last
            layer's states tell.
        trees: children of a row and nodes of a tree; None gives every row one child, a chain.
        max_depth: levels of a tree at most.

    Returns:
        Trees that hang from the last of `tokens_BS`.

    Raises:
        InvalidConfig: fewer states than the head has modules, no depth, or tokens that states of
            other layers cannot tell.
        TargetShapeMismatch: states of another width.
        DraftShapeMismatch: not one token for each state.
    """
    check_whole("max_depth", max_depth, 1)
    drafter.attach(target)
    if isinstance(drafter, MedusaDrafter):
        head, modules = drafter.model, 1
    else:
        head, modules = drafter.model.head, drafter.model.head.num_modules
    batch, size, width = hidden_BSD.shape
    due = head.target_size * len(head.taps)
    if width != due:
        raise TargetShapeMismatch(
            f"hidden states {width} wide, and drafter {drafter.name} reads {due} numbers a token: "
            f"layers {head.taps}, {head.target_size} each"
        )
    if size < modules:
        raise InvalidConfig(
            f"hidden_BSD holds the states of {size} tokens, and each of drafter {drafter.name}'s "
            f"{modules} modules reads one token further; give those of at least {modules}"
        )
    if tokens_BS is None:
        if not head.needs_norm:
            raise InvalidConfig(
                f"tokens_BS is not given, and states of layers {head.taps} do not tell the "
                "target's tokens; give the token behind each state"
            )
        tokens_BS = head.parts.output(head.parts.norm(hidden_BSD)).argmax(-1)
    if tokens_BS.shape != (batch, size):
        raise DraftShapeMismatch(
            f"tokens_BS has shape {tuple(tokens_BS.shape)}, ({batch}, {size}) is due; give the "
            "token behind each state"
        )
    texts = [_text(-1 - b, tokens, max_depth) for b, tokens in enumerate(tokens_BS.tolist())]
    group = Group(texts, drafter, rule_named("greedy"), trees)
    draws = GroupDraws(group, group.noise(), target.vocab_size)
    try:
        for text, hidden_SD in zip(texts, hidden_BSD.unbind(), strict=True):
            drafter.notice(text, 0, hidden_SD)
        return drafter.propose(texts, group.depths(), draws).tree
    finally:
        for text in texts:
            drafter.close(text)


def _text(key: int, tokens: list[int], depth: int) -> Sequence:
    """A text whose first token stands for the one before the first that is given."""
    prompt = (0, *tokens)
    request = Request(prompt, SamplingParams(temperature=0.0))
    return Sequence(key, request, 0, "greedy", depth, depth + 1, frozenset(), list(prompt))
