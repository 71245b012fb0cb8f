"""What is certified: anything that continues token ids, and what it should have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outrider.certify.model.book import Book, Laws, set_controls
from outrider.certify.model.captured import Capturing
from outrider.config import SamplingParams, as_tokens
from outrider.errors import InvalidConfig, ModelError, PromptTooLong

Prompts: TypeAlias = Sequence[Sequence[int]]
Generate: TypeAlias = Callable[[Prompts, SamplingParams, int], Sequence[Any]]
"""`(prompts, params, seed)` -> one text per prompt: token ids, its end included, or an object with
`token_ids` and, where `params.logprobs` asks for them, `logprobs`."""


@dataclass(frozen=True, slots=True)
class Made:
    """One text that was made: its new tokens, and their log-probabilities where they were told."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """Who is certified, and against what.

    Attributes:
        name: for the report.
        generate: with speculation on.
        target: the target's book, or another that says what should come.
        plain: the same with speculation off; None where it cannot be had.
        draft: the draft model's book; None without one, or where it is not to be had. Beyond its
            context nothing is taken to be drafted.
        near_tie: two logits closer than this may change places by rounding alone.
        seeded: whether a seed is promised to give the same text again.
        capture: what its rule is given, where it can show that; None = it cannot.
        controls: fields of SamplingParams that it has; None = it looks to that itself.
        obeys: whether each control was asked for alone before, and obeyed.
    """

    name: str
    generate: Generate
    target: Laws
    plain: Generate | None = None
    draft: Book | None = None
    near_tie: float = 1e-3
    seeded: bool = True
    controls: frozenset[str] | None = None
    capture: Capturing | None = None
    obeys: bool = False

    def refuse(self, params: SamplingParams) -> None:
        """Says no to what would not be looked at, before any text is made.

        Raises:
            InvalidConfig: a control that the subject does not have; a grammar.
        """
        if params.grammar_source is not None:
            raise InvalidConfig("laws under a grammar are not certified yet; certify without it")
        asked = ["temperature", *set_controls(params)]
        asked += [name for name in ("ignore_eos", "stop_token_ids") if getattr(params, name)]
        for name in asked if self.controls is not None else ():
            if name not in (self.controls or ()):
                raise InvalidConfig(
                    f"{name}={getattr(params, name)!r}: refused, as {self.name} has no such "
                    "control in its adapter; leave it out"
                )

    def hold(self, prompts: Prompts, length: int) -> None:
        """Looks whether the target's book can read the longest text there may be.

        Raises:
            PromptTooLong: it has a shorter context.
        """
        longest, most = max(map(len, prompts)) + length, self.target.max_length
        if most is not None and longest > most:
            raise PromptTooLong(
                f"texts of {longest} tokens, prompt included, and the target reads {most}; "
                "give shorter prompts, or ask for fewer tokens"
            )

    def texts(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        """What it continues prompts with."""
        return made(self.generate, prompts, params, seed, self.target)


def made(
    generate: Generate, prompts: Prompts, params: SamplingParams, seed: int, target: Laws
) -> list[Made]:
    """What came out, looked through.

    Args:
        generate: who continues.
        prompts: token ids.
        params: the controls.
        seed: of the noise.
        target: knows how many tokens there are.

    Raises:
        ModelError: another number of texts than prompts, something that is no text, or a token
            there is not.
    """
    out = list(generate(prompts, params, seed))
    if len(out) != len(prompts):
        raise ModelError(
            f"{len(prompts)} prompts gave {len(out)} texts; generate(prompts, params, seed) "
            "returns one text per prompt"
        )
    texts = [_made(one) for one in out]
    beyond = [x for text in texts for x in text.token_ids if not 0 <= x < target.width]
    if beyond:
        raise ModelError(
            f"generate returned token {beyond[0]}, and the target's vocabulary has {target.width}"
        )
    return texts


def _made(one: Any) -> Made:
    tokens, logprobs = getattr(one, "token_ids", one), getattr(one, "logprobs", None)
    try:
        ids = as_tokens("text", tokens)
    except InvalidConfig as error:
        raise ModelError(f"generate returned what is no text: {error}") from error
    if logprobs is None:
        return Made(ids)
    try:
        told = tuple(_number(entry) for entry in cast("Sequence[Any]", logprobs))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"log-probabilities came as {type(logprobs).__name__} of what is no number ({error}); "
            "a number for each token is due"
        ) from error
    if len(told) != len(ids):
        raise ModelError(f"a text of {len(ids)} tokens came with {len(told)} log-probabilities")
    return Made(ids, told)


def _number(entry: Any) -> float:
    return float(getattr(entry, "logprob", entry))
