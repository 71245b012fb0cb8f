"""Heads in the files of their authors: EAGLE 1 to 3 and Medusa. Names are mapped, shapes checked.

EAGLE: `config.json` beside `pytorch_model.bin` or `model.safetensors` (github.com/SafeAILab/EAGLE).
Medusa: `config.json` beside `medusa_lm_head.pt` or `.safetensors` (github.com/FasterDecoding).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from outrider.errors import InvalidConfig, ModelError, UnsupportedModel
from outrider.models.eagle import EagleHead
from outrider.models.eagle1 import FeatureHead
from outrider.models.head import Head
from outrider.models.head_files import (
    CONFIG,
    WEIGHTS,
    check_class,
    check_layer,
    fill,
    read_config,
    read_tensors,
    target_said,
)
from outrider.models.medusa import MedusaHeads, MedusaShape
from outrider.models.speculators import (
    EMBEDDINGS,
    LAYER_KEYS,
    TAPS,
    drafted,
    head_of,
    load_head,
    rope_of,
)

if TYPE_CHECKING:
    from outrider.models.hf import LoadedTarget

_MEDUSA_NAME = re.compile(r"(?:medusa_head\.|heads\.)?(\d+)\.(\d+)\.((?:linear\.)?(?:weight|bias))")
EAGLE3 = "LlamaForCausalLMEagle3"
"""The class by which SGLang knows such a head."""
_LAYERS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def load_eagle(folder: Path, target: LoadedTarget) -> Head:
    """Read an EAGLE head of any generation, in float32.

    Raises:
        ModelError: no head, or files that cannot be read or do not fit each other; one that was
            made for a model of another class.
        UnsupportedModel: a kind of head, or a variation, that is not read.
    """
    config = read_config(folder)
    check_class(folder, target_said(folder, config), target)
    if "speculators_model_type" in config:
        return load_head(folder, target)
    tensors = read_tensors(folder)
    if any(name.startswith("midlayer.") for name in tensors):
        return _eagle3(folder, config, tensors, target)
    if "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors):
        return _eagle1(folder, config, tensors, target)
    raise UnsupportedModel(
        f"{str(folder)!r} holds no EAGLE head that is read here: it has neither fc beside "
        "layers.0 (EAGLE) nor midlayer (EAGLE-3), nor the layout of speculators"
    )


def _eagle3(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: LoadedTarget,
) -> Head:
    said = {"draft_vocab_size": config.get("vocab_size"), **config, TAPS: _taps(folder, config)}
    own = {re.sub(r"^midlayer\.", "layers.0.", name): t for name, t in tensors.items()}
    return head_of(folder, {**said, "transformer_layer_config": config}, own, target)


def _taps(folder: Path, config: Mapping[str, Any]) -> list[int] | None:
    """Behind how many layers a head reads, where it says so; `save_original` has the two ways.

    Raises:
        ModelError: layers that are no numbers.
    """
    inner = config.get("eagle_config")
    numbers = inner.get(TAPS) if isinstance(inner, Mapping) else None
    if config.get(TAPS) or not numbers:
        return config.get(TAPS)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ModelError(
            f"{TAPS} of eagle_config in {str(folder)!r} is {numbers!r}, no list of layers; give "
            "the folder of an EAGLE-3 head"
        )
    return [number + 1 for number in numbers]


def _eagle1(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: LoadedTarget,
) -> Head:
    check_layer(folder, config)
    missing = [name for name in _LAYERS if config.get(name) is None]
    if missing or config.get("hidden_act", "silu") != "silu":
        reason = f"lacks {', '.join(missing)}" if missing else "has another hidden_act than silu"
        raise ModelError(f"{CONFIG} in {str(folder)!r} {reason}; give the folder of an EAGLE head")
    depth = int(target.model.config.get_text_config().num_hidden_layers)
    try:
        heads = config["num_attention_heads"]
        layers = LlamaConfig(
            **{name: config[name] for name in _LAYERS},
            num_hidden_layers=config.get("num_hidden_layers", 1),
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_parameters=rope_of(config),
            attention_bias=any(name.endswith("q_proj.bias") for name in tensors),
        )
        head = FeatureHead(
            layers, depth, bias="fc.bias" in tensors, own_embeddings=EMBEDDINGS in tensors
        )
    # What transformers makes of such values ends in whatever stumbles over them first.
    except Exception as error:
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} is none of an EAGLE head ({error!r}); give the folder of "
            "an EAGLE head"
        ) from error
    own = {name: tensor.float() for name, tensor in tensors.items()}
    fill(head, own, folder, "an EAGLE head")
    return head.eval()


def load_medusa(folder: Path, target: LoadedTarget) -> MedusaHeads:
    """Read Medusa heads, in float32.

    Raises:
        ModelError: no heads, or files that cannot be read or do not fit each other.
    """
    config, text = read_config(folder), target.model.config.get_text_config()
    if not {"medusa_num_heads", "medusa_num_layers"} <= config.keys():
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} says no medusa_num_heads and medusa_num_layers; give the "
            "folder of Medusa heads"
        )
    blocks = config["medusa_num_layers"]
    own: dict[str, Tensor] = {}
    for name, tensor in read_tensors(folder).items():
        found = _MEDUSA_NAME.fullmatch(name)
        own[f"heads.{found[1]}.{found[2]}.{found[3]}" if found else name] = tensor.float()
    # The uploaded configurations say 2 heads beside files of 5, which their own loader overrides.
    held = {name.split(".")[1] for name in own if name.startswith("heads.")}
    said = config["medusa_num_heads"]
    output = own.get(f"heads.0.{blocks}.weight")
    if output is None or output.dim() != 2:
        raise ModelError(
            f"the weights in {str(folder)!r} hold no output layer behind {blocks} blocks (0."
            f"{blocks}.weight); give Medusa heads with layers of their own"
        )
    try:
        shape = MedusaShape(
            int(output.shape[0]),
            int(output.shape[1]),
            int(said) if int(said) < 1 else max(int(said), len(held)),
            int(blocks),
            int(text.num_hidden_layers),
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidConfig):
            raise
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} is none of Medusa heads ({error})"
        ) from error
    heads = MedusaHeads(shape)
    fill(heads, own, folder, "Medusa heads")
    return heads.eval()


def save_original(head: EagleHead, folder: Path, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 head as SGLang reads it; whoever loads it takes its target's embeddings."""
    shape = head.shape
    layer = shape.layer_config().to_dict()
    config: dict[str, Any] = {
        **{key: layer[key] for key in LAYER_KEYS if key in layer},
        "architectures": [EAGLE3],
        "draft_vocab_size": shape.draft_vocab_size,
        TAPS: list(shape.taps),
        # There a state bears the number, from 0, of the layer that gave it; here, how many ran.
        "eagle_config": {
            TAPS: [tap - 1 for tap in shape.taps],
            "use_aux_hidden_state": True,
        },
        "rope_scaling": _scaling(shape.rope),
        "rope_theta": shape.rope["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {
        name.replace("layers.0.", "midlayer."): value.detach().to(
            "cpu", dtype if value.is_floating_point() else value.dtype
        )
        for name, value in head.state_dict().items()
    }
    tensors["t2d"] = drafted(head)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary scaling where there is some, by its older name."""
    own = {key: value for key, value in rope.items() if key != "rope_theta"}
    return None if own.get("rope_type", "default") == "default" else own
