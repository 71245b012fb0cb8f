"""`outrider certify endpoint`: what a server writes with speculation on, held to its law."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, terminal
from outrider.cli.certify_html import Html, check_html, write_html
from outrider.cli.certify_model import PROMPT_TOKENS, PROMPTS, printed
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
from outrider.config import SamplingParams
from outrider.errors import EmptyPrompt, InvalidConfig

if TYPE_CHECKING:
    from outrider.certify.endpoint.remote import Reference
    from outrider.certify.endpoint.wire import Prompt

LAW = SamplingParams()
PROMPT_LETTERS = 80
"""Of the bundled prompts, where there is no tokenizer to count tokens with."""


def certify_endpoint(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of an OpenAI-compatible server.")],
    plain_url: Annotated[
        str | None, typer.Option(help="The same model served without speculation.")
    ] = None,
    switch_on: Annotated[
        str | None,
        typer.Option(help="Fields of a request with speculation on, as JSON.", metavar="JSON"),
    ] = None,
    switch_off: Annotated[
        str | None,
        typer.Option(help="Fields of a request with speculation off, as JSON.", metavar="JSON"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="The target, read here: a folder, a GGUF file, or 'bundled'."
        ),
    ] = None,
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="Its draft model, to name faults by.")
    ] = "none",
    served: Annotated[
        str | None, typer.Option(help="The server's name of its model; by default its first.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OUTRIDER_API_KEY", help="Sent as bearer token.", show_default=False),
    ] = None,
    file: PromptFile = None,
    temperature: options.Temperature = LAW.temperature,
    top_k: options.TopK = LAW.top_k,
    top_p: options.TopP = LAW.top_p,
    min_p: options.MinP = LAW.min_p,
    repetition_penalty: options.RepetitionPenalty = LAW.repetition_penalty,
    presence_penalty: options.PresencePenalty = LAW.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = LAW.frequency_penalty,
    logit_bias: options.LogitBias = None,
    within: Within = WITHIN,
    alpha: Alpha = ALPHA,
    max_tokens: TextTokens = TEXT_TOKENS,
    requests: Annotated[
        int | None, typer.Option(help="Requests at most; by default what --within needs.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens at most, a text counted whole; by default what --within needs."),
    ] = None,
    logprobs: Annotated[
        int, typer.Option(help="Likeliest tokens to ask for; 0 leaves log-probabilities alone.")
    ] = 20,
    near_tie: Annotated[
        float, typer.Option(help="Nats by which rounding may move a log-probability.")
    ] = 0.1,
    at_once: Annotated[int, typer.Option(help="Requests under way together.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one answer.")] = 120.0,
    seed: Seed = 1,
    html: Html = None,
    json_output: options.Json = False,
) -> int:
    """Certify a server: what it writes with speculation on, held to the law of plain decoding.

    With --model each token is held to the law that the model gives here. Without, the server's
    own log-probabilities tell the law, if it tells them. Without these, texts are compared with
    those of --plain-url, or of the same server under --switch-off. First each control is asked for
    in turn. One may look at any time, and it stops as soon as the law is refuted or shown to
    hold within --within; what that takes at most is said before it starts. A bias of just that size
    is planted and must be found, or the run is void. Ctrl-C ends it with what was seen so far.

    \b
    Exit codes: 0 lossless, 1 not, 3 undecided or void, 2 usage.

    \b
    Examples:
      outrider certify endpoint http://localhost:8000
      outrider certify endpoint http://localhost:8000 --model ./llama --temperature 0.8
      outrider certify endpoint http://localhost:8000 --plain-url http://localhost:8001 --logprobs 0
      outrider certify endpoint http://localhost:8080 --switch-off '{"speculative.n_max": 0}'
    """
    from outrider.certify.endpoint.run import Certifier, Limits
    from outrider.certify.endpoint.server import Server, completions_url, served_models
    from outrider.certify.model.plan import Plan

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=options.as_bias(logit_bias),
    )
    check_html(html)
    plan = Plan(within=within, alpha=alpha, length=max_tokens, seed=seed)
    for name, number in (("at-once", at_once), ("requests", requests), ("tokens", tokens)):
        if number is not None and number < 1:
            raise InvalidConfig(f"{name}={number}: at least 1 is needed")

    def server(where: str, switch: str | None) -> Server:
        address, extra = completions_url(where), _fields(switch)
        name = served or next(iter(served_models(address, api_key)), "default")
        return Server(address, name, extra, api_key, at_once, timeout)

    plain = None
    if plain_url is not None or switch_off is not None:
        plain = server(plain_url or url, switch_off)
    reference, prompts = _reference(model, drafter, file)
    certifier = Certifier(
        server(url, switch_on),
        prompts,
        params,
        plan,
        plain=plain,
        reference=reference,
        tops=logprobs,
        near_tie=near_tie,
        limits=Limits(requests, tokens),
    )
    console = terminal.err()
    console.out(terminal.escaped(str(certifier.need)), highlight=False)
    with console.status("certifying ...") as status:
        report = certifier.report(lambda line: status.update(terminal.escaped(line)))
    if html is not None:
        write_html(html, report, context, None if reference is None else reference.decode)
    if json_output:
        typer.echo(json.dumps(report.as_dict()))
    else:
        printed(report, terminal.out())
    return report.exit_code


def _fields(switch: str | None) -> dict[str, Any]:
    try:
        told = json.loads(switch or "{}")
    except ValueError as error:
        raise InvalidConfig(
            f"{switch!r} is no JSON ({error}); give an object such as '{{\"speculate\": false}}'"
        ) from error
    if not isinstance(told, dict):
        raise InvalidConfig(f"{switch!r}: an object is due, such as '{{\"speculate\": false}}'")
    return told


def _reference(
    model: str | None, drafter: str, file: Path | None
) -> tuple[Reference | None, Sequence[Prompt]]:
    """The model that is read here, if any, and the prompts: its token ids, or else text."""
    if file is None:
        from outrider.models.bundled import eval_prompts

        texts = [text[:PROMPT_LETTERS] for text in eval_prompts("code")[:PROMPTS]]
    else:
        texts = [line for line in options.read_prompt(None, file).splitlines() if line]
    if not texts:
        raise EmptyPrompt(f"{file} has no prompt; write one on each line")
    if model is None:
        return None, texts
    from outrider.certify.adapters.own import subject
    from outrider.certify.endpoint.remote import Reference

    llm = options.Loading(model, drafter).load()
    own = subject(llm)
    most = PROMPT_TOKENS if file is None else None
    prompts = [tuple(llm.tokenizer.encode(text)[:most]) for text in texts]
    return Reference(model, own.target, llm.tokenizer, own.draft), prompts
