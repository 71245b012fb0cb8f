"""From names to objects: which folder, which drafter, and whether the two fit each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from outrider.config import check_flag, check_whole, shown
from outrider.control.controller import Controller
from outrider.control.measure import facts_of
from outrider.control.stored import stored
from outrider.drafters import (
    CombinedDrafter,
    Drafter,
    DrafterSpec,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    alternatives,
)
from outrider.engine.choice import WITHOUT_MODEL, parts_of
from outrider.errors import (
    InvalidConfig,
    ModelError,
    UnsupportedModel,
    VocabularyMismatch,
    warn,
)
from outrider.llm.heads import HEADS, head_drafter
from outrider.llm.options import Speculation
from outrider.models.base import Target
from outrider.models.bridge import BridgedModel, Dictionary
from outrider.models.bundled import BUNDLED, bundled_path
from outrider.models.exit_search import PROMPTS, best_exit, search_exit
from outrider.models.hf import (
    NOT_STRICT,
    HuggingFaceTarget,
    LoadedTarget,
    model_folder,
    refuse_cache_bytes,
)
from outrider.models.libllama import GgufTokenizer, LibllamaTarget, is_gguf
from outrider.models.libllama.products import Products, fits, products, why_not
from outrider.models.mtp_files import num_mtp_modules
from outrider.models.quantised import quantised, quantised_anew
from outrider.models.recurrent import RecurrentTarget
from outrider.models.text import TextTokenizer, Tokenizer
from outrider.types import Compile

Loaded: TypeAlias = LoadedTarget | LibllamaTarget
"""What a model folder, or a GGUF file, becomes."""

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in which arithmetic models run; None leaves the choice to the machine."""

    device: str | None = None
    dtype: torch.dtype | None = None
    strict: bool = False
    pack: bool | None = None
    share_prefixes: bool = True
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        check_flag("strict", self.strict)
        check_flag("share_prefixes", self.share_prefixes)
        if self.pack is not None:
            check_flag("pack", self.pack)
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise InvalidConfig(f"compile={shown(self.compile)}: True, False or 'auto' is due")
        if self.compile is True and self.strict:
            raise InvalidConfig(NOT_STRICT)

    def load(self, folder: Path, *, guesses: bool = False) -> Loaded:
        """The model of a folder or of a GGUF file.

        Raises:
            InvalidConfig: what a GGUF file cannot honour. Who only guesses may be asked for it,
                beside a target that can.
        """
        if is_gguf(folder):
            if not guesses:
                self._check_file(folder)
            if guesses and self.device not in (None, "cpu"):
                raise InvalidConfig(
                    f"the draft model {str(folder)!r} is a GGUF file, which runs on the processor, "
                    f"and the target is on {self.device}; draft with a model folder"
                )
            if self.device not in (None, "cpu"):
                raise InvalidConfig(
                    f"device={self.device!r}: GGUF files run on the processor here; leave it out"
                )
            return self._file(folder, guesses)
        loaded = HuggingFaceTarget.load(
            folder,
            device=self.device,
            dtype=self.dtype,
            strict=self.strict,
            pack=self.pack is not False,
            share_prefixes=self.share_prefixes,
        )
        return self.compiled(loaded)

    def _file(self, file: Path, guesses: bool) -> LibllamaTarget:
        """A GGUF file, with Outrider's own products where they are asked for or were made before.

        Raises:
            InvalidConfig: `compile=True`, and there can be none; who only guesses does without.
            ModelError: they cannot be compiled.
        """
        build = self.compile is True
        own: Products | None = None
        if self.compile is not False:
            if build and not guesses and (reason := why_not()) is not None:
                raise InvalidConfig(
                    f"compile=True cannot be had of {str(file)!r}: {reason}; leave it out"
                )
            try:
                own = products(build=build)
            except ModelError as error:
                if build:
                    raise
                warn(str(error))
        if own is not None and not fits(file):
            own = None
            warn(
                f"memory has no room for a copy of {str(file)!r}: its weights stay in the file, "
                "and libllama's own products are used"
            )
        target = LibllamaTarget(file, share_prefixes=self.share_prefixes, products=own)
        if own is not None and build and not guesses and not target.file.laid_out_bytes:
            warn(
                f"compile=True: {str(file)!r} ({target.file.quantisation}) has no weights that "
                "Outrider has products for on this processor; libllama's own are used"
            )
        return target

    def _check_file(self, file: Path) -> None:
        """Refuses what a GGUF file cannot be asked for.

        Raises:
            InvalidConfig: naming the option.
        """
        reasons = {
            "strict=True": (
                self.strict,
                "the last bits of libllama's rows depend on where a text's cells lie",
            ),
            "pack=True": (self.pack is True, "libllama lays weights out by itself"),
            f"dtype={self.dtype}": (
                self.dtype is not None,
                "the file's quantisation is the model's arithmetic",
            ),
        }
        for name, (asked, reason) in reasons.items():
            if asked:
                raise InvalidConfig(
                    f"{name} cannot be had of {str(file)!r}: {reason}; leave it out"
                )

    def compiled(self, target: LoadedTarget) -> LoadedTarget:
        """The same target, compiled where that is asked for, or was done before.

        Raises:
            UnsupportedModel, ModelError: `compile=True`, and it cannot be.
        """
        if self.compile is False or self.strict:
            return target
        try:
            if isinstance(target, HuggingFaceTarget):
                target.compile(build=self.compile is True)
            elif self.compile is True:
                raise UnsupportedModel(
                    f"compile=True: the {target.model.config.model_type} model has recurrent "
                    "state, and forwards over blocks of tokens alone are compiled; leave it out"
                )
        except ModelError as error:
            if self.compile is True:
                raise
            if not isinstance(error, UnsupportedModel):
                warn(str(error))
        return target


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


