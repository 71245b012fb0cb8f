"""The early-exit head: what a target's first layers lack to guess as the whole model does.

Behind the exit a row's state passes a low-rank adapter, then the target's own final norm and output
layer; a confidence says how likely the guess after it stays. Adapter and stop are those of Kangaroo
(Liu et al. 2024, arXiv 2404.18911), without its attention: a row is adapted by itself, so there is
no cache beside the target's. Its folder holds `config.json` and `model.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.config import check_between, check_whole
from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.hf import HuggingFaceTarget

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KIND, VERSION = "early-exit", 1


@dataclass(frozen=True, slots=True)
class ExitShape:
    """The shape of an early-exit head, and of the target it is for.

    Attributes:
        vocab_size: tokens of the target.
        hidden_size: width of the target.
        layers: behind how many of its layers the head reads.
        rank: width of the adapter.
        exit_threshold: confidence below which drafting stops where nobody says.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    rank: int
    exit_threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "rank"):
            check_whole(name, getattr(self, name), 1)
        check_between("exit_threshold", self.exit_threshold, 0.0, 1.0)


class ExitHead(nn.Module):
    """An adapter of states `[..., D]` behind a target's first layers, and a confidence.

    A new head changes nothing, and is as sure as its guess is likely, roughly.
    """

    def __init__(self, shape: ExitShape) -> None:
        super().__init__()
        self.shape = shape
        # What the constructors draw is written over, and the global generator is not theirs.
        with torch.random.fork_rng(devices=[]):
            self.norm = nn.RMSNorm(shape.hidden_size, 1e-6)
            self.down = nn.Linear(shape.hidden_size, shape.rank, bias=False)
            self.up = nn.Linear(shape.rank, shape.hidden_size, bias=False)
            self.sure = nn.Linear(shape.hidden_size + 1, 1)
        with torch.no_grad():
            for weight in (self.up.weight, self.sure.weight):
                weight.zero_()
            # Of the share's logarithm: a guess of one half then stays about as often as not.
            self.sure.weight[0, -1] = 1.0
            self.sure.bias.fill_(1.0)

    def forward(self, h_RD: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """The states as the target's final norm and head are to read them."""
        return h_RD + self.up(F.silu(self.down(self.norm(h_RD))))

    def confidence_logits(
        self, h_nD: Float[Tensor, "n D"], logits_nV: Float[Tensor, "n V"]
    ) -> Float[Tensor, " n"]:
        """How likely the guesses after some adapted states stay, as logits.

        The likeliest token's share tells most of it, the state itself the rest.
        """
        kind = self.sure.weight.dtype
        normed_nD = F.rms_norm(h_nD.float(), h_nD.shape[-1:])
        share_n1 = logits_nV.float().log_softmax(-1).amax(-1, keepdim=True)
        return self.sure(torch.cat((normed_nD, share_n1), -1).to(kind))[..., 0].float()


def save_exit_head(
    head: ExitHead,
    folder: Path,
    *,
    verifier: str,
    architecture: str,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a head; `verifier` and `architecture` are its target's name and class."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "outrider_head": KIND,
        "version": VERSION,
        **asdict(head.shape),
        "verifier": {"architectures": [architecture], "name_or_path": verifier},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)


def load_exit_head(folder: Path, target: HuggingFaceTarget | None = None) -> ExitHead:
    """Read a head, in float32, and hold it to its target where one is given.

    Raises:
        ModelError: no early-exit head, or files that cannot be read or do not fit each other; one
            that was made for a model of another class.
        UnsupportedModel: a version that is not read.
        VocabularyMismatch, TargetShapeMismatch: the head of another target.
    """
    config = _config(folder)
    try:
        shape = ExitShape(**{field.name: config[field.name] for field in fields(ExitShape)})
    except (KeyError, InvalidConfig) as error:
        raise ModelError(
            f"{CONFIG} in {str(folder)!r} is none of an early-exit head ({error}); give a folder "
            "that outrider train early-exit has written"
        ) from error
    head = ExitHead(shape)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the weights in {str(folder)!r} cannot be read; give the whole folder, with {WEIGHTS}"
        ) from error
    due = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    own = {name: tuple(value.shape) for name, value in tensors.items()}
    if own != due:
        wrong = ", ".join(sorted(name for name in own | due if own.get(name) != due.get(name)))
        raise ModelError(
            f"{WEIGHTS} and {CONFIG} in {str(folder)!r} are of different heads ({wrong} differ); "
            "give the whole folder of one"
        )
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
    if target is not None:
        check_class(folder, config.get("verifier") or {}, target)
        check_exit_fits(head, target)
    return head.eval().requires_grad_(False)


def is_exit_head(folder: Path) -> bool:
    """Whether a folder says of itself that it is one of these."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("outrider_head") == KIND


def check_exit_fits(head: ExitHead, target: HuggingFaceTarget) -> None:
    """Refuse a head of another target's shape.

    Raises:
        VocabularyMismatch: another vocabulary.
        TargetShapeMismatch: another width, or fewer layers than the head reads behind.
    """
    shape, config = head.shape, target.model.config.get_text_config()
    if shape.vocab_size != target.vocab_size:
        raise VocabularyMismatch(
            f"the early-exit head was made for a vocabulary of {shape.vocab_size} tokens, the "
            f"target has {target.vocab_size}; give the head of this target"
        )
    if shape.hidden_size != config.hidden_size:
        raise TargetShapeMismatch(
            f"the early-exit head reads hidden states of width {shape.hidden_size}, the target's "
            f"are {config.hidden_size} wide; give the head of this target"
        )
    if shape.layers >= config.num_hidden_layers:
        raise TargetShapeMismatch(
            f"the early-exit head reads behind layer {shape.layers}, the target has "
            f"{config.num_hidden_layers} layers; give the head of this target"
        )


def check_class(folder: Path, verifier: Mapping[str, Any], target: HuggingFaceTarget) -> None:
    """Refuse a head whose folder names a target of another class.

    Raises:
        ModelError: naming both.
    """
    classes = verifier.get("architectures") or []
    own = type(target.model).__name__
    if classes and own not in classes:
        raise ModelError(
            f"the head in {str(folder)!r} was made for {verifier.get('name_or_path')!r}, a "
            f"{' or '.join(classes)}, and the target is a {own}; give the head of this target"
        )


def _config(folder: Path) -> dict[str, Any]:
    if not is_exit_head(folder):
        raise ModelError(
            f"{str(folder)!r} holds no early-exit head ({CONFIG} says of none); give a folder that "
            "outrider train early-exit has written"
        )
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))
    if config.get("version") != VERSION:
        raise UnsupportedModel(
            f"the early-exit head in {str(folder)!r} is of version {config.get('version')!r}, and "
            f"{VERSION} is read here; train it anew"
        )
    return config
