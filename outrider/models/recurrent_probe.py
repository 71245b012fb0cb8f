"""The trial of a model with recurrent state: does its state carry, and can it be put back?

Some families begin every pass of several rows from an empty state. With weights or in arithmetic
where little depends on the state this would go unnoticed, so the state is made loud: multiplied
until rows read one by one hear it, and then rows read together must hear the same.

A text is then read as decoding reads it: in chunks of several sizes, with rows in between that are
forgotten, a commit of fewer rows than were staged, and another sequence beside it. All rows must be
those of one plain forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from outrider.errors import UnsupportedModel
from outrider.models.base import Rows
from outrider.models.capability import TRIAL_TOLERANCE
from outrider.models.recurrent_state import known

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

    from outrider.models.recurrent import RecurrentTarget

NUM_TOKENS = 32
"""Tokens of the trial's text."""

PREFIX, CHUNK = 12, 5
"""Tokens read first, and those read after them one by one and together."""

STATES = ("conv_states", "recurrent_states")
"""The states of transformers' cache layers."""

LOUDNESS = tuple(2.0**power for power in range(6, 61, 6))
"""What a state is multiplied by, in turn, until it is heard."""

HEARD = 0.1
"""A state is heard where it moves rows by so much of their own spread."""

CLEARANCE = 4.0
"""How many times smaller the difference between the two readings must be."""

NUM_STRICT_TOKENS = 64
"""Tokens on which strict compares bits."""


@torch.inference_mode()
def own_rows(model: PreTrainedModel, vocab_size: int) -> Float[Tensor, "n V"]:
    """The model's plain logits of the trial's text, read at once and without a cache.

    Raises:
        UnsupportedModel: the forward fails.
    """
    tokens = _tokens(NUM_TOKENS, vocab_size, model.device)
    try:
        return model(tokens[None], use_cache=False).logits[0]
    except Exception as error:
        raise _failed(model, error) from error


@torch.inference_mode()
def check_state(target: RecurrentTarget, own: Float[Tensor, "n V"]) -> None:
    """Refuse a model whose rows, read in chunks with its state put back, are not its own.

    Raises:
        UnsupportedModel: with what was measured.
    """
    model = target.model
    try:
        cache = target.make_cache()
        if not known(cache):
            kinds = sorted({type(layer).__name__ for layer in cache.layers})
            raise refusal(model, f"its cache has layers that cannot be put back, among {kinds}")
        for kind in STATES:
            _check_heard(target, kind, own[PREFIX : PREFIX + CHUNK])
        rows = _read_with_detours(target)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise _failed(model, error) from error
    worst = float((rows.float() - own.float()).abs().max() / own.float().abs().max())
    if not worst <= TRIAL_TOLERANCE.get(target.dtype, 0.1):
        raise refusal(
            model,
            "rows read in chunks, with its state put back in between, differ from its own by "
            f"{worst:.1e} of the largest logit",
        )


