"""The controller: a drafter that chooses among drafters, round by round, nobody included.

It chooses by what was measured in rounds that are over. Of the round at hand it knows the texts as
they stand and what certain drafters (look-ups) say of them, never a token that was drawn: so every
rule that is exact stays exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.control.book import Book
from outrider.control.chooser import Chooser
from outrider.control.costs import Costs
from outrider.control.guard import Rest
from outrider.control.knowledge import Knowledge
from outrider.control.live import context_class
from outrider.control.rounds import Offer, Round, State, View
from outrider.control.settings import ControlSettings
from outrider.control.sizes import Grown
from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.combined import Parts, SeveralDrafters, named
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence
from outrider.types import StageTimes

if TYPE_CHECKING:
    from jaxtyping import Int64

READ_AHEAD = 512
"""A text of which a drafter has to read more than this is left to the engine for a step, which
reads it in chunks where that is more than one."""
NOTED_AT_REST = 16
"""Rounds left out one after another that are noted together at most: noting each of them would use
the caches that the forward needs, as asking does."""
NOTED_TOGETHER = 16
"""Rounds of one text that are noted together at most where asking pays: what is run again at once
takes less than behind a forward each time. What they have changed of the text's luck counts at
once."""
SEASONED, SEASONED_LEAST = 4, 2
"""Rounds of a text, the one that reads its prompt among them, behind which any is left out; of many
texts at a time, and where rests are long."""


@dataclass(slots=True)
class _Quiet:
    """Rounds left out one after another: whose, by which rest, and the times not noted yet.

    What the first one looked at stays as it is: a round of a small model is as long as looking.
    """

    texts: Sequenced[Sequence]
    rest: Rest
    times: list[StageTimes]


@dataclass(slots=True)
class _Standing:
    """A text of which rounds are chosen for by what stands, as long as asking pays.

    Attributes:
        texts: the list that was asked for.
        view: the round; its offers and how deep it may be are those of the round at hand.
        whole: whether more is to be looked at in the next one.
    """

    texts: Sequenced[Sequence]
    view: View
    whole: bool = False


class Controller(SeveralDrafters):
    """Chooses, for each round of a group of texts, who drafts, how deep, and chains or trees.

    Certain drafters (`ngram`, `suffix`, `recycle`) are asked in each round and compared with what
    came, whether their offer was taken or not; of those that draw the one is asked that promises
    most, and the others once in a while. Where nobody promises more than plain decoding, measured,
    nothing is drafted, and after many such rounds some are left out in which nobody is asked; a
    choice that loses time all the same is left for a while. Where the engine drafts trees they are
    at most as large as its budget.

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
        self.by_clock = True
        self.name = ",".join(drafter.name for drafter in drafters) if name is None else name
        self.settings = settings or ControlSettings()
        self.max_depth = self.settings.max_depth
        self.settings.check_fallback(tuple(drafter.name for drafter in drafters))
        self._clock = clock
        self._known = Knowledge(self.drafters, costs)
        self._chooser = Chooser(self.drafters, self._known, self.settings)
        self._first = self.first_names(self.drafters)
        self._certain = [arm for arm, drafter in enumerate(self.drafters) if drafter.certain]
        self._drawing = [arm for arm, drafter in enumerate(self.drafters) if not drafter.certain]
        self._states: dict[int, State] = {}
        self._reading: dict[int, int] = {}
        self._round: Round | None = None
        # Of about so many texts under one rule: one that is left alone is worth more than many.
        self._rests: dict[tuple[int, str], Rest] = {}
        # Of the round under way: whether nobody is asked, and whether it reads prompts then.
        self._resting = self._reads = False
        # Of texts that are left out, by the number of their list.
        self._quiets: dict[int, _Quiet] = {}
        self._standing: _Standing | None = None
        # Rounds in which somebody was asked, and that are not noted yet.
        self._over: list[tuple[int, Round, StageTimes]] = []
        # Seconds that noting one took the last time.
        self._noting_s = 0.0

    def report(self) -> dict[str, Any]:
        """Of each choice its rounds, how deep and large in the mean, what came of it; for JSON.

        `mean_nodes` are those of a round's largest draft, of a chain its depth; in `tree_rounds`
        of the rounds trees were drafted. Up to 15 rounds of texts at work are not in it yet.
        """
        return {
            name: {
                "rounds": tally.rounds,
                "mean_depth": tally.levels / tally.rounds,
                "mean_nodes": tally.nodes / tally.rounds,
                "tree_rounds": tally.trees,
                "tokens_per_round": tally.tokens / tally.rounds,
                "seconds": tally.seconds,
                "reasons": dict(tally.reasons),
            }
            # The engine's thread may add to both meanwhile.
            for name, tally in list(self._known.tallies.items())
            if tally.rounds
        }

    def never_asked(self) -> tuple[str, ...]:
        """Nobody: who is not asked was weighed, and `report` says why."""
        return ()

    def unread(self, text: Sequence) -> int:
        """What the drafter that is to draw for the text has left to read of it."""
        arm = self._reading.get(text.key)
        return 0 if arm is None else self.drafters[arm].unread(text)

    def read(self, text: Sequence, rows: int) -> None:
        """That drafter reads ahead."""
        arm = self._reading.get(text.key)
        if arm is None:
            return
        started, before = self._clock(), self.drafters[arm].unread(text)
        self.drafters[arm].read(text, rows)
        left = self.drafters[arm].unread(text)
        if left < before:
            self._known.read_ahead(arm, before - left, self._clock() - started)
            self._state(text).read[arm] = len(text.tokens) - left

    def pauses(self, texts: Sequenced[Sequence]) -> bool:
        """In a rest that lasts."""
        kind, on = (len(texts).bit_length(), texts[0].rule), self.settings.fallback == "none"
        rest = self._rests.get(kind)
        if rest is None or not on or not rest.holds(self._known.now + 1):
            return False
        return self._seasoned(texts, rest)

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """What promises most tokens a second, or nothing."""
        self._known.now += 1
        standing = self._standing
        if standing is not None and texts is standing.texts:
            return self._drafted(self._again(standing, depths[0], draws), draws)
        if standing is not None or self._over:
            self._standing = None
            self._note_asked()
        quiet = self._quiets.get(id(texts))
        if quiet is not None and quiet.rest.holds(self._known.now):
            self._resting, self._reads, self._round = True, False, None
            return draws.points([()] * len(texts))
        self._wake()
        kind = len(texts).bit_length(), texts[0].rule
        rest = self._rests.get(kind) or self._rests.setdefault(kind, Rest())
        # A fallback is asked for where nobody pays.
        on = self.settings.fallback == "none"
        holds = on and rest.holds(self._known.now)
        # A round that reads prompts tells of no times, and the next one as much of look-ups.
        self._reads = on and rest.goes_on(self._known.now) and not all(t.num_output for t in texts)
        self._resting = self._reads or (holds and self._seasoned(texts, rest))
        if self._resting:
            self._round = None
            for text in texts if self._reading else ():
                self._reading.pop(text.key, None)
            if not self._reads:
                self._quiets[id(texts)] = _Quiet(texts, rest, [])
            return draws.points([()] * len(texts))
        most, caps = self.settings.max_depth, list(depths)
        if max(caps) > most:
            caps = [min(depth, most) for depth in caps]
        view = self._view(texts, caps, draws)
        choice = self._chooser.choose(view)
        if rest.pays and on and len(texts) == 1 and draws.trees is None:
            state = view.states[0]
            if not state.guards:
                # The next round reads no prompt.
                going_on = view if state.rounds else replace(view, prompt_rows=0)
                whole = not choice.lasts or self._known.plain_due(1, view.context)
                self._standing = _Standing(texts, going_on, whole)
        return self._drafted(Round.of(view, choice), draws)

    def _again(self, standing: _Standing, depth: int, draws: RoundDraws) -> Round:
        """A round of a text whose last one was chosen for, too: by what stands, or anew."""
        view, (state,) = standing.view, standing.view.states
        if state.pending:
            self._known.compare(view.texts[0], state, 1.0)
        view.caps = [min(depth, self.settings.max_depth)]
        view.offers = self._offers(view.texts, view.states, view.caps, draws)
        choice = None if standing.whole else self._chooser.again(view)
        if choice is None:
            choice = self._chooser.choose(view)
            standing.whole = not choice.lasts
        return Round.of(view, choice)

    def _renewed(self, standing: _Standing) -> _Standing | None:
        """What stands behind rounds that were noted; None where it may be better not to ask."""
        view, known = standing.view, self._known
        (text,) = view.texts
        view.context = context_class(len(text.tokens))
        view.times = known.times(1, view.context, self.settings.max_depth)
        if view.times is None or not self._rests[1, view.rule].pays:
            return None
        self._chooser.renew(view, known.now)
        standing.whole = known.plain_due(1, view.context)
        return standing

    def foresee(
        self, text: Sequence, accepted_1: Int64[Tensor, " 1"], token_1: Int64[Tensor, " 1"]
    ) -> None:
        """Tells who drew, behind whose row this round is noted and the next one chosen for.

        Not where that one may be a plain one to be timed: it would wait for the row.
        """
        done, standing = self._round, self._standing
        if standing is None or done is None or not done.choice.lasts:
            return
        arm = done.plan.arm
        if arm is None:
            return
        # The text may become one of a longer class, of which nothing is timed.
        longer = context_class(len(text.tokens) + 1 + done.levels)
        contexts = {standing.view.context, longer}
        if not any(self._known.plain_due(1, context, ahead=1) for context in contexts):
            self.drafters[arm].foresee(text, accepted_1, token_1)

    def commit(self, text: Sequence, accepted: int) -> None:
        """Notes what was kept, and tells all of them where anybody was asked."""
        if self._resting:
            return
        if self._round is not None:
            self._round.kept[text.key] = accepted
        for drafter in self._committed:
            drafter.commit(text, accepted)

    def timed(self, texts: Sequenced[Sequence], times: StageTimes) -> None:
        """Learns from the round."""
        done, self._round = self._round, None
        resting, self._resting = self._resting, False
        if done is not None:
            view = done.view
            for state in view.states:
                state.rounds += 1
            self._over.append((self._known.now, done, times))
            # What was chosen for this round alone, and where it may be better not to ask, at once.
            standing = self._standing
            if standing is None or not done.choice.lasts or len(self._over) >= NOTED_TOGETHER:
                self._standing = None
                self._note_asked()
                if standing is not None:
                    self._standing = self._renewed(standing)
            else:
                self._known.felt(done)
        elif resting and self._reads:
            self._known.rested(texts, [times], plain=False)
            for text in texts:
                # Its prompt is read: the next round is not its first.
                state = self._state(text)
                state.rounds = max(1, state.rounds)
        elif resting and (quiet := self._quiets.get(id(texts))) is not None:
            quiet.times.append(times)
            # Not by the round that asks again: that would be thought to take so long.
            if len(quiet.times) == NOTED_AT_REST or not quiet.rest.holds(self._known.now + 1):
                for one in self._quiets.values():
                    self._note(one)
        if not resting:
            super().timed(texts, times)

    def _note_asked(self) -> None:
        """Learns from rounds in which somebody was asked."""
        known, rounds = self._known, self._over
        if not rounds:
            return
        started, now, self._over = self._clock(), known.now, []
        try:
            for known.now, done, times in rounds:
                found = known.over(done, times)
                if found is not None:
                    saved_s, spent_s = found
                    # What is noted of a round takes time as asking does; of the last one that is
                    # known.
                    noting_s, num = min(self._noting_s, spent_s), len(done.view.texts)
                    rest = self._rests[num.bit_length(), done.view.rule]
                    last = done is rounds[-1][1]
                    rest.saw(known.now, num, saved_s - noting_s, spent_s + noting_s, last=last)
        finally:
            known.now = now
        self._noting_s = (self._clock() - started) / len(rounds)

    def _note(self, quiet: _Quiet) -> None:
        """Notes rounds that were left out."""
        if quiet.times:
            self._known.rested(quiet.texts, quiet.times, plain=True)
            quiet.times = []

    def _wake(self, *, everybody: bool = False) -> None:
        """Notes what was left out of texts whose rest is over, and looks at them anew."""
        for key, quiet in tuple(self._quiets.items()):
            if everybody or not quiet.rest.holds(self._known.now):
                del self._quiets[key]
                self._note(quiet)

    def discard(self, text: Sequence) -> None:
        """The round teaches nothing."""
        self._round = self._standing = None
        super().discard(text)

    def close(self, text: Sequence) -> None:
        """Forgets the text."""
        self._standing = None
        try:
            self._note_asked()
            self._wake(everybody=True)
        finally:
            self._chooser.forget()
            if self._states.pop(text.key, None) is not None:
                self._known.close(text)
            self._reading.pop(text.key, None)
            super().close(text)

    def _state(self, text: Sequence) -> State:
        found = self._states.get(text.key)
        if found is None:
            found = self._states[text.key] = State()
        return found

    def _seasoned(self, texts: Sequenced[Sequence], rest: Rest) -> bool:
        """Whether enough of each text's rounds were looked at to leave some out."""
        least = SEASONED_LEAST if rest.deep else max(SEASONED_LEAST, SEASONED // len(texts))
        states = (self._states.get(text.key) for text in texts)
        return all(state is not None and state.rounds >= least for state in states)

    def _view(self, texts: Sequenced[Sequence], caps: list[int], draws: RoundDraws) -> View:
        """The round as it stands, before anything is drawn."""
        known, prompt_rows = self._states, 0
        states = [known.get(text.key) or self._state(text) for text in texts]
        for text, state in zip(texts, states, strict=True):
            if not state.rounds:
                prompt_rows += text.num_prompt - 1
            if state.pending:
                self._known.compare(text, state, 1 / len(texts))
        length = sum([len(text.tokens) for text in texts])
        context = context_class(length // len(texts))
        width = 1 if draws.trees is None else draws.trees.width
        times = self._known.times(len(texts), context, _most_rows(caps, draws), width)
        # Elsewhere who ends early leaves its place to one that waits.
        uneven = 0.0
        if len(texts) > 1 and times is not None and not draws.followed:
            uneven = self._known.full * times.fixed
        return View(
            texts=tuple(texts),
            states=states,
            caps=caps,
            rule=texts[0].rule,
            context=context,
            trees=draws.trees,
            max_certain=draws.max_certain,
            prompt_rows=prompt_rows,
            times=times,
            offers=self._offers(texts, states, caps, draws),
            uneven=uneven,
            lefts=self._known.left_of(texts) if uneven else (),
        )

    def _offers(
        self,
        texts: Sequenced[Sequence],
        states: Sequenced[State],
        caps: Sequenced[int],
        draws: RoundDraws,
    ) -> list[Offer | None]:
        """Each text's best certain chain, by what the book has of it."""
        best: list[Offer | None] = [None] * len(texts)
        if draws.trees is not None:
            if not draws.max_certain:
                # The rule takes no certain tokens.
                return best
            own, draws.trees = draws.trees, None
            try:
                return self._offers(texts, states, caps, draws)
            finally:
                draws.trees = own
        rule, now = texts[0].rule, self._known.now
        for arm in self._certain:
            chains, parts = self.drafters[arm].chains(texts, caps), None
            if chains is None:
                chains, parts = self._said(arm, texts, caps, draws)
            if not any(chains):
                continue
            book, serves = self._known.book(arm, rule), self._chooser.serves(arm, rule)
            for b, tokens in enumerate(chains):
                if not tokens:
                    continue
                text, state, known = texts[b], states[b], best[b]
                cell, survival = book.offered(text.key, len(tokens))
                own = None if parts is None else parts[b][: len(tokens)]
                offer = Offer(arm, tokens, own, len(text.tokens), survival, cell)
                if arm not in state.pending:
                    state.pending[arm] = offer
                if serves and state.allows(now, None):
                    better = known is None or sum(survival) > sum(known.survival)
                    best[b] = offer if better else known
        return best

    def _said(
        self, arm: int, texts: Sequenced[Sequence], caps: Sequenced[int], draws: RoundDraws
    ) -> tuple[list[list[int]], list[list[int]]]:
        """What a certain drafter says that has no chains to tell, and which part of it does."""
        draft = self.drafters[arm].propose(texts, caps, draws)
        rows = zip(draft.tree.tokens_BN.tolist(), draft.tree.counts_B.tolist(), strict=True)
        return [row[:count] for row, count in rows], draft.parts().tolist()

    def _drafted(self, current: Round, draws: RoundDraws) -> Draft:
        """The draft of the plan: by who draws, by look-ups, or by both."""
        self._round = current
        view, choice = current.view, current.choice
        plan, num = choice.plan, len(view.texts)
        arm = plan.arm
        if plan.depth == 0 or arm is None:
            for text in view.texts if self._reading else ():
                self._reading.pop(text.key, None)
            lengths = plan.lengths if plan.depth else [0] * num
            current.offered = list(lengths)
            return self._taken(current, lengths, draws)
        if num == 1 and plan.trees is None:
            # It was weighed beside what the text is offered, and its ledgers were looked at.
            book, deepest = self._known.book(arm, view.rule), plan.depth
            if choice.stop is not None and view.times is not None and book.confidence.settled:
                # A drafter that tells when to stop may go on as deep as may be.
                deepest = max(deepest, view.times.most - 1)
            depths, lengths = [self._asked(current, arm, 0, deepest, book)], ()
        else:
            depths, lengths = self._shared_out(current, arm)
        draft = self._drawn(current, arm, depths, draws)
        if any(lengths):
            taken = self._taken(current, lengths, draws)
            draft = Parts([draft, taken], [0, 0]).side_by_side([length > 0 for length in lengths])
        current.offered = draft.tree.counts_B.tolist()
        return draft

    def _taken(self, current: Round, lengths: Sequenced[int], draws: RoundDraws) -> Draft:
        """The first tokens of certain drafts."""
        if not any(lengths):
            return draws.points([()] * len(lengths))
        taken: list[tuple[int, Offer, int]] = []
        tokens: list[list[int]] = [[] for _ in lengths]
        view = current.view
        for b, (offer, length) in enumerate(zip(view.offers, lengths, strict=True)):
            if offer is None or not length:
                continue
            taken.append((b, offer, length))
            tokens[b] = offer.tokens[:length]
            current.served[b], current.taken[b], current.asked[b] = offer.arm, True, length
            current.cells[b] = offer.cell
            view.states[b].pending.pop(offer.arm, None)
        draft, arm = draws.points(tokens), taken[0][1].arm
        if all(offer.arm == arm and offer.parts is None for _, offer, _ in taken):
            return named(draft, self._first[arm])
        part_BN = torch.zeros_like(draft.tree.tokens_BN)
        for b, offer, length in taken:
            parts = torch.tensor((offer.parts or [0] * length)[:length])
            part_BN[b, :length] = self._first[offer.arm] + parts
        return replace(draft, part_BN=part_BN)

    def _shared_out(self, current: Round, arm: int) -> tuple[list[int], list[int]]:
        """How deep each text is drawn for; and what is taken of a certain draft worth more."""
        view, plan = current.view, current.plan
        depths, lengths = [0] * len(view.texts), [0] * len(view.texts)
        book, trees, only = self._known.book(arm, view.rule, plan.trees), plan.trees, plan.only
        if only is not None:
            lengths = [0 if b == only else length for b, length in enumerate(plan.lengths)]
        now, of_trees = self._known.now, trees is not None
        for b in range(len(depths)) if only is None else (only,):
            state, offer = view.states[b], view.offers[b]
            if only is None and state.guards and not state.allows(now, arm, trees=of_trees):
                continue
            depth = min(view.caps[b], plan.depth) if state.rounds else 0
            if offer is not None and only is None and depth > 0:
                drawn = book.survival(view.texts[b].key, depth)[:depth]
                if sum(offer.survival[:depth]) >= sum(drawn):
                    lengths[b] = min(depth, len(offer.tokens))
                    continue
            depths[b] = self._asked(current, arm, b, plan.depth, book)
        return depths, lengths

    def _asked(self, current: Round, arm: int, b: int, deepest: int, book: Book) -> int:
        """A drafter is asked for text b, unless it has to read it first; how deep.

        In a text's first round nobody who draws is.
        """
        view = current.view
        text, state, depth = view.texts[b], view.states[b], min(view.caps[b], deepest)
        if depth < 1 or not state.rounds:
            return 0
        key, tokens, reading = text.key, len(text.tokens), self._reading
        if reading.get(key) != arm:
            reading[key] = arm
            if self.drafters[arm].unread(text) > READ_AHEAD:
                # If that is more than a chunk it is read so, between other texts' rounds.
                current.waiting = True
                return 0
        current.asked[b], current.served[b], current.cells[b] = depth, arm, book.cell(key)
        current.unread += tokens - state.read.get(arm, 0)
        state.read[arm] = tokens
        return depth

    def _drawn(self, current: Round, arm: int, depths: list[int], draws: RoundDraws) -> Draft:
        """The chosen drafter's draft."""
        drafter, trees = self.drafters[arm], current.plan.trees
        own, draws.trees = draws.trees, trees
        before, drafter.stop = drafter.stop, current.choice.stop
        try:
            started = self._clock()
            draft = drafter.propose(current.view.texts, depths, draws)
            current.drawn_s = self._clock() - started
        finally:
            draws.trees, drafter.stop = own, before
        current.levels, current.branches = draft.tree.depth, not draft.tree.is_chain
        current.worth_BN = draft.worth_BN
        if trees is not None and draft.worth_BN is not None:
            starts = [len(text.tokens) for text in current.view.texts]
            current.grown = Grown(draft, starts)
        return named(draft, self._first[arm])


def _most_rows(caps: Sequenced[int], draws: RoundDraws) -> int:
    """Rows that may be drafted in all."""
    if draws.trees is None:
        return sum(caps)
    return sum(max(draws.trees.nodes, cap) for cap in caps if cap)
