"""What goes over the wire: SamplingParams as a completions request, and an answer's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outrider.certify.model.book import set_controls
from outrider.config import SamplingParams
from outrider.errors import EndpointError, InvalidConfig

Name: TypeAlias = int | str
"""A token: its id, or its text where a server tells no ids."""
Prompt: TypeAlias = str | tuple[int, ...]
NAMES: Mapping[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "typical_p": ("typical_p",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    # vLLM's name and llama.cpp's.
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "min_tokens": ("min_tokens",),
}
"""Controls a request can carry, and what servers call them."""
STANDARD = "temperature", "top_p"
"""Sent in every request; the others where they are asked for, or where the server takes `OFF`."""
OFF: Mapping[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Servers have defaults of their own, or their checkpoints do: these switch them off."""
IDS: Mapping[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_tokens": True,
}
"""Asks vLLM and llama.cpp for token ids."""
ID_PREFIX = "token_id:"
UNKNOWN = "\ufffd"
"""Stands for bytes that are no whole character: several tokens may look like this."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Prompt
    params: SamplingParams
    seed: int
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One text that came.

    Attributes:
        text: without its end.
        finish: `stop`, `length`, or what else a server says.
        ids: the tokens' ids, where they are told.
        names: the tokens as log-probabilities name them; None without log-probabilities.
        logprobs: of the tokens.
        tops: the likeliest tokens at each place; empty where a server tells none.
        num_tokens: of the text, as the server counts them.
        prompt_ids: the prompt's tokens, where they are told.
    """

    text: str
    finish: str
    ids: tuple[int, ...] | None = None
    names: tuple[Name, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    tops: tuple[Mapping[Name, float], ...] = ()
    num_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None


def body(ask: Ask, model: str, taken: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """A request of /v1/completions.

    Args:
        ask: what is asked.
        model: the name a server knows it by.
        taken: fields beyond the standard that it takes: `OFF`, `IDS`, or nothing.
        extra: fields to add, such as the one that switches speculation off.

    Raises:
        InvalidConfig: a control that such requests do not have.
    """
    params = ask.params
    known = {*NAMES, "logit_bias"}
    if unknown := [name for name in set_controls(params) if name not in known]:
        raise InvalidConfig(
            f"{unknown[0]}={getattr(params, unknown[0])!r}: completions requests have no such "
            f"control; they have {', '.join(sorted(known))}"
        )
    sent: dict[str, Any] = {
        "model": model,
        "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
        "max_tokens": params.max_tokens,
        "seed": ask.seed,
        **{name: getattr(params, name) for name in STANDARD},
        **taken,
    }
    for name in set_controls(params):
        if name != "logit_bias":
            sent |= dict.fromkeys(NAMES[name], getattr(params, name))
    if params.bias_pairs:
        sent["logit_bias"] = {str(token): number for token, number in params.bias_pairs}
    if params.stop:
        sent["stop"] = list(params.stop)
    if ask.logprobs is not None:
        sent["logprobs"] = ask.logprobs
    return json.dumps({**sent, **extra}).encode()


def answer(raw: bytes, url: str) -> Answer:
    """The text of an answer.

    Raises:
        EndpointError: it is none.
    """
    try:
        whole = json.loads(raw)
        choice = whole["choices"][0]
        text, finish = str(choice["text"]), str(choice.get("finish_reason"))
        names, logprobs, tops = _told(choice.get("logprobs"))
        ids = _ids(choice.get("token_ids") or choice.get("tokens") or whole.get("tokens"))
        if ids is None and names is not None and all(isinstance(x, int) for x in names):
            ids = cast("tuple[int, ...]", names)
        prompt = choice.get("prompt_token_ids") or whole.get("prompt_token_ids")
        count = (whole.get("usage") or {}).get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{url} answered what is no completion ({type(error).__name__}: {error}); give the "
            "address of an OpenAI-compatible server, up to /v1"
        ) from error
    return Answer(text, finish, ids, names, logprobs, tops, count, _ids(prompt))


def words(text: str) -> list[str]:
    """A text cut where letters and other characters meet, in place of its tokens."""
    found: list[str] = []
    for char in text:
        if found and char.isalnum() and found[-1][-1].isalnum():
            found[-1] += char
        else:
            found.append(char)
    return found


def _ids(told: Any) -> tuple[int, ...] | None:
    usual = isinstance(told, list) and all(isinstance(x, int) for x in cast("list[Any]", told))
    return tuple(cast("list[int]", told)) if usual else None


def _told(
    given: Any,
) -> tuple[tuple[Name, ...] | None, tuple[float, ...] | None, tuple[Mapping[Name, float], ...]]:
    """Names, log-probabilities and likeliest tokens: of the completions form, or llama.cpp's."""
    if not given:
        return None, None, ()
    if "content" in given:
        content = given["content"] or []
        return (
            tuple(_name(one) for one in content),
            tuple(_number(one["logprob"]) for one in content),
            tuple(
                {_name(top): _number(top["logprob"]) for top in one.get("top_logprobs") or ()}
                for one in content
            ),
        )
    tops = given.get("top_logprobs") or [{}] * len(given["tokens"])
    return (
        tuple(_as_name(token) for token in given["tokens"]),
        tuple(_number(number) for number in given["token_logprobs"]),
        tuple({_as_name(token): _number(x) for token, x in (top or {}).items()} for top in tops),
    )


def _name(entry: Any) -> Name:
    return entry["id"] if "id" in entry else _as_name(entry["token"])


def _as_name(token: str) -> Name:
    return int(token.removeprefix(ID_PREFIX)) if token.startswith(ID_PREFIX) else token


def _number(told: Any) -> float:
    # A log-probability of -inf has no place in JSON: some servers tell nothing there.
    return -float("inf") if told is None else float(told)