def folder_of(model: str | Path, name: str = "model") -> Path:
    """The folder of `"bundled"` or of a path, or a GGUF file; `name` is what errors call it.

    Raises:
        InvalidConfig: something else than a path.
        ModelError: nothing is there, or no model.
        MissingExtra: the bundled models are not installed.
    """
    if not isinstance(model, (str, Path)):
        raise InvalidConfig(
            f"{name}={shown(model)}: the path of a model folder or GGUF file, or 'bundled', is "
            "due; wrap a loaded model in outrider.models.HuggingFaceTarget and give it to "
            "SpeculativeDecoder"
        )
    if str(model) == BUNDLED:
        return bundled_path("target")
    folder = Path(model).expanduser()
    if is_gguf(folder):
        if not folder.is_file():
            raise ModelError(
                f"{name}={str(model)!r} is no file; give the path of a GGUF file "
                "(`hf download NAME FILE --local-dir DIR` fetches one)"
            )
        return folder
    if not folder.is_dir():
        raise ModelError(
            f"{name}={str(model)!r} is no folder; give a folder saved with save_pretrained, a GGUF "
            f"file, or 'bundled'{_remedy(str(model))}"
        )
    return model_folder(folder)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder or of a GGUF file.

    Raises:
        ModelError: there is none that can be read.
    """
    return GgufTokenizer(folder) if is_gguf(folder) else TextTokenizer(folder)


def _remedy(model: str) -> str:
    """What to do about a name that may be one of the Hub's."""
    if not _HUB_NAME.fullmatch(model):
        return ""
    return f"; nothing is downloaded here: `hf download {model} --local-dir DIR` first"


