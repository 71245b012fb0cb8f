"""The early-exit head: what a target's first layers lack to guess as the whole model does.

Behind the exit a row's state passes a low-rank adapter, then the target's own final norm and output
layer; a confidence says how likely the guess after it stays. Adapter and stop are those of Kangaroo
(Liu et al. 2024, arXiv 2404.18911), without its attention: a row is adapted by itself, so there is
no cache beside the target's. Its folder holds `config.json` and `model.safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.config import check_between, check_whole
from outrider.errors import InvalidConfig, ModelError, TargetShapeMismatch, UnsupportedModel
from outrider.models.head import TargetHead, check_fits
from outrider.models.head_files import (
    CONFIG,
    FINGERPRINT,
    WEIGHTS,
    check_class,
    fill,
    read_config,
    read_tensors,
    target_said,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.hf import HuggingFaceTarget

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
        depth: how many layers the target has; None where it is not known.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    rank: int
    exit_threshold: float = 0.0
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "layers", "rank"):
            check_whole(name, getattr(self, name), 1)
        if self.depth is not None:
            check_whole("depth", self.depth, self.layers + 1)
        check_between("exit_threshold", self.exit_threshold, 0.0, 1.0)


class ExitHead(TargetHead):
    """An adapter of states `[..., D]` behind a target's first layers, and a confidence.

    A new head changes nothing, and is as sure as its guess is likely, roughly.
    """

    kind = KIND

    def __init__(self, shape: ExitShape) -> None:
        super().__init__()
        self.shape = shape
        self.taps = (shape.layers,)
        self.vocab_size, self.target_size = shape.vocab_size, shape.hidden_size
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
        normed_nD = F.rms_norm(h_nD.float(), h_nD.shape[-1:])
        share_n1 = logits_nV.float().log_softmax(-1).amax(-1, keepdim=True)
        return self.sure(torch.cat((normed_nD, share_n1), -1).to(self.dtype))[..., 0].float()


def save_exit_head(
    head: ExitHead,
    folder: Path,
    *,
    verifier: str,
    architecture: str,
    dtype: torch.dtype = torch.float16,
    fingerprint: str | None = None,
) -> None:
    """Write a head; `verifier`, `architecture` and `fingerprint` are its target's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "outrider_head": KIND,
        "version": VERSION,
        **asdict(head.shape),
        FINGERPRINT: fingerprint,
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
    own = {name: tensor.float() for name, tensor in read_tensors(folder).items()}
    fill(head, own, folder, "an early-exit head")
    if target is not None:
        check_class(folder, target_said(folder, config), target)
        check_exit_fits(head, target)
    return head.eval().requires_grad_(False)


def is_exit_head(folder: Path) -> bool:
    """Whether a folder says of itself that it is one of these."""
    try:
        return read_config(folder).get("outrider_head") == KIND
    except ModelError:
        return False


def check_exit_fits(head: ExitHead, target: HuggingFaceTarget) -> None:
    """Refuse a head of another target's shape.

    Raises:
        VocabularyMismatch: another vocabulary.
        TargetShapeMismatch: another width, or another number of layers.
    """
    check_fits(head, target)
    layers = int(target.model.config.get_text_config().num_hidden_layers)
    if head.shape.depth not in (None, layers):
        raise TargetShapeMismatch(
            f"the early-exit head was made for a target of {head.shape.depth} layers, and this one "
            f"has {layers}; give the head of this target"
        )
    if head.shape.layers >= layers:
        raise TargetShapeMismatch(
            f"the early-exit head reads behind layer {head.shape.layers}, the target has "
            f"{layers} layers; give the head of this target"
        )


def _config(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if config.get("outrider_head") != KIND:
        raise ModelError(
            f"{str(folder)!r} holds no early-exit head ({CONFIG} says of none); give a folder that "
            "outrider train early-exit has written"
        )
    if config.get("version") != VERSION:
        raise UnsupportedModel(
            f"the early-exit head in {str(folder)!r} is of version {config.get('version')!r}, and "
            f"{VERSION} is read here; train it anew"
        )
    return config
