"""A target's final norm and output layer, through which gradients of a head before them pass.

That nothing else lies between them and the logits a trial tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import UnsupportedModel
from outrider.models.base import Rows
from outrider.models.capability import is_close, row_errors
from outrider.models.head import final_norm
from outrider.models.hf import HuggingFaceTarget

if TYPE_CHECKING:
    from jaxtyping import Float

TRIAL_ROWS = 8


class ExitTail:
    """From states before the final norm to logits; nothing of it learns.

    Raises:
        UnsupportedModel: a target whose logits are more than final norm and output layer.
    """

    def __init__(self, target: HuggingFaceTarget) -> None:
        model: Any = target.model
        config = model.config.get_text_config()
        output = model.get_output_embeddings()
        self._output = output.weight.detach(), getattr(output, "bias", None)
        self._norm = final_norm(target)
        states_RD, logits_RV = _read(target, int(config.num_hidden_layers))
        with torch.no_grad():
            error = float(row_errors(self(states_RD), logits_RV).max())
        if not is_close(model, error):
            raise UnsupportedModel(
                f"no early-exit head can be trained for the {config.model_type} model "
                f"{type(model).__name__}: its logits are more than its final norm and its output "
                f"layer make of hidden states (they differ by {error:.1e} of the largest); "
                "early-exit:L needs no training"
            )

    def __call__(self, h_RD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """The logits, in the model's dtype."""
        weight_VD, bias_V = self._output
        return F.linear(self._norm(h_RD.to(weight_VD.dtype)), weight_VD, bias_V)


def _read(target: HuggingFaceTarget, depth: int) -> tuple[Tensor, Tensor]:
    """Last states and logits of a few rows."""
    seq = target.open(TRIAL_ROWS)
    tokens_R = torch.arange(1, 1 + TRIAL_ROWS) % target.vocab_size
    try:
        with target.uncompiled(), target.tapping((depth,)) as taps:
            logits_RV = target.score(Rows((seq,), (TRIAL_ROWS,), tokens_R))
        return taps.of(seq).clone(), logits_RV.clone()
    finally:
        target.close(seq)
