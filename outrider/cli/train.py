"""`outrider train lm`: a recipe run with a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.cli import terminal

if TYPE_CHECKING:
    from outrider.train.loop import Progress as Step

LINES_PER_RUN = 100


def train_lm(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a bundled recipe.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the checkpoint.")],
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after so long and keep the state.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of resuming the run in the folder.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where to train: auto (the GPU where there is one), cpu, cuda.")
    ] = "auto",
) -> int:
    """Train the language model of a recipe, or distil the draft model of one.

    A run that was stopped or killed is resumed by the same command.

    \b
    Examples:
      outrider train lm tiny --out runs/tiny
      outrider train lm my-recipe.toml --out runs/mine --max-minutes 30
    """
    from outrider.train import run_recipe

    with _Bar() as bar:
        try:
            outcome = run_recipe(
                recipe,
                out=out,
                resume=not fresh,
                max_minutes=max_minutes,
                device=device,
                progress=bar.step,
            )
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
    """A bar with loss, held-out perplexity and speed; lines where there is no terminal."""

    def __init__(self) -> None:
        self._console = terminal.err()
        self._perplexity = ""
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
        if at.perplexity is not None:
            self._perplexity = f", held-out perplexity {at.perplexity:.2f}"
        figures = f"loss {at.loss:.3f}{self._perplexity}, {at.rate_tok_s:.0f} tokens/s"
        self._bar.update(self._task, completed=at.step, total=at.steps, figures=figures)
        every = max(1, at.steps // LINES_PER_RUN)
        if not self._console.is_terminal and (at.step % every == 0 or at.step == at.steps):
            self.note(f"step {at.step}/{at.steps}  {figures}")
