"""Heads in the folders of other engines, and the command lines that serve them.

What an engine cannot serve is refused by name before anything is written.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.config import check_whole, nearest
from outrider.errors import InvalidConfig, ModelError, TargetShapeMismatch, UnsupportedModel
from outrider.models.bundled import BUNDLED, bundled_path
from outrider.models.eagle import EagleHead
from outrider.models.exit_head import is_exit_head
from outrider.models.head_files import CONFIG, check_fingerprint, check_sizes, read_config
from outrider.models.originals import save_original
from outrider.models.speculators import Made, load_head, made_for, save_head

README = "README.md"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
CONVERTER = "convert_hf_to_gguf.py"
OUTTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
"""Precisions by the names of that converter."""
TAPS = 3
"""Layers that the heads of other engines read: their first product is three states wide."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the folder, the command lines that serve it in order, and notes on them."""

    folder: Path
    engine: str
    commands: tuple[str, ...]
    acceptance_test: str
    notes: tuple[str, ...] = ()

    def said(self) -> str:
        """As a text of Markdown."""
        lines = [f"# An EAGLE-3 head for {self.engine}", "", "```bash", *self.commands, "```", ""]
        lines += [f"* {note}" for note in self.notes]
        lines += ["", "Whether the server's texts have the target's law:", "", "```bash"]
        return "\n".join([*lines, self.acceptance_test, "```", ""])


def export_head(
    head: str | Path,
    *,
    to: str,
    out: str | Path,
    target: str | Path | None = None,
    k: int = 4,
) -> Exported:
    """Writes a head for another engine to the folder `out`, with a README of the command lines.

    Args:
        head: the folder of an EAGLE-3 head.
        to: `speculators`, `vllm`, `sglang` or `gguf`.
        out: a folder that is empty, or not there yet.
        target: the model it is served with; None is the one it was trained for. A name of the Hub
            is taken as it is, a folder is held against the head.
        k: tokens drafted per round.

    Raises:
        InvalidConfig: another engine, a folder that is not empty, a `k` that is no number, a
            target that is nowhere.
        ModelError: no head that can be read, or one of a model of another class or other weights.
        VocabularyMismatch, TargetShapeMismatch: the head of another target.
        UnsupportedModel: a head that the engine cannot serve.
    """
    if to not in ENGINES:
        raise InvalidConfig(
            f"to={to!r} does not exist; heads are exported to {', '.join(ENGINES)}"
            + nearest(to, ENGINES)
        )
    check_whole("k", k, 1)
    source, folder = Path(head).expanduser(), Path(out).expanduser()
    if is_exit_head(source):
        raise UnsupportedModel(
            f"{str(source)!r} is an early-exit head, and {to} runs no target in two parts; draft "
            "with it in Outrider, or export an EAGLE-3 head"
        )
    made = made_for(source)
    read = load_head(source)
    _check_served(read, source, to)
    name = str(target or made.name)
    served = str(bundled_path("target")) if name == BUNDLED else name
    model = Path(served).expanduser()
    if (model / CONFIG).is_file():
        _check_target(read, made, source, model)
    elif target is not None and not HUB_NAME.fullmatch(served):
        raise InvalidConfig(
            f"target={served!r} is no folder of a model; give one, 'bundled' or a name of the Hub"
        )
    _make_empty(folder)
    return ENGINES[to](_Job(read, made, folder, served, k, name == BUNDLED))


@dataclass(frozen=True, slots=True)
class _Job:
    """A head, what its folder says of its target, where it goes and how it is served.

    `bundled` says that the target is the one of `outrider-models`.
    """

    head: EagleHead
    made: Made
    folder: Path
    target: str
    k: int
    bundled: bool

    def done(self, engine: str, commands: list[str], port: int, *notes: str) -> Exported:
        """Everything said, in the folder too."""
        test = _command(
            "outrider certify endpoint", f"http://localhost:{port}", {"--model": self.target}
        )
        exported = Exported(self.folder, engine, tuple(commands), test, notes)
        (self.folder / README).write_text(exported.said(), "utf-8")
        return exported

    def save(self) -> None:
        """The layout of speculators, in the head's own precision."""
        save_head(
            self.head,
            self.folder,
            verifier=self.target,
            architecture=self.made.architecture,
            dtype=self.made.dtype,
            embeddings=self.head.embed_tokens is not None,
            fingerprint=self.made.fingerprint,
        )


def _check_served(head: EagleHead, source: Path, to: str) -> None:
    """Refuses what the engines' own modules have no room for."""
    taps = head.shape.taps
    if len(taps) != TAPS:
        raise UnsupportedModel(
            f"the head in {str(source)!r} reads {len(taps)} layers ({', '.join(map(str, taps))}), "
            f"and {to} serves heads over {TAPS}; train it with three taps"
        )
    if to == "sglang" and head.shape.norm_before_residual:
        raise UnsupportedModel(
            f"the head in {str(source)!r} has norm_before_residual=True, which sglang has no name "
            "for; export it to vllm, or train one without"
        )


