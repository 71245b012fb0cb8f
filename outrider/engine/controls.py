"""Sampling controls of one group of texts: logits in, the requests' own processed laws out."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

import torch
from torch import Tensor

from outrider.decoding import processed_probs
from outrider.sequence import Sequence


class Controls:
    """The sampling parameters of B texts as tensors, one processed law per row.

    Draft and target rows go through the same object, so that one definition serves sampling and the
    acceptance test.
    """

    def __init__(self, texts: Sequenced[Sequence]) -> None:
        self.texts = texts
        params = [text.request.sampling for text in texts]
        self.temperature_B = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        self.top_k_B = torch.tensor([p.top_k for p in params])
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        self.min_p_B = torch.tensor([p.min_p for p in params], dtype=torch.float64)
        self._no_ends = all(
            p.min_tokens == 0 or not (text.end_tokens or p.stop_token_ids)
            for text, p in zip(texts, params, strict=True)
        )

    def masked(self, logits_RV: Tensor, owners: Sequenced[int], ahead: Sequenced[int]) -> Tensor:
        """Logits with the tokens that may not end a text yet at -inf.

        Row r belongs to text `owners[r]` and predicts its token number `num_output + ahead[r]`.
        """
        if self._no_ends:
            return logits_RV
        out = logits_RV.clone()
        for row, (owner, steps) in enumerate(zip(owners, ahead, strict=True)):
            text = self.texts[owner]
            if text.num_output + steps < text.request.sampling.min_tokens:
                ends = text.end_tokens | set(text.request.sampling.stop_token_ids)
                out[row, sorted(ends)] = -torch.inf
        return out

    def probs(self, masked_RV: Tensor, owners: Sequenced[int]) -> Tensor:
        """Processed laws `[R, V]` of masked logits, float32 (float64 stays float64)."""
        rows = torch.tensor(owners)
        return processed_probs(
            masked_RV,
            self.temperature_B[rows],
            self.top_k_B[rows],
            self.top_p_B[rows],
            self.min_p_B[rows],
        )
