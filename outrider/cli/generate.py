"""`outrider generate`: one text, live, with the source of every token and a closing line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, terminal
from outrider.cli.sources import SourceSpans
from outrider.cli.timing import Run, measure, warm_up
from outrider.config import SamplingParams, counted
from outrider.errors import EmptyPrompt, InvalidConfig
from outrider.types import Delta, SpeculativeMetrics

if TYPE_CHECKING:
    from outrider.llm import LLM

LAW = SamplingParams()
STAGES = ("draft", "score", "verify", "commit", "other")


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; '-' or nothing reads standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt here.")] = None,
    model: options.Model = "bundled",
    drafter: options.Drafter = "auto",
    depth: options.Depth = None,
    rule: options.Rule = None,
    width: options.Width = 1,
    nodes: options.Nodes = None,
    exit_threshold: options.ExitThreshold = None,
    min_acceptance_rate: options.MinAcceptanceRate = None,
    max_depth: options.MaxDepth = None,
    fallback: options.Fallback = None,
    shape: options.Shape = None,
    profile: options.Profile = None,
    lossy: options.Lossy = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="New tokens at most.")
    ] = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = LAW.top_k,
    top_p: options.TopP = LAW.top_p,
    min_p: options.MinP = LAW.min_p,
    typical_p: options.TypicalP = LAW.typical_p,
    repetition_penalty: options.RepetitionPenalty = LAW.repetition_penalty,
    presence_penalty: options.PresencePenalty = LAW.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = LAW.frequency_penalty,
    no_repeat_ngram: options.NoRepeatNgram = LAW.no_repeat_ngram,
    logit_bias: options.LogitBias = None,
    bad_word: options.BadWord = None,
    min_tokens: options.MinTokens = LAW.min_tokens,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.Grammar = None,
    logprobs: options.Logprobs = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text, whoever guesses.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End before this text; may be repeated. In bash an empty line is $'\\n\\n'."
        ),
    ] = None,
    strict: options.Strict = None,
    compile: options.Compile = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    json_output: options.Json = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too and print both speeds.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write every round here, a line of JSON each: candidates, their probabilities, "
            "the path kept, times. It holds the text: you alone may read it. `outrider replay` "
            "does.",
        ),
    ] = None,
    observe: Annotated[
        bool,
        typer.Option(
            "--observe",
            help="With --trace: keep no guess, so that there is one behind every token and any "
            "depth can be replayed, and time a few rounds of each depth; of auto and a,b once with "
            "each drafter. At temperature 0 and under coupled the text is the same.",
        ),
    ] = False,
) -> int:
    """Continue a prompt.

    On a terminal the source of each token is told by its colour; otherwise the text is plain.
    Control characters the model writes are shown escaped; --json carries the text as it is. Ctrl-C
    ends with the text so far and exit code 130.

    \b
    Examples:
      outrider generate "def fibonacci(n):"
      outrider generate --temperature 0.8 --seed 7 --compare "def parse("
      outrider generate --compile "def fibonacci(n):"
      outrider generate --temperature 0.8 --width 3 --nodes 12 "def parse("
      outrider generate --model ./llama --drafter draft:./llama-small --file prompt.txt
      outrider generate --drafter draft,suffix --max-depth 8 --compare "def parse("
      outrider generate --repetition-penalty 1.2 --no-repeat-ngram 4 --bad-word TODO "def f("
      outrider generate --drafter ngram+draft --trace rounds.jsonl "def f("
      outrider generate --profile plan.toml "def f("
      outrider generate --drafter draft,ngram --trace rounds.jsonl --observe --depth 8 "def f("
      outrider generate --regex "[0-9]{4}-[0-9]{2}" --drafter grammar+draft "date = "
      git log -1 | outrider generate --max-tokens 40 --stop "." --json
    """
    text = options.read_prompt(prompt, file)
    if not text:
        raise EmptyPrompt("the prompt is empty; give at least one character to continue from")
    if logprobs is not None and not json_output:
        raise InvalidConfig(f"logprobs={logprobs} are shown as JSON alone; add --json")
    if trace is not None and compare:
        raise InvalidConfig(
            f"trace={str(trace)!r} takes time of its own, and --compare measures; leave one out"
        )
    if observe and trace is None:
        raise InvalidConfig("observe: what is observed is written by --trace FILE; add it")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram=no_repeat_ngram,
        logit_bias=options.as_bias(logit_bias),
        bad_words=tuple(bad_word or ()),
        json_schema=options.as_schema(json_schema),
        regex=regex,
        grammar=options.as_text("grammar", grammar),
        logprobs=logprobs,
        seed=seed,
        stop=tuple(stop or ()),
    )
    from outrider.control.trace import open_private

    # Where runs are compared each reads its prompt.
    loading = options.Loading(
        model, drafter, depth, rule, strict, dtype, device, width, nodes,
        lossless=not lossy, share_prefixes=not compare, compile=compile,
        exit_threshold=exit_threshold,
        bounds={
            "min_acceptance_rate": min_acceptance_rate, "max_depth": max_depth,
            "fallback": fallback,
        },
        shape=options.as_shape(shape),
    ).profiled(profile)  # fmt: skip
    sampling, loading = _settled(sampling, loading)
    with nullcontext() if trace is None else open_private(trace) as rounds:
        llm = loading.load()
        tokens = llm.tokenizer.encode(text)
        if compare:
            warm_up(llm, tokens, sampling)
        show = None if json_output else _Screen(llm, tokens)
        if rounds is None:
            run = measure(llm, tokens, sampling, show=show)
        else:
            run = _traced(llm, tokens, sampling, show, _Tracing(rounds, loading, observe=observe))
    plain = measure(llm, tokens, sampling, depth=0) if compare and not run.interrupted else None
    interrupted = run.interrupted or (plain is not None and plain.interrupted)
    if interrupted:
        plain = None  # Half a comparison says nothing.
    assert loading.rule is not None
    comparable = options.same_tokens(sampling, loading.rule)
    if json_output:
        settled = {
            "seed": sampling.seed,
            "rule": loading.rule,
            "lossless": run.lossless,
            "cache": llm.info()["cache"],
            "control": llm.info().get("control"),
            "definitions": SpeculativeMetrics.definitions(),
        }
        typer.echo(json.dumps({**run.as_dict(), **settled, **_compared(run, plain, comparable)}))
    else:
        _close(run, plain, llm.info(), comparable=comparable, observed=trace if observe else None)
    if interrupted and not run.interrupted:
        terminal.error_line("interrupted before the comparison was done")
    return terminal.INTERRUPTED if interrupted else 0


def _settled(
    sampling: SamplingParams, loading: options.Loading
) -> tuple[SamplingParams, options.Loading]:
    """The rule, and a seed drawn here where none is given: both can be told, and compared under.

    A drawn seed does not choose the rule as a given one does.
    """
    from outrider.engine.settings import resolve_rule, tree_budget
    from outrider.llm.options import Speculation
    from outrider.noise import fresh_seed

    depth = Speculation(loading.drafter, loading.depth).depth(loading.width)
    trees = tree_budget(depth, loading.width, loading.nodes, loading.shape)
    rule = resolve_rule(loading.rule, sampling, trees=trees, lossless=loading.lossless)
    if sampling.seed is None:
        sampling = replace(sampling, seed=fresh_seed())
    return sampling, replace(loading, rule=rule)


@dataclass(frozen=True, slots=True)
class _Tracing:
    """Where rounds are written, and how the model was loaded."""

    file: IO[str]
    loading: options.Loading
    observe: bool


def _traced(
    llm: LLM,
    tokens: list[int],
    sampling: SamplingParams,
    show: Callable[[Delta], None] | None,
    how: _Tracing,
) -> Run:
    """Writes each round before it is shown; Ctrl-C loses the one under way at most."""
    from outrider.control.observe import observing
    from outrider.control.record import (
        Asked,
        alternatives_of,
        depths_to_time,
        observed_by,
        settings_of,
        timed,
    )
    from outrider.control.trace import TraceWriter

    rule, writer, requests = str(llm.rule), TraceWriter(how.file), llm.requests
    names = alternatives_of(requests) if how.observe else []
    first = names[0] if names else None
    asked = Asked([tokens], sampling, requests.depth, rule, drafter=first)
    drafter = requests.engine.choice.of(first) if how.observe else None
    with observing(rule, drafter, lossless=how.loading.lossless) as watched:
        number = writer.text(settings_of(requests, asked, tokens, observed=how.observe))

        def write(delta: Delta) -> None:
            if delta.trace is not None:
                seed, position = sampling.seed or 0, delta.trace.position
                would = watched.would(seed, position) if how.observe else None
                writer.round(number, delta.trace, would)
            if show is not None:
                show(delta)

        llm.rule = watched.name if how.observe else rule
        try:
            run = measure(llm, tokens, sampling, drafter=first, show=write, trace=True)
        finally:
            llm.rule = rule
    if how.observe and not run.interrupted:
        texts = observed_by(requests, asked, names[1:])
        for name in names or [None]:
            own = replace(asked, drafter=name)
            there, back = timed(requests, own, depths_to_time(requests.depth))
            texts += (*there, *back)
        for text in texts:
            number = writer.text(text.settings)
            for one in text.rounds:
                writer.round(number, one.trace, one.would)
    return run


class _Screen:
    """Writes deltas to standard output as they come, each token in the colour of its source."""

    def __init__(self, llm: LLM, prompt: list[int]) -> None:
        self._spans = SourceSpans(llm.tokenizer, prompt)
        self._console = terminal.out()
        self._coloured = terminal.shows_colours(self._console)
        if self._coloured:
            terminal.err().print(terminal.legend())

    def __call__(self, delta: Delta) -> None:
        for text, source in self._spans.of(delta):
            style = terminal.STYLES[source] if self._coloured else None
            # `out` and not `print`: wrapping and tab expansion would change the text.
            self._console.out(terminal.escaped(text), style=style, highlight=False, end="")
        self._console.file.flush()


def _close(
    run: Run, plain: Run | None, info: dict[str, Any], *, comparable: bool, observed: Path | None
) -> None:
    """Ends the text with a newline and says how it was made, on standard error."""
    terminal.out().out("", highlight=False)
    note = terminal.err()
    metrics = run.metrics
    note.print(
        _figures(run, observed) + (" (interrupted)" if run.interrupted else ""),
        style="dim",
    )
    seconds = ((name, getattr(metrics, f"{name}_s")) for name in STAGES)
    note.print(
        f"{metrics.wall_s:.2f} s: "
        + ", ".join(f"{name} {spent:.2f}" for name, spent in seconds)
        + f" (other: {SpeculativeMetrics.definitions()['other_s']})",
        style="dim",
    )
    for line in _chosen(info.get("control", {})):
        note.print(line, style="dim")
    cache = info["cache"]
    if cache is not None:
        context = cache["context_bytes"]
        note.print(
            f"cache: {terminal.size(cache['held_bytes'])} held, "
            f"{terminal.size(cache['bytes_per_token'])} a token"
            + ("" if context is None else f", {terminal.size(context)} a context"),
            style="dim",
        )
    if not run.lossless:
        note.print("lossy: this rule changes the law of the text", style="yellow")
    if plain is not None:
        equal = run.token_ids == plain.token_ids
        said = "yes" if equal else "no"
        note.print(
            f"plain: {plain.metrics.tokens_per_s:.1f} tokens/s, "
            f"speed-up {_speed_up(run, plain):.2f}x, tokens equal: "
            + (said if comparable else "equal in law only (give --seed to compare tokens)"),
            style="dim",
        )
        if comparable and run.lossless and not equal:
            note.print(options.why_unequal(info), style="yellow")


def _figures(run: Run, observed: Path | None) -> str:
    """How much, how fast and how well guessed; of an observed text nothing is kept on purpose."""
    size, metrics = counted(len(run.token_ids), "token"), run.metrics
    if observed is not None:
        return (
            f"{size} observed: behind each stands a guess in {observed}, and none was kept, so "
            f"that any depth can be tried on them: outrider replay {observed}"
        )
    return (
        f"{size}, {metrics.tokens_per_s:.1f} tokens/s, "
        f"acceptance rate {metrics.acceptance_rate:.2f}, "
        f"mean acceptance length {metrics.mean_acceptance_length:.2f}"
    )


def _chosen(control: dict[str, Any]) -> Iterator[str]:
    """What the controller chose, how often, and why; nothing where there is none."""
    for name, one in sorted(control.items(), key=lambda item: -item[1]["rounds"]):
        reasons = sorted(one["reasons"].items(), key=lambda item: -item[1])
        size = f" of {one['mean_nodes']:.1f} tokens" if one["mean_nodes"] else ""
        if one["tree_rounds"]:
            size += f" on {one['mean_depth']:.1f} levels, {one['tree_rounds']} with trees"
        yield (
            f"chosen: {name} in {counted(one['rounds'], 'round')}{size}, "
            f"{one['tokens_per_round']:.2f} tokens a round ("
            + ", ".join(f"{num}: {reason}" for reason, num in reasons)
            + ")"
        )


def _speed_up(run: Run, plain: Run) -> float:
    return run.metrics.tokens_per_s / (plain.metrics.tokens_per_s or 1.0)


def _compared(run: Run, plain: Run | None, comparable: bool) -> dict[str, Any]:
    """What a comparison adds to the JSON; nothing where there was none."""
    if plain is None:
        return {}
    return {
        "plain": plain.as_dict(),
        "speed_up": _speed_up(run, plain),
        "tokens_equal": run.token_ids == plain.token_ids if comparable else None,
    }