def _check_target(head: EagleHead, made: Made, source: Path, model: Path) -> None:
    """Refuses a target that the head is not of, by the target's configuration alone."""
    check_fingerprint(source, model)
    config, who = read_config(model), f"the target {str(model)!r}"
    text, shape = config.get("text_config") or config, head.shape
    classes = config.get("architectures") or [made.architecture]
    if made.architecture not in classes:
        raise ModelError(
            f"the head in {str(source)!r} was made for {made.name!r}, a {made.architecture}, and "
            f"{who} is a {' or '.join(map(str, classes))}; give the head of this target"
        )
    vocab = shape.vocab_size, text.get("vocab_size")
    width = shape.hidden_size, text.get("hidden_size")
    check_sizes(f"the head in {str(source)!r}", who, vocab, width)
    if shape.taps[-1] >= int(text.get("num_hidden_layers", 0)):
        raise TargetShapeMismatch(
            f"the head in {str(source)!r} reads behind layer {shape.taps[-1]}, and of {who}, with "
            f"{text.get('num_hidden_layers')} layers, engines hand out what is before the last; "
            "train one with lower taps"
        )


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        full = any(folder.iterdir())
    except OSError as error:
        raise InvalidConfig(
            f"out={str(folder)!r} is no folder and cannot be made one ({error.strerror}); give "
            "another"
        ) from error
    if full:
        raise InvalidConfig(f"out={str(folder)!r} is not empty; give a new folder")


def _speculators(job: _Job) -> Exported:
    job.save()
    return job.done("speculators", [_vllm_command(job)], 8000, *VLLM_NOTES)


def _vllm(job: _Job) -> Exported:
    job.save()
    return job.done("vLLM", [_vllm_command(job)], 8000, *VLLM_NOTES)


VLLM_NOTES = (
    "`draft_sample_method` probabilistic draws from the head's law, and `rejection_sample_method` "
    "standard is the lossless test of single tokens; `block` keeps more where the server has it.",
)


def _vllm_command(job: _Job) -> str:
    config = {
        "method": "eagle3",
        "model": str(job.folder),
        "num_speculative_tokens": job.k,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    return _command("vllm serve", job.target, {"--speculative-config": json.dumps(config)})


def _sglang(job: _Job) -> Exported:
    """The layout of the head's authors; guesses and their test are chosen by options."""
    save_original(job.head, job.folder, job.made.dtype)
    command = _command(
        "python -m sglang.launch_server",
        None,
        {
            "--model-path": job.target,
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": str(job.folder),
            "--speculative-num-steps": str(job.k),
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": str(job.k + 1),
            "--speculative-accept-threshold-single": "1.0",
            "--speculative-accept-threshold-acc": "1.0",
        },
    )
    return job.done(
        "SGLang",
        [command],
        30000,
        "One guess a step is the head's likeliest and is kept while it is what the target draws; "
        "thresholds below 1.0 are lossy.",
        "`--speculative-use-rejection-sampling` draws guesses from the head's law instead: certify "
        "the server anew with it.",
    )


def _gguf(job: _Job) -> Exported:
    """What llama.cpp's converter reads; the converter and its own model are not ours."""
    job.save()
    found = shutil.which(CONVERTER)
    convert = f"python {shlex.quote(found or CONVERTER)}"
    head, target = str(job.folder / "head.gguf"), str(job.folder / "target.gguf")
    own_type = OUTTYPES.get(str(job.made.dtype).removeprefix("torch."), "auto")
    own = {"--target-model-dir": job.target, "--outfile": head, "--outtype": own_type}
    its = {"--outfile": target, "--outtype": _outtype(Path(job.target).expanduser())}
    serve = {
        "--model": target,
        "--model-draft": head,
        "--spec-type": "draft-eagle3",
        "--spec-draft-n-max": str(job.k),
        "--top-k": "0",
        "--top-p": "1.0",
        "--min-p": "0.0",
        "--port": "8080",
    }
    return job.done(
        "llama.cpp",
        [
            _command(convert, job.target, its),
            _command(convert, str(job.folder), own),
            _command("llama-server", None, serve),
        ],
        8080,
        HASH_NOTES[job.bundled],
        f"`{CONVERTER}` is llama.cpp's own"
        + ("." if found else ", in the root of its sources; name it with its folder."),
        "A guess is kept while it is what the server draws from the target, its one way of "
        "verifying; its usual truncations are switched off, so that temperature alone shapes the "
        "law.",
    )


HASH_NOTES = {
    True: "The lines that convert do not work as they stand: the converter knows BPE tokenizers by "
    "a hash, that of the bundled target is not among them, and it stops at target and head alike "
    "(`BPE pre-tokenizer was not recognized`). Have its `get_vocab_base_pre` return 'smaug-bpe' "
    "first, which splits text much as this tokenizer does.",
    False: "The converter knows BPE tokenizers by a hash, and stops at those of one's own making "
    "(`BPE pre-tokenizer was not recognized`) until its `get_vocab_base_pre` has a name for them.",
}
"""Whether the target is the bundled one, and what that means to llama.cpp's converter."""


def _outtype(model: Path) -> str:
    """A target's own precision; the converter's own choice where its folder does not tell."""
    config = read_config(model) if (model / CONFIG).is_file() else {}
    text = config.get("text_config")
    parts = (config, text) if isinstance(text, dict) else (config,)
    said = [part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
    return OUTTYPES.get(str(said[0]), "auto") if said else "auto"


ENGINES = {"speculators": _speculators, "vllm": _vllm, "sglang": _sglang, "gguf": _gguf}
"""Where heads can be exported to."""


def _command(program: str, argument: str | None, options: Mapping[str, str]) -> str:
    """A command line for a shell, an option a line."""
    parts = [program if argument is None else f"{program} {shlex.quote(argument)}"]
    parts += [f"{name} {shlex.quote(value)}" for name, value in options.items()]
    return " \\\n  ".join(parts)
