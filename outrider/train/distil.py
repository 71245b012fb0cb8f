"""Distillation: a draft model learns its target's laws, on the corpus and on their own text.

What counts for speculation is agreement on the text the target writes, greedy and sampled; a corpus
alone never shows the contexts a model runs itself into (Agarwal et al. 2024, Zhou et al. 2024).
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.drafters import ModelDrafter
from outrider.models.base import Target
from outrider.models.capability import keeps_recurrent_state
from outrider.models.hf import HuggingFaceTarget
from outrider.models.recurrent import RecurrentTarget
from outrider.train import forward
from outrider.train.chance import generator
from outrider.train.head import accepted_length
from outrider.train.losses import text_distance
from outrider.train.recipe import DistilRecipe, Recipe
from outrider.train.schedule import context_at
from outrider.train.stream import TokenStream
from outrider.train.together import ALONE, Together
from outrider.train.writing import continue_rows


class Distillation:
    """The recipe's loss and total variation from the target's law, at temperature 1.

    Every step reads corpus rows and, from a pool that is renewed as the run goes on, rows the
    models wrote.
    """

    figure = "held-out accepted length"

    def __init__(
        self,
        recipe: Recipe,
        target: Any,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        end_id: int,
    ):
        assert recipe.distil is not None
        self._recipe, self._distil, self._target = (
            recipe,
            recipe.distil,
            target.eval().requires_grad_(False),
        )
        self._measured = _served(self._target)
        self._stream = TokenStream(train, end_id, recipe.seed)
        self._held_out = TokenStream(held_out, end_id, recipe.seed)
        length = self._distil.prompt_tokens + self._distil.continuation_tokens
        self._pools = {
            "target": torch.empty(0, length, dtype=torch.int64),
            "draft": torch.empty(0, length, dtype=torch.int64),
        }

    def state(self) -> dict[str, Tensor]:
        """The pools: what the draft wrote at earlier steps could not be written again."""
        return dict(self._pools)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from another object's `state`."""
        self._pools = dict(state)

    def backward(self, model: Any, step: int, together: Together = ALONE) -> float:
        """Add one step's gradients; the loss returned is the total variation: 1 - acceptance."""
        if step % self._distil.refresh_steps == 0:
            self._renew_pools(model, step, together)
        batches = self._batches(step)
        total = sum(tokens_BT.numel() for tokens_BT in batches)
        variation = 0.0
        for _, tokens_BT in together.share(batches):
            share = tokens_BT.numel() / total
            device = model.lm_head.weight.device
            with forward.mixed(self._recipe.train, device):
                lost, tv = distances(self._target, model, tokens_BT.to(device), self._distil)
            (share * (lost + self._tv_weight(step) * tv)).backward()
            variation += share * tv.item()
        return variation

    @property
    def stages(self) -> tuple[int, ...]:
        """All steps take the same time."""
        return (0,)

    def rehearse(self, model: Any, step: int) -> int:
        """One micro-batch of text, gradients included; how many tokens it had."""
        run, device = self._recipe.train, model.lm_head.weight.device
        count = max(1, min(run.micro_tokens, run.batch_tokens) // run.context)
        tokens_BT = self._stream.rows(0, count * run.context, run.context)[0].to(device)
        with forward.mixed(run, device):
            lost, _ = distances(self._target, model, tokens_BT, self._distil)
        lost.backward()
        return tokens_BT.numel()

    def held_out(self, model: Any) -> float:
        """Mean accepted length of a copy of the draft, in its target's loop, on held-out text."""
        draft = copy.deepcopy(model).requires_grad_(False)
        drafter = ModelDrafter(_served(draft))
        size = self._distil.prompt_tokens
        return accepted_length(self._measured, drafter, self._held_out, size)

    def _tv_weight(self, step: int) -> float:
        """Total variation has no gradient between disjoint laws, so it joins when they are near."""
        return self._distil.tv_weight if step >= self._distil.tv_from_step else 0.0

    def _batches(self, step: int) -> list[Tensor]:
        """The step's rows: target-written, draft-written, corpus, each its share of the tokens."""
        d, run = self._distil, self._recipe.train
        draw = generator(self._recipe.seed, "rows", step)
        context = context_at(step, run)
        written: list[Tensor] = []
        for name, share in (("target", d.target_share), ("draft", d.draft_share)):
            pool = self._pools[name]
            rows = round(share * run.batch_tokens / pool.size(1))
            written.append(
                pool[torch.randint(len(pool), (rows,), generator=draw)] if len(pool) else pool[:0]
            )
        corpus_share = 1 - d.target_share - d.draft_share
        corpus_tokens = math.ceil(corpus_share * run.batch_tokens / context) * context
        parts = [torch.cat(written)]
        if corpus_tokens:
            parts.append(self._stream.rows(step, corpus_tokens, context)[0])
        return [
            micro
            for part in parts
            if len(part)
            for micro in part.split(max(1, run.micro_tokens // part.size(1)))
        ]

    def _renew_pools(self, model: Any, step: int, together: Together) -> None:
        """Let both models continue prompts from the training text; the oldest rows make room.

        Of several processes one has the target write, another the draft, and all get both.
        """
        d, device = self._distil, model.lm_head.weight.device
        model.eval()
        shares = {"target": d.target_share, "draft": d.draft_share}
        written: dict[str, Tensor] = {}
        for i, (name, writer) in enumerate((("target", self._target), ("draft", model))):
            share = shares[name]
            if share == 0:
                continue
            draw = generator(self._recipe.seed, f"written by {name}", step)
            rows = round(d.refresh_rows * share / (d.target_share + d.draft_share))
            prompts_BT = self._prompts(rows, draw)
            greedy_B = torch.rand(rows, generator=draw) < d.greedy_share
            written[name] = prompts_BT.new_zeros(rows, self._pools[name].size(1))
            if i % together.count == together.rank:
                with forward.mixed(self._recipe.train, device):
                    written[name] = continue_rows(
                        writer, prompts_BT, d.continuation_tokens, greedy_B, draw
                    )
        # Behind the loop: nobody waits for one text before writing another.
        for name, new in written.items():
            kept = [self._pools[name], together.added(new, device)]
            self._pools[name] = torch.cat(kept)[-round(d.pool_rows * shares[name]) :]
        model.train()

    def _prompts(self, rows: int, draw: torch.Generator) -> Tensor:
        """Stretches of the training text at random places."""
        starts = torch.randint(self._stream.epoch_tokens, (rows,), generator=draw).tolist()
        return torch.stack(
            [self._stream.read(start, self._distil.prompt_tokens) for start in starts]
        )


def distances(
    target: Any, draft: Any, tokens_BT: Tensor, distil: DistilRecipe
) -> tuple[Tensor, Tensor]:
    """The recipe's loss and the mean total variation between next-token laws."""
    with torch.no_grad():
        log_p_BTV = forward.log_laws(target, tokens_BT)
    log_q_BTV = forward.log_laws(draft, tokens_BT)
    given = log_p_BTV, log_q_BTV, tokens_BT, distil.steps
    variation = text_distance("tv", *given)
    return (variation if distil.loss == "tv" else text_distance(distil.loss, *given)), variation


def _served(model: Any) -> Target:
    """A model behind `score`: its own weights in other modules, so that it stays as it is."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, tensors)
    if keeps_recurrent_state(own):
        return RecurrentTarget(own, pack=False)
    return HuggingFaceTarget(own, pack=False, arrange=False, share_prefixes=False)
