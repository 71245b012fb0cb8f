"""`outrider profile`: where a step's time goes, and how fast each stage reads."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli import options, terminal
from outrider.config import SamplingParams, counted
from outrider.errors import EmptyPrompt, InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.bench.profile import Profile

FILE_WIDTH = 100


def profile(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; left out, held-out prompts are."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt here.")] = None,
    prompts: Annotated[
        int, typer.Option(help="How many of the bundled held-out prompts, where none is given.")
    ] = 4,
    model: options.Model = "bundled",
    drafter: options.Drafter = "auto",
    depth: options.Depth = None,
    rule: options.Rule = None,
    width: options.Width = 1,
    nodes: options.Nodes = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Texts at a time.")] = 1,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="New tokens of each text.")
    ] = 64,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn above temperature 0.")] = 0,
    repeats: Annotated[
        int, typer.Option(help="Runs with hooks, and as many without, in turn.")
    ] = 2,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch; by default its own.")
    ] = None,
    strict: options.Strict = None,
    compile: options.Compile = None,
    dtype: options.Dtype = None,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs",
            help="Measure what rounds cost here, in under half a minute, and keep it: auto begins "
            "with it.",
        ),
    ] = False,
    json_output: options.Json = False,
) -> int:
    """Show where the time of a decoding step goes, stage by stage, on a processor.

    Stages add up to the wall time of the steps that read no prompt. Bytes are weights and cached
    keys and values as a step reads them; the last column compares their speed with what the machine
    reads at best. The same texts are made without the hooks too, and both times are shown.

    \b
    Examples:
      outrider profile
      outrider profile --drafter none --compile
      outrider profile --costs
      outrider profile --drafter suffix --batch 4 --prompts 8
      outrider profile --model ./llama --file prompt.txt --threads 2 --json
    """
    for name, value in (
        ("prompts", prompts), ("batch", batch), ("repeats", repeats), ("threads", threads),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise InvalidConfig(f"{name}={value}: at least 1 is due")
    text = None if prompt is None and file is None else options.read_prompt(prompt, file)
    if text == "":
        raise EmptyPrompt("the prompt is empty; give at least one character to continue from")
    from outrider.bench.machine import Machine
    from outrider.bench.profile import MEANINGS
    from outrider.bench.profile import profile as run

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )
    loading = options.Loading(
        model, drafter, depth, rule, strict, dtype, None,
        width, nodes, share_prefixes=False, compile=compile,
    )  # fmt: skip
    with _threads(threads):
        llm = (loading if costs else loading.steady()).load()
        texts = [text] if text is not None else _held_out(prompts)
        ids = [llm.tokenizer.encode(one) for one in texts]
        if costs:
            found = llm.measure_costs(ids).as_dict()
            typer.echo(json.dumps(found) if json_output else _words(found, llm.costs_file))
            return 0
        found = run(llm, ids, sampling, batch=batch, repeats=repeats)
        machine = asdict(Machine.here())
    if json_output:
        settled = {"machine": machine, "info": llm.info(), "meanings": MEANINGS}
        typer.echo(json.dumps(asdict(found) | settled, default=str))
    else:
        _print(found, machine, terminal.out())
    return 0


def _words(costs: dict[str, Any], kept: Path) -> str:
    """Costs in a few lines, the least work first, and the file that they are kept in."""
    order = itemgetter("texts", "context", "rows")
    lines = [
        f"{counted(one['rows'], 'row')} of {counted(one['texts'], 'text')} at "
        f"{counted(one['context'], 'token')}: {1e3 * one['seconds']:.2f} ms"
        for one in sorted(costs["forwards"], key=order)
    ]
    lines += [
        f"{name}: {1e3 * one['level_s']:.2f} ms a level"
        for name, one in sorted(costs["drafts"].items())
    ]
    return "\n".join([*lines, f"kept in {kept}, which auto begins with"])


def _held_out(num: int) -> list[str]:
    from outrider.models.bundled import eval_prompts

    known = eval_prompts("code")
    if num > len(known):
        raise InvalidConfig(f"prompts={num}: there are {len(known)} held-out prompts")
    return known[:num]


@contextmanager
def _threads(num: int | None) -> Iterator[None]:
    """With so many threads of torch; a process that goes on has its own again."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if num is None else num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _print(found: Profile, machine: dict[str, Any], console: Console) -> None:
    from outrider.bench.profile import STAGES

    if not console.is_terminal:
        console.width = FILE_WIDTH
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    for name in ("ms/step", "share", "calls", "MB/step", "GB/s", "of bandwidth"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.stages:
        table.add_row(
            STAGES[one.part, one.stage],
            f"{one.ms:.3f}",
            f"{one.share:.1%}",
            f"{one.calls:.1f}" if one.calls else "",
            f"{one.num_bytes / 1e6:.2f}" if one.num_bytes else "",
            "" if one.gb_per_s is None else f"{one.gb_per_s:.1f}",
            "" if one.of_bandwidth is None else f"{one.of_bandwidth:.0%}",
        )
    table.add_row("step", f"{found.ms_per_step:.3f}", "100.0%")
    console.print(table)
    hooks = found.ms_per_step / found.ms_without_hooks - 1
    lines = (
        f"without hooks: {found.ms_without_hooks:.3f} ms a step ({hooks:+.1%} with them)",
        f"{counted(found.steps, 'step')}, {counted(found.tokens, 'token')} a run; prompts read in "
        f"{found.reading_ms:.0f} ms beside them",
        f"{found.bandwidth_gb_s:.1f} GB/s read at best by "
        f"{counted(machine['num_threads'], 'thread')}; "
        f"{machine['processor']}",
        *found.notes,
    )
    for line in lines:
        console.out(line, style="dim", highlight=False)
