"""`outrider plan`: which drafter, how deep, how wide, at which batch, and whether at all."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli import options, terminal
from outrider.config import SamplingParams, counted
from outrider.errors import EmptyPrompt, InvalidConfig

if TYPE_CHECKING:
    from outrider.control.plan import Plan, Prediction, Verified
    from outrider.drafters import DrafterSpec
    from outrider.interop.commands import Equivalent, Speculating
    from outrider.llm import LLM

FILE_WIDTH = 110
SHOWN = 12


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--target", "--model", "-m", metavar="MODEL", help="A model folder, or 'bundled'."
        ),
    ] = "bundled",
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Drafters to compare, set apart by commas; by default those of auto and suffix.",
            metavar="A,B,C",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='One prompt a line, as text or as JSON with "text" or "prompt"; left out, '
            "held-out prompts are.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="How many of them at most.")] = 12,
    batch: Annotated[
        str, typer.Option("--batch", "-b", help="Texts at a time, several set apart by commas.")
    ] = "1",
    depth: Annotated[int, typer.Option("--depth", "-k", help="Levels drafted at most.")] = 8,
    widths: Annotated[
        str, typer.Option(help="Widths of trees, set apart by commas; 1 looks at chains alone.")
    ] = "3",
    rules: Annotated[
        str | None,
        typer.Option(
            help="Verification rules, set apart by commas; by default that of the temperature."
        ),
    ] = None,
    temperature: options.Temperature = 0.0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="New tokens of each text.")
    ] = 64,
    seed: Annotated[
        int | None, typer.Option(help="Of what is drawn above temperature 0; asks for coupled.")
    ] = None,
    verify: Annotated[int, typer.Option(help="How many of the best to run at each batch.")] = 3,
    compile: options.Compile = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    charts: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw four charts into this folder.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what is best as a profile, for --profile."),
    ] = None,
    json_output: options.Json = False,
) -> int:
    """Foretell how fast each drafter, depth and tree would be on your prompts, and run the best.

    Each drafter guesses once behind every token of the texts, a few rounds of each kind are timed,
    and from both follows the speed of all combinations, with intervals. The best are run in turn
    with plain decoding. Where nothing pays it says so, and what acceptance would.

    \b
    Examples:
      outrider plan
      outrider plan --drafters draft,suffix --batch 1,8 --charts charts --save plan.toml
      outrider plan --target ./llama --drafters draft:./llama-small,ngram --prompts prompts.txt
      outrider plan --temperature 1 --rules token,block --json
    """
    from outrider.bench.charts import figures
    from outrider.control.plan import Search
    from outrider.control.plan import plan as run
    from outrider.control.record import Asked
    from outrider.decoding.rules import rule_named
    from outrider.drafters import DrafterSpec

    specs = options.words("drafters", drafters) or _drafters(model)
    parts = [DrafterSpec.parse_all(spec) for spec in specs]
    search = Search(
        drafters=tuple("+".join(one.kind for one in several) for several in parts),
        depth=depth,
        widths=tuple(width for width in options.whole("widths", widths) if width != 1),
        batches=options.whole("batch", batch),
        rules=options.words("rules", rules) or (None,),
        verify=verify,
    )
    if len(set(search.drafters)) < len(specs):
        raise InvalidConfig(
            f"drafters={','.join(specs)}: two of one kind cannot be loaded at once; plan for each"
        )
    if num_prompts < 1:
        raise InvalidConfig(f"num-prompts={num_prompts}: at least 1 is due")
    for rule in search.rules:
        if rule is not None:
            rule_named(rule)
    if save is not None and not save.absolute().parent.is_dir():
        raise InvalidConfig(f"save={str(save)!r}: its folder does not exist; make it first")
    if charts is not None:
        figures()
    texts = _prompts(prompts, num_prompts)
    loading = options.Loading(
        model, "+".join(specs), depth, dtype=dtype, device=device, share_prefixes=False,
        compile=compile,
    )  # fmt: skip
    llm = loading.load()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    asked = Asked([llm.tokenizer.encode(text) for text in texts], sampling, depth)
    with terminal.err().status("planning ...") as status:
        found = run(llm.requests, asked, search, lambda now: status.update(f"planning {now} ..."))
    best = found.best(search.batches[0])
    how = _speculating(llm, model, dict(zip(search.drafters, parts, strict=True)), best)
    if save is not None:
        _save(save, how, best, found, rule=best.candidate.rule if rules else None)
    drawn = _draw(found, charts)
    if json_output:
        typer.echo(json.dumps(_as_dict(found, search.batches, how)))
    else:
        console = terminal.out()
        if not console.is_terminal:
            console.width = FILE_WIDTH
        for one in search.batches:
            _print(found, one, console)
        _close(found, how, [*drawn, *([save] if save is not None else [])], console)
    return 0


def _drafters(model: str) -> tuple[str, ...]:
    from outrider.llm.load import auto_specs

    return (*auto_specs(model), "suffix")


def _prompts(file: Path | None, most: int) -> list[str]:
    """The prompts of a file's lines.

    Raises:
        EmptyPrompt: there is none.
        InvalidConfig: a line of JSON without a prompt.
    """
    if file is None:
        from outrider.models.bundled import eval_prompts

        return eval_prompts("code")[:most]
    remedy = "give a file of prompts, one a line, or leave --prompts out for held-out ones"
    text = options.read_prompt(None, file, remedy)
    lines = [line for line in text.splitlines() if line.strip()][:most]
    if not lines:
        raise EmptyPrompt(f"{file} has no prompt; write one on each line")
    return [_prompt(line, file) for line in lines]


def _prompt(line: str, file: Path) -> str:
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)
    except ValueError:
        return line
    text = found.get("text", found.get("prompt"))
    if not isinstance(text, str) or not text:
        raise InvalidConfig(f'{file} has a line of JSON without "text" or "prompt"; give one')
    return text


def _speculating(
    llm: LLM, target: str, drafters: dict[str, tuple[DrafterSpec, ...]], best: Prediction
) -> Speculating:
    """The best, as other engines are told; paths hold wherever a command is run."""
    from outrider.interop.commands import Speculating
    from outrider.llm.load import draft_folder

    kind, file = best.candidate, Path(target)
    model = str(file.resolve() if file.exists() else llm.tokenizer.folder)
    if kind.depth == 0:
        return Speculating(model, "none", 0, kind.rule, batch=kind.batch)
    parts = [
        replace(one, path=str(Path(one.path).resolve()))
        if one.path and Path(one.path).exists()
        else one
        for one in drafters[kind.drafter]
    ]
    spec, path = "+".join(map(str, parts)), parts[0].path if len(parts) == 1 else None
    if spec == "draft":
        path = str(draft_folder(parts[0], "bundled"))
    trees = kind.trees
    return Speculating(
        model,
        spec,
        kind.depth,
        kind.rule,
        None if trees is None else trees.width,
        None if trees is None else trees.nodes,
        path,
        kind.batch,
    )


def _save(path: Path, how: Speculating, best: Prediction, found: Plan, *, rule: str | None) -> None:
    from outrider.bench.machine import Machine
    from outrider.llm.profile import write_profile

    kind = best.candidate
    speculates = kind.depth > 0
    say = {
        "drafter": how.drafter,
        "k": kind.depth if speculates else None,
        "rule": rule,
        "width": kind.width,
        "nodes": kind.nodes,
        "shape": None if kind.shape is None else list(kind.shape),
    }
    about = {
        "model": how.model,
        "machine": Machine.here().processor,
        "predicted": (
            f"{best.speedup} times plain decoding, {counted(kind.batch, 'text')} at a time"
        ),
    }
    for one in found.verified:
        if one.prediction == best:
            about["measured"] = f"{one.speedup} times plain decoding"
    write_profile(path, say, about)


def _draw(found: Plan, folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    from outrider.bench.charts import draw_plan

    return draw_plan(found, folder)


def _print(found: Plan, batch: int, console: Console) -> None:
    table = _table(f"{batch} at a time", "tokens/round")
    own = found.of(batch)
    shown = [one for one in own if one in own[:SHOWN] or one.candidate.depth == 0]
    for one in shown:
        table.add_row(
            str(one.candidate),
            one.candidate.rule,
            f"{one.tokens_per_s.mean:.1f}",
            f"{one.plain_tokens_per_s:.1f}",
            str(one.speedup) if one.candidate.depth else "1",
            f"{one.tokens_per_round:.2f}",
        )
    console.print(table)
    if len(own) > len(shown):
        console.out(f"and {len(own) - len(shown)} slower", style="dim", highlight=False)
    _print_run([one for one in found.verified if one.prediction in own], console)
    console.out(_advice(found, batch) + "\n", highlight=False)


def _print_run(run: list[Verified], console: Console) -> None:
    if not run:
        return
    table = _table("run, in turn with plain decoding", "foretold")
    for one in run:
        table.add_row(
            str(one.prediction.candidate),
            one.prediction.candidate.rule,
            f"{one.tokens_per_s:.1f}",
            f"{one.plain_tokens_per_s:.1f}",
            str(one.speedup),
            f"{one.prediction.speedup.mean:.2f}",
        )
    console.print(table)


def _table(title: str, last: str) -> Table:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("drafts")
    for name in ("rule", "tokens/s", "plain", "speed-up", last):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _advice(found: Plan, batch: int) -> str:
    """What to do at a batch, in a sentence or two."""
    best = found.best(batch)
    if best.candidate.depth:
        return f"Speculate: {best.candidate}, {batch} at a time."
    said = [f"Do not speculate {batch} at a time: nothing is surely faster than plain decoding."]
    for one in found.break_even:
        if one.batch != batch:
            continue
        if one.acceptance is None:
            said.append(f"No acceptance would make {one.drafter} pay.")
        elif one.found < one.acceptance:
            said.append(
                f"{one.drafter} would break even at an acceptance of {one.acceptance:.2f}; "
                f"it has {one.found:.2f}."
            )
    return " ".join(said)


def _close(found: Plan, how: Speculating, written: list[Path], console: Console) -> None:
    """The command lines, and how far predictions were off."""
    from outrider.interop.commands import equivalents

    console.out("The same elsewhere:", highlight=False)
    for one in equivalents(how):
        note = f"  # {one.note}" if one.note and one.command else one.note
        console.out(f"  {one.command or ''}{note}", highlight=False)
    lines = [
        "a speed-up is over its plain: tokens/s of plain decoding in the minutes in which this "
        "drafter's rounds were timed, or it was run"
    ]
    if found.verified:
        held = sum(one.holds for one in found.verified)
        worst = max(abs(one.error) for one in found.verified)
        lines.append(
            f"{held} of {len(found.verified)} predicted speed-ups were within 10 % of what was "
            f"run, or inside its interval; tokens/s were {worst:.0%} off at most"
        )
        groups = found.verified[0].speedup.num_groups
        lines.append(
            f"intervals of what was run are over {groups} groups of texts, each run twice: other "
            "prompts are in them, this machine on another day is not"
        )
    if written:
        lines.append(f"written: {', '.join(map(str, written))}")
    for line in lines:
        console.out(line, style="dim", highlight=False)


def _as_dict(found: Plan, batches: tuple[int, ...], how: Speculating) -> dict[str, Any]:
    from outrider.bench.machine import Machine
    from outrider.interop.commands import equivalents

    def engine(one: Equivalent) -> dict[str, Any]:
        return asdict(one)

    return {
        "machine": asdict(Machine.here()),
        "predictions": [
            {**asdict(one), "plain_tokens_per_s": one.plain_tokens_per_s}
            for one in found.predictions
        ],
        "verified": [
            {**asdict(one), "error": one.error, "holds": one.holds} for one in found.verified
        ],
        "break_even": [asdict(one) for one in found.break_even],
        "acceptance": {name: list(rates) for name, rates in found.acceptance.items()},
        "advice": {str(batch): _advice(found, batch) for batch in batches},
        "best": {str(batch): asdict(found.best(batch).candidate) for batch in batches},
        "equivalents": [engine(one) for one in equivalents(how)],
    }
