"""A server that tells log-probabilities: its own answers say what law each token should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.certify.endpoint.rows import REST, Known, Row, known
from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import UNKNOWN, Answer, Ask, Name, Prompt
from outrider.certify.model.book import Texts
from outrider.certify.model.subject import Made, Prompts
from outrider.config import SamplingParams
from outrider.errors import EndpointError, InvalidConfig

Judged: TypeAlias = tuple[Row, Known, bool]
Places: TypeAlias = list[tuple[tuple[int, ...], Row]]
KEPT_PLACES = 512
"""Places that may be asked for once more."""
CONTROLS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""Those whose law log-probabilities tell."""


class Vocabulary:
    """Numbers for tokens, given out as they come; 0 is any that was not told."""

    def __init__(self) -> None:
        self._numbers: dict[Name | tuple[str, Prompt], int] = {}
        self._names: list[Name | tuple[str, Prompt] | None] = [None]

    def __len__(self) -> int:
        return len(self._names)

    def number(self, name: Name | tuple[str, Prompt]) -> int:
        """The token's number, a new one where it is new."""
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def name(self, number: int) -> Name | None:
        """What a server calls a token; None for those that it did not tell."""
        name = self._names[number]
        return None if isinstance(name, tuple) else name


@dataclass(slots=True)
class ToldLaws:
    """The laws that answers told, text by text.

    Attributes:
        params: the controls whose law is due; where it says nothing about a token, laws are sure
            of that token, so that nothing can be won or lost by it.
        processed: whether what is told is the law after the controls.
        near: log-probabilities closer than this may change places by rounding.
        vocabulary: the tokens.
    """

    params: SamplingParams
    processed: bool = False
    near: float = 0.0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    _due: SamplingParams = field(init=False)
    _rows: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Row]] = field(
        default_factory=dict[tuple[tuple[int, ...], tuple[int, ...]], list[Row]]
    )

    def __post_init__(self) -> None:
        self._due = self._asked(self.params)

    @property
    def ends(self) -> tuple[int, ...]:
        """None is known: an end of text is a token like others."""
        return ()

    @property
    def width(self) -> int:
        """Tokens that were told so far."""
        return len(self.vocabulary)

    @property
    def max_length(self) -> int | None:
        """Not told."""
        return None

    def note(self, prompt: tuple[int, ...], rows: list[Row]) -> tuple[int, ...]:
        """Keeps what was told of a text; returns its tokens."""
        output = tuple(row.came for row in rows)
        self._rows[prompt, output] = rows
        return output

    def logits(self, texts: Texts) -> Tensor:
        """What was told, `[N, V]` in nats; -inf for the other tokens."""
        rows = [row for text in texts for row in self._rows[text.prompt, text.output]]
        return self._dense([(row.tokens, row.logprobs) for row in rows], -torch.inf)

    def laws(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """The laws `[N, V]`, float64."""
        parts = [
            (law.tokens, law.probs) if judged else (np.array([row.came]), np.ones(1))
            for row, law, judged in self._known(texts, params, late)
        ]
        return self._dense(parts, 0.0)

    def scores(
        self, logits_NV: Tensor, texts: Texts, params: SamplingParams, late: int = 0
    ) -> Tensor:
        """Log-probabilities after bias and penalties, `[N, V]`; of a token not told, its most."""
        uncut = self._asked(replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0))
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for row, before in self._each(texts, late):
            law = known(row, uncut, before)
            told = law.tokens[law.tokens != REST]
            parts.append((np.append(told, REST), np.append(law.scores, law.rest_score)))
        return self._dense(parts, -torch.inf)

    def judged(self, texts: Texts) -> Tensor:
        """Of which tokens the law that is due says something, `[N]`."""
        return torch.tensor([judged for _, _, judged in self._known(texts, self.params, 0)])

    def _known(self, texts: Texts, params: SamplingParams, late: int) -> Iterator[Judged]:
        """Each token's row and law, and whether the law that is due says something about it."""
        asked = self._asked(params)
        pairs = zip(self._each(texts, 0), self._each(texts, late), strict=True)
        for (row, before), (_, heard) in pairs:
            due = known(row, self._due, before, self.near)
            same = asked == self._due and not late
            law = due if same else known(row, asked, heard, self.near)
            yield row, law, due.judges(row)

    def _each(self, texts: Texts, late: int) -> Iterator[tuple[Row, Counter[int]]]:
        """Each token's row, and the tokens before it that the controls have heard of."""
        for text in texts:
            for i, row in enumerate(self._rows[text.prompt, text.output]):
                yield row, Counter(text.output[: max(0, i - late)])

    def _asked(self, params: SamplingParams) -> SamplingParams:
        if self.processed:
            return SamplingParams()
        bias = {self.vocabulary.number(token): number for token, number in params.bias_pairs}
        return replace(params, logit_bias=bias)

    def _dense(self, parts: Sequence[tuple[np.ndarray, np.ndarray]], fill: float) -> Tensor:
        rows_NV = torch.full((len(parts), self.width), fill, dtype=torch.float64)
        for row_V, (tokens, values) in zip(rows_NV, parts, strict=True):
            row_V[torch.from_numpy(tokens)] = torch.from_numpy(values)
        return rows_NV


