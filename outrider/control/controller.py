"""The controller: a drafter that chooses among drafters, round by round, nobody included.

It chooses by what was measured in rounds that are over. Of the round at hand it knows the texts as
they stand and what certain drafters (look-ups) say of them, never a token that was drawn: so every
rule that is exact stays exact.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.control import plans
from outrider.control.book import Book
from outrider.control.costs import Costs
from outrider.control.guard import Guard
from outrider.control.live import LiveDraft, LiveRounds, context_class
from outrider.control.plans import Class, Drawing, Plan, Tally, Times
from outrider.control.settings import ControlSettings
from outrider.decoding import Draft
from outrider.drafters import ModelDrafter
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.combined import Parts, SeveralDrafters
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence
from outrider.types import StageTimes

HYSTERESIS = 1.03
"""Another choice must promise so much more than the one at hand."""
PLAIN_AT_FIRST = 2
"""Plain rounds that are timed before anything else."""
PLAIN_EVERY = 256
"""Rounds of drafts after which a plain one is timed again."""
BUDGET = 0.02
"""Share of the time that samples of drafters not chosen may take."""
SAMPLE_EVERY = 12
"""Rounds between two samples of a drafter at least; none where the last one was kept whole."""
SAMPLE_DEPTH = 2
READ_AHEAD = 512
"""A text of which a drafter has to read more than this is read in the engine's chunks first."""
SCORED = 4
"""Tokens of a certain offer that is not taken which are compared with what came."""
SURE = 0.9
"""The confidence that is asked of a drafted token at most."""


TIMED = "plain decoding is timed"


@dataclass(slots=True)
class Offer:
    """A certain draft of a text: tokens, which stand from `start` on, and its class in the book."""

    tokens: list[int]
    start: int
    cell: int


@dataclass(frozen=True, slots=True)
class Found:
    """The best certain draft of a text.

    Attributes:
        arm: who found it.
        tokens: what it says.
        names: which of all parts' names each token goes by.
        survival: the chance of each that it and all before it are kept.
        cell: its class in the book.
    """

    arm: int
    tokens: list[int]
    names: list[int]
    survival: list[float]
    cell: int


@dataclass(slots=True)
class State:
    """What is kept of a text.

    Attributes:
        rounds: how many it went through.
        read: by drafter, how many of its tokens that has read.
        offers: by drafter, an offer that was not taken and is still to be compared.
    """

    rounds: int = 0
    read: dict[int, int] = field(default_factory=dict[int, int])
    offers: dict[int, Offer] = field(default_factory=dict[int, Offer])


@dataclass(slots=True)
class Round:
    """The round under way."""

    texts: list[Sequence]
    rule: str
    context: int
    plan: Plan
    why: str
    clean: bool
    served: list[int | None]
    asked: list[int]
    cells: list[int]
    offered: list[int] = field(default_factory=list[int])
    trees: bool = False
    pending: int = 0
    levels: int = 0
    rows: int = 0
    draft_s: float = 0.0
    kept: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def arm(self) -> int | None:
        """The drafter that drew."""
        return self.plan.arm


