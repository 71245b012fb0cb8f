"""A trial at load: rows in chunks, on trees and after rollbacks are rows of a plain pass.

libllama runs families whose memory is of many kinds. That a row sees its own text and nothing else
is tried out, not looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.errors import NonFinite, UnsupportedModel
from outrider.models.base import Rows, Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

    from outrider.models.libllama.file import ModelFile

TRIAL_TOKENS = 8
TRIALS = 4
"""Texts a model is tried on before it is refused."""
TOLERANCE = 0.1
"""Of a row's largest logit. Sums in another order move rows of quantised models by 0.02, as their
activations are rounded to eight bits; a key too many or too few, among so few, moves them more."""


def check_rows_of(target: Target, file: ModelFile) -> None:
    """Compare rows read in every way with those of one plain pass.

    A last bit may send a row of a mixture of experts to another one. That hits a row here and
    there, and not in every text; a row that sees what it must not is wrong in all of them.

    Raises:
        UnsupportedModel: naming the family and the way.
        NonFinite: a model that gives no logits.
    """
    way, error = _worst_way(target, file, 0)
    for attempt in range(1, TRIALS):
        if error < TOLERANCE:
            break
        way, error = _worst_way(target, file, attempt)
    if not error < TOLERANCE:
        raise UnsupportedModel(
            f"the {file.family} model in {str(file.path)!r} cannot be used: its rows {way} differ "
            f"from those of a plain pass by {error:.2f} of the largest logit; give another model"
        )


def _worst_way(target: Target, file: ModelFile, attempt: int) -> tuple[str, float]:
    """How rows came about that differ most from a plain pass's, and by how much."""
    chance = torch.Generator().manual_seed(attempt)
    tokens = torch.randint(0, file.vocab_size, (TRIAL_TOKENS + 1,), generator=chance)
    text, junk = tokens[:-1], tokens[-1:]
    seq = target.open(TRIAL_TOKENS)
    try:
        want = target.score(Rows((seq,), (TRIAL_TOKENS,), text))
    finally:
        target.close(seq)
    if not torch.isfinite(want).all():
        raise NonFinite(
            f"the {file.family} model in {str(file.path)!r} gives NaN or infinite logits; fetch or "
            "convert it again"
        )
    errors = {
        way: _error(got, want[first : first + len(got)])
        for way, (got, first) in _rows_by_way(target, text, junk).items()
    }
    return max(errors.items(), key=lambda found: found[1])


def _rows_by_way(
    target: Target, text: Int64[Tensor, " n"], junk: Int64[Tensor, " 1"]
) -> dict[str, tuple[Float[Tensor, "r V"], int]]:
    """Rows of the text, by how they came about, and where the first of them stands."""
    found: dict[str, tuple[Tensor, int]] = {}
    seq = target.open(TRIAL_TOKENS)
    try:
        target.read(seq, text[:4].tolist())
        if target.scores_trees:
            nodes = torch.cat((text[4:5], junk, text[5:6], junk))
            rows = target.score(Rows((seq,), (4,), nodes, torch.tensor([1, 3, 5, 13])))
            found["on a tree"] = rows[[0, 2]], 4
            target.commit(seq, [0, 2])
        else:
            found["after others"] = target.score(Rows((seq,), (2,), text[4:6])), 4
            target.commit(seq, 2)
        target.score(Rows((seq,), (2,), torch.cat((text[6:7], junk))))
        target.discard(seq)
        found["after a rollback"] = target.score(Rows((seq,), (2,), text[6:8])), 6
    finally:
        target.close(seq)
    return found


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())
