"""A server beside a model that is read here: its texts as token ids."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import UNKNOWN, Answer, Ask
from outrider.certify.model.book import Book, Laws, Text
from outrider.certify.model.subject import Made, Prompts
from outrider.config import SamplingParams
from outrider.errors import EndpointError
from outrider.models.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Reference:
    """A model that says what a server should write.

    Attributes:
        name: for the report.
        target: says what the server's target should write.
        tokenizer: of both, where tokens are told as text; None = they are told as ids.
        draft: the book of its draft model, which lets faults of drafting be named; None without.
    """

    name: str
    target: Laws
    tokenizer: Tokenizer | None = None
    draft: Book | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text; where no tokenizer is known, their ids."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return self.tokenizer.decode(list(tokens))

    def ids_by_text(self) -> Mapping[str, int]:
        """The tokens that no other token looks like."""
        if self.tokenizer is None:
            return {}
        texts = [self.tokenizer.decode([token]) for token in range(self.target.width)]
        often = Counter(texts)
        return {
            text: token
            for token, text in enumerate(texts)
            if often[text] == 1 and UNKNOWN not in text
        }


@dataclass(slots=True)
class Remote:
    """Texts of a server, for prompts of token ids.

    Attributes:
        server: who is asked.
        reference: who knows the tokens.
        spelt: whether the server tells tokens as text, with log-probabilities alone.
    """

    server: Server
    reference: Reference
    spelt: bool = False
    _ids: Mapping[str, int] = field(default_factory=dict[str, int])

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        """One request a prompt, each with a seed of its own; none where the budget is spent."""
        if self.server.meter.spent:
            return [Made(())] * len(prompts)
        asked = [
            Ask(tuple(prompt), params, seed + i, 1 if self.spelt else params.logprobs)
            for i, prompt in enumerate(prompts)
        ]
        return [
            self._made(ask, one, params)
            for ask, one in zip(asked, self.server.all(asked), strict=True)
        ]

    def _made(self, asked: Ask, one: Answer, params: SamplingParams) -> Made:
        ids = one.ids if one.ids is not None else self._by_text(one)
        ends = () if params.ignore_eos else self.reference.target.ends
        if one.finish == "stop" and ends and not set(ids[-1:]) & set(ends):
            # Some servers leave the end out of what they tell.
            return Made((*ids, self._end(asked, ids, params)))
        told = one.logprobs if params.logprobs is not None else None
        return Made(ids, told)

    def _end(self, asked: Ask, ids: tuple[int, ...], params: SamplingParams) -> int:
        """The token that ended a text: where it may be one of several, drawn from their law.

        Of a right server it is as good as the one that came, since nothing else was told of it.
        """
        target, ends = self.reference.target, self.reference.target.ends
        if len(ends) == 1:
            return ends[0]
        texts = [Text(cast("tuple[int, ...]", asked.prompt), (*ids, ends[0]))]
        logits_NV = target.logits(texts)
        law_V = target.laws(logits_NV, texts, params)[-1]
        chances = [float(law_V[end]) for end in ends]
        chance = random.Random(f"{asked.seed} {ids}")
        if sum(chances) > 0:
            return chance.choices(ends, chances)[0]
        scores_V = target.scores(logits_NV, texts, params)[-1]
        return max(ends, key=lambda end: float(scores_V[end]))

    def _by_text(self, one: Answer) -> tuple[int, ...]:
        """Ids of tokens that are told as text."""
        if not self._ids:
            self._ids = self.reference.ids_by_text()
        try:
            return tuple(self._ids[str(name)] for name in one.names or ())
        except KeyError as error:
            raise EndpointError(
                f"{self.server.url} tells no token ids, and {error} may be several tokens; "
                "certify it by log-probabilities, --plain-url or a switch, without --model"
            ) from error
