"""A head with a cache of keys and values: rows staged, then committed or discarded.

Row i of a sequence is the head's reading of the feature behind token i and of token i + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.cache import CacheManager
from outrider.errors import TargetShapeMismatch, UnsupportedModel, VocabularyMismatch
from outrider.models.attention_cpu import attend_cpu
from outrider.models.attention_op import Forward, Options
from outrider.models.base import Rows, Target, check_tokens
from outrider.models.eagle import EagleHead
from outrider.models.hf import HuggingFaceTarget
from outrider.models.packing import arrange_linears
from outrider.models.plan import make_plan

if TYPE_CHECKING:
    from jaxtyping import Float


class CachedHead:
    """A head behind `score`, `commit` and `discard`, as a target is."""

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self._cache = CacheManager(share_prefixes=False)
        self._options = Options(head.shape.head_size**-0.5)

    def open(self, reserve: int) -> int:
        """Return the handle of a new, empty sequence that may grow to `reserve` rows (a hint)."""
        return self._cache.open(reserve)

    def length(self, seq: int) -> int:
        """Return the number of committed rows."""
        return self._cache.length(seq)

    @torch.inference_mode()
    def score(
        self, rows: Rows, h_RD: Float[Tensor, "R D"]
    ) -> tuple[Float[Tensor, "wanted M"], Float[Tensor, "wanted D"]]:
        """Stage rows of tokens and of the features before them.

        Returns logits over the draft vocabulary and features, both after the wanted rows.
        """
        check_tokens(rows.tokens_R.tolist(), self.head.shape.vocab_size)
        device = h_RD.device
        plan = make_plan(self._cache, rows, device)
        forward = Forward(self._cache, plan, attend_cpu)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return forward.attend(0, query, keys, values, self._options)

        tokens_1R = rows.tokens_R.to(device)[None]
        out_RD = self.head.step(tokens_1R, h_RD[None], plan.positions[None], attend)[0]
        for seq, span in zip(rows.seqs, plan.spans, strict=True):
            self._cache.stage(seq, span.num_rows, span.ancestors)
        if rows.logits_rows is not None:
            out_RD = out_RD[rows.logits_rows]
        return self.head.logits(out_RD), out_RD

    def commit(self, seq: int, rows: int) -> None:
        """Keep the first `rows` staged rows; forget the others."""
        self._cache.commit(seq, rows)

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence."""
        self._cache.discard(seq)

    def close(self, seq: int) -> None:
        """Give back the sequence's memory."""
        self._cache.close(seq)


def fitted(head: EagleHead, target: Target) -> EagleHead:
    """The head in its target's dtype, on its device, with its embeddings, ready to draft.

    Raises:
        UnsupportedModel: a target without hidden states to be had.
        VocabularyMismatch, TargetShapeMismatch: the target is another than the head's.
    """
    if not isinstance(target, HuggingFaceTarget):
        raise UnsupportedModel(
            "an EAGLE head reads hidden states of a Hugging Face model with a cache of keys and "
            f"values, and the target is a {type(target).__name__}; use drafter='ngram'"
        )
    check_fits(head, target)
    with target.tapping(head.shape.taps):
        pass
    head.borrow(target.model.get_input_embeddings())
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    arrange_linears(head)
    return head


def check_fits(head: EagleHead, target: HuggingFaceTarget) -> None:
    """Refuse a head of another target's shape.

    Raises:
        VocabularyMismatch: another vocabulary.
        TargetShapeMismatch: another width.
    """
    shape, config = head.shape, target.model.config.get_text_config()
    if shape.vocab_size != target.vocab_size:
        raise VocabularyMismatch(
            f"the head was made for a vocabulary of {shape.vocab_size} tokens, the target has "
            f"{target.vocab_size}; give the head of this target"
        )
    if shape.hidden_size != config.hidden_size:
        raise TargetShapeMismatch(
            f"the head reads hidden states of width {shape.hidden_size}, the target's are "
            f"{config.hidden_size} wide; give the head of this target"
        )
