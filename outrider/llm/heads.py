"""Drafters that read their target's hidden states, from the folders that specs name."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters import Drafter, DrafterSpec, EagleDrafter, MedusaDrafter
from outrider.errors import ModelError
from outrider.models.base import Target
from outrider.models.head import Head, check_fits, tapped_target
from outrider.models.hf import LoadedTarget
from outrider.models.mtp_files import load_mtp
from outrider.models.originals import load_eagle, load_medusa
from outrider.models.speculators import check_verifier

HEADS = ("eagle", "medusa", "mtp")
"""Kinds of drafters that are made here."""


def head_drafter(spec: DrafterSpec, model: Path, target: Target) -> Drafter:
    """The drafter of a head; `model` is the target's own folder, where MTP modules may lie.

    Raises:
        ModelError: no head that can be read, or one of a model of another class.
        UnsupportedModel: a kind of head, or of target, that is not served.
        VocabularyMismatch, TargetShapeMismatch: a head of another vocabulary or width.
    """
    tapped = tapped_target(target)
    folder = model if spec.path is None else Path(spec.path).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"drafter='{spec.kind}:{spec.path}': no folder is there; give that of a head"
            " (nothing is downloaded here: `hf download NAME --local-dir DIR` first)"
        )
    if spec.kind == "medusa":
        heads = load_medusa(folder, tapped)
        check_fits(heads, tapped)
        return MedusaDrafter(heads)
    head = _eagle(folder, tapped) if spec.kind == "eagle" else load_mtp(folder, tapped)
    check_fits(head, tapped)
    return EagleDrafter(head)


def _eagle(folder: Path, target: LoadedTarget) -> Head:
    check_verifier(folder, target)
    return load_eagle(folder, target)