class Controller(SeveralDrafters):
    """Chooses, for each round of a group of texts, who drafts and how deep.

    Certain drafters (`ngram`, `suffix`, `recycle`) are asked in every round and compared with what
    came, whether their offer was taken or not; of those that draw the one is asked that promises
    most, and the others once in a while. Where nobody promises more than plain decoding, measured,
    nothing is drafted; a choice that loses time all the same is left for a while.

    Args:
        drafters: the alternatives, the preferred first among equals.
        settings: bounds of the choice.
        costs: measured before; None learns from rounds alone.
        name: what reports call it.
        clock: seconds; of a test its own.

    Raises:
        InvalidConfig: no drafter, or a fallback that is none of them.
    """

    def __init__(
        self,
        drafters: Sequenced[Drafter],
        settings: ControlSettings | None = None,
        *,
        costs: Costs | None = None,
        name: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not drafters:
            raise InvalidConfig("no drafters to choose among; drafter='none' decodes plainly")
        super().__init__(drafters)
        self.name = ",".join(drafter.name for drafter in drafters) if name is None else name
        self.settings = settings or ControlSettings()
        self.settings.check_fallback(tuple(drafter.name for drafter in drafters))
        self._clock = clock
        self._live = LiveRounds(costs)
        self._drafts = [LiveDraft(drafter.name, costs) for drafter in drafters]
        self._first = self.first_names(self.drafters)
        self._certain = [i for i, drafter in enumerate(drafters) if drafter.certain]
        self._offered: list[list[float]] = [[] for _ in drafters]
        self._books: dict[tuple[int, str, bool], Book] = {}
        self._guards: dict[int | None, Guard] = {None: Guard()}
        self._guards |= {i: Guard() for i in range(len(drafters))}
        self._sampled: dict[int, int] = {}
        self._budget_s = 0.0
        self._states: dict[int, State] = {}
        self._reading: dict[int, int] = {}
        self._now = self._plain_at = 0
        self._current: int | None = None
        self._round: Round | None = None
        self._lengths = 64.0
        self.tallies: dict[str, Tally] = {}

    # What the engine asks.

    def unread(self, text: Sequence) -> int:
        """What the drafter that is to draw for the text has left to read of it."""
        arm = self._reading.get(text.key)
        return 0 if arm is None else self.drafters[arm].unread(text)

    def read(self, text: Sequence, rows: int) -> None:
        """That drafter reads ahead."""
        arm = self._reading.get(text.key)
        if arm is None:
            return
        started = self._clock()
        before = self.drafters[arm].unread(text)
        self.drafters[arm].read(text, rows)
        done = before - self.drafters[arm].unread(text)
        if done > 0:
            self._drafts[arm].saw_prompt(done, self._clock() - started)
            self._state(text).read[arm] = len(text.tokens) - before + done

    def never_asked(self) -> tuple[str, ...]:
        """Nobody: who is not asked was weighed, and `report` says why."""
        return ()

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """What promises most tokens a second, or nothing."""
        self._now += 1
        caps = [min(depth, self.settings.max_depth) for depth in depths]
        states = [self._state(text) for text in texts]
        clean = all(state.rounds for state in states)
        for text, state in zip(texts, states, strict=True):
            state.rounds += 1
            if state.offers:
                self._compare(text, state, 1 / len(texts))
        context = context_class(sum(len(text.tokens) for text in texts) // len(texts))
        rule = texts[0].rule
        offers = self._offers(texts, caps, draws)
        times = self._times(len(texts), context, sum(caps))
        plan, why = self._chosen(texts, states, caps, draws, times, offers, rule, clean=clean)
        self._round = current = Round(
            list(texts), rule, context, plan, why, clean,
            [None] * len(texts), [0] * len(texts), [0] * len(texts),
        )  # fmt: skip
        return self._drafted(current, states, caps, draws, times, offers)

    def commit(self, text: Sequence, accepted: int) -> None:
        """Notes what was kept, and tells those who drafted."""
        current = self._round
        if current is not None:
            current.kept[text.key] = accepted
        super().commit(text, accepted)

    def discard(self, text: Sequence) -> None:
        """The round teaches nothing."""
        self._round = None
        super().discard(text)

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        state = self._states.pop(text.key, None)
        self._reading.pop(text.key, None)
        if state is not None and text.finished:
            self._lengths += 0.1 * (text.num_output - self._lengths)
        for book in self._books.values():
            book.close(text.key)
        super().close(text)

    def timed(self, texts: Sequenced[Sequence], times: StageTimes) -> None:
        """Learns from the round, which is over."""
        current, self._round = self._round, None
        if current is None:
            return
        target_s = times.score_s + times.verify_s + times.commit_s
        took_s = target_s + times.draft_s
        self._count(current, took_s)
        self._budget_s = min(self._budget_s + BUDGET * took_s, 30 * BUDGET * took_s + took_s)
        self._learn_kept(current)
        num = len(current.texts)
        if not current.clean:
            self._learn_reading(current, times)
            return
        before = self._live.plain_s(num, current.context)
        self._live.saw(num, num + current.rows, current.context, target_s)
        if current.rows == 0:
            self._plain_at = self._now
        elif before is not None:
            gained = num + sum(current.kept.values())
            key = current.arm if current.levels else None
            expected_s = max(current.plan.expected_s, before)
            self._guards[key].saw(self._now, before * gained / num, took_s, expected_s)

    # What is known.

    def _state(self, text: Sequence) -> State:
        found = self._states.get(text.key)
        if found is None:
            found = self._states[text.key] = State()
        return found

    def _book(self, arm: int, rule: str, *, trees: bool) -> Book:
        found = self._books.get((arm, rule, trees))
        if found is None:
            found = self._books[arm, rule, trees] = Book()
        return found

    def _times(self, num: int, context: int, drafted: int) -> Times | None:
        plain_s = self._live.plain_s(num, context)
        curve = self._live.curve(context, num + drafted + 2)
        return None if plain_s is None or curve is None else Times(num, plain_s, curve)

    def _compare(self, text: Sequence, state: State, part: float) -> None:
        """Scores offers that were not taken by what came instead: full information for nothing."""
        for arm, offer in list(state.offers.items()):
            came = text.tokens[offer.start : offer.start + len(offer.tokens)]
            same = 0
            for ours, theirs in zip(offer.tokens, came, strict=False):
                if ours != theirs:
                    break
                same += 1
            if same < len(came) or len(came) == len(offer.tokens):
                book = self._book(arm, text.rule, trees=False)
                book.saw(text.key, offer.cell, same, len(offer.tokens), part=part)
                del state.offers[arm]

    def _offers(
        self, texts: Sequenced[Sequence], caps: list[int], draws: RoundDraws
    ) -> list[Found | None]:
        """Each text's best certain draft, by what the book has of it; of trees there is none."""
        best: list[Found | None] = [None] * len(texts)
        if draws.trees is not None:
            return best
        worth = [0.0] * len(texts)
        for arm in self._certain:
            draft = self.drafters[arm].propose(texts, caps, draws)
            book = self._book(arm, texts[0].rule, trees=False)
            rows = draft.tree.tokens_BN.tolist()
            parts = None if draft.part_BN is None else draft.part_BN.tolist()
            for b, count in enumerate(draft.tree.counts_B.tolist()):
                if not count:
                    continue
                text, tokens = texts[b], rows[b][:count]
                cell = book.cell(text.key, count)
                survival = book.counts(cell).survival(count)[:count]
                own = sum(survival)
                if best[b] is None or own > worth[b]:
                    named = [0] * count if parts is None else parts[b][:count]
                    names = [self._first[arm] + part for part in named]
                    best[b], worth[b] = Found(arm, tokens, names, survival, cell), own
                state = self._states[text.key]
                if arm not in state.offers:
                    state.offers[arm] = Offer(tokens[:SCORED], len(text.tokens), cell)
        return best

    # The choice.

    def _chosen(
        self,
        texts: Sequenced[Sequence],
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        times: Times | None,
        offers: list[Found | None],
        rule: str,
        *,
        clean: bool,
    ) -> tuple[Plan, str]:
        """The plan, and why."""
        nothing = Plan(None, 0, 0.0, 0.0)
        if times is None:
            return nothing, TIMED
        context = context_class(sum(len(text.tokens) for text in texts) // len(texts))
        known = self._live.plain_count(len(texts), context)
        overdue = self._now - self._plain_at >= PLAIN_EVERY
        least = PLAIN_AT_FIRST if not self._current_known() else 1
        if clean and (known < least or overdue):
            return nothing, TIMED
        found = self._alternatives(texts, states, caps, draws, times, offers, rule)
        base = plans.plain(times)
        best, why = base, "nobody promises more than plain decoding"
        for one in found:
            if one.rate_tok_s > best.rate_tok_s:
                best, why = one, "it promises most tokens a second"
        held = next(
            (one for one in found if one.arm is not None and one.arm == self._current), None
        )
        if (
            held is not None
            and best.arm != held.arm
            and best.rate_tok_s < HYSTERESIS * held.rate_tok_s
        ):
            best, why = held, "nobody promises clearly more"
        if best is base and self.settings.fallback != "none":
            best, why = self._fallen_back(found, base)
        self._current = best.arm
        if clean and best.arm is None:
            sample = self._sample(texts, states, caps, draws, times, rule)
            if sample is not None:
                return sample, "a sample, to know whether it would pay"
        return best, why

    def _current_known(self) -> bool:
        return self._plain_at > 0

    def _fallen_back(self, found: list[Plan], base: Plan) -> tuple[Plan, str]:
        arm = next(i for i, one in enumerate(self.drafters) if one.name == self.settings.fallback)
        for one in found:
            if one.arm == arm or (one.arm is None and self.drafters[arm].certain):
                return one, "it is the fallback"
        return base, "the fallback has nothing to offer"

    def _alternatives(
        self,
        texts: Sequenced[Sequence],
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        times: Times,
        offers: list[Found | None],
        rule: str,
    ) -> list[Plan]:
        """The best plan of each kind that is allowed now."""
        found: list[Plan] = []
        if any(offers) and self._allowed(None, rule):
            plan = plans.certain(
                times, [() if offer is None else offer.survival for offer in offers]
            )
            if plan is not None:
                found.append(plan)
        for arm in self._drawing(draws):
            if self._allowed(arm, rule):
                drawing = self._as_drawing(arm, texts, states, caps, draws, times, rule)
                plan = plans.drawn(times, drawing)
                if plan is not None:
                    found.append(plan)
        return found

    def _drawing(self, draws: RoundDraws) -> list[int]:
        """Drafters that are weighed as a whole: those that draw, and of trees all that can."""
        if draws.trees is None:
            return [arm for arm, one in enumerate(self.drafters) if not one.certain]
        return [
            arm for arm, one in enumerate(self.drafters) if not one.certain or draws.max_certain
        ]

    def _allowed(self, arm: int | None, rule: str) -> bool:
        """Whether the guard and the least acceptance rate let a choice through."""
        name = None if arm is None else self.drafters[arm].name
        if name is not None and name == self.settings.fallback:
            return True
        if not self._guards[arm].allows(self._now):
            return False
        least = self.settings.min_acceptance_rate
        if least == 0:
            return True
        arms = [arm] if arm is not None else [i for i, d in enumerate(self.drafters) if d.certain]
        rates = [
            book.rate
            for (own, ruled, _), book in self._books.items()
            if own in arms and ruled == rule
        ]
        known = [rate for rate in rates if rate is not None]
        return not known or max(known) >= least

    def _as_drawing(
        self,
        arm: int,
        texts: Sequenced[Sequence],
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        times: Times,
        rule: str,
    ) -> Drawing:
        """A drafter as it stands for the texts that it could draft for."""
        book = self._book(arm, rule, trees=draws.trees is not None)
        most = max(caps, default=0)
        classes: Counter[tuple[int, int]] = Counter()
        reading_s = 0.0
        level_s = self._drafts[arm].level_s(len(texts), times.plain_s)
        token_s = self._token_s(arm, level_s, times)
        for text, state, cap in zip(texts, states, caps, strict=True):
            if cap < 1 or state.rounds < 2:
                continue
            pending = len(text.tokens) - state.read.get(arm, 0)
            if pending > self.settings.max_depth + 2:
                left = max(1.0, min(text.remaining, max(16.0, self._lengths - text.num_output)))
                # Half of what is left to make, at two tokens a round.
                reading_s += pending * token_s * min(1.0, 2.0 / left)
            if self._current != arm:
                book.drift(text.key)
            classes[book.cell(text.key), cap] += 1
        rows = None
        if draws.trees is not None:
            nodes = draws.max_certain if self.drafters[arm].certain else draws.trees.nodes
            rows = [min(nodes, draws.trees.width * level) for level in range(most + 1)]
        return Drawing(
            arm,
            level_s,
            [
                Class(book.counts(cell).survival(most), cap, num)
                for (cell, cap), num in classes.items()
            ],
            self._offered[arm],
            rows,
            reading_s,
        )

    def _token_s(self, arm: int, level_s: float, times: Times) -> float:
        """Seconds for each token the drafter has to read."""
        target_s = self._live.prompt_token_s
        if target_s is None:
            target_s = times.curve[1] / 16
        share = min(1.0, level_s / times.plain_s)
        return self._drafts[arm].prompt_token_s(target_s * share)

    def _sample(
        self,
        texts: Sequenced[Sequence],
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        times: Times,
        rule: str,
    ) -> Plan | None:
        """A short draft for one text by a drafter that is not chosen, where the budget has it."""
        due = [
            arm
            for arm in self._drawing(draws)
            if self._now - self._sampled.get(arm, -SAMPLE_EVERY) >= SAMPLE_EVERY
        ]
        if not due:
            return None
        arm = min(due, key=lambda one: self._sampled.get(one, -SAMPLE_EVERY))
        level_s = self._drafts[arm].level_s(1, times.plain_s)
        token_s = self._token_s(arm, level_s, times)
        able = [
            (len(text.tokens) - state.read.get(arm, 0), b)
            for b, (text, state) in enumerate(zip(texts, states, strict=True))
            if caps[b] >= 1 and state.rounds >= 2
        ]
        if not able:
            return None
        pending, b = min(able)
        cost_s = SAMPLE_DEPTH * level_s + pending * token_s
        if cost_s > self._budget_s:
            return None
        self._budget_s -= cost_s
        self._sampled[arm] = self._now
        lengths = [0] * len(texts)
        lengths[b] = min(SAMPLE_DEPTH, caps[b])
        expected_s = times.plain_s + cost_s
        return Plan(arm, lengths[b], len(texts) / expected_s, expected_s, tuple(lengths))

    # The draft.

    def _drafted(
        self,
        current: Round,
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        times: Times | None,
        offers: list[Found | None],
    ) -> Draft:
        """The draft of the plan."""
        plan, num = current.plan, len(current.texts)
        if plan.depth == 0 or plan.arm is None:
            self._reading.clear()
            lengths = plan.lengths if plan.depth else [0] * num
            return self._sealed(current, self._taken(current, draws, offers, lengths))
        depths, lengths = self._depths(current, states, caps, draws, offers)
        drawn = self._drawn(current, depths, draws, times)
        if not any(lengths):
            return self._sealed(current, drawn)
        taken = self._taken(current, draws, offers, lengths)
        chosen = [1 if length else 0 for length in lengths]
        return self._sealed(current, Parts([drawn, taken], [0, 0]).side_by_side(chosen))

    def _taken(
        self,
        current: Round,
        draws: RoundDraws,
        offers: list[Found | None],
        lengths: Sequenced[int],
    ) -> Draft:
        """The first tokens of certain drafts."""
        tokens: list[list[int]] = []
        names: list[list[int]] = []
        for b, (offer, length) in enumerate(zip(offers, lengths, strict=True)):
            taken = offer is not None and length > 0
            tokens.append(offer.tokens[:length] if taken else [])
            names.append(offer.names[:length] if taken else [])
            if taken:
                current.served[b], current.asked[b] = offer.arm, length
                current.cells[b] = offer.cell
                self._states[current.texts[b].key].offers.pop(offer.arm, None)
        draft = draws.points(tokens)
        most = draft.tree.num_nodes
        if most == 0:
            return draft
        part_BN = torch.tensor([[*row, *[0] * (most - len(row))] for row in names])
        return replace(draft, part_BN=part_BN)

    def _depths(
        self,
        current: Round,
        states: list[State],
        caps: list[int],
        draws: RoundDraws,
        offers: list[Found | None],
    ) -> tuple[list[int], list[int]]:
        """How deep each text is drawn for; and what is taken of a certain draft that says more."""
        plan, arm = current.plan, current.plan.arm
        assert arm is not None
        depths, lengths = [0] * len(caps), [0] * len(caps)
        current.trees = draws.trees is not None
        book = self._book(arm, current.rule, trees=current.trees)
        for b, (text, state) in enumerate(zip(current.texts, states, strict=True)):
            depth = min(caps[b], plan.lengths[b] if plan.lengths else plan.depth)
            if depth < 1 or state.rounds < 2:
                continue
            cell, offer = book.cell(text.key), offers[b]
            if offer is not None and not plan.lengths:
                drawn = book.counts(cell).survival(depth)[:depth]
                if sum(offer.survival[:depth]) >= sum(drawn):
                    lengths[b] = min(depth, len(offer.tokens))
                    continue
            self._reading[text.key] = arm
            if self.drafters[arm].unread(text) > READ_AHEAD:
                # The engine reads it in chunks, between other texts' rounds.
                continue
            depths[b] = current.asked[b] = depth
            current.served[b], current.cells[b] = arm, cell
            current.pending += len(text.tokens) - state.read.get(arm, 0)
            state.read[arm] = len(text.tokens)
        return depths, lengths

    def _drawn(
        self, current: Round, depths: list[int], draws: RoundDraws, times: Times | None
    ) -> Draft:
        """The chosen drafter's draft."""
        arm = current.plan.arm
        assert arm is not None and times is not None
        drafter = self.drafters[arm]
        if isinstance(drafter, ModelDrafter):
            drafter.confidence = self._confidence(current, arm, times)
        started = self._clock()
        draft = drafter.propose(current.texts, depths, draws)
        current.draft_s = self._clock() - started
        current.levels = draft.tree.depth
        self._learn_draft(current, sum(depth > 0 for depth in depths), times)
        part_BN = draft.part_BN
        if part_BN is None:
            part_BN = torch.zeros_like(draft.tree.tokens_BN)
        return replace(draft, part_BN=part_BN + self._first[arm])

    def _confidence(self, current: Round, arm: int, times: Times) -> float:
        """How sure the drafter must be of a token to go on after it: as the next level costs.

        A drafted token's own probability says how likely it is kept where the text is greedy. The
        token that stops the draft stays in it.
        """
        if current.rule != "greedy" or current.plan.lengths:
            return 0.0
        num = len(current.texts)
        level_s = self._drafts[arm].level_s(num, times.plain_s)
        row_s = times.target_s(num * (current.plan.depth + 1)) - times.target_s(
            num * current.plan.depth
        )
        return min(SURE, current.plan.rate_tok_s / num * (level_s + row_s))

    def _sealed(self, current: Round, draft: Draft) -> Draft:
        """The same draft, of which is noted how much there is."""
        current.offered = draft.tree.counts_B.tolist()
        current.rows = sum(current.offered)
        return draft

    # What a round teaches.

    def _learn_draft(self, current: Round, num: int, times: Times) -> None:
        arm, levels = current.plan.arm, current.levels
        assert arm is not None
        if not num or not levels:
            return
        live = self._drafts[arm]
        if current.pending > num * (self.settings.max_depth + 2):
            beside = levels * live.level_s(num, times.plain_s)
            live.saw_prompt(current.pending, current.draft_s - beside)
        else:
            live.saw(num, levels, current.draft_s)

    def _learn_kept(self, current: Round) -> None:
        sampled = bool(current.arm is not None and current.plan.lengths)
        part = 1.0 if sampled else 1 / len(current.texts)
        for b, text in enumerate(current.texts):
            arm, asked, offered = current.served[b], current.asked[b], current.offered[b]
            if arm is None:
                continue
            kept = current.kept.get(text.key, 0)
            book = self._book(arm, current.rule, trees=current.trees)
            if arm != current.arm:
                book.saw(text.key, current.cells[b], kept, offered, part=part)
                continue
            levels = min(asked, offered)
            self._learn_offered(arm, asked, levels)
            book.saw(text.key, current.cells[b], kept, levels, asked, part=part)
            if sampled and levels and kept == levels:
                # Another one at once: it may pay again.
                self._sampled[arm] = self._now - SAMPLE_EVERY

    def _learn_offered(self, arm: int, asked: int, offered: int) -> None:
        shares = self._offered[arm]
        shares.extend([1.0] * (asked - len(shares)))
        for i in range(asked):
            shares[i] += 0.1 * ((offered > i) - shares[i])

    def _learn_reading(self, current: Round, times: StageTimes) -> None:
        """What a token of a prompt takes, from rounds that read short ones."""
        fresh = [text for text in current.texts if self._states_of(text).rounds == 1]
        tokens = sum(text.num_prompt for text in fresh)
        if 32 <= tokens <= READ_AHEAD:
            seconds = times.score_s / tokens
            known = self._live.prompt_token_s
            self._live.prompt_token_s = seconds if known is None else 0.7 * known + 0.3 * seconds

    def _states_of(self, text: Sequence) -> State:
        return self._states.get(text.key) or State()

    def _count(self, current: Round, took_s: float) -> None:
        names = {self.drafters[arm].name for arm in current.served if arm is not None}
        name = "+".join(sorted(names)) or "none"
        tally = self.tallies.setdefault(name, Tally())
        tally.rounds += 1
        tally.levels += max(current.offered, default=0)
        tally.tokens += len(current.texts) + sum(current.kept.values())
        tally.seconds += took_s
        tally.reasons[current.why] = tally.reasons.get(current.why, 0) + 1

    def report(self) -> dict[str, Any]:
        """Rounds of each choice, how deep in the mean, what came of it, and why; for JSON."""
        return {
            name: {
                "rounds": tally.rounds,
                "mean_depth": tally.levels / tally.rounds,
                "tokens_per_round": tally.tokens / tally.rounds,
                "seconds": tally.seconds,
                "reasons": dict(tally.reasons),
            }
            for name, tally in self.tallies.items()
        }
