"""EAGLE-3 heads in the folder layout of `speculators`: config.json beside model.safetensors.

What that package writes (0.9) is read, and what is written it reads, as do the engines that take
its folders. A head that cannot be what its files say is refused before any forward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import InvalidConfig, ModelError, UnsupportedModel
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.head_files import (
    CONFIG,
    FINGERPRINT,
    WEIGHTS,
    check_layer,
    fill,
    read_config,
    read_tensors,
    target_said,
)

if TYPE_CHECKING:
    from outrider.models.hf import LoadedTarget

KIND, VERSION = "eagle3", "0.9.0"
TAPS = "eagle_aux_hidden_state_layer_ids"
EMBEDDINGS = "embed_tokens.weight"
WITHOUT = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
"""Variations of the layout that are not read, and what says that a head has none of them."""


def save_head(
    head: EagleHead,
    folder: Path,
    *,
    verifier: str,
    architecture: str,
    dtype: torch.dtype | None = None,
    embeddings: bool = True,
    fingerprint: str | None = None,
) -> None:
    """Write a head; `verifier`, `architecture` and `fingerprint` are its target's.

    Without `embeddings` who loads it takes the target's, as Outrider and vLLM do.
    """
    tensors_of = head.state_dict()
    if embeddings:
        tensors_of[EMBEDDINGS] = head.embeddings.weight
    else:
        tensors_of.pop(EMBEDDINGS, None)
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    layer = shape.layer_config().to_dict()
    layer = {key: layer[key] for key in LAYER_KEYS if key in layer}
    stored = head.lm_head.weight.dtype if dtype is None else dtype
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": str(stored).removeprefix("torch."),
        TAPS: list(shape.taps),
        "norm_before_residual": shape.norm_before_residual,
        **WITHOUT,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": [architecture], "name_or_path": verifier},
        },
        "speculators_model_type": KIND,
        "speculators_version": VERSION,
        FINGERPRINT: fingerprint,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **layer,
            "rope_parameters": dict(shape.rope),
            # Where older readers look.
            "rope_theta": shape.rope["rope_theta"],
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {
        name: tensor.detach().to("cpu", stored if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors_of.items()
    }
    tensors["t2d"] = drafted(head)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)


def drafted(head: EagleHead) -> Tensor:
    """Which tokens of the target the head can guess, bool `[V]`."""
    none = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    return none.index_fill_(0, head.tokens.cpu(), True)


LAYER_KEYS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def load_head(folder: Path, target: LoadedTarget | None = None) -> EagleHead:
    """Read a head, in float32; taps that the folder leaves out are the usual ones of `target`.

    Raises:
        ModelError: no head, or files that cannot be read or do not fit each other; a pickle that
            holds more than tensors.
        UnsupportedModel: a kind of head, or a variation, that is not read.
    """
    return head_of(folder, _config(folder), read_tensors(folder), target)


def head_of(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: LoadedTarget | None = None,
) -> EagleHead:
    """The head of a configuration and tensors in the layout; see `load_head`."""
    shape = _shape(folder, config, target)
    tokens = _tokens(folder, shape, tensors)
    head = EagleHead(shape, tokens, own_embeddings=EMBEDDINGS in tensors)
    own = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    fill(head, own, folder, "an EAGLE-3 head")
    return head.eval()


@dataclass(frozen=True, slots=True)
class Made:
    """What a head's folder says of its making: its target and its precision."""

    name: str
    architecture: str
    dtype: torch.dtype
    fingerprint: str | None


def made_for(folder: Path) -> Made:
    """Read for which target a head was made.

    Raises:
        ModelError: no head, or one that does not say.
        UnsupportedModel: a kind of head that is not read.
    """
    config = _config(folder)
    said = target_said(folder, config)
    name, classes = said.get("name_or_path"), said.get("architectures") or []
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if not name or not classes or not isinstance(dtype, torch.dtype):
        raise ModelError(
            f"the head in {str(folder)!r} does not say for which target and in which precision it "
            f"was made; its {CONFIG} lacks verifier or dtype"
        )
    return Made(str(name), str(classes[0]), dtype, config.get(FINGERPRINT))


