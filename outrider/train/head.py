"""What heads of every kind learn from: text, what their target writes, and its laws on both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.drafters import Drafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import ModelError
from outrider.models.base import Rows, Target
from outrider.models.hf import HuggingFaceTarget
from outrider.train.chance import generator
from outrider.train.forward import mixed
from outrider.train.kept import Kept, row_bytes
from outrider.train.recipe import HeadRecipe
from outrider.train.stream import TokenStream
from outrider.train.together import ALONE, Together
from outrider.types import Compile, Completion, Request, SamplingParams

PROMPTS, NEW_TOKENS, DEPTH = 8, 48, 4
"""Held-out prompts that are drafted for, tokens made of each, and how far ahead."""


class HeadObjective(ABC):
    """A head's loss on text and on its target's own continuations of it."""

    figure = "held-out accepted length"

    def __init__(
        self,
        recipe: HeadRecipe,
        target: HuggingFaceTarget,
        train: Sequence[Sequence[int]],
        held_out: Sequence[Sequence[int]],
        end_id: int,
        compile: Compile = False,
    ) -> None:
        self._recipe, self._target = recipe, target
        self._compile: Compile = compile
        target.model.requires_grad_(False)
        self._stream = TokenStream(train, end_id, recipe.seed)
        self._held_out = TokenStream(held_out, end_id, recipe.seed)
        self._written = torch.empty(0, recipe.train.context, dtype=torch.int32)
        self._kept, self._row_bytes = Kept(recipe.head), 0

    @abstractmethod
    def loss(self, model: Any, tokens_BT: Tensor, whole_BT: Tensor, step: int) -> Tensor:
        """The loss on some of a step's rows, with its gradients; the whole step's is their mean."""

    @abstractmethod
    def drafter(self, model: Any) -> Drafter:
        """A drafter of a copy of the head as it is now."""

    def state(self) -> dict[str, Tensor]:
        """What the target wrote: other machines would not write it again."""
        return {"written": self._written}

    @property
    def kept_bytes(self) -> int:
        """What this process keeps of readings in the end; known once a row has been read."""
        return self._kept.size(self._row_bytes) if self._row_bytes else 0

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from another object's `state`."""
        self._take(state["written"])

    def backward(self, model: Any, step: int, together: Together = ALONE) -> float:
        """Add one step's gradients, those of this process's rows, and return their loss."""
        run = self._recipe.train
        if self._recipe.head.written_share and not len(self._written):
            self._write(together)
        tokens_BT = self._rows(step)
        total = 0.0
        at_once = min(run.micro_tokens // run.context, len(tokens_BT) // together.count)
        micro = tokens_BT.split(max(1, at_once))
        for _, micro_BT in together.share(micro):
            with mixed(run, self._target.device):
                loss = self.loss(model, micro_BT, tokens_BT, step)
            share = len(micro_BT) / len(tokens_BT)
            (share * loss).backward()
            total += share * loss.item()
        return total

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which a step takes another time."""
        return (0,)

    def rehearse(self, model: Any, step: int) -> int:
        """One micro-batch of text, gradients included; how many tokens it had."""
        run = self._recipe.train
        count = max(1, min(run.micro_tokens, run.batch_tokens) // run.context)
        tokens_BT = self._stream.rows(0, count * run.context, run.context)[0]
        with mixed(run, self._target.device):
            loss = self.loss(model, tokens_BT, tokens_BT, step)
        loss.backward()
        return tokens_BT.numel()

    def held_out(self, model: Any) -> float:
        """Mean accepted length of greedy chains of DEPTH drafted tokens after held-out prompts."""
        size = self._recipe.head.prompt_tokens
        return accepted_length(self._target, self.drafter(model), self._held_out, size)

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

    def _read(
        self, tokens_BT: Tensor, taps: tuple[int, ...], kept_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The target's states behind some layers, and its log law at some tokens or all, by rows.

        The law is that of the whole vocabulary.
        """
        own = [i for i, row_T in enumerate(tokens_BT) if self._kept.expects(row_T)]
        if not own:
            return self._read_anew(tokens_BT, taps, kept_M)
        others = [i for i in range(len(tokens_BT)) if i not in own]
        read: dict[int, tuple[Tensor, Tensor]] = {}
        for i in own:
            read[i] = self._kept.reading(
                tokens_BT[i : i + 1], lambda row: self._read_anew(row, taps, kept_M)
            )
        if others:
            fresh = self._read_anew(tokens_BT[others], taps, kept_M)
            read |= {i: (fresh[0][j, None], fresh[1][j, None]) for j, i in enumerate(others)}
        device, in_order = self._target.device, [read[i] for i in range(len(tokens_BT))]
        features = torch.cat([part.to(device) for part, _ in in_order])
        return features, torch.cat([part.to(device).float() for _, part in in_order])

    def _read_anew(
        self, tokens_BT: Tensor, taps: tuple[int, ...], kept_M: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        size, target = tokens_BT.shape[1], self._target
        seqs = [target.open(size) for _ in tokens_BT]
        try:
            # The head's products may be in another precision; the laws it learns are the target's.
            whole = torch.autocast(target.device.type, enabled=False)
            with whole, target.tapping(taps) as tapped:
                rows = Rows(tuple(seqs), (size,) * len(seqs), tokens_BT.flatten())
                logits_RV = target.score(rows).float()
            norm_R1 = logits_RV.logsumexp(-1, keepdim=True)
            log_p_RM = (logits_RV if kept_M is None else logits_RV[:, kept_M]) - norm_R1
            features = [tapped.of(seq) for seq in seqs]
        finally:
            for seq in seqs:
                target.close(seq)
        # Copies: what is made in inference mode cannot be differentiated through.
        made = torch.stack(features).clone(), log_p_RM.view(*tokens_BT.shape, -1)
        self._row_bytes = row_bytes(*made)
        return made

    def _write(self, together: Together) -> None:
        """Lets the target continue stretches of the text, greedily and at temperature 1.

        Each of several processes writes its share, and gets the others'.
        """
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
        own = range(together.rank, head.written_rows, together.count)
        with compiled_meanwhile(self._target, self._compile):
            done = _complete(
                Engine(self._target, NoDrafter(), Emitter(None)),
                [prompts[i] for i in own],
                [params[i] for i in own],
            )
        written = torch.zeros(head.written_rows, run.context, dtype=torch.int32)
        for i, one in zip(own, done, strict=True):
            written[i] = torch.tensor([*prompts[i], *one.token_ids])
        self._take(together.added(written, self._target.device))

    def _take(self, written: Tensor) -> None:
        self._written = written
        self._kept.expect(written)


@contextmanager
def compiled_meanwhile(target: HuggingFaceTarget, compile: Compile) -> Iterator[None]:
    """The target's forwards compiled: True if they can be, "auto" if they were before.

    Behind it they are the model's own: a run that is resumed reads as the one that was killed.

    Raises:
        UnsupportedModel, ModelError: True, and they cannot be.
    """
    with ExitStack() as stack:
        if compile is True or (compile == "auto" and target.device.type == "cpu"):
            try:
                stack.enter_context(target.compiled(build=compile is True))
            except ModelError:
                if compile is True:
                    raise
        yield


def accepted_length(target: Target, drafter: Drafter, held_out: TokenStream, size: int) -> float:
    """Mean accepted length of greedy chains of DEPTH tokens after prompts of `size` tokens."""
    room = max(1, held_out.epoch_tokens - size)
    prompts = [held_out.read(i * room // PROMPTS, size).tolist() for i in range(PROMPTS)]
    params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)] * PROMPTS
    engine = Engine(target, drafter, Emitter(None))
    _complete(engine, prompts, params)
    return engine.metrics.mean_acceptance_length


def _complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """One continuation of each prompt."""
    requests = Requests(engine, depth=DEPTH, end_tokens=frozenset())
    pairs = zip(prompts, params, strict=True)
    return requests.complete([Request(tuple(p), sampling) for p, sampling in pairs])