def check_bits(target: RecurrentTarget) -> None:
    """Refuse strict unless rows have the same bits read one by one and in chunks.

    Raises:
        UnsupportedModel: naming the family.
    """
    num_tokens = min(NUM_STRICT_TOKENS, target.max_length or NUM_STRICT_TOKENS)
    tokens = _tokens(num_tokens, target.vocab_size, target.device)
    wanted = _read(target, tokens, [1] * num_tokens)
    for count in (num_tokens, 5, 2, 17):
        if not torch.equal(_read(target, tokens, [count] * -(-num_tokens // count)), wanted):
            raise UnsupportedModel(
                f"strict=True cannot be kept by the {target.model.config.model_type} model in "
                f"{target.dtype} here: its recurrent state gets other bits from rows read together "
                "than from rows read one by one; use strict=False"
            )


def refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    """The error for a model that cannot be a target, with the reason."""
    return UnsupportedModel(
        f"the {model.config.model_type} model {type(model).__name__} keeps recurrent state and "
        f"cannot be a target: {reason}; use another model"
    )


def _failed(model: PreTrainedModel, error: Exception) -> UnsupportedModel:
    return refusal(model, f"a trial forward failed ({type(error).__name__}: {error})")


def _read_with_detours(target: RecurrentTarget) -> Tensor:
    tokens = _tokens(NUM_TOKENS, target.vocab_size, target.device)
    rubbish = tokens.flip(0)
    seq, other = target.open(NUM_TOKENS), target.open(NUM_TOKENS)
    out = [_score(target, seq, tokens[:PREFIX])]
    target.commit(seq, PREFIX)
    _score(target, seq, rubbish[:4])
    target.discard(seq)
    _score(target, other, rubbish[:7])
    out.append(_score(target, seq, tokens[PREFIX : PREFIX + CHUNK]))
    # The first two of five: they are pending again, and read with the rows behind them.
    target.commit(seq, 2)
    target.commit(other, 7)
    again = target.length(seq)
    for count in (7, 1, 1, NUM_TOKENS):
        rows = _score(target, seq, tokens[target.length(seq) :][:count])
        target.commit(seq, len(rows))
        out.append(rows[PREFIX + CHUNK - again :] if again < PREFIX + CHUNK else rows)
        again = target.length(seq)
    target.close(seq)
    target.close(other)
    return torch.cat(out)


def _check_heard(target: RecurrentTarget, kind: str, own: Tensor) -> None:
    """Refuse a model whose passes of several rows do not go on from its states of one kind."""
    for factor in LOUDNESS:
        apart = _read_scaled(target, kind, factor, [1] * CHUNK)
        if apart is None:
            return
        effect = _difference(apart, own)
        if not effect >= HEARD:
            continue
        together = _read_scaled(target, kind, factor, [CHUNK])
        if together is None or not _difference(together, apart) * CLEARANCE <= effect:
            raise refusal(target.model, f"its passes of several rows do not go on from its {kind}")
        return


def _read_scaled(
    target: RecurrentTarget, kind: str, factor: float, counts: list[int]
) -> Tensor | None:
    """The chunk's rows after the states of one kind were multiplied; None without such states."""
    tokens = _tokens(NUM_TOKENS, target.vocab_size, target.device)
    seq = target.open(NUM_TOKENS)
    _score(target, seq, tokens[:PREFIX])
    target.commit(seq, PREFIX)
    states = [
        state
        for layer in target.state(seq).cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for state in getattr(layer, kind).values()
        if state is not None
    ]
    for state in states:
        state.mul_(factor)
    rows = _go_on(target, seq, tokens[PREFIX : PREFIX + CHUNK], counts) if states else None
    target.close(seq)
    return rows


def _read(target: RecurrentTarget, tokens: Tensor, counts: list[int]) -> Tensor:
    seq = target.open(len(tokens))
    rows = _go_on(target, seq, tokens, counts)
    target.close(seq)
    return rows


def _go_on(target: RecurrentTarget, seq: int, tokens: Tensor, counts: list[int]) -> Tensor:
    out: list[Tensor] = []
    for count in counts:
        read = sum(map(len, out))
        out.append(_score(target, seq, tokens[read : read + count]))
        target.commit(seq, len(out[-1]))
    return torch.cat(out)


def _score(target: RecurrentTarget, seq: int, tokens: Tensor) -> Tensor:
    return target.score(Rows((seq,), (len(tokens),), tokens))


def _tokens(count: int, vocab_size: int, device: torch.device) -> Int64[Tensor, " n"]:
    return (torch.arange(1, count + 1, device=device) * 7919) % vocab_size


def _difference(got: Tensor, own: Tensor) -> float:
    """The root mean square of the differences, in units of the spread of the rows' own logits."""
    got, own = got.float(), own.float()
    return float((got - own).square().mean().sqrt() / own.std().clamp_min(1e-30))
