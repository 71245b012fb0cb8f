"""What a model must be able to do to be a target, found out by looking and by a trial.

Refused by name, with the reason: encoder-decoders, recurrent or hybrid state (`RecurrentTarget` is
for it), attention that does not pass transformers' attention interface, positions that cannot be
given, masks that are neither causal nor sliding windows. The trial compares a dozen tokens with the
model's own attention.
"""

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModel
from outrider.models.attention_op import LayerCall, observing
from outrider.models.registration import NAME, MaskRequest, observing_masks

TRIAL_TOKENS = 12
TRIAL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference allowed, in units of the largest logit."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

RECURRENT_MARKS = (
    "mamba",
    "ssm",
    "rwkv",
    "conv",
    "linear_attention",
    "recurrent",
    "xlstm",
    "deltanet",
)


@dataclass(slots=True)
class Trial:
    """What the trial forward saw: each attention call, and each mask the family asked for."""

    calls: list[LayerCall] = field(default_factory=list)
    masks: list[MaskRequest] = field(default_factory=list)


def check_by_looking(model: PreTrainedModel) -> None:
    """Refuse what configuration and signature already rule out.

    Raises:
        UnsupportedModel: naming the family and the reason.
    """
    config = model.config
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise _refusal(
            model, "it is an encoder-decoder; only decoder-only language models can be a target"
        )
    if keeps_recurrent_state(model):
        raise UnsupportedModel(
            f"the {config.model_type} model {type(model).__name__} keeps recurrent state, which "
            "blocks of keys and values do not hold; wrap it in outrider.models.RecurrentTarget"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(model, "its forward takes no position_ids, so rows cannot be placed")
    if getattr(text, "alibi", False):
        raise _refusal(model, "its attention bias (alibi) is built from a mask, not from positions")
    if not model._can_set_attn_implementation():
        raise _refusal(model, "its attention does not go through transformers' attention interface")


def keeps_recurrent_state(model: PreTrainedModel) -> bool:
    """Return whether configuration or class say that some layers carry a state along the text."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    marked = any(mark in str(kind) for kind in kinds for mark in RECURRENT_MARKS)
    return marked or bool(getattr(model, "_is_stateful", False))


def refuse_experts(model: PreTrainedModel) -> None:
    """Refuse a mixture of experts for strict: an expert sees as many rows as the others leave it.

    Raises:
        UnsupportedModel: naming the family.
    """
    text = model.config.get_text_config()
    if any((getattr(text, name, None) or 1) > 1 for name in EXPERT_COUNTS):
        raise UnsupportedModel(
            f"strict=True cannot be kept by the {model.config.model_type} model: its experts see "
            "varying numbers of rows, so a row's bits depend on its neighbours; use strict=False"
        )


def try_out(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Set the model's attention to the op and try it; return its own eager logits.

    Raises:
        UnsupportedModel: naming the family and the reason.
    """
    try:
        own = own_logits(model, tokens)
        model.set_attn_implementation(NAME)
        trial = observe(model, tokens)
    except Exception as error:
        raise _refusal(
            model, f"a trial forward failed ({type(error).__name__}: {error})"
        ) from error
    check_trial(model, trial)
    return own


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return `[n, V]`: the model's own eager attention on a few tokens."""
    before = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        return model(tokens[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


@torch.inference_mode()
def observe(model: PreTrainedModel, tokens: Tensor) -> Trial:
    """Run the model once through the op outside of any cache, and note what the op is asked for."""
    trial = Trial()
    with observing(trial.calls.append), observing_masks(trial.masks.append):
        model(
            tokens[None],
            position_ids=torch.arange(len(tokens), device=tokens.device)[None],
            use_cache=False,
        )
    return trial


def check_trial(model: PreTrainedModel, trial: Trial) -> None:
    """Refuse what the trial shows: layers that bypass the op, unknown masks, lost windows.

    Raises:
        UnsupportedModel: naming the family and the reason.
    """
    layers = {call.layer for call in trial.calls}
    wanted = model.config.get_text_config().num_hidden_layers
    if len(layers) != wanted or None in layers:
        raise _refusal(
            model,
            f"{len(layers)} of its {wanted} layers call the attention interface by their own index",
        )
    for request in trial.masks:
        if not _is_causal_or_window(request):
            raise _refusal(
                model, "it masks attention otherwise than causally or by a sliding window"
            )
    asked = {request.window for request in trial.masks}
    for call in trial.calls:
        unequal = call.window != call.mask_window if call.mask_known else {call.window} != asked
        if unequal:
            raise _refusal(
                model, f"layer {call.layer} names window {call.window} but masks {call.mask_window}"
            )


def check_logits(model: PreTrainedModel, got: Tensor, own: Tensor) -> None:
    """Refuse a model whose rows through the op are not its own.

    Raises:
        UnsupportedModel: with the measured difference.
    """
    error = float(
        (got.float() - own.float()).abs().max() / own.float().abs().max().clamp_min(1e-30)
    )
    if not error <= TRIAL_TOLERANCE.get(own.dtype, 0.1):
        raise _refusal(
            model,
            f"its rows through the op differ from its own by {error:.1e} of the largest logit",
        )


def trial_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """Return a few different token ids, int64."""
    return (torch.arange(1, TRIAL_TOKENS + 1, device=device) * 7919) % vocab_size


def _is_causal_or_window(request: MaskRequest) -> bool:
    window = request.window
    rows = [0, 1, 11] if window is None else [0, 1, window - 1, window, 2 * window + 1]
    for row in rows:
        keys = torch.arange(row + 3)
        seen = torch.as_tensor(
            request.function(torch.tensor(0), torch.tensor(0), torch.tensor(row), keys)
        )
        wanted = (keys <= row) & (torch.tensor(True) if window is None else keys > row - window)
        if not torch.equal(seen.expand(len(keys)).cpu(), wanted):
            return False
    return True


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    family = model.config.model_type
    return UnsupportedModel(
        f"the {family} model {type(model).__name__} cannot be a target: {reason}; use another model"
    )
