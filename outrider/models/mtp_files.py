"""MTP modules in checkpoints: whether there are any, reading them, and a folder of their own.

transformers drops them when it loads a model. Two ways of naming are read: `model.layers.{n}.` from
the number of the model's layers on (DeepSeek-V3, GLM-4-MoE), and `mtp.` (Qwen3-Next, Mellum).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.head_files import (
    CONFIG,
    FINGERPRINT,
    WEIGHTS,
    check_class,
    check_sizes,
    read_config,
)
from outrider.models.hf import LoadedTarget
from outrider.models.mtp import MtpHead, MtpModule, module_of

INDEX = "model.safetensors.index.json"
KIND = "mtp"
_NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_OWN = {
    "enorm.weight": "enorm",
    "hnorm.weight": "hnorm",
    "eh_proj.weight": "eh_proj",
    "shared_head.norm.weight": "norm",
    "pre_fc_norm_embedding.weight": "enorm",
    "pre_fc_norm_hidden.weight": "hnorm",
    "fc.weight": "eh_proj",
    "norm.weight": "norm",
}
"""Parts of a module beside its layer, by the names of either way."""
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own."""


def num_mtp_modules(folder: Path) -> int:
    """How many MTP modules lie in a checkpoint folder; 0 where there are none, or no safetensors.

    Nothing but names is read.
    """
    try:
        layers = _said(read_config(folder))["num_hidden_layers"]
        return len(_modules(_places(folder), int(layers)))
    except (ModelError, KeyError, TypeError, ValueError):
        return 0


def load_mtp(folder: Path, target: LoadedTarget) -> MtpHead:
    """Read the MTP modules of a checkpoint, or of a folder of their own, in the target's dtype.

    Raises:
        ModelError: none are there, or they are those of another model.
        UnsupportedModel: a target that cannot have any here.
        VocabularyMismatch, TargetShapeMismatch: modules of another vocabulary or width.
    """
    config = read_config(folder)
    _check_target(folder, config, target)
    options = _options(folder, config, target)
    places = _places(folder)
    layers = int(target.model.config.get_text_config().num_hidden_layers)
    found = _modules(places, layers)
    if not found:
        raise ModelError(
            f"{str(folder)!r} holds no MTP modules behind {layers} layers; train one with "
            "`outrider train mtp`, or use drafter='ngram'"
        )
    modules: list[MtpModule] = []
    for number, names in enumerate(found):
        tensors = _read(places, names)
        _check_shapes(folder, tensors, target)
        own = {_OWN[n]: tensors.pop(n) for n in list(tensors) if n in _OWN}
        for name in _SHARED:
            tensors.pop(name, None)
        made = module_of(target, number, tensors, options)
        _fill(made, own, folder)
        modules.append(made.to(target.dtype))
    return MtpHead(modules, target).eval()