def share_cache(cache_bytes: int | None, target: Loaded, drafter: Drafter) -> None:
    """Bounds all caches together: target and draft models get room for as many tokens each.

    Raises:
        InvalidConfig: a bound that is no number of bytes, or holds no block of tokens; a model
            whose cache is not of blocks.
    """
    if cache_bytes is None:
        return
    for model in (target, *draft_models(drafter)):
        if isinstance(model, RecurrentTarget):
            refuse_cache_bytes(cache_bytes, model.model.config.model_type)
    models = _cached(target, drafter)
    blocks = [model.cache_plan()["block_tokens"] for model in models]
    each = [model.block_bytes // tokens for model, tokens in zip(models, blocks, strict=True)]
    total = sum(each)
    check_whole("cache_bytes", cache_bytes, max(1, total * max(blocks, default=0)))
    for model, token_bytes in zip(models, each, strict=True):
        model.limit_cache(cache_bytes * token_bytes // total)


def plan_cache(target: Loaded, drafter: Drafter, max_texts: int) -> dict[str, Any] | None:
    """What the caches of target and draft model take, and may take, in bytes.

    None where none of them is of blocks.

    `context_bytes` are those of a text as long as the context, `planned_bytes` of `max_texts` such
    texts. Nothing is taken before it is needed; `max_bytes` (None: no bound) is never passed.
    """
    plans = [model.cache_plan() for model in _cached(target, drafter)]
    if not plans:
        return None
    per_token = sum(plan["bytes_per_token"] for plan in plans)
    context = None if target.max_length is None else per_token * target.max_length
    bounds = [plan["max_bytes"] for plan in plans]
    return {
        "bytes_per_token": per_token,
        "block_tokens": plans[0]["block_tokens"],
        "context_bytes": context,
        "max_texts": max_texts,
        "planned_bytes": None if context is None else context * max_texts,
        "max_bytes": None if None in bounds else sum(bounds),
        "held_bytes": sum(plan["held_bytes"] for plan in plans),
        "share_prefixes": plans[0]["share_prefixes"],
    }


def _cached(target: Loaded, drafter: Drafter) -> list[HuggingFaceTarget | LibllamaTarget]:
    """The models that keep keys and values in blocks."""
    models = (target, *draft_models(drafter))
    return [model for model in models if isinstance(model, (HuggingFaceTarget, LibllamaTarget))]


def draft_models(drafter: Drafter) -> list[Target]:
    """The models a drafter guesses with."""
    drafts = [part.model for part in parts_of(drafter) if isinstance(part, ModelDrafter)]
    return [draft.model if isinstance(draft, BridgedModel) else draft for draft in drafts]


def draft_folder(spec: DrafterSpec, model: str | Path) -> Path | None:
    """The folder of the draft model a spec means for a target; None where it means none."""
    if spec.path is not None:
        return folder_of(spec.path, "drafter")
    if spec.kind in ("auto", "draft") and str(model) == BUNDLED:
        return bundled_path("draft")
    if spec.kind == "draft":
        raise InvalidConfig(
            f"drafter='draft': the target {str(model)!r} has no registered draft model; "
            "name one with draft:PATH (in a speculative_config with 'model')"
        )
    return None


def load_drafter(
    options: Speculation,
    model: str | Path,
    tokenizer: Tokenizer,
    place: Placement,
    target: Callable[[], Loaded],
) -> Drafter:
    """The drafter of a spec string; `target` gives the target, loaded where it is not yet.

    Raises:
        InvalidConfig: an unknown spec.
        VocabularyMismatch: a draft model with another tokenizer than the target's.
        UnsupportedModel: int8 or early-exit for a model or machine that has none.
    """

    def made(spec: DrafterSpec) -> Drafter:
        if spec.kind in HEADS or (spec.kind == "early-exit" and spec.path is not None):
            return head_drafter(spec, folder_of(model), target(), options.exit_threshold)
        folder = draft_folder(spec, model)
        if folder is not None and spec.kind == "bridge":
            warn_of_templates(own := tokenizer_of(folder), tokenizer)
            dictionary = Dictionary.of(tokenizer, own, target().vocab_size)
            bridged = BridgedModel(place.load(folder, guesses=True), dictionary)
            return ModelDrafter(bridged, name="bridge")
        if folder is not None:
            check_vocabularies(own := tokenizer_of(folder), tokenizer)
            warn_of_templates(own, tokenizer)
            return ModelDrafter(place.load(folder, guesses=True))
        if spec.kind == "early-exit":
            layers = spec.layers or _best_layers(options, tokenizer, target())
            return EarlyExitDrafter(layers, exit_threshold=options.exit_threshold)
        if spec.kind == "int8":
            own_weights = target()
            if not isinstance(own_weights, HuggingFaceTarget):
                reason = (
                    "the target is a GGUF file, quantised already"
                    if isinstance(own_weights, LibllamaTarget)
                    else "the target has recurrent state"
                )
                raise UnsupportedModel(
                    "drafter='int8' needs weights of linear layers alone, and "
                    f"{reason}; use drafter='ngram'"
                )

            # Weights of eight bits cannot be traced: compile=True is the target's.
            own_place = replace(place, compile="auto") if place.compile is True else place

            def remade(old: Target) -> Target:
                anew = quantised_anew(cast("HuggingFaceTarget", old), own_weights)
                return own_place.compiled(anew)

            copied = own_place.compiled(quantised(own_weights))
            return ModelDrafter(copied, name="int8", remake=remade)
        asked: dict[str, Callable[[], Drafter]] = {
            "none": NoDrafter,
            "suffix": options.suffix.drafter,
            "ngram": lambda: NgramDrafter(options.shortest, options.longest),
        }
        return (WITHOUT_MODEL | asked)[spec.kind]()

    auto = auto_specs(model)

    def together(spec: str) -> Drafter:
        drafters = [made(one) for one in DrafterSpec.parse_all(spec, auto[0])]
        return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)

    if options.control is None:
        return together(options.drafter)
    found: list[Drafter] = []
    for spec in alternatives(options.drafter, auto):
        try:
            found.append(together(spec))
        except UnsupportedModel as error:
            if spec in alternatives(options.drafter, ()):
                raise
            log.info("auto goes without %s: %s", spec, error)
    facts = facts_of(str(tokenizer.folder), target().info(), found)
    return Controller(found, options.control, costs=stored(facts), name=options.drafter)


def auto_specs(model: str | Path) -> tuple[str, ...]:
    """What `auto` chooses among for a target, the preferred first.

    Those are the MTP modules of its checkpoint and its registered draft model, where it has any,
    and prompt lookup.
    """
    modules = ("mtp",) if num_mtp_modules(folder_of(model)) else ()
    registered = ("draft",) if str(model) == BUNDLED else ()
    return (*modules, *registered, "ngram")


def _best_layers(options: Speculation, tokenizer: Tokenizer, target: Loaded) -> int:
    """How many layers had best draft, for prompts of several kinds."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    best = best_exit(search_exit(target, prompts, k=options.depth()))
    log.info(
        "early-exit:%d promises %.2f times the speed of plain decoding, with an acceptance of %.2f",
        best.layers,
        best.speedup,
        best.acceptance,
    )
    return best.layers


def check_vocabularies(draft: Tokenizer, target: Tokenizer) -> None:
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


def warn_of_templates(draft: Tokenizer, target: Tokenizer) -> None:
    """Warns where one side alone has a chat template: it was not trained on the other's texts."""
    if draft.has_chat_template == target.has_chat_template:
        return
    sides = ("draft model", "target") if target.has_chat_template else ("target", "draft model")
    warn(
        f"the {sides[0]}'s tokenizer has no chat template and the {sides[1]}'s has one: the draft "
        "model may guess badly in conversations; use a pair trained alike"
    )
