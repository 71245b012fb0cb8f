"""What heads that read themselves learn: their target's laws, also from their own features.

Training-time test (Li et al. 2025, arXiv 2503.01840): row i is read several times, each time one
token further and from the head's last feature in place of the target's, and sees the true features
up to i and the rows of its own line, as when it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.drafters import Drafter, EagleDrafter
from outrider.models.attention_op import Options
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.head import Head, TargetParts
from outrider.models.hf import HuggingFaceTarget
from outrider.train.chance import generator
from outrider.train.head import HeadObjective
from outrider.train.losses import block_shortfall, distance, divergence
from outrider.train.recipe import EagleRecipe, HeadRecipe, UnrolledRecipe
from outrider.train.schedule import readings_at


class TrainingTimeTest(HeadObjective):
    """The loss of a head like EAGLE-3's, from the second step on behind its own features."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which each place is read once more."""
        recipe = self._recipe.head
        assert isinstance(recipe, UnrolledRecipe)
        return tuple(sorted({0, *recipe.changes(self._recipe.train.steps)}))

    def loss(self, model: Head, tokens_BT: Tensor, whole_BT: Tensor, step: int) -> Tensor:
        """The loss on rows of text."""
        recipe = self._recipe.head
        assert isinstance(recipe, UnrolledRecipe)
        features_BTF, log_p_BTM = self._read(tokens_BT, model.taps, model.tokens)
        pair = tokens_BT.to(features_BTF.device), whole_BT.to(features_BTF.device)
        readings = readings_at(step, self._recipe.train, recipe)
        return unrolled_loss(model, recipe, pair, features_BTF, log_p_BTM, readings)

    def drafter(self, model: Head) -> Drafter:
        """A drafter of a copy of the head."""
        return EagleDrafter(model.copied())


def unrolled_loss(
    head: Head,
    recipe: UnrolledRecipe,
    texts: tuple[Tensor, Tensor],
    features_BTF: Tensor,
    log_p_BTM: Tensor,
    readings: int,
) -> Tensor:
    """The weighted mean of the losses of all readings, in nats (total variation: a probability).

    `texts` are rows, and all rows of which they are a part and whose loss is the parts' mean;
    `log_p_BTM` is the target's law at the tokens that can be guessed.
    `block` is the number of tokens refused of all readings as one chain.
    """
    tokens_BT, whole_BT = texts
    # The last row's last reading takes the last token but one, of which the next is known.
    rows = tokens_BT.shape[1] - readings - 1
    positions_BN = torch.arange(rows, device=tokens_BT.device).expand(len(tokens_BT), -1)
    lines = Lines(rows, tokens_BT.device)
    # What is added up stays in the parameters' precision, whatever that of the products.
    h_BND = head.fused(features_BTF[:, :rows].to(head.dtype)).to(head.dtype)
    loss, weight = h_BND.new_zeros(()), 0.0
    every = torch.arange(head.vocab_size, device=tokens_BT.device)
    kept = every if head.tokens is None else head.tokens
    drafted = torch.full_like(every, -100)
    drafted[kept] = every[: len(kept)]
    chain: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(readings):
        first, last = 1 + step, 1 + step + rows
        h_BND = head.step(tokens_BT[:, first:last], h_BND, positions_BN + step, lines.attend)
        logits_RM = head.logits(h_BND).float().flatten(0, 1)
        log_p_RM = log_p_BTM[:, first:last].flatten(0, 1)
        followed_BN = tokens_BT[:, first + 1 : last + 1]
        own = recipe.step_decay**step
        weight += own
        if recipe.loss == "kl":
            loss = loss + own * divergence(log_p_RM, logits_RM)
            continue
        log_q_RM = logits_RM.log_softmax(-1)
        next_R = drafted[followed_BN].flatten()
        if recipe.loss == "block":
            chain.append((log_p_RM, log_q_RM, next_R))
            continue
        known = float((drafted[whole_BT[:, first + 1 : last + 1]] >= 0).float().mean())
        loss = loss + own * distance(recipe.loss, log_p_RM, log_q_RM, next_R, known)
    return block_shortfall(*zip(*chain, strict=True)) if chain else loss / weight


class Lines:
    """Attention of all rows' lines, step after step.

    Row i sees the first step's keys up to i and, of the later steps, those of its own line.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._later = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: Options | None = None,
        layer: int = 0,
    ) -> Tensor:
        """The rows' attention `[B, N, H, E]`."""
        batch, heads, rows, size = query.shape
        groups = keys.shape[1]
        scaling = size**-0.5 if options is None else options.scaling
        self._keys.append(keys)
        self._values.append(values)
        q = query.view(batch, groups, heads // groups, rows, size) * scaling
        first = (q @ self._keys[0][:, :, None].transpose(-1, -2)).masked_fill(
            self._later, -torch.inf
        )
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k in self._keys[1:]]
        weights = torch.cat((first, *own), -1).softmax(-1)
        out = weights[..., :rows] @ self._values[0][:, :, None]
        for i, v in enumerate(self._values[1:]):
            out = out + weights[..., rows + i, None] * v[:, :, None]
        return out.reshape(batch, heads, rows, -1).transpose(1, 2)


def taps_of(recipe: EagleRecipe, target: HuggingFaceTarget) -> tuple[int, ...]:
    """The layers a head reads: those of the recipe, or a low, a middle and a high one.

    Every engine hands out what comes before its last layer; few what comes behind it.
    """
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    usual = (2, depth // 2, depth - 3) if depth >= 8 else (1, depth // 2, depth - 1)
    return recipe.taps or tuple(sorted({layer for layer in usual if layer >= 1})) or (1,)


def draft_tokens(documents: Sequence[Sequence[int]], vocab_size: int, count: int) -> Tensor:
    """The most frequent `count` tokens of the documents, ascending; the first of equals."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in documents:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[: min(count, vocab_size)].sort().values


def new_head(recipe: HeadRecipe, target: HuggingFaceTarget, tokens: Tensor) -> EagleHead:
    """A head of the target's widths, in float32, whose layer adds nothing yet.

    Its output layer begins as the target's own rows of the draft vocabulary.
    """
    config = target.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    shape = EagleShape(
        vocab_size=target.vocab_size,
        draft_vocab_size=len(tokens),
        hidden_size=int(config.hidden_size),
        ffn_size=recipe.eagle.ffn_size or int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", heads)),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        taps=taps_of(recipe.eagle, target),
        max_positions=int(target.max_length or 2048),
    )
    head = EagleHead(shape, tokens)
    draw = generator(recipe.seed, "weights")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 2 and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.size(1) ** -0.5, generator=draw)
        output: Any = target.model.get_output_embeddings()
        head.lm_head.weight.copy_(output.weight[tokens])
    head.borrow(TargetParts.of(target, norm=False))
    return head
