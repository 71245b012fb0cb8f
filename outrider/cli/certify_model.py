"""`outrider certify model`: what comes out of a model, held to the law of plain decoding."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli import options, terminal
from outrider.cli.certify_html import Html, check_html, write_html
from outrider.cli.certify_options import (
    ALPHA,
    TEXT_TOKENS,
    WITHIN,
    Alpha,
    PromptFile,
    Seed,
    TextTokens,
    Within,
)
from outrider.config import SamplingParams, check_between
from outrider.errors import EmptyPrompt, InvalidConfig

if TYPE_CHECKING:
    from outrider.certify.adapters.engine import Launch
    from outrider.certify.model.report import Report
    from outrider.certify.model.subject import Subject
    from outrider.llm import LLM

LAW = SamplingParams()
PROMPTS, PROMPT_TOKENS = 32, 24
"""Of the bundled set: all are read again for every text."""


def certify_model(
    context: typer.Context,
    model: options.Model = "bundled",
    drafter: options.Drafter = "auto",
    depth: options.Depth = None,
    rule: options.Rule = None,
    width: options.Width = 1,
    nodes: options.Nodes = None,
    lossy: options.Lossy = False,
    file: PromptFile = None,
    temperature: options.Temperature = LAW.temperature,
    top_k: options.TopK = LAW.top_k,
    top_p: options.TopP = LAW.top_p,
    min_p: options.MinP = LAW.min_p,
    typical_p: options.TypicalP = LAW.typical_p,
    repetition_penalty: options.RepetitionPenalty = LAW.repetition_penalty,
    presence_penalty: options.PresencePenalty = LAW.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = LAW.frequency_penalty,
    no_repeat_ngram: options.NoRepeatNgram = LAW.no_repeat_ngram,
    within: Within = WITHIN,
    alpha: Alpha = ALPHA,
    max_tokens: TextTokens = TEXT_TOKENS,
    budget: Annotated[
        int | None, typer.Option(help="Tokens at most; by default what --within needs.")
    ] = None,
    seed: Seed = 1,
    strict: options.Strict = None,
    compile: options.Compile = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    html: Html = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Another engine to certify: transformers, vllm, llama_cpp, openvino, or a file of "
            "your own; it is held to --model."
        ),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter that the engine is installed for.")
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option", "-o", help="Of the engine; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    engine_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for one answer of the engine; by default for ever."),
    ] = None,
    near_tie: Annotated[
        float | None,
        typer.Option(
            help="How far rounding may move a logit, in nats; by default 0.001, in 16 bits 0.25. "
            "An --engine in 16 bits beside a --model in 32 needs it."
        ),
    ] = None,
    json_output: options.Json = False,
) -> int:
    """Certify a model and its drafter: texts with speculation on, held to the target's law.

    Greedy tokens, seeds and log-probabilities are compared with the target's own. Sampled tokens
    are bet on one by one, against the exact law that the text before them gives: one may look at
    any time, and it stops as soon as the law is refuted or shown to hold within --within. A bias of
    just that size is planted and must be found, or the run is void. The verdict is one of lossless,
    rule bias, numeric drift, control ignored, seed ignored, undecided, void.

    \b
    Exit codes: 0 lossless, 1 not, 3 undecided or void, 2 usage.

    \b
    Examples:
      outrider certify model
      outrider certify model --temperature 0.8 --top-k 40 --rule token
      outrider certify model --model ./llama --drafter draft:./llama-small --file prompts.txt
      outrider certify model --within 0.05 --json
      outrider certify model --html report.html
      outrider certify model -m ./llama --engine vllm --python venv/bin/python -o model=./llama
    """
    from outrider.certify.adapters.own import subject
    from outrider.certify.model.plan import Plan
    from outrider.certify.model.run import certify
    from outrider.engine.settings import resolve_rule, tree_budget

    trees = tree_budget(depth or 1, width, nodes)
    plan = Plan(within=within, alpha=alpha, length=max_tokens, budget=budget, seed=seed)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        no_repeat_ngram=no_repeat_ngram,
    )
    check_html(html)
    launch = _launch(engine, python, engine_option or [], engine_timeout)
    console = terminal.err()
    loading = options.Loading(
        model,
        drafter,
        depth,
        strict=strict,
        dtype=dtype,
        device=device,
        width=width,
        nodes=nodes,
        lossless=not lossy,
        compile=compile,
    )
    llm = loading.steady().load()
    prompts = _prompts(llm, file)
    own = subject(llm, resolve_rule(rule, params, trees=trees, lossless=not lossy))
    if near_tie is not None:
        check_between("near_tie", near_tie, 0, float("inf"), low_open=True)
        own = replace(own, near_tie=near_tie)
    with console.status("certifying ...") as status, _certified(own, launch) as certified:
        report = certify(
            certified,
            prompts,
            params,
            plan,
            lambda line: status.update(terminal.escaped(line)),
        )
    if html is not None:
        write_html(html, report, context, llm.tokenizer.decode)
    if json_output:
        typer.echo(json.dumps(report.as_dict()))
    else:
        printed(report, terminal.out())
    return report.exit_code


def _launch(
    engine: str | None, python: Path | None, given: list[str], timeout_s: float | None
) -> Launch | None:
    from outrider.certify.adapters.engine import Launch, options_of

    if engine is None:
        if python is not None or given or timeout_s is not None:
            raise InvalidConfig(
                "--python, --engine-option and --engine-timeout are for an --engine; name one"
            )
        return None
    return Launch(engine, options_of(given), python, timeout_s)


def _certified(own: Subject, launch: Launch | None) -> AbstractContextManager[Subject]:
    from outrider.certify.adapters.engine import subject

    return nullcontext(own) if launch is None else subject(launch, own)


def _prompts(llm: LLM, file: Path | None) -> list[list[int]]:
    if file is None:
        from outrider.models.bundled import eval_prompts

        texts = eval_prompts("code")[:PROMPTS]
        return [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
    lines = options.read_prompt(None, file).splitlines()
    prompts = [llm.tokenizer.encode(line) for line in lines if line]
    if not prompts:
        raise EmptyPrompt(f"{file} has no prompt; write one on each line")
    return prompts


def printed(report: Report, console: Console) -> None:
    """A report for a terminal."""
    table = Table(box=None, pad_edge=False)
    for name in ("check", "verdict", "what was seen"):
        table.add_column(name)
    for check in (*report.checks, report.control):
        caught = check is report.control and check.verdict == "rule bias"
        verdict = "found" if caught else check.verdict
        table.add_row(check.name, verdict, terminal.escaped(check.said).replace("[", r"\["))
    console.print(table)
    for check in report.checks:
        if case := check.case:
            console.out(f"\n{check.name}, to see it: {json.dumps(case)}")
    asked = ", ".join(f"{name} {value}" for name, value in report.controls.items())
    console.out(f"\n{report.subject}; {asked}; {report.seconds:.0f} s", highlight=False)
    console.out(f"verdict: {report.verdict}", highlight=False)
