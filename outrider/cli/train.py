"""`outrider train lm`, `draft`, `eagle3`, `mtp` and `early-exit`: runs with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.cli import options, terminal
from outrider.config import counted
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.train.loop import Outcome
    from outrider.train.loop import Progress as Step
    from outrider.train.plan import Plan

LINES_PER_RUN = 100

MaxMinutes = Annotated[float | None, typer.Option(help="Stop after so long and keep the state.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start anew instead of resuming the run in the folder.")
]
TrainingDevice = Annotated[
    str, typer.Option(help="Where to train: auto (the GPU where there is one), cpu, cuda.")
]


def train_lm(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a bundled recipe.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the checkpoint.")],
    max_minutes: MaxMinutes = None,
    fresh: Fresh = False,
    device: TrainingDevice = "auto",
) -> int:
    """Train the language model of a recipe, or distil the draft model of one.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train lm tiny --out runs/tiny
      outrider train lm my-recipe.toml --out runs/mine --max-minutes 30
    """
    from outrider.train import run_recipe

    return _shown(
        out,
        lambda progress: run_recipe(
            recipe,
            out=out,
            resume=not fresh,
            max_minutes=max_minutes,
            device=device,
            progress=progress,
        ),
    )


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not minutes >= 0:
        raise InvalidConfig(f"max_minutes={minutes}: a number of at least 0 is due")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be trained, and on what."""

    target: str
    text: Sequence[Path]
    recipe: str | None
    tokens: int | None
    loss: str | None
    device: str
    compile: bool | None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a run takes, and the run: of a folder and its limits."""

    plan: Callable[[], Plan]
    run: Callable[..., Outcome]


def _draft(asked: _Asked) -> _Prepared:
    from outrider.train.run_draft import plan_draft, prepare_draft, run_draft

    if asked.compile is not None:
        raise InvalidConfig(
            "--compile and --no-compile are for what a head's target writes before the first step, "
            "and a draft model learns from rows written throughout; leave them out"
        )
    run = prepare_draft(
        asked.recipe,
        target=asked.target,
        text=asked.text,
        tokens=asked.tokens,
        loss=asked.loss,
        device=asked.device,
    )
    return _Prepared(partial(plan_draft, run), partial(run_draft, run))


def _head(kind: str, asked: _Asked) -> _Prepared:
    from outrider.train.run_head import head_recipe, plan_head, prepare_head, run_head

    recipe, manifest = head_recipe(kind, asked.recipe, tokens=asked.tokens, loss=asked.loss)
    run = prepare_head(
        recipe,
        target=asked.target,
        text=asked.text,
        manifest=manifest,
        device=asked.device,
        compile="auto" if asked.compile is None else asked.compile,
    )
    return _Prepared(partial(plan_head, run), partial(run_head, run))


def _command(prepared: Callable[[_Asked], _Prepared], said: str) -> Callable[..., int]:
    """The command that trains one kind of drafter for a target; `said` is its help."""

    def command(
        out: Annotated[Path, typer.Option("--out", "-o", help="The folder it is written to.")],
        target: Annotated[
            str, typer.Option(help="The model it is for: a folder, or 'bundled'.")
        ] = "bundled",
        text: Annotated[
            list[Path] | None,
            typer.Option(
                help="Files, folders, Parquet or JSONL of texts or conversations; repeatable."
            ),
        ] = None,
        recipe: Annotated[
            str | None, typer.Option(help="A TOML file, or the name of a bundled recipe.")
        ] = None,
        tokens: Annotated[int | None, typer.Option(help="Tokens to train on.")] = None,
        loss: Annotated[str | None, typer.Option(help="ce, kl, reverse-kl, tv or block.")] = None,
        max_minutes: MaxMinutes = None,
        fresh: Fresh = False,
        device: TrainingDevice = "auto",
        compile: options.Compile = None,
        plan: Annotated[
            bool, typer.Option("--plan", help="Say what time and memory it takes, and stop.")
        ] = False,
    ) -> int:
        _check_minutes(max_minutes)
        ready = prepared(_Asked(target, text or (), recipe, tokens, loss, device, compile))
        if plan:
            terminal.out().out(ready.plan().said(), highlight=False)
            return 0
        run = partial(ready.run, out, resume=not fresh, max_minutes=max_minutes)
        return _shown(out, lambda progress: run(progress=progress))

    command.__doc__ = said
    return command


train_draft = _command(
    _draft,
    """Train a small draft model that imitates a target of your own, on your own text.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train draft --target ./my-model --text src/ --out runs/draft
      outrider train draft --target ./my-model --text src/ --out runs/draft --loss tv --plan
      outrider generate --model ./my-model --drafter draft:runs/draft "import "
    """,
)
train_eagle3 = _command(
    partial(_head, "eagle3"),
    """Train an EAGLE-3 head for a target, on its own hidden states.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train eagle3 --text src/ --out runs/head
      outrider train eagle3 --target ./my-model --text chats.jsonl --out runs/head --plan
      outrider generate --model ./my-model --drafter eagle:runs/head "import "
    """,
)
train_mtp = _command(
    partial(_head, "mtp"),
    """Train an MTP module for a target: one more layer of its own kind, on its last hidden states.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train mtp --text src/ --out runs/mtp
      outrider generate --model ./my-model --drafter mtp:runs/mtp "import "
    """,
)
train_early_exit = _command(
    partial(_head, "early-exit"),
    """Train an early-exit head: an adapter behind a target's first layers, and a confidence.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train early-exit --text src/ --out runs/exit
      outrider train early-exit --recipe exit --out runs/exit --plan
      outrider generate --drafter early-exit:runs/exit --exit-threshold 0.4 "import "
    """,
)


def _shown(out: Path, run: Callable[[Callable[[Step], None]], Outcome]) -> int:
    """Runs under a bar, and says what came of it; of several processes the leading one speaks."""
    from outrider.train.together import joined

    with _Bar() as bar:
        try:
            outcome = run(bar.step)
        except KeyboardInterrupt:
            bar.note("interrupted; the same command resumes from the last saved state")
            return terminal.INTERRUPTED
    if not joined().leads:
        return 0
    terminal.out().out(
        f"{out}: step {outcome.step}, {counted(outcome.tokens, 'token')}, "
        f"{outcome.elapsed_s / 60:.1f} minutes"
        + ("" if outcome.finished else "; not finished, the same command resumes it"),
        highlight=False,
    )
    return 0


class _Bar:
    """A bar with loss, held-out figure and speed; lines where there is no terminal."""

    def __init__(self) -> None:
        self._console = terminal.err()
        self._held_out = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=None, figures="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, line: str) -> None:
        """A line of its own."""
        self._console.out(line, highlight=False)

    def step(self, at: Step) -> None:
        """Moves the bar to where the run stands."""
        if at.held_out is not None:
            self._held_out = f", {at.figure} {at.held_out:.2f}"
        figures = f"loss {at.loss:.3f}{self._held_out}, {at.rate_tok_s:.0f} tokens/s"
        self._bar.update(self._task, completed=at.step, total=at.steps, figures=figures)
        every = max(1, at.steps // LINES_PER_RUN)
        if not self._console.is_terminal and (at.step % every == 0 or at.step == at.steps):
            self.note(f"step {at.step}/{at.steps}  {figures}")
