"""Where greedy texts with and without speculation part: a near tie of plain decoding, or a fault?

Without a model or log-probabilities the answer lies in what plain decoding draws there: the shared
beginning is asked for once more, as a prompt, at a temperature so low that only near ties come.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.certify.endpoint.server import Server
from outrider.certify.endpoint.wire import Answer, Ask, Prompt, words
from outrider.certify.model.plan import OTHER
from outrider.config import SamplingParams
from outrider.errors import EndpointError

Outcome = Literal["tie", "fault", "open"]
PLACES, MOST, AT_ONCE = 8, 40, 8
"""Partings that are looked into, requests of draws at each, and how many are under way together."""
ASKED = PLACES * (MOST + 1)
"""Requests that it takes at most."""
COLDEST = 0.02
"""Servers take a lower temperature for 0."""
FAR = 5.0
"""So many times that temperature below the likeliest token is no near tie any more."""
FEW = 4
"""Tokens that are asked for where texts alone are told."""
COUNTED = "presence_penalty", "frequency_penalty", "min_tokens"
"""Controls that count a text's own tokens, which a prompt's are not."""
SHOWN = 20
"""Letters of a text that a case shows."""
END = "\0"
"""Stands behind a text that ended."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where two texts part.

    Attributes:
        before: the prompt and what both texts have, as a prompt.
        ours, due: what comes then with speculation, and without.
        exact: whether `before` are the very tokens: text may be cut into others as a prompt.
    """

    before: Prompt
    ours: Sequence[Any]
    due: Sequence[Any]
    exact: bool

    def side(self, came: Answer) -> bool | None:
        """Whether an answer goes on as with speculation; None = neither that way nor the other."""
        told = _items(came) if self.exact else _letters(came)
        ours, due = (_shared(told, one) for one in (self.ours, self.due))
        return None if ours == due else ours > due

    def shown(self, items: Sequence[Any]) -> Any:
        """The first of some items, for a reader."""
        some = ["end of text" if x == END else x for x in items[: 1 if self.exact else SHOWN]]
        return some if self.exact else "".join(some)


@dataclass(frozen=True, slots=True)
class Settled:
    """What was found at one parting.

    Attributes:
        index: of the prompt.
        outcome: a near tie of plain decoding, a fault, or neither is shown.
        why: of what is open, why.
        case: what to ask for to see it.
        ours, drawn: how often plain decoding drew what came with speculation, of how many draws.
    """

    index: int
    outcome: Outcome
    why: str = ""
    case: dict[str, Any] | None = None
    ours: int = 0
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Partings:
    """Looks into where texts part.

    Attributes:
        plain: the server without speculation.
        prompts: the prompts.
        params: the request's controls.
        near: log-probabilities closer than this may change places by rounding.
        alpha: the chance of a wrong outcome, of all places together.
        seed: of the draws, and of which places are looked into.
    """

    plain: Server
    prompts: Sequence[Prompt]
    params: SamplingParams
    near: float
    alpha: float
    seed: int

    def settled(
        self, parted: Sequence[int], on: Sequence[Answer], off: Sequence[Answer]
    ) -> Iterator[Settled]:
        """One outcome for each place that is looked into, a few of those that part."""
        some = random.Random(self.seed).sample(list(parted), min(PLACES, len(parted)))
        for index in sorted(some):
            yield self._settled(index, on[index], off[index])

    def _settled(self, index: int, on: Answer, off: Answer) -> Settled:
        if counted := [name for name in COUNTED if getattr(self.params, name)]:
            return Settled(index, "open", f"{counted[0]} counts tokens that a prompt's are not")
        place = parting(self.prompts[index], on, off)
        if place is None:
            return Settled(index, "open", "no token ids are told, and the prompt is given as such")
        count, heat = 1 if place.exact else FEW, max(self.near, COLDEST)
        warm = SamplingParams(max_tokens=count, temperature=heat, logit_bias=self.params.logit_bias)
        case = {
            "prompt": place.before,
            "params": {"temperature": heat, "max_tokens": count},
            "came": place.shown(place.ours),
            "due": place.shown(place.due),
        }
        try:
            first = place.side(self.plain.ask(Ask(place.before, replace(warm, temperature=0.0), 0)))
            if first and place.exact:
                # Read as a prompt, plain decoding goes the other way itself.
                return Settled(index, "tie", case=case)
            if first is not False:
                why = "as a prompt the shared beginning is not gone on with like the plain text"
                return Settled(index, "open", why)
            ours, drawn, outcome = self._drawn(place, warm, heat)
        except EndpointError as error:
            return Settled(index, "open", str(error))
        why = f"{ours} of {drawn} draws are between" if outcome == "open" else ""
        return Settled(index, outcome, why, case, ours, drawn)

    def _drawn(self, place: Place, params: SamplingParams, heat: float) -> tuple[int, int, Outcome]:
        """Draws until two shares are told apart: that of a near tie, and of one that is far.

        Source: Wald's sequential probability ratio test, Annals of Mathematical Statistics 1945.
        """
        tie, far = (1 / (1 + math.exp(gap)) for gap in (self.near / heat, FAR))
        gains = math.log(tie / far), math.log((1 - tie) / (1 - far))
        enough = math.log(2 * PLACES / self.alpha)
        ours = drawn = 0
        for start in range(0, MOST, AT_ONCE):
            seed = self.seed + OTHER + start
            asked = [Ask(place.before, params, seed + i) for i in range(AT_ONCE)]
            sides = [place.side(one) for one in self.plain.all(asked)]
            ours += sides.count(True)
            drawn += sides.count(True) + sides.count(False)
            for_tie = ours * gains[0] + (drawn - ours) * gains[1]
            if abs(for_tie) >= enough:
                return ours, drawn, "tie" if for_tie > 0 else "fault"
        return ours, drawn, "open"


def parting(prompt: Prompt, on: Answer, off: Answer) -> Place | None:
    """Where two texts of a prompt part, in tokens where they are told, else in text.

    None where neither can be put behind the prompt.
    """
    given = prompt if isinstance(prompt, tuple) else on.prompt_ids
    if given is not None and on.ids is not None and off.ids is not None:
        ours, due = _items(on), _items(off)
        at = _shared(ours, due)
        return Place((*given, *on.ids[:at]), ours[at:], due[at:], exact=True)
    if isinstance(prompt, tuple):
        return None
    # A word that both begin with is left to come, and the blank before it: a prompt that ends
    # there has other tokens.
    some = words(on.text)
    same = "".join(some[: _shared(some, words(off.text))]).rstrip()
    ours, due = (_letters(one)[len(same) :] for one in (on, off))
    return Place(prompt + same, ours, due, exact=False)


def _items(answer: Answer) -> list[Any]:
    return [*(answer.ids or ()), *([END] if answer.finish == "stop" else [])]


def _letters(answer: Answer) -> list[Any]:
    return [*answer.text, *([END] if answer.finish == "stop" else [])]


def _shared(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many of their first items are the same."""
    both = zip(one, two, strict=False)
    return next((i for i, (x, y) in enumerate(both) if x != y), min(len(one), len(two)))
