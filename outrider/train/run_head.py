"""One head from text to a folder that Outrider and other engines load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.bundled import bundled_path
from outrider.models.device import pick_device
from outrider.models.eagle import EagleHead
from outrider.models.exit_head import ExitHead, save_exit_head
from outrider.models.head import TargetHead
from outrider.models.head_files import fingerprint
from outrider.models.hf import HuggingFaceTarget, model_folder
from outrider.models.mtp import MtpHead
from outrider.models.mtp_files import save_mtp
from outrider.models.speculators import save_head
from outrider.models.text import TextTokenizer
from outrider.train.eagle import TrainingTimeTest, draft_tokens, new_head
from outrider.train.exit import ExitTraining, new_exit_head
from outrider.train.head import HeadObjective
from outrider.train.job import Job
from outrider.train.loop import Outcome, ProgressCallback
from outrider.train.mtp import layer_options, new_module
from outrider.train.plan import Plan, planned
from outrider.train.prepare import sha256_of
from outrider.train.recipe import EagleRecipe, ExitRecipe, HeadRecipe, MtpRecipe, TrainRecipe
from outrider.train.recipe_file import load_head_recipe
from outrider.train.run import recipe_path
from outrider.train.sources import texts_of
from outrider.train.texts import Texts
from outrider.train.together import joined
from outrider.types import Compile

_PLAIN = HeadRecipe(
    "head",
    20251,
    TrainRecipe(2_048_000, context=256, long_context=256, vector_rate=1e-3),
)
PLAIN = {
    EagleRecipe.kind: _PLAIN,
    MtpRecipe.kind: replace(_PLAIN, mtp=MtpRecipe()),
    ExitRecipe.kind: replace(
        _PLAIN, train=replace(_PLAIN.train, matrix_rate=5e-3), exit=ExitRecipe()
    ),
}
"""What is trained where no recipe is named, by the kind of head."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run made ready: its recipe, target, text, and the head at its start."""

    recipe: HeadRecipe
    target: HuggingFaceTarget
    objective: HeadObjective
    head: TargetHead
    inputs: dict[str, str]
    name: str
    fingerprint: str | None = None


def head_recipe(
    kind: str,
    path_or_name: str | None = None,
    *,
    tokens: int | None = None,
    loss: str | None = None,
) -> tuple[HeadRecipe, Path | None]:
    """A head's recipe and where the manifest of its corpus lies; a plain one where none is named.

    `kind` is one of PLAIN. `tokens` and `loss` go before what the recipe says.

    Raises:
        InvalidConfig: a recipe that cannot be meant, or of another kind of head.
    """
    manifest = None
    if path_or_name is None:
        recipe = PLAIN[kind]
    else:
        path = recipe_path(path_or_name)
        recipe = load_head_recipe(path)
        if recipe.corpus is not None:
            manifest = path.parent / recipe.corpus.manifest
    if recipe.head.kind != kind:
        raise InvalidConfig(
            f"the recipe {path_or_name!r} is of a head of kind {recipe.head.kind}, and {kind} is "
            f"asked for; run `outrider train {recipe.head.kind}` with it"
        )
    if tokens is not None:
        recipe = replace(recipe, train=replace(recipe.train, tokens=tokens))
    if loss is not None:
        changed: dict[str, Any] = {recipe.head.section: replace(recipe.head, loss=loss)}
        recipe = replace(recipe, **changed)
    return recipe, manifest


def plan_head(run: HeadRun) -> Plan:
    """Times one micro-batch of text; the run's own gradients and optimisers are not touched."""
    plan = planned("a head", run.head, run.objective, run.recipe.train, run.target.device)
    # Of another device than the processor the plan tells that one's memory.
    kept = run.objective.kept_bytes if run.target.device.type == "cpu" else 0
    return replace(plan, memory_bytes=plan.memory_bytes + kept)


def prepare_head(
    recipe: HeadRecipe,
    *,
    target: str | Path,
    text: Sequence[str | Path] = (),
    manifest: Path | None = None,
    device: str = "auto",
    compile: Compile = "auto",
) -> HeadRun:
    """Read the target and the text; nothing is trained or written yet.

    `text` is taken in place of the recipe's corpus, whose manifest lies at `manifest`. With
    `compile` the target's forwards are compiled while it writes the rows of its own.

    Raises:
        InvalidConfig: no text, or too little; a recipe, target or device that cannot be used.
        UnsupportedModel: a target without hidden states to be had.
    """
    if compile is True and not recipe.head.written_share:
        raise InvalidConfig(
            "--compile is for rows that the target writes before the first step, and "
            f"{recipe.head.section}.written_share is 0; leave it out, or give a share"
        )
    torch.set_num_threads(recipe.train.threads)
    joined(device)
    folder = bundled_path("target") if str(target) == "bundled" else model_folder(Path(target))
    tokenizer = TextTokenizer(folder)
    texts = texts_of(text, recipe.corpus, manifest, tokenizer)
    loaded = HuggingFaceTarget.load(folder, device=str(pick_device(device)), share_prefixes=False)
    if not isinstance(loaded, HuggingFaceTarget):
        raise UnsupportedModel(
            f"the target {str(target)!r} has recurrent state, and heads are trained for models "
            "with a cache of keys and values alone; train a draft model for it"
        )
    ends = sorted(tokenizer.end_tokens())
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    inputs = {"target": sha256_of(folder / "config.json", *weights), "text": texts.sha256}
    objective, head = _begun(recipe, loaded, texts, ends[0] if ends else 0, compile)
    head, made_for = head.to(loaded.device), fingerprint(folder)
    return HeadRun(recipe, loaded, objective, head, inputs, str(target), made_for)


def _begun(
    recipe: HeadRecipe, target: HuggingFaceTarget, texts: Texts, end_id: int, compile: Compile
) -> tuple[HeadObjective, TargetHead]:
    """What is minimised, and the head as it is before the first step."""
    given = recipe, target, texts.train, texts.held_out, end_id, compile
    if recipe.exit is not None:
        return ExitTraining(*given), new_exit_head(recipe, target)
    if recipe.mtp is not None:
        return TrainingTimeTest(*given), new_module(recipe, target)
    tokens = draft_tokens(texts.train, target.vocab_size, recipe.eagle.draft_vocab)
    return TrainingTimeTest(*given), new_head(recipe, target, tokens)


def run_head(
    run: HeadRun,
    out: Path,
    *,
    resume: bool = True,
    max_minutes: float | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Train the head and write it to `out` in float16: EAGLE-3's in the layout of speculators.

    As any `Job` runs.

    Raises:
        InvalidConfig: a folder or state that cannot be used.
    """
    save = partial(_save, run)
    job = Job(run.head, run.objective, run.recipe, run.inputs, run.target.device, save)
    return job.run(out, resume=resume, max_minutes=max_minutes, progress=progress)


def _save(run: HeadRun, out: Path) -> None:
    """Write the head that was trained."""
    head, architecture = run.head, type(run.target.model).__name__
    said: dict[str, Any] = {"verifier": run.name, "fingerprint": run.fingerprint}
    if isinstance(head, ExitHead):
        save_exit_head(head, out, architecture=architecture, **said)
    elif isinstance(head, MtpHead):
        save_mtp(
            head,
            out,
            target=run.target,
            dtype=torch.float16,
            options=layer_options(run.recipe),
            **said,
        )
    else:
        assert isinstance(head, EagleHead)
        save_head(
            head,
            out,
            architecture=architecture,
            dtype=torch.float16,
            embeddings=False,
            **said,
        )
