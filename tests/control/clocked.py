"""Rounds on a clock of their own: models that take as long as they are told, and drafters to order.

Everything but the time is real: engine, rules, drafters, controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from outrider import SamplingParams, TargetScores
from outrider.control import Controller, ControlSettings
from outrider.control.plans import Times
from outrider.control.rounds import Offer, State, View
from outrider.drafters import Drafter, ModelDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.models.base import Rows
from outrider.models.protocol import ProtocolTarget
from outrider.sequence import Sequence as Text
from outrider.tree import TreeBudget
from outrider.types import Completion, Request

VOCAB = 32


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(ProtocolTarget):
    """A model of which a forward takes `seconds(rows)` of a clock."""

    def __init__(self, model: object, clock: Clock, seconds: Callable[[int], float]) -> None:
        super().__init__(model)  # pyright: ignore[reportArgumentType]
        self._clock, self.seconds = clock, seconds

    def score(self, rows: Rows):
        self._clock.now += self.seconds(len(rows.tokens_R))
        return super().score(rows)


class Chant:
    """Says tokens that follow from the place and the two before; a share of them it gets wrong.

    `wrong(place)` is the share at a place; which places those are is settled once. What it gets
    wrong it has `second` of all where that is asked for, and else nowhere.
    """

    vocab_size = VOCAB

    def __init__(self, wrong: Callable[[int], float], seed: int, *, second: bool = False) -> None:
        self._wrong = wrong
        self._second = second
        chance = np.random.default_rng(seed)
        self._dice = chance.random(100_000)

    def verify(self, prefix: Sequence[int], draft_tokens: Sequence[int]) -> TargetScores:
        text = [*prefix, *draft_tokens]
        return TargetScores([self._row(text[:end]) for end in range(len(prefix), len(text) + 1)])

    def _row(self, text: Sequence[int]):
        place = len(text)
        # Neither repeats nor can be looked up.
        token = (7 * text[-1] + 3 * place * place + 11 * place // 3) % VOCAB
        # Each text has its own chances, by the third token of its prompt.
        miss = self._dice[(place + 997 * text[min(2, place - 1)]) % len(self._dice)]
        miss = miss < self._wrong(place)
        row = np.full(VOCAB, np.log(1e-9))
        if self._second:
            row[[(token + miss) % VOCAB, (token + 1 - miss) % VOCAB]] = np.log([0.6, 0.4])
        else:
            row[(token + miss) % VOCAB] = 0.0
        return row


def view_of(
    texts: Sequence[Text],
    times: Times,
    offers: Sequence[Offer | None],
    *,
    read: Sequence[dict[int, int]] = (),
    uneven: float = 0.0,
    ending: Sequence[int] = (),
) -> View:
    """Texts in the midst of greedy chains, 96 tokens from their end, or 24 where others end last.

    `read` is what drafters have read of each.
    """
    lefts = [96.0 if b in ending else 24.0 for b in range(len(texts))] if ending else ()
    return View(
        texts=texts,
        states=[State(rounds=20, read=own) for own in read or [{} for _ in texts]],
        caps=[16] * len(texts),
        rule="greedy",
        context=0,
        trees=None,
        max_certain=0,
        prompt_rows=0,
        times=times,
        offers=offers,
        uneven=uneven,
        lefts=lefts,
    )


class World:
    """One engine, its clock, and the means to ask how fast it was."""

    def __init__(
        self,
        monkeypatch,
        *,
        target_s: Callable[[int], float] = lambda rows: 1.0 + 0.02 * rows,
        draft_s: Callable[[int], float] = lambda rows: 0.1,
        wrong: Callable[[int], float] = lambda place: 0.1,
        more: Sequence[Drafter] = (),
        drafter: Callable[[World], Drafter] | None = None,
        second: bool = False,
        trees: TreeBudget | None = None,
        **settings,
    ) -> None:
        self.clock = Clock()
        clock = SimpleNamespace(perf_counter=self.clock)
        monkeypatch.setattr("outrider.engine.laps.time", clock)
        target = Slow(Chant(lambda place: 0.0, 1), self.clock, target_s)
        chant = Chant(wrong, 2, second=second)
        self.model = ModelDrafter(Slow(chant, self.clock, draft_s), name="draft")
        if drafter is None:
            self.controller = Controller(
                [self.model, *more], ControlSettings(**settings), clock=self.clock
            )
            chosen: Drafter = self.controller
        else:
            chosen = drafter(self)
        self.engine = Engine(target, chosen, Emitter(None), trees=trees)
        self.requests = Requests(self.engine, depth=16, end_tokens=frozenset())

    def run(
        self, tokens: int = 200, prompts: Sequence[Sequence[int]] = ((1, 2, 3),), **sampling
    ) -> float:
        """Makes texts; how many tokens a second."""
        before = self.clock.now
        self.done = self.complete(tokens, prompts, **sampling)
        return sum(len(one.token_ids) for one in self.done) / (self.clock.now - before)

    def complete(
        self, tokens: int, prompts: Sequence[Sequence[int]], **sampling
    ) -> list[Completion]:
        params = SamplingParams(
            max_tokens=tokens, temperature=sampling.pop("temperature", 0.0), **sampling
        )
        return self.requests.complete([Request(tuple(prompt), params) for prompt in prompts])


class Fixed(ModelDrafter):
    """The draft model at one depth, for comparison."""

    depth = 1

    def propose(self, texts, depths, draws):
        return super().propose(texts, [min(self.depth, one) for one in depths], draws)


def fixed(depth: int) -> Callable[[World], Drafter]:
    """What makes it in a world."""

    def made(world: World) -> Drafter:
        drafter = Fixed(world.model.model)
        drafter.depth = depth
        return drafter

    return made


def plain(world: World) -> Drafter:
    """Nobody drafts in a world."""
    return NoDrafter()
