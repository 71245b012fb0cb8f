"""Arrays as users hand them in: turned into tensors, and refused where they cannot be meant."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import (
    DegenerateDistribution,
    DistributionWidthMismatch,
    DraftShapeMismatch,
    InvalidConfig,
    NonFinite,
    TargetShapeMismatch,
    TokenOutOfRange,
)

Array: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
"""What the functions here take: tensors, numpy arrays or nested lists."""

MASS_TOLERANCE = 1e-2
"""How far a law's mass may be from one: rows rounded to bfloat16 or float16 come within half."""


def check_seed(seed: int) -> int:
    """The seed as a Python int; raises InvalidConfig outside [0, 2**64)."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**64:
        raise InvalidConfig(f"seed={seed!r}: a whole number in [0, 2**64) is due")
    return number


def _tensor(name: str, array: Array) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    try:
        return torch.from_numpy(np.array(array))
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"{name} is no array of numbers: {error}") from error


def floats(name: str, array: Array) -> Tensor:
    """As a float32 tensor, float64 where it is that; InvalidConfig where it holds no floats."""
    values = _tensor(name, array)
    if values.is_floating_point():
        return values if values.dtype == torch.float64 else values.float()
    if not isinstance(array, (Tensor, np.ndarray)) and values.dtype == torch.int64:
        return values.float()  # a nested list such as [[0, 1]]
    raise InvalidConfig(f"{name} has dtype {values.dtype}; a floating dtype is due")


def integers(name: str, array: Array) -> Tensor:
    """As an int64 tensor; InvalidConfig for other numbers than integers."""
    values = _tensor(name, array)
    if values.numel() == 0 and not isinstance(array, (Tensor, np.ndarray)):
        return values.long()  # an empty list has no dtype of its own
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InvalidConfig(f"{name} has dtype {values.dtype}; an integer dtype is due")
    return values.long()


def float_row(name: str, array: Array) -> Tensor:
    """One row as float64."""
    row = floats(name, array).double()
    if row.ndim != 1:
        raise InvalidConfig(f"{name} has shape {tuple(row.shape)}; one row [V] is due")
    return row


def exp_row(name: str, array: Array) -> Tensor:
    """One row of log-probabilities as probabilities; NonFinite for NaN and +inf."""
    row = float_row(name, array)
    if row.isnan().any() or (row == torch.inf).any():
        raise NonFinite(f"{name} holds NaN or +inf; natural log-probabilities or -inf are due")
    return row.exp()


def check_probs(name: str, probs: Tensor) -> None:
    """Refuses NaN, infinities and negative numbers."""
    if not probs.isfinite().all():
        raise NonFinite(f"{name} holds NaN or an infinity; probabilities are due")
    if (probs < 0).any():
        raise InvalidConfig(f"{name} holds {float(probs.min())}; no probability is negative")


def check_shapes(draft_BKV: Tensor | None, target_BTV: Tensor, tokens_BK: Tensor) -> None:
    """Refuses parts whose shapes disagree."""
    if tokens_BK.ndim != 2:
        raise DraftShapeMismatch(f"draft_tokens has shape {tuple(tokens_BK.shape)}; [B, K] is due")
    num_texts, depth = tokens_BK.shape
    if target_BTV.ndim != 3 or target_BTV.shape[:2] != (num_texts, depth + 1):
        raise TargetShapeMismatch(
            f"target_probs has shape {tuple(target_BTV.shape)}; "
            f"[{num_texts}, {depth + 1}, V] is due: one row more than drafted tokens"
        )
    width = target_BTV.shape[2]
    if width == 0:
        raise DegenerateDistribution("target_probs has shape [..., 0]: a vocabulary is due")
    if draft_BKV is None:
        return
    if draft_BKV.ndim != 3 or draft_BKV.shape[:2] != (num_texts, depth):
        raise DraftShapeMismatch(
            f"draft_probs has shape {tuple(draft_BKV.shape)}; "
            f"[{num_texts}, {depth}, {width}] is due"
        )
    if draft_BKV.shape[2] != width:
        raise DistributionWidthMismatch(
            f"draft_probs covers {draft_BKV.shape[2]} tokens, target_probs {width}"
        )


def chain_lengths(draft_lengths: Array | None, tokens_BK: Tensor) -> Tensor:
    """Drafted tokens of each chain, K where nothing is said."""
    num_texts, depth = tokens_BK.shape
    if draft_lengths is None:
        return torch.full((num_texts,), depth, device=tokens_BK.device)
    lengths_B = integers("draft_lengths", draft_lengths).to(tokens_BK.device)
    if lengths_B.shape != (num_texts,):
        raise DraftShapeMismatch(
            f"draft_lengths has shape {tuple(lengths_B.shape)}; [{num_texts}] is due"
        )
    if ((lengths_B < 0) | (lengths_B > depth)).any():
        raise DraftShapeMismatch(f"draft_lengths={lengths_B.tolist()}: each must lie in 0..{depth}")
    return lengths_B


def check_values(
    draft_BKV: Tensor | None, target_BTV: Tensor, tokens_BK: Tensor, lengths_B: Tensor
) -> Tensor:
    """Checks what will be read; returns the tokens with padding set to 0."""
    width, depth = target_BTV.shape[2], tokens_BK.shape[1]
    drafted_BK = torch.arange(depth, device=tokens_BK.device) < lengths_B[:, None]
    wrong_BK = drafted_BK & ((tokens_BK < 0) | (tokens_BK >= width))
    if wrong_BK.any():
        raise TokenOutOfRange(
            f"draft_tokens holds {int(tokens_BK[wrong_BK][0])}; the vocabulary is 0..{width - 1}"
        )
    read_BT = torch.nn.functional.pad(drafted_BK, (1, 0), value=True)
    check_probs("target_probs", target_BTV[read_BT])
    _check_masses("target_probs", target_BTV, read_BT)
    if draft_BKV is not None:
        check_probs("draft_probs", draft_BKV[drafted_BK])
        _check_masses("draft_probs", draft_BKV, drafted_BK)
    return tokens_BK.masked_fill(~drafted_BK, 0)


def _check_masses(name: str, probs: Tensor, read: Tensor) -> None:
    """Refuses rows that are read and do not sum to one."""
    mass = probs[read].sum(-1)
    wrong = ((mass - 1).abs() > MASS_TOLERANCE).nonzero()
    if len(wrong):
        first = int(wrong[0])
        row = tuple(read.nonzero()[first].tolist())
        raise DegenerateDistribution(
            f"{name} row {row} has mass {float(mass[first]):.6g}; a law sums to one: give "
            "probabilities, such as softmax makes of logits"
        )
