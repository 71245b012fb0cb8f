"""Whether two ways of decoding gave the same tokens, and how near a tie was where they did not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.bench.paired import Runs
from outrider.models.base import Rows, Target


def differences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Runs,
    other: Runs,
) -> tuple[int, float | None]:
    """How many texts are equal, and the widest top-two gap where others first differ, or None."""
    gaps: list[float] = []
    for prompt, a, b in zip(prompts, plain, other, strict=True):
        first, second = a[0].tokens, b[0].tokens
        if first != second:
            at = next(i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y)
            gaps.append(_gap(target, [*prompt, *first[:at]]))
    return len(prompts) - len(gaps), max(gaps, default=None)


def _gap(target: Target, tokens: Sequence[int]) -> float:
    """The distance between the two largest logits after the tokens."""
    seq = target.open(len(tokens))
    last = torch.tensor([len(tokens) - 1])
    logits = target.score(
        Rows((seq,), (len(tokens),), torch.tensor(list(tokens)), logits_rows=last)
    )
    target.close(seq)
    best, second = logits[0].float().topk(2).values.tolist()
    return best - second
