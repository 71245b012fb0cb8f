"""A dozen tokens read in every way a round reads them: chunks, a batch, a tree.

Two texts part after nine tokens. The first is read, committed, and continued by a tree whose
branch is the second's end; the second goes along as a chain. Each row has a plain forward of the
model to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.base import Rows, Target
from outrider.models.plan import chain_ancestors

LENGTH, FORK, FIRST, SECOND = 12, 9, 7, 3
"""Tokens of the first text, those both share, and those of each that are read at first."""


@dataclass(frozen=True, slots=True)
class TrialTexts:
    """The two texts: `main` of 12 tokens, `other` of 10, int64."""

    main: Tensor
    other: Tensor


def trial_texts(vocab_size: int, device: torch.device, attempt: int = 0) -> TrialTexts:
    """Return two texts of a few different tokens, others at each attempt."""
    first = 1 + attempt * (LENGTH + 1)
    tokens = (torch.arange(first, first + LENGTH + 1, device=device) * 7919) % vocab_size
    return TrialTexts(tokens[:LENGTH], torch.cat((tokens[:FORK], tokens[LENGTH:])))


def trial_rows(
    target: Target, texts: TrialTexts, score: Callable[[Rows], Tensor] | None = None
) -> Tensor:
    """Return all rows' logits: 7 and 3 of the texts' first tokens, the tree, the other's rest.

    `score` is another way to the target's rows than its own.
    """
    score = target.score if score is None else score
    main, other = texts.main.cpu(), texts.other.cpu()
    seqs = target.open(LENGTH), target.open(FORK + 1)
    try:
        first = score(Rows(seqs, (FIRST, SECOND), torch.cat((main[:FIRST], other[:SECOND]))))
        for seq, count in zip(seqs, (FIRST, SECOND), strict=True):
            target.commit(seq, count)
        chain = chain_ancestors(LENGTH - FIRST)
        branch = chain[FORK - FIRST - 1] | 1 << len(chain)
        rest = other[SECOND:]
        rows = torch.cat((main[FIRST:], other[-1:], rest))
        ancestors = torch.cat((chain, branch[None], chain_ancestors(len(rest))))
        second = score(Rows(seqs, (len(chain) + 1, len(rest)), rows, ancestors))
    finally:
        for seq in seqs:
            target.close(seq)
    return torch.cat((first, second))


def trial_wanted(own_main: Tensor, own_other: Tensor) -> Tensor:
    """Return plain logits in the order of `trial_rows`."""
    return torch.cat(
        (own_main[:FIRST], own_other[:SECOND], own_main[FIRST:], own_other[-1:], own_other[SECOND:])
    )