@dataclass(slots=True)
class Told:
    """Texts with what was told of them: a `Generate` whose prompts are numbers of a vocabulary.

    Attributes:
        server: who is asked.
        laws: where it is kept.
        most: how many likeliest tokens are asked for.
        given: the prompts, by what stands for them.
        places: what was told after the beginnings of texts whose ids are known.
        silent: tokens of which nothing was told.
        answers: those of the last call.
    """

    server: Server
    laws: ToldLaws
    most: int
    given: dict[tuple[int, ...], Prompt] = field(default_factory=dict[tuple[int, ...], Prompt])
    places: Places = field(default_factory=Places)
    silent: int = 0
    answers: list[Answer] = field(default_factory=list[Answer])

    def numbered(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """What stands for prompts: their tokens, or of a text a token of its own."""
        number = self.laws.vocabulary.number
        for prompt in prompts:
            text = isinstance(prompt, str)
            key = (number(("prompt", prompt)),) if text else tuple(map(number, prompt))
            self.given[key] = prompt
        return list(self.given)

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> list[Made]:
        """One request a prompt, each with a seed of its own; none where the budget is spent."""
        if self.server.meter.spent:
            return [Made(())] * len(prompts)
        asked = [
            Ask(self.given[tuple(prompt)], params, seed + i, self.most)
            for i, prompt in enumerate(prompts)
        ]
        self.answers = self.server.all(asked)
        return [
            self._made(tuple(prompt), one)
            for prompt, one in zip(prompts, self.answers, strict=True)
        ]

    def _made(self, prompt: tuple[int, ...], one: Answer) -> Made:
        if one.names is None or one.logprobs is None:
            raise EndpointError(
                f"{self.server.url} tells no log-probabilities; certify it with --plain-url, a "
                "switch, or --model"
            )
        if one.finish == "stop" and one.num_tokens != len(one.names):
            raise EndpointError(
                f"{self.server.url} leaves the end of text out of its log-probabilities, so that "
                "they do not tell its chance; certify it with --plain-url, a switch, or --model"
            )
        told = zip(one.names, one.logprobs, one.tops, strict=True)
        rows = [self._row(name, own, top) for name, own, top in told]
        self.silent += sum(not len(row.tokens) for row in rows)
        ids, given = one.ids, self.given[prompt]
        start = given if not isinstance(given, str) else one.prompt_ids
        if start is not None and ids is not None and len(self.places) < KEPT_PLACES:
            self.places += [((*start, *ids[:i]), row) for i, row in enumerate(rows) if i]
        return Made(self.laws.note(prompt, rows), one.logprobs)

    def _row(self, name: Name, own: float, top: Mapping[Name, float]) -> Row:
        """The likeliest tokens; names that may be several tokens count as not told."""
        finite = [(x, number) for x, number in top.items() if number > -1e30]
        # The token itself is told beside the likeliest ones: it is not one of them.
        # Of equals it comes last, or what came would decide what was told.
        likely = sorted(finite, key=lambda pair: (-pair[1], pair[0] == name))[: self.most]
        # Behind a name that may be several tokens nothing is known to be the likeliest of the rest.
        unclear = (isinstance(x, str) and UNKNOWN in x for x, _ in likely)
        told = likely[: next((i for i, one in enumerate(unclear) if one), len(likely))]
        tokens = np.array([self.laws.vocabulary.number(x) for x, _ in told], dtype=np.int64)
        number = self.laws.vocabulary.number(name)
        came = number if number in tokens else REST
        return Row(tokens, np.array([number for _, number in told]), came, own)


def check_tellable(params: SamplingParams, asked: Sequence[str]) -> None:
    """Refuses controls whose law log-probabilities do not tell.

    Raises:
        InvalidConfig: such a control.
    """
    if beyond := [name for name in asked if name not in CONTROLS]:
        raise InvalidConfig(
            f"{beyond[0]}={getattr(params, beyond[0])!r}: log-probabilities do not tell its law; "
            "certify with --model, --plain-url or a switch"
        )
