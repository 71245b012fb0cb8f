"""One head from text to a folder that Outrider and other engines load."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.bundled import bundled_path
from outrider.models.device import pick_device
from outrider.models.eagle import EagleHead
from outrider.models.head import Head
from outrider.models.hf import HuggingFaceTarget, model_folder
from outrider.models.mtp import MtpHead
from outrider.models.mtp_files import save_mtp
from outrider.models.speculators import save_head
from outrider.models.text import TextTokenizer
from outrider.train.corpus import load_corpus
from outrider.train.eagle import TrainingTimeTest, draft_tokens, new_head
from outrider.train.loop import Outcome, Progress, ProgressCallback, train
from outrider.train.mtp import layer_options, new_module
from outrider.train.prepare import sha256_of
from outrider.train.recipe import EagleRecipe, HeadRecipe, MtpRecipe, TrainRecipe
from outrider.train.recipe_file import load_head_recipe
from outrider.train.run import STATE_FOLDER, recipe_path
from outrider.train.texts import Texts, read_texts

LOG = "log.jsonl"
PLAIN = HeadRecipe(
    "head",
    20251,
    TrainRecipe(2_048_000, context=256, long_context=256, vector_rate=1e-3),
    EagleRecipe(),
)
PLAIN_MTP = replace(PLAIN, name="mtp", mtp=MtpRecipe())
"""What is trained where no recipe is named."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run made ready: its recipe, target, text, and the head at its start."""

    recipe: HeadRecipe
    target: HuggingFaceTarget
    objective: TrainingTimeTest
    head: Head
    inputs: dict[str, str]
    name: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will take, by the time and memory of one of its micro-batches here."""

    steps: int
    tokens: int
    parameters: int
    seconds: float
    memory_bytes: int

    def said(self) -> str:
        """In a line."""
        return (
            f"{self.steps} steps, {self.tokens} tokens, a head of {self.parameters:,} parameters: "
            f"about {self.seconds / 60:.0f} minutes and {self.memory_bytes / 1e9:.1f} GB here"
        )


def head_recipe(
    path_or_name: str | None = None,
    *,
    kind: str = "eagle3",
    tokens: int | None = None,
    loss: str | None = None,
) -> tuple[HeadRecipe, Path | None]:
    """A head's recipe and where the manifest of its corpus lies; a plain one where none is named.

    `kind` is that of the head, `eagle3` or `mtp`. `tokens` and `loss` go before what it says.

    Raises:
        InvalidConfig: a recipe that cannot be meant, or is one of another kind of head.
    """
    manifest = None
    if path_or_name is None:
        recipe = PLAIN_MTP if kind == "mtp" else PLAIN
    else:
        path = recipe_path(path_or_name)
        recipe = load_head_recipe(path)
        if recipe.corpus is not None:
            manifest = path.parent / recipe.corpus.manifest
    if recipe.kind != kind:
        raise InvalidConfig(
            f"the recipe {str(path_or_name)!r} is of kind {recipe.kind}, and {kind} is asked for; "
            f"run `outrider train {recipe.kind}`"
        )
    if tokens is not None:
        recipe = replace(recipe, train=replace(recipe.train, tokens=tokens))
    if loss is not None:
        changed: dict[str, Any] = {recipe.head.section: replace(recipe.head, loss=loss)}
        recipe = replace(recipe, **changed)
    return recipe, manifest


def plan_head(run: HeadRun) -> Plan:
    """Times one micro-batch of text; the run's own gradients and optimisers are not touched."""
    recipe = run.recipe.train
    started = time.perf_counter()
    tokens = run.objective.rehearse(run.head)
    run.head.zero_grad(set_to_none=True)
    seconds = (time.perf_counter() - started) * recipe.steps * recipe.batch_tokens / tokens
    parameters = sum(p.numel() for p in run.head.parameters())
    held = 4 * 3 * parameters
    if run.target.device.type == "cuda":
        used = torch.cuda.max_memory_allocated(run.target.device)
    else:
        used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Plan(recipe.steps, recipe.tokens, parameters, seconds, used + held)


