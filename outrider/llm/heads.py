"""Drafters with a head of their target's, from the folders that specs name."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters import (
    Drafter,
    DrafterSpec,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
)
from outrider.errors import ModelError
from outrider.models.base import Target
from outrider.models.bundled import BUNDLED, bundled_path
from outrider.models.early_exit import gated_target
from outrider.models.exit_head import load_exit_head
from outrider.models.head import check_fits, tapped_target
from outrider.models.head_files import check_fingerprint
from outrider.models.mtp_files import load_mtp
from outrider.models.originals import load_eagle, load_medusa

HEADS = ("eagle", "medusa", "mtp")
"""Kinds of drafters that always have a head; early-exit may."""


def head_drafter(
    spec: DrafterSpec, model: Path, target: Target, exit_threshold: float | None = None
) -> Drafter:
    """The drafter of a head; `model` is the target's own folder, where MTP modules may lie.

    Raises:
        ModelError: no head that can be read, or one of a model of another class or other weights.
        UnsupportedModel: a kind of head, or of target, that is not served.
        VocabularyMismatch, TargetShapeMismatch: a head of another target.
    """
    if spec.path is not None:
        check_fingerprint(_folder(spec), model)
    if spec.kind == "early-exit":
        exit_head = load_exit_head(_folder(spec), gated_target(target))
        layers = exit_head.shape.layers
        return EarlyExitDrafter(layers, head=exit_head, exit_threshold=exit_threshold)
    tapped = tapped_target(target)
    folder = model if spec.path is None else _folder(spec)
    if spec.kind == "medusa":
        heads = load_medusa(folder, tapped)
        check_fits(heads, tapped)
        return MedusaDrafter(heads)
    head = (load_eagle if spec.kind == "eagle" else load_mtp)(folder, tapped)
    check_fits(head, tapped)
    return EagleDrafter(head)


def _folder(spec: DrafterSpec) -> Path:
    """The folder that a spec names; `bundled` stands for the bundled target's own head."""
    if spec.path == BUNDLED:
        return bundled_path(spec.kind)
    folder = Path(str(spec.path)).expanduser()
    if not folder.is_dir():
        number = ", or a number of layers" if spec.kind == "early-exit" else ""
        raise ModelError(
            f"drafter='{spec.kind}:{spec.path}': no folder is there; give that of a head{number} "
            "(nothing is downloaded here: `hf download NAME --local-dir DIR` first)"
        )
    return folder
