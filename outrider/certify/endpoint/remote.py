"""A server beside a model that is read here: its texts as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import UNKNOWN, Answer, Ask
from outrider.certify.model.book import Book, Laws
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
        return [self._made(one, params) for one in self.server.all(asked)]

    def _made(self, one: Answer, params: SamplingParams) -> Made:
        ids = one.ids if one.ids is not None else self._by_text(one)
        ends = () if params.ignore_eos else self.reference.target.ends
        if one.finish == "stop" and len(ends) == 1 and ids[-1:] != ends:
            # Some servers leave the end out of what they tell.
            return Made((*ids, *ends))
        told = one.logprobs if params.logprobs is not None else None
        return Made(ids, told)

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
