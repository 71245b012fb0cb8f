"""EAGLE-3 heads in the layout of their authors, which SGLang reads: one flat configuration.

The decoder layer is called `midlayer`, the rest bears the names of the `speculators` layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.eagle import EagleHead
from outrider.models.speculators import CONFIG, LAYER_KEYS, WEIGHTS, drafted

ARCHITECTURE = "LlamaForCausalLMEagle3"


def save_original(head: EagleHead, folder: Path, dtype: torch.dtype) -> None:
    """Write a head whose reader takes its target's embeddings."""
    shape = head.shape
    layer = shape.layer_config().to_dict()
    config: dict[str, Any] = {
        **{key: layer[key] for key in LAYER_KEYS if key in layer},
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": shape.draft_vocab_size,
        # There a state bears the number, from 0, of the layer that gave it; here, how many ran.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in shape.taps],
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