def prepare_head(
    recipe: HeadRecipe,
    *,
    target: str | Path,
    text: Sequence[str | Path] = (),
    manifest: Path | None = None,
    device: str = "auto",
) -> HeadRun:
    """Read the target and the text; nothing is trained or written yet.

    `text` is taken in place of the recipe's corpus, whose manifest lies at `manifest`.

    Raises:
        InvalidConfig: no text, or too little; a recipe, target or device that cannot be used.
        UnsupportedModel: a target without hidden states to be had.
    """
    torch.set_num_threads(recipe.train.threads)
    folder = bundled_path("target") if str(target) == "bundled" else model_folder(Path(target))
    tokenizer = TextTokenizer(folder)
    texts = _texts(recipe, text, manifest, tokenizer)
    loaded = HuggingFaceTarget.load(folder, device=str(pick_device(device)), share_prefixes=False)
    if not isinstance(loaded, HuggingFaceTarget):
        raise UnsupportedModel(
            f"the target {str(target)!r} has recurrent state, and heads read hidden states of "
            "models with a cache of keys and values alone; train a draft model for it"
        )
    ends = sorted(tokenizer.end_tokens())
    objective = TrainingTimeTest(
        recipe, loaded, texts.train, texts.held_out, ends[0] if ends else 0
    )
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    inputs = {"target": sha256_of(folder / "config.json", *weights), "text": texts.sha256}
    if recipe.mtp is None:
        tokens = draft_tokens(texts.train, loaded.vocab_size, recipe.eagle.draft_vocab)
        head: Head = new_head(recipe, loaded, tokens)
    else:
        head = new_module(recipe, loaded)
    head = head.to(loaded.device)
    return HeadRun(recipe, loaded, objective, head, inputs, str(target))


def _texts(
    recipe: HeadRecipe,
    text: Sequence[str | Path],
    manifest: Path | None,
    tokenizer: TextTokenizer,
) -> Texts:
    if text:
        return read_texts(text, tokenizer)
    if recipe.corpus is None or manifest is None:
        raise InvalidConfig("no text to train on; give files, folders or JSONL with --text")
    corpus = load_corpus(recipe.corpus, manifest)
    train, held_out = (
        tuple(tuple(tokenizer.encode(document.text)) for document in documents)
        for documents in (corpus.train, corpus.held_out)
    )
    return Texts(train, held_out, sha256_of(manifest))


def run_head(
    run: HeadRun,
    out: Path,
    *,
    resume: bool = True,
    max_minutes: float | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Train the head and write it to `out` in float16: EAGLE-3 in the layout of speculators.

    The state of the run lives in `out/training`, beside a line of JSON for each step; it is resumed
    from there unless `resume` is False. When `max_minutes` are over first, the state is saved and
    no head is written.

    Raises:
        InvalidConfig: a folder or state that cannot be used.
    """
    state = out / STATE_FOLDER
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"out={str(out)!r} is no folder and cannot be made one ({error.strerror}); give "
            "another folder"
        ) from error
    with (state / LOG).open("a" if resume else "w", encoding="utf-8") as log:

        def noted(at: Progress) -> None:
            line: dict[str, Any] = {
                "step": at.step,
                "loss": at.loss,
                "rate_tok_s": at.rate_tok_s,
                "elapsed_s": at.elapsed_s,
            }
            if at.held_out is not None:
                line["accepted_length"] = at.held_out
            log.write(json.dumps(line) + "\n")
            log.flush()
            if progress is not None:
                progress(at)

        outcome = train(
            run.head,
            run.objective,
            run.recipe,
            state,
            inputs=run.inputs,
            resume=resume,
            max_minutes=max_minutes,
            progress=noted,
        )
    if outcome.finished:
        _save(run, out)
    return outcome


def _save(run: HeadRun, out: Path) -> None:
    head = run.head
    if isinstance(head, EagleHead):
        save_head(
            head,
            out,
            verifier=run.name,
            architecture=type(run.target.model).__name__,
            dtype=torch.float16,
            embeddings=False,
        )
    elif isinstance(head, MtpHead):
        save_mtp(
            head,
            out,
            verifier=run.name,
            target=run.target,
            dtype=torch.float16,
            options=layer_options(run.recipe),
        )
