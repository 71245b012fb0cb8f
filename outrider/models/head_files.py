"""Reading the folder of a head: its configuration, its tensors, and whether the two fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.errors import ModelError, TargetShapeMismatch, VocabularyMismatch

if TYPE_CHECKING:
    from outrider.models.hf import LoadedTarget

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", WEIGHTS, PICKLE)
"""Where the tensors of a head may lie, the first that is there."""
FINGERPRINT = "target_fingerprint"
_WHOLE = (
    *("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
_POSITIVE = ("rms_norm_eps", "rope_theta")
_OBJECTS = ("rope_scaling", "rope_parameters")
SAMPLE = 1 << 20
"""Bytes of a file that are read at its beginning, in its middle and at its end."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's configuration.

    Raises:
        ModelError: there is none that can be read.
    """
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(folder)!r} holds no {CONFIG} that can be read; give the folder of a head as it "
            "was saved"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} in {str(folder)!r} is no object; give the folder of a head")
    return config


def check_layer(folder: Path, layer: Mapping[str, Any]) -> None:
    """Refuse a description of Llama layers whose values are none, where they are given.

    Raises:
        ModelError: naming file, key and value.
    """
    for name, value in layer.items():
        if name in _WHOLE:
            fits, due = type(value) is int and value >= 1, "a whole number of at least 1"
        elif name in _POSITIVE:
            fits, due = type(value) in (int, float) and value > 0, "a number above 0"
        elif name in _OBJECTS:
            fits, due = isinstance(value, dict), "an object"
        else:
            continue
        if value is not None and not fits:
            raise ModelError(
                f"{CONFIG} in {str(folder)!r} has {name}={value!r}, where {due} is due; give the "
                "folder of a head as it was saved"
            )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The folder's tensors, from safetensors or a pickle of tensors alone.

    Raises:
        ModelError: no such file, one that cannot be read, or a pickle that holds more.
    """
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise ModelError(
            f"{str(folder)!r} holds neither {WEIGHTS} nor {PICKLE}; give the whole folder"
        )
    try:
        if found.suffix == ".safetensors":
            return load_file(found)
        held: Any = torch.load(found, map_location="cpu", weights_only=True)
    # Damaged bytes end in whatever the reader of their place raises.
    except Exception as error:
        raise _refused(folder) from error
    tensors = isinstance(held, Mapping) and all(isinstance(t, Tensor) for t in held.values())
    if not tensors:
        raise _refused(folder)
    return dict(held)


def _refused(folder: Path) -> ModelError:
    return ModelError(
        f"the weights in {str(folder)!r} cannot be read, or hold more than tensors; give {WEIGHTS}"
    )


def fill(head: nn.Module, tensors: Mapping[str, Tensor], folder: Path, what: str) -> None:
    """Give a head its weights, which must be its parameters by name and shape.

    Raises:
        ModelError: they are not.
    """
    due = {name: value.shape for name, value in head.named_parameters()}
    if tensors.keys() != due.keys():
        names = sorted(tensors.keys() ^ due.keys())
        said = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ModelError(
            f"the head in {str(folder)!r} has other tensors than {what} ({said}); give the folder "
            "as it was saved"
        )
    wrong = next((name for name in due if tensors[name].shape != due[name]), None)
    if wrong is not None:
        raise ModelError(
            f"{wrong} in {str(folder)!r} has shape {tuple(tensors[wrong].shape)}, and {CONFIG} "
            f"says {tuple(due[wrong])}; the two are of different heads"
        )
    head.load_state_dict(dict(tensors), strict=False)


def target_said(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a head's configuration says of its target; nothing where it says nothing.

    Raises:
        ModelError: something else than an object.
    """
    within = config.get("speculators_config")
    within = within if isinstance(within, dict) else config
    said = within.get("verifier") or within.get("target") or {}
    if not isinstance(said, dict):
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} says of its target {said!r}, where an object with its "
            "name and class is due; give the folder as it was saved"
        )
    return said


def check_class(folder: Path, said: Mapping[str, Any], target: LoadedTarget) -> None:
    """Refuse a head that was made for a model of another class; `said` describes that model.

    Raises:
        ModelError: naming both.
    """
    classes, own = said.get("architectures") or [], type(target.model).__name__
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} has architectures={classes!r}, where a list of names is "
            "due; give the folder as it was saved"
        )
    if classes and own not in classes:
        name = said.get("name_or_path")
        raise ModelError(
            f"the head in {str(folder)!r} was made for {name!r}, a {' or '.join(classes)}, and the "
            f"target is a {own}; give the head of this target"
        )


def check_sizes(
    head: str,
    target: str,
    vocab: tuple[int | None, int | None],
    width: tuple[int | None, int | None],
) -> None:
    """Refuse a head whose vocabulary or width, the former of each pair, is not its target's.

    None is a size that the head does not tell; `head` and `target` are what both are called.

    Raises:
        VocabularyMismatch: another vocabulary.
        TargetShapeMismatch: another width.
    """
    if vocab[0] not in (None, vocab[1]):
        raise VocabularyMismatch(
            f"{head} was made for a vocabulary of {vocab[0]} tokens, {target} has {vocab[1]}; give "
            "the head of this target"
        )
    if width[0] not in (None, width[1]):
        raise TargetShapeMismatch(
            f"{head} reads hidden states of width {width[0]}, those of {target} are {width[1]} "
            "wide; give the head of this target"
        )


def fingerprint(model: Path) -> str:
    """The sha256 of a model folder: its configuration, and three stretches of each file of weights.

    Large files are not read whole, so that a load does not wait for it.
    """
    digest = hashlib.sha256((model / CONFIG).read_bytes())
    for path in sorted(model.glob("*.safetensors")) or sorted(model.glob("*.bin")):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start in (0, max(0, size - SAMPLE) // 2, max(0, size - SAMPLE)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def check_fingerprint(folder: Path, model: Path) -> None:
    """Refuse a head that was made for other weights than those in the folder of its target.

    Nothing is refused where the head does not say, or the target is no folder.

    Raises:
        ModelError: naming both; no head.
    """
    config = read_config(folder)
    made = config.get(FINGERPRINT)
    if made is None or not (model / CONFIG).is_file() or made == fingerprint(model):
        return
    name = target_said(folder, config).get("name_or_path")
    raise ModelError(
        f"the head in {str(folder)!r} was made for {name!r}, and the target {str(model)!r} has "
        f"other weights or another {CONFIG}; give the head of this target, or delete {FINGERPRINT} "
        f"from the head's {CONFIG} to take it all the same"
    )
