"""`outrider demo`: the bundled pair on held-out code, plain and speculative, token by token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli import options, terminal
from outrider.cli.sources import SourceSpans
from outrider.cli.timing import Run, measure, warm_up
from outrider.config import SamplingParams, counted
from outrider.errors import InvalidConfig
from outrider.types import Delta

if TYPE_CHECKING:
    from outrider.llm import LLM

NOT_EQUAL = 1
DEPTH = 3
"""Tokens guessed per round; of 2, 3 and 4 what the pair gained most from on four prompts."""
COLUMNS_NEEDED = 100
SMOKE_TOKENS = 24


def demo(
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens.")] = 160,
    depth: Annotated[
        int, typer.Option("--depth", "-k", help="Tokens guessed per round at most.")
    ] = DEPTH,
    prompt: Annotated[int, typer.Option(help="Which of the held-out prompts, from 0.")] = 0,
    strict: options.Strict = True,
    smoke: Annotated[bool, typer.Option("--smoke", help="A short run, for checks.")] = False,
    json_output: options.Json = False,
) -> int:
    """Watch the bundled models complete held-out code, plainly and speculatively.

    Both texts are timed twice, in the order plain, speculative, speculative, plain; the exit code
    is 1 when their tokens differ.

    \b
    Examples:
      outrider demo
      outrider demo --prompt 3 --max-tokens 200
      outrider demo --json
    """
    from outrider.models.bundled import eval_prompts

    text = _chosen(eval_prompts("code"), prompt)
    llm = options.Loading("bundled", "draft", depth, strict=strict, share_prefixes=False).load()
    tokens = llm.tokenizer.encode(text)
    sampling = SamplingParams(
        max_tokens=SMOKE_TOKENS if smoke else max_tokens, temperature=0, ignore_eos=True
    )
    warm_up(llm, tokens, sampling)
    stage = _Silent() if json_output else _stage(llm, tokens, text)
    with stage:
        plain = measure(llm, tokens, sampling, depth=0, show=stage.plain)
        fast = measure(llm, tokens, sampling, show=stage.fast)
    pair = Pair([plain], [fast])
    if not (smoke or pair.interrupted):
        pair.fast.append(measure(llm, tokens, sampling))
        pair.plain.append(measure(llm, tokens, sampling, depth=0))
    if pair.interrupted:
        return terminal.INTERRUPTED
    if json_output:
        typer.echo(json.dumps({"prompt": text, "model": llm.info(), **pair.as_dict()}, default=str))
    else:
        pair.report(terminal.out(), llm.info())
    return 0 if pair.tokens_equal else NOT_EQUAL


def _chosen(prompts: list[str], index: int) -> str:
    if not 0 <= index < len(prompts):
        raise InvalidConfig(f"prompt={index}: there are held-out prompts 0 to {len(prompts) - 1}")
    return prompts[index]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same text made plainly and speculatively, each once or more."""

    plain: list[Run]
    fast: list[Run]

    @property
    def tokens_equal(self) -> bool:
        """Whether every run gave the very same tokens."""
        return all(run.token_ids == self.plain[0].token_ids for run in (*self.plain, *self.fast))

    @property
    def interrupted(self) -> bool:
        """Whether a run was cut short."""
        return any(run.interrupted for run in (*self.plain, *self.fast))

    @property
    def speed_up(self) -> float:
        """Speculative over plain tokens/s."""
        return rate(self.fast) / rate(self.plain)

    def as_dict(self) -> dict[str, Any]:
        """The comparison, ready for JSON."""
        return {
            "tokens_equal": self.tokens_equal,
            "plain_tokens_per_s": rate(self.plain),
            "speculative_tokens_per_s": rate(self.fast),
            "speed_up": self.speed_up,
            "plain": self.plain[0].as_dict(),
            "speculative": self.fast[0].as_dict(),
        }

    def report(self, console: Console, info: dict[str, Any]) -> None:
        """The figures, and the closing line; of tokens that differ why they may."""
        metrics = self.fast[0].metrics
        console.out(
            f"{counted(len(self.plain[0].token_ids), 'token')} each; acceptance rate "
            f"{metrics.acceptance_rate:.2f}, mean acceptance length "
            f"{metrics.mean_acceptance_length:.2f}",
            highlight=False,
        )
        console.out(
            f"tokens equal: {'yes' if self.tokens_equal else 'no'}; "
            f"plain {rate(self.plain):.1f} tokens/s, "
            f"speculative {rate(self.fast):.1f} tokens/s ({self.speed_up:.2f}x)",
            highlight=False,
        )
        if not self.tokens_equal:
            console.out(options.why_unequal(info), highlight=False)


def rate(runs: list[Run]) -> float:
    """Tokens per second over several runs."""
    return sum(len(run.token_ids) for run in runs) / sum(run.metrics.wall_s for run in runs)


class _Silent:
    """Shows nothing."""

    plain = fast = None

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Columns:
    """Two columns on a terminal: the plain text fills the left, then the other one the right."""

    def __init__(self, console: Console, llm: LLM, prompt: list[int], text: str) -> None:
        self._llm, self._prompt = llm, prompt
        self._left, self._right = Text(), Text()
        self._spans = SourceSpans(llm.tokenizer, prompt)
        console.print(Text(terminal.escaped(text), style="dim"))
        console.print(terminal.legend())
        self._live = Live(self._table(), console=console)

    def __enter__(self) -> _Columns:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def _table(self) -> Table:
        table = Table("plain", "speculative", expand=True)
        table.columns[0].ratio = table.columns[1].ratio = 1
        table.add_row(self._left, self._right)
        return table

    def plain(self, delta: Delta) -> None:
        """Adds to the left."""
        self._left.append(terminal.escaped(delta.text))
        self._live.update(self._table())

    def fast(self, delta: Delta) -> None:
        """Adds to the right, in the colours of the sources."""
        for text, source in self._spans.of(delta):
            self._right.append(terminal.escaped(text), style=terminal.STYLES[source])
        self._live.update(self._table())


class _Lines:
    """The prompt and the text once, one after the other: for files, pipes and narrow terminals."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._console.out(terminal.escaped(text), highlight=False, end="")

    plain = None

    def fast(self, delta: Delta) -> None:
        """Writes the delta."""
        self._console.out(terminal.escaped(delta.text), highlight=False, end="")

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._console.out("\n", highlight=False)


def _stage(llm: LLM, tokens: list[int], text: str) -> _Columns | _Lines:
    console = terminal.out()
    if console.is_terminal and console.width >= COLUMNS_NEEDED:
        return _Columns(console, llm, tokens, text)
    return _Lines(console, text)
