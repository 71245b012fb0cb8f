"""Controls that look at the text: penalties, bans and biases on rows of logits, and typical_p.

Pure functions of rows and of what stands before them; who keeps count of a text is the engine.
Forbidden tokens have logit -inf, which every later control leaves as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64, UInt8


def allow(rows_nV: Float[Tensor, "n V"], ids_M: Int64[Tensor, " M"]) -> None:
    """Forbids every token but `ids_M`, in place."""
    kept_nM = rows_nV[:, ids_M]
    rows_nV.fill_(-torch.inf)
    rows_nV[:, ids_M] = kept_nM


def allow_bits(rows_nV: Float[Tensor, "n V"], bits_nM: UInt8[Tensor, "n M"]) -> None:
    """Forbids every token whose bit is not set, in place: token t is bit t % 8 of byte t // 8."""
    bit_8 = torch.arange(8, dtype=torch.uint8, device=bits_nM.device)
    set_nV = ((bits_nM[:, :, None] >> bit_8) & 1).flatten(1)[:, : rows_nV.shape[1]]
    rows_nV.masked_fill_(set_nV == 0, -torch.inf)


def forbid(rows_nV: Float[Tensor, "n V"], banned: Sequence[Iterable[int]]) -> None:
    """Forbids the tokens in `banned[r]` in row r, in place."""
    places = [(row, token) for row, tokens in enumerate(banned) for token in tokens]
    if places:
        at_2k = torch.tensor(places, device=rows_nV.device).T
        rows_nV[at_2k[0], at_2k[1]] = -torch.inf


def bias(
    rows_nV: Float[Tensor, "n V"], ids_M: Int64[Tensor, " M"], bias_M: Float[Tensor, " M"]
) -> None:
    """Adds a number to the logits of some tokens, in place; ids are distinct."""
    rows_nV[:, ids_M] += bias_M.to(rows_nV.dtype)


def penalised(
    logits_nM: Float[Tensor, "n M"],
    seen_nM: Bool[Tensor, "n M"],
    counts_nM: Float[Tensor, "n M"],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Float[Tensor, "n M"]:
    """Logits of tokens after the repetition, presence and frequency penalties, in this order.

    Repetition divides the positive and multiplies the negative logits of tokens seen (Keskar et
    al. 2019, arXiv 1909.05858, equation 3, in the form of transformers and vLLM). Presence is
    subtracted once from tokens with a count, frequency as many times as it says.

    Args:
        logits_nM: logits of M tokens in n rows.
        seen_nM: tokens that stand in the prompt or the output before the row.
        counts_nM: how many times they stand in the output before the row.
        repetition: positive; 1 is off.
        presence: 0 is off.
        frequency: 0 is off.
    """
    # Products and differences are rounded one by one: a fused step would round otherwise in the
    # vectorised part of a row than in its rest, and plain and drafted rows have different widths.
    if repetition != 1:
        changed_nM = torch.where(logits_nM < 0, logits_nM * repetition, logits_nM / repetition)
        logits_nM = torch.where(seen_nM, changed_nM, logits_nM)
    if presence != 0:
        logits_nM = logits_nM - (counts_nM > 0).to(logits_nM.dtype) * presence
    if frequency != 0:
        logits_nM = logits_nM - counts_nM.to(logits_nM.dtype) * frequency
    return logits_nM


def last_of_words(words: Iterable[Sequence[int]], before: Sequence[int]) -> set[int]:
    """The last token of each word whose other tokens end `before`: what may not come next.

    A word of one token always counts. transformers' NoBadWordsLogitsProcessor does the same.
    """
    found: set[int] = set()
    for word in words:
        num = len(word) - 1
        # Most words fail at the token nearest to their end.
        if num and (num > len(before) or before[-1] != word[num - 1]):
            continue
        if tuple(before[len(before) - num :]) == tuple(word[:-1]):
            found.add(word[-1])
    return found


def repeating(before: Sequence[int], size: int, start: int = 0) -> set[int]:
    """Tokens that would end an n-gram of `size` tokens a second time after `before`.

    Only n-grams that end at index `start` of `before` or later are looked at.
    """
    num = size - 1
    if len(before) < num:
        return set()
    last = tuple(before[len(before) - num :])
    ends = range(max(num, start), len(before))
    return {before[end] for end in ends if tuple(before[end - num : end]) == last}


def typical(scores_RV: Float[Tensor, "R V"], mass_R: Float[Tensor, " R"]) -> Float[Tensor, "R V"]:
    """Keeps the tokens whose surprise is nearest to the row's entropy, up to a mass.

    Locally typical sampling (Meister et al. 2022, arXiv 2202.00666, equation 8), with the ties of
    transformers' TypicalLogitsWarper: all that are as far from the entropy as the last one needed.
    """
    logprobs_RV = torch.log_softmax(scores_RV, -1)
    entropy_R1 = -(logprobs_RV * logprobs_RV.exp()).nansum(-1, keepdim=True)
    far_RV = (-logprobs_RV - entropy_R1).abs()
    sorted_RV, order_RV = far_RV.sort(dim=-1, stable=True)
    upto_RV = scores_RV.gather(1, order_RV).softmax(-1).cumsum(-1)
    num_R1 = (upto_RV < mass_R.to(scores_RV.dtype)[:, None]).sum(-1, keepdim=True)
    most_R1 = sorted_RV.gather(1, num_R1.clamp_(max=scores_RV.shape[1] - 1))
    return scores_RV.masked_fill(far_RV > most_R1, -torch.inf)
