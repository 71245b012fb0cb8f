"""What a model must be able to do to be a target, found out by looking and by a trial.

Refused by name, with the reason: encoder-decoders, recurrent or hybrid state (`RecurrentTarget` is
for it), positions that cannot be given, masks that are neither causal nor sliding windows nor
chunks. Attention that does not pass transformers' attention interface goes through the slab
(`hf_slab`), where nothing speaks against it. The trial compares chunks, a tree and a batch of a
dozen tokens with the model's own attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModel
from outrider.models.attention_op import LayerCall, MaskRequest, observing
from outrider.models.doors import InterfaceDoor
from outrider.models.hf_slab import SlabDoor
from outrider.models.reach import Reach, Window, recognise
from outrider.models.registration import NAME, observing_masks

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
    """What the trial forward saw: each attention call, each mask asked for, and the device."""

    calls: list[LayerCall] = field(default_factory=list)
    masks: list[MaskRequest] = field(default_factory=list)
    device: torch.device | None = None


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


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether the model is a mixture of experts."""
    text = model.config.get_text_config()
    return any((getattr(text, name, None) or 1) > 1 for name in EXPERT_COUNTS)


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
    if has_experts(model):
        raise UnsupportedModel(
            f"strict=True cannot be kept by the {model.config.model_type} model: its experts see "
            "varying numbers of rows, so a row's bits depend on its neighbours; use strict=False"
        )


def refuse_slab(model: PreTrainedModel) -> None:
    """Refuse the slab for strict: in a model's own attention a row's bits depend on its neighbours.

    Raises:
        UnsupportedModel: naming the family.
    """
    raise UnsupportedModel(
        f"strict=True cannot be kept by the {model.config.model_type} model: its attention does "
        "not go through transformers' attention interface, and its own keeps no order of "
        "arithmetic; use strict=False"
    )


def through_interface(model: PreTrainedModel, tokens: Tensor) -> InterfaceDoor | str:
    """Set the model's attention to the op, try it, and return the door, or why there is none.

    Raises:
        UnsupportedModel: a mask that no other door could follow either.
    """
    if not model._can_set_attn_implementation():
        return "its attention does not go through transformers' attention interface"
    try:
        model.set_attn_implementation(NAME)
        trial = observe(model, tokens)
    except Exception as error:
        return _failure(error)
    layers = [call.layer for call in trial.calls]
    wanted = model.config.get_text_config().num_hidden_layers
    if len(set(layers)) != wanted or len(layers) != wanted or None in layers:
        return (
            f"{len(set(layers))} of its {wanted} layers call the attention interface by their own "
            f"index, in {len(layers)} calls"
        )
    reaches = check_trial(model, trial)
    text = model.config.get_text_config()
    counts_rows = bool(getattr(text, "attn_temperature_tuning", False))
    return InterfaceDoor(tokens.device, reaches, counts_rows=counts_rows)


def through_slab(model: PreTrainedModel, reason: str) -> SlabDoor:
    """Return the door of a model that keeps its own attention, if nothing speaks against it.

    `reason` is why it does not go through the interface.

    Raises:
        UnsupportedModel: that reason, or one of its own.
    """
    text = model.config.get_text_config()
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise _refusal(model, reason)
    bounded = sorted(name for name in text.to_dict() if _bounds(name, getattr(text, name, None)))
    if bounded:
        raise _refusal(
            model,
            f"its own attention is bounded by {', '.join(bounded)}, which only the attention "
            "interface can follow",
        )
    return SlabDoor(int(text.num_hidden_layers), model.dtype, reason)


def _bounds(name: str, value: object) -> bool:
    if name == "layer_types":
        return value is not None and set(value) != {"full_attention"}  # type: ignore[call-overload]
    marked = any(mark in name for mark in ("window", "chunk", "local", "sparse"))
    return bool(value) and marked and "expert" not in name


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return `[n, V]`: the model's own eager attention on a few tokens.

    Raises:
        UnsupportedModel: its own forward fails.
    """
    before = model.config._attn_implementation or "eager"
    may_set = model._can_set_attn_implementation()
    if may_set:
        model.set_attn_implementation("eager")
    try:
        return model(tokens[None], use_cache=False).logits[0]
    except Exception as error:
        raise failed_trial(model, error) from error
    finally:
        if may_set:
            model.set_attn_implementation(before)


@torch.inference_mode()
def observe(model: PreTrainedModel, tokens: Tensor) -> Trial:
    """Run the model once through the op outside of any cache, and note what the op is asked for."""
    trial = Trial(device=tokens.device)
    with observing(trial.calls.append), observing_masks(trial.masks.append):
        model(
            tokens[None],
            position_ids=torch.arange(len(tokens), device=tokens.device)[None],
            use_cache=False,
        )
    return trial


def check_trial(model: PreTrainedModel, trial: Trial) -> Mapping[int, Reach | None]:
    """Return how far each layer's rows see.

    Raises:
        UnsupportedModel: unknown masks, lost windows.
    """
    try:
        known = {
            id(asked): recognise(asked.function, asked.size, trial.device) for asked in trial.masks
        }
    except (ValueError, IndexError) as error:
        raise _refusal(
            model, "it masks attention otherwise than causally, by a sliding window or by chunks"
        ) from error
    reaches: dict[int, Reach | None] = {}
    for call in trial.calls:
        named = None if call.window is None else Window(call.window)
        reach = None if call.mask is None else known[id(call.mask)]
        if call.mask is None and set(known.values()) != {named}:
            raise _refusal(model, f"layer {call.layer} names {named} and makes a mask of its own")
        if call.mask is not None and named not in (None, reach):
            raise _refusal(model, f"layer {call.layer} names {named} but masks {reach}")
        assert call.layer is not None
        reaches[call.layer] = named if call.mask is None else reach
    return reaches


def row_errors(got: Tensor, own: Tensor) -> Tensor:
    """Return each row's largest difference in units of the largest of the model's own logits."""
    got, own = got.float(), own.float()
    return (got - own).abs().amax(-1) / own.abs().max().clamp_min(1e-30)


def check_logits(model: PreTrainedModel, errors: Tensor) -> None:
    """Refuse a model whose cached rows are not its own.

    Raises:
        UnsupportedModel: with the measured difference.
    """
    error = float(errors.max())
    if not is_close(model, error):
        raise _refusal(
            model, f"its cached rows differ from its own by {error:.1e} of the largest logit"
        )


def is_close(model: PreTrainedModel, error: float) -> bool:
    """Return whether an error is no more than the arithmetic of the model's dtype explains."""
    return error <= TRIAL_TOLERANCE.get(model.dtype, 0.1)


def failed_trial(model: PreTrainedModel, error: Exception) -> UnsupportedModel:
    """Return the refusal of a model whose trial raised."""
    return _refusal(model, _failure(error))


def _failure(error: Exception) -> str:
    return f"a trial forward failed ({type(error).__name__}: {error})"


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    family = model.config.model_type
    return UnsupportedModel(
        f"the {family} model {type(model).__name__} cannot be a target: {reason}; use another model"
    )
