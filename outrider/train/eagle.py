"""What heads learn: their target's laws, also from features that are their own.

Training-time test (Li et al. 2025, arXiv 2503.01840): row i is read several times, each time one
token further and from the head's last feature in place of the target's, and sees the true features
up to i and the rows of its own line, as when it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.attention_op import Options
from outrider.models.base import Rows
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.head import Head, TargetParts
from outrider.models.hf import HuggingFaceTarget
from outrider.train.chance import generator
from outrider.train.recipe import EagleRecipe, HeadRecipe, UnrolledRecipe
from outrider.train.stream import TokenStream
from outrider.types import Completion, Request, SamplingParams

PROMPTS, NEW_TOKENS, DEPTH = 8, 48, 4
"""Held-out prompts that are drafted for, tokens made of each, and how far ahead."""


class TrainingTimeTest:
    """A head's loss on text and on its target's own continuations of it."""

    figure = "held-out accepted length"

    def __init__(
        self,
        recipe: HeadRecipe,
        target: HuggingFaceTarget,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        end_id: int,
    ) -> None:
        self._recipe, self._target = recipe, target
        self._stream = TokenStream(train, end_id, recipe.seed)
        self._held_out = TokenStream(held_out, end_id, recipe.seed)
        self._written = torch.empty(0, recipe.train.context, dtype=torch.int32)

    def state(self) -> dict[str, Tensor]:
        """What the target wrote: other machines would not write it again."""
        return {"written": self._written}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from another object's `state`."""
        self._written = state["written"]

    def backward(self, model: Head, step: int) -> float:
        """Add one step's gradients and return its loss."""
        run, head = self._recipe.train, self._recipe.head
        if head.written_share and not len(self._written):
            self._write()
        tokens_BT = self._rows(step)
        total = 0.0
        for micro_BT in tokens_BT.split(max(1, run.micro_tokens // run.context)):
            loss = self._loss(model, micro_BT)
            share = len(micro_BT) / len(tokens_BT)
            (share * loss).backward()
            total += share * loss.item()
        return total

    def rehearse(self, model: Head) -> int:
        """One micro-batch of text, gradients included; how many tokens it had."""
        run = self._recipe.train
        count = max(1, min(run.micro_tokens, run.batch_tokens) // run.context)
        tokens_BT = self._stream.rows(0, count * run.context, run.context)[0]
        self._loss(model, tokens_BT).backward()
        return tokens_BT.numel()

    def _loss(self, model: Head, tokens_BT: Tensor) -> Tensor:
        features_BTF, logits_BTM = self._read(tokens_BT, model)
        tokens_BT = tokens_BT.to(features_BTF.device)
        return unrolled_loss(model, self._recipe.head, tokens_BT, features_BTF, logits_BTM)

    def held_out(self, model: Head) -> float:
        """Mean accepted length of greedy chains of DEPTH drafted tokens after held-out prompts."""
        drafter = EagleDrafter(model.copied())
        size = self._recipe.head.prompt_tokens
        room = max(1, self._held_out.epoch_tokens - size)
        starts = [i * room // PROMPTS for i in range(PROMPTS)]
        prompts = [self._held_out.read(start, size).tolist() for start in starts]
        params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)] * PROMPTS
        engine = Engine(self._target, drafter, Emitter(None))
        _complete(engine, prompts, params)
        return engine.metrics.mean_acceptance_length

    def _rows(self, step: int) -> Tensor:
        """The step's rows `[B, T]`: the target's own, and the text's."""
        run = self._recipe.train
        count = run.batch_tokens // run.context
        own = round(self._recipe.head.written_share * count)
        draw = generator(self._recipe.seed, "rows", step)
        which = torch.randint(max(1, len(self._written)), (own,), generator=draw)
        rows = [self._written[which].long()] if own else []
        if own < count:
            rows.append(self._stream.rows(step, (count - own) * run.context, run.context)[0])
        return torch.cat(rows)

    def _read(self, tokens_BT: Tensor, model: Head) -> tuple[Tensor, Tensor]:
        """The target's features and its logits over the tokens to guess, row by row."""
        size, target = tokens_BT.shape[1], self._target
        seqs = [target.open(size) for _ in tokens_BT]
        try:
            with target.tapping(model.taps) as taps:
                rows = Rows(tuple(seqs), (size,) * len(seqs), tokens_BT.flatten())
                logits_RM = target.score(rows)
            if model.tokens is not None:
                logits_RM = logits_RM[:, model.tokens]
            features = [taps.of(seq) for seq in seqs]
        finally:
            for seq in seqs:
                target.close(seq)
        # Copies: what is made in inference mode cannot be differentiated through.
        return torch.stack(features).clone(), logits_RM.view(*tokens_BT.shape, -1).clone()

    def _write(self) -> None:
        """Lets the target continue stretches of the text, greedily and at temperature 1."""
        run, head, seed = self._recipe.train, self._recipe.head, self._recipe.seed
        draw = generator(seed, "written")
        starts = torch.randint(self._stream.epoch_tokens, (head.written_rows,), generator=draw)
        prompts = [
            self._stream.read(start, head.prompt_tokens).tolist() for start in starts.tolist()
        ]
        greedy = torch.rand(head.written_rows, generator=draw) < head.greedy_share
        params = [
            SamplingParams(
                max_tokens=run.context - head.prompt_tokens,
                temperature=0.0 if likeliest else 1.0,
                seed=seed + i,
            )
            for i, likeliest in enumerate(greedy.tolist())
        ]
        done = _complete(Engine(self._target, NoDrafter(), Emitter(None)), prompts, params)
        rows = [[*p, *d.token_ids] for p, d in zip(prompts, done, strict=True)]
        self._written = torch.tensor(rows, dtype=torch.int32)


def _complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """One continuation of each prompt."""
    requests = Requests(engine, depth=DEPTH, end_tokens=frozenset())
    pairs = zip(prompts, params, strict=True)
    return requests.complete([Request(tuple(p), sampling) for p, sampling in pairs])


def unrolled_loss(
    head: Head,
    recipe: UnrolledRecipe,
    tokens_BT: Tensor,
    features_BTF: Tensor,
    logits_BTM: Tensor,
) -> Tensor:
    """The weighted mean of the losses of all steps, in nats (total variation: a probability)."""
    steps = recipe.steps
    # The last row's last step reads the last token but one, of which the next is known.
    rows = tokens_BT.shape[1] - steps - 1
    position_1N = torch.arange(rows, device=tokens_BT.device)[None]
    lines = Lines(rows, tokens_BT.device)
    h_BND = head.fused(features_BTF[:, :rows].to(head.dtype))
    loss, weight = h_BND.new_zeros(()), 0.0
    every = torch.arange(head.vocab_size, device=tokens_BT.device)
    kept = every if head.tokens is None else head.tokens
    drafted = torch.full_like(every, -100)
    drafted[kept] = every[: len(kept)]
    for step in range(steps):
        first, last = 1 + step, 1 + step + rows
        h_BND = head.step(tokens_BT[:, first:last], h_BND, position_1N + step, lines.attend)
        log_q_RM = head.logits(h_BND).float().log_softmax(-1).flatten(0, 1)
        target_RM = logits_BTM[:, first:last].flatten(0, 1).float()
        followed_BN = tokens_BT[:, first + 1 : last + 1]
        own = recipe.step_decay**step
        weight += own
        next_R = drafted[followed_BN].flatten()
        loss = loss + own * distance(recipe.loss, target_RM, log_q_RM, next_R)
    return loss / weight


def distance(loss: str, target_RM: Tensor, log_q_RM: Tensor, next_R: Tensor) -> Tensor:
    """Mean distance of the head's laws from the target's over the draft vocabulary.

    `next_R` are the text's own next tokens as draft ids, -100 where they are none.
    """
    if loss == "ce":
        lost = F.nll_loss(log_q_RM, next_R, ignore_index=-100, reduction="sum")
        return lost / (next_R >= 0).sum().clamp(min=1)
    log_p_RM = target_RM.log_softmax(-1)
    if loss == "kl":
        return F.kl_div(log_q_RM, log_p_RM, reduction="batchmean", log_target=True)
    if loss == "reverse-kl":
        return F.kl_div(log_p_RM, log_q_RM, reduction="batchmean", log_target=True)
    return (log_p_RM.exp() - log_q_RM.exp()).clamp(min=0).sum(-1).mean()


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
    target.model.requires_grad_(False)
    head.borrow(TargetParts.of(target, norm=False))
    return head
