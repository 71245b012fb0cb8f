"""From names to objects: which folder, which drafter, and whether the two fit each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.config import check_flag, check_whole
from outrider.drafters import Drafter, DrafterSpec, ModelDrafter, NgramDrafter, NoDrafter
from outrider.errors import InvalidConfig, ModelError, OutriderWarning, VocabularyMismatch
from outrider.llm.options import Speculation
from outrider.models.bundled import bundled_path
from outrider.models.hf import HuggingFaceTarget, model_folder
from outrider.models.text import TextTokenizer

BUNDLED = "bundled"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in which arithmetic models run; None leaves the choice to the machine."""

    device: str | None = None
    dtype: torch.dtype | None = None
    strict: bool = False
    pack: bool | None = None

    def __post_init__(self) -> None:
        check_flag("strict", self.strict)
        if self.pack is not None:
            check_flag("pack", self.pack)

    def load(self, folder: Path) -> HuggingFaceTarget:
        """The model of a folder."""
        return HuggingFaceTarget.load(
            folder,
            device=self.device,
            dtype=self.dtype,
            strict=self.strict,
            pack=self.pack is not False,
        )


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by name.

    Raises:
        InvalidConfig: a name that is none.
    """
    if name is None or name == "auto" or isinstance(name, torch.dtype):
        return None if isinstance(name, str) else name
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidConfig(f"dtype={name!r} does not exist; dtypes are {', '.join(DTYPES)}")
    return DTYPES[name]


def folder_of(model: str | Path) -> Path:
    """The folder of `"bundled"` or of a path.

    Raises:
        InvalidConfig: something else than a path.
        ModelError: nothing is there, or no model.
        MissingExtra: the bundled models are not installed.
    """
    if not isinstance(model, (str, Path)):
        raise InvalidConfig(f"model={model!r}: the path of a model folder, or 'bundled', is due")
    if str(model) == BUNDLED:
        return bundled_path("target")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"model={str(model)!r} is no folder; give a folder saved with save_pretrained, "
            "or 'bundled'"
        )
    return model_folder(folder)


def share_cache(cache_bytes: int | None, target: HuggingFaceTarget, drafter: Drafter) -> None:
    """Bounds all caches together: target and draft model get room for as many tokens each.

    Raises:
        InvalidConfig: a bound that is no number of bytes, or holds no block of tokens.
    """
    if cache_bytes is None:
        return
    draft = drafter.model if isinstance(drafter, ModelDrafter) else None
    models = [m for m in (target, draft) if isinstance(m, HuggingFaceTarget)]
    total = sum(model.block_bytes for model in models)
    check_whole("cache_bytes", cache_bytes, max(1, total))
    for model in models:
        model.limit_cache(cache_bytes * model.block_bytes // total)


def draft_folder(spec: DrafterSpec, model: str | Path) -> Path | None:
    """The folder of the draft model a spec means for a target; None where it means none."""
    if spec.path is not None:
        return folder_of(spec.path)
    if spec.kind in ("auto", "draft") and str(model) == BUNDLED:
        return bundled_path("draft")
    if spec.kind == "draft":
        raise InvalidConfig(
            f"drafter='draft': the target {str(model)!r} has no registered draft model; "
            "name one with draft:PATH (in a speculative_config with 'model')"
        )
    return None


def load_drafter(
    options: Speculation, model: str | Path, tokenizer: TextTokenizer, place: Placement
) -> Drafter:
    """The drafter of a spec string.

    Raises:
        InvalidConfig: an unknown spec.
        VocabularyMismatch: a draft model with another tokenizer than the target's.
    """
    spec = DrafterSpec.parse(options.drafter)
    folder = draft_folder(spec, model)
    if folder is not None:
        check_vocabularies(own := TextTokenizer(folder), tokenizer)
        warn_of_templates(own, tokenizer)
        return ModelDrafter(place.load(folder))
    if spec.kind == "none":
        return NoDrafter()
    return NgramDrafter(options.shortest, options.longest)


def check_vocabularies(draft: TextTokenizer, target: TextTokenizer) -> None:
    """Refuses a draft whose tokens do not mean what the target's mean.

    Raises:
        VocabularyMismatch: names both sides and the first token that differs.
    """
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return
    token = next(t for t in sorted({*ours, *theirs}) if ours.get(t) != theirs.get(t))
    raise VocabularyMismatch(
        f"the draft model in {str(draft.folder)!r} has {len(theirs)} tokens, the target in "
        f"{str(target.folder)!r} {len(ours)}, and they differ (first at {token!r}: "
        f"{theirs.get(token)} against {ours.get(token)}); choose a draft of the target's tokenizer"
    )


def warn_of_templates(draft: TextTokenizer, target: TextTokenizer) -> None:
    """Warns where one side alone has a chat template: it was not trained on the other's texts."""
    if draft.has_chat_template == target.has_chat_template:
        return
    sides = ("draft model", "target") if target.has_chat_template else ("target", "draft model")
    warnings.warn(
        f"the {sides[0]}'s tokenizer has no chat template and the {sides[1]}'s has one: the draft "
        "model may guess badly in conversations; use a pair trained alike",
        OutriderWarning,
        stacklevel=2,
    )