def save_mtp(
    head: MtpHead,
    folder: Path,
    *,
    verifier: str,
    target: LoadedTarget,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    fingerprint: str | None = None,
) -> None:
    """Write the modules to a folder of their own, under the names of DeepSeek-V3's.

    `options` are those of the target's config that their layers do not share, `fingerprint` is that
    of its folder. What is said of it stands apart, so that nothing takes this one for a model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = target.model.config.get_text_config()
    (depth,) = head.taps
    config = {
        "dtype": str(dtype).removeprefix("torch."),
        "layer_options": dict(options),
        "num_nextn_predict_layers": head.num_modules,
        "outrider_head": KIND,
        FINGERPRINT: fingerprint,
        "target": {
            "architectures": [type(target.model).__name__],
            "hidden_size": int(text.hidden_size),
            "model_type": text.model_type,
            "name_or_path": verifier,
            "num_hidden_layers": depth,
            "vocab_size": head.vocab_size,
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    named: dict[str, Tensor] = {}
    for number, module in enumerate(head.mtp):
        prefix = f"model.layers.{depth + number}."
        for name, tensor in module.state_dict().items():
            name = name.removeprefix("block.") if name.startswith("block.") else name
            name = "shared_head.norm.weight" if name == "norm.weight" else name
            named[prefix + name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(named, folder / WEIGHTS, {"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)


def _places(folder: Path) -> dict[str, Path]:
    """In which file each of a folder's tensors lies.

    Raises:
        ModelError: files that cannot be read.
    """
    try:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
            if any(Path(file).name != file for file in index.values()):
                raise ValueError(f"{INDEX} names files outside the folder")
            return {name: folder / file for name, file in index.items()}
        places: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        return places
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(
            f"the weights in {str(folder)!r} cannot be read ({error}); give a whole checkpoint"
        ) from error


def _modules(names: Iterable[str], layers: int) -> list[dict[str, str]]:
    """Of each module the names in the checkpoint, by its own."""
    numbered: dict[int, dict[str, str]] = {}
    shared: dict[str, str] = {}
    for name in names:
        if name.startswith("mtp."):
            rest = name.removeprefix("mtp.")
            own = _NUMBERED.fullmatch(rest)
            if own is None:
                shared[rest] = name
            else:
                numbered.setdefault(int(own[1]), {})[own[2]] = name
        elif (own := _NUMBERED.fullmatch(name)) is not None and int(own[1]) >= layers:
            numbered.setdefault(int(own[1]) - layers, {})[own[2]] = name
    modules = {number: {**shared, **own} for number, own in sorted(numbered.items())}
    modules = {n: own for n, own in modules.items() if "eh_proj" in map(_OWN.get, own)}
    if list(modules) != list(range(len(modules))):
        raise ModelError(
            f"MTP modules {list(modules)} are there, counted from 0, and others before them are "
            "not; give a whole checkpoint"
        )
    return list(modules.values())


def _read(places: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        for file in {places[name] for name in names.values()}:
            with safe_open(file, framework="pt") as tensors:
                for own, name in names.items():
                    if places[name] == file:
                        found[own] = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"MTP modules cannot be read ({error}); give a whole checkpoint"
        ) from error
    return found


def _check_target(folder: Path, config: Mapping[str, Any], target: LoadedTarget) -> None:
    """Refuse a folder whose configuration is another target's."""
    try:
        said = _said(config)
    except TypeError as error:
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} is no model's ({error}); give a whole checkpoint"
        ) from error
    text = target.model.config.get_text_config()
    whole = {"name_or_path": config.get("_name_or_path") or str(folder), **config, **said}
    name = whole["name_or_path"]
    check_class(folder, whole, target)
    _check_sizes(folder, said.get("vocab_size"), said.get("hidden_size"), target)
    layers = said.get("num_hidden_layers", text.num_hidden_layers)
    if layers != text.num_hidden_layers:
        raise ModelError(
            f"the head in {str(folder)!r} was made for {name!r}, whose layer {layers} it reads, "
            f"and the target's last is layer {text.num_hidden_layers}; give the head of this target"
        )


def _said(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of the target: its own part, that of the text, or all of it.

    Raises:
        TypeError: the part is no object.
    """
    said = config.get("target") or config.get("text_config") or config
    if not isinstance(said, dict):
        raise TypeError(f"{said!r} stands where the target is described")
    return said


def _options(folder: Path, config: Mapping[str, Any], target: LoadedTarget) -> dict[str, Any]:
    """In what the modules' layers differ from the target's: whole numbers of its configuration."""
    options = config.get("layer_options") or {}
    text = target.model.config.get_text_config()
    fits = isinstance(options, dict) and all(
        type(value) is int and value > 0 and type(getattr(text, name, None)) is int
        for name, value in options.items()
    )
    if not fits:
        raise ModelError(
            f"layer_options in {str(folder)!r} is {options!r}; sizes by their names in the "
            "target's config.json are due"
        )
    return options


def _check_shapes(folder: Path, tensors: Mapping[str, Tensor], target: LoadedTarget) -> None:
    shared = next((tensors[name] for name in _SHARED if name in tensors), None)
    vocab = None if shared is None else shared.shape[0]
    weights = [t for name, t in tensors.items() if _OWN.get(name) == "eh_proj"]
    _check_sizes(folder, vocab, weights[0].shape[0], target)


def _check_sizes(folder: Path, vocab: int | None, width: int | None, target: LoadedTarget) -> None:
    own = int(target.model.config.get_text_config().hidden_size)
    sizes = (vocab, target.vocab_size), (width, own)
    check_sizes(f"the head in {str(folder)!r}", "the target", *sizes)


def _fill(module: MtpModule, own: Mapping[str, Tensor], folder: Path) -> None:
    """Give a module what it has beside its layer."""
    for name in ("enorm", "hnorm", "eh_proj", "norm"):
        weight = getattr(module, name).weight
        if name not in own or own[name].shape != weight.shape:
            found = tuple(own[name].shape) if name in own else None
            raise ModelError(
                f"{name} of the MTP modules in {str(folder)!r} has shape {found}, "
                f"{tuple(weight.shape)} is due; give the whole checkpoint"
            )
        with torch.no_grad():
            weight.copy_(own[name])
