"""`outrider train lm`, `train eagle3` and `train mtp`: runs with a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.cli import terminal
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.train.loop import Outcome
    from outrider.train.loop import Progress as Step

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


Target = Annotated[str, typer.Option(help="The model it is for: a folder, or 'bundled'.")]
Text = Annotated[
    list[Path] | None,
    typer.Option(help="Files, folders or JSONL of texts or conversations; repeatable."),
]
HeadOut = Annotated[Path, typer.Option("--out", "-o", help="The folder of the head.")]
HeadRecipeName = Annotated[
    str | None, typer.Option(help="A TOML file, or a bundled recipe; see docs/heads.md.")
]
Tokens = Annotated[int | None, typer.Option(help="Tokens to train on.")]
Loss = Annotated[str | None, typer.Option(help="ce, kl, reverse-kl or tv.")]
Planned = Annotated[
    bool, typer.Option("--plan", help="Say what time and memory it takes, and stop.")
]


def train_eagle3(
    out: HeadOut,
    target: Target = "bundled",
    text: Text = None,
    recipe: HeadRecipeName = None,
    tokens: Tokens = None,
    loss: Loss = None,
    max_minutes: MaxMinutes = None,
    fresh: Fresh = False,
    device: TrainingDevice = "auto",
    plan: Planned = False,
) -> int:
    """Train an EAGLE-3 head for a target, on its own hidden states.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train eagle3 --text src/ --out runs/head
      outrider train eagle3 --target ./my-model --text chats.jsonl --out runs/head --plan
      outrider generate --model ./my-model --drafter eagle:runs/head "import "
    """
    asked = _Asked("eagle3", recipe, tokens, loss, target, tuple(text or ()), device)
    return _train_head(asked, out, plan, fresh, max_minutes)


def train_mtp(
    out: HeadOut,
    target: Target = "bundled",
    text: Text = None,
    recipe: HeadRecipeName = None,
    tokens: Tokens = None,
    loss: Loss = None,
    max_minutes: MaxMinutes = None,
    fresh: Fresh = False,
    device: TrainingDevice = "auto",
    plan: Planned = False,
) -> int:
    """Train an MTP module for a target: one more layer of its own kind, on its last hidden states.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train mtp --text src/ --out runs/mtp
      outrider generate --model ./my-model --drafter mtp:runs/mtp "import "
    """
    asked = _Asked("mtp", recipe, tokens, loss, target, tuple(text or ()), device)
    return _train_head(asked, out, plan, fresh, max_minutes)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which head of what."""

    kind: str
    recipe: str | None
    tokens: int | None
    loss: str | None
    target: str
    text: tuple[Path, ...]
    device: str


def _train_head(
    asked: _Asked, out: Path, plan: bool, fresh: bool, max_minutes: float | None
) -> int:
    from outrider.train.run_head import head_recipe, plan_head, prepare_head, run_head

    if max_minutes is not None and max_minutes < 0:
        raise InvalidConfig(f"max_minutes={max_minutes}: a number of at least 0 is due")
    chosen, manifest = head_recipe(
        asked.recipe, kind=asked.kind, tokens=asked.tokens, loss=asked.loss
    )
    run = prepare_head(
        chosen, target=asked.target, text=asked.text, manifest=manifest, device=asked.device
    )
    if plan:
        terminal.out().out(plan_head(run).said(), highlight=False)
        return 0
    return _shown(
        out,
        lambda progress: run_head(
            run, out, resume=not fresh, max_minutes=max_minutes, progress=progress
        ),
    )


def _shown(out: Path, run: Callable[[Callable[[Step], None]], Outcome]) -> int:
    """Runs under a bar, and says what came of it."""
    with _Bar() as bar:
        try:
            outcome = run(bar.step)
        except KeyboardInterrupt:
            bar.note("interrupted; the same command resumes from the last saved state")
            return terminal.INTERRUPTED
    terminal.out().out(
        f"{out}: step {outcome.step}, {outcome.tokens} tokens, {outcome.elapsed_s / 60:.1f} minutes"
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