def _config(folder: Path) -> Mapping[str, Any]:
    config = read_config(folder)
    kind = config.get("speculators_model_type")
    if kind != KIND:
        raise UnsupportedModel(
            f"{str(folder)!r} holds no EAGLE-3 head (speculators_model_type is {kind!r}); "
            f"{KIND!r} is read here"
        )
    return config


def _shape(folder: Path, config: Mapping[str, Any], target: LoadedTarget | None) -> EagleShape:
    for name, without in WITHOUT.items():
        if config.get(name) not in (None, without):
            raise UnsupportedModel(
                f"the head in {str(folder)!r} has {name}={config[name]!r}, which is not read here"
            )
    layer = config.get("transformer_layer_config") or {}
    if not isinstance(layer, dict):
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} has transformer_layer_config={layer!r}, where an object "
            "is due; give a folder as it was saved"
        )
    check_layer(folder, {**layer, "draft_vocab_size": config.get("draft_vocab_size")})
    try:
        width, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        taps = config.get(TAPS) or _usual_taps(folder, target)
        others = {
            "target_hidden_size": config.get("target_hidden_size") in (None, width),
            "num_hidden_layers": layer.get("num_hidden_layers", 1) == 1,
            "hidden_act": layer.get("hidden_act", "silu") == "silu",
            "attention_bias": not layer.get("attention_bias"),
            "mlp_bias": not layer.get("mlp_bias"),
            "model_type": layer.get("model_type", "llama") == "llama",
        }
        wrong = next((name for name, fits in others.items() if not fits), None)
        if wrong is not None:
            value = config.get(wrong, layer.get(wrong))
            raise UnsupportedModel(
                f"the head in {str(folder)!r} has {wrong}={value!r}, which is not read here"
            )
        return EagleShape(
            vocab_size=int(layer["vocab_size"]),
            draft_vocab_size=int(config["draft_vocab_size"] or layer["vocab_size"]),
            hidden_size=width,
            ffn_size=int(layer["intermediate_size"]),
            heads=heads,
            kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_size=int(layer.get("head_dim") or width // heads),
            taps=tuple(taps),
            max_positions=int(layer.get("max_position_embeddings", 2048)),
            norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope=rope_of(layer),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, (InvalidConfig, ModelError)):
            raise
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} is none of an EAGLE-3 head ({error!r}); give a folder "
            "as it was saved"
        ) from error


def rope_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters, said in one place or, as older files do, in two."""
    if layer.get("rope_parameters"):
        return dict(layer["rope_parameters"])
    scaled = dict(layer.get("rope_scaling") or {"rope_type": "default"})
    return {**scaled, "rope_theta": float(layer.get("rope_theta", 10000.0))}


def _usual_taps(folder: Path, target: LoadedTarget | None) -> tuple[int, ...]:
    """The layers that heads are made for where nothing is said: low, middle and high."""
    if target is None:
        raise ModelError(
            f"the head in {str(folder)!r} does not say which layers it reads; load it with its "
            "target"
        )
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    return 2, depth // 2, depth - 3


def _tokens(folder: Path, shape: EagleShape, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The target's tokens of the draft vocabulary; None where it is the whole."""
    d2t = tensors.get("d2t")
    if d2t is None:
        if shape.draft_vocab_size != shape.vocab_size:
            raise ModelError(
                f"the head in {str(folder)!r} guesses {shape.draft_vocab_size} of "
                f"{shape.vocab_size} tokens and does not say which (d2t); give the whole folder"
            )
        return None
    tokens = d2t.long().flatten() + torch.arange(d2t.numel())
    t2d = tensors.get("t2d")
    fits = (
        d2t.shape == (shape.draft_vocab_size,)
        and len(tokens) > 0
        and bool((tokens.diff() > 0).all())
        and int(tokens[0]) >= 0
        and int(tokens[-1]) < shape.vocab_size
        and (t2d is None or torch.equal(t2d.nonzero().flatten(), tokens))
    )
    if not fits:
        raise ModelError(
            f"d2t in {str(folder)!r} is no ascending map of {shape.draft_vocab_size} drafted to "
            f"{shape.vocab_size} tokens, or t2d is of another"
        )
    return tokens
