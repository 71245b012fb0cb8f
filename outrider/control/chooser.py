"""The choice: the plan of most tokens a second, unless it does not pay as measured."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

from outrider.control import plans
from outrider.control.knowledge import SAMPLE_EVERY, Knowledge
from outrider.control.plans import Class, Drawing, Plan, Times
from outrider.control.rounds import Choice, Offer, Stake, View
from outrider.control.settings import ControlSettings
from outrider.control.sizes import rows_of, sizes_of
from outrider.control.standing import Alone, Stands
from outrider.decoding import rule_named
from outrider.drafters.base import Drafter
from outrider.drafters.stop import Stop
from outrider.sequence import Sequence
from outrider.tree import TreeBudget

HYSTERESIS = 1.03
"""Another drafter must promise so much more than the one at work."""
MANY = 0.03
"""Of many texts so much more must be promised than plain decoding makes, of two half of it: by what
some are ahead of the others when drafting ends, nothing was saved."""
LOOK_AGAIN = 4
"""Rounds after which it is looked anew whether a sample can be afforded."""
SAMPLE_DEPTH = 2
WEIGH_AGAIN = 4
"""Rounds after which a drafter that stands idle is weighed anew where nothing has changed."""
NOTHING = Plan(None, 0, 0.0, 0.0)
_CHAINS = (None,)
TIMED = "plain decoding is timed"
UNTIMED = "prompts are read, and nothing is timed yet"
MOST = "it promises most tokens a second"
HELD = "nobody promises clearly more"
PLAIN = "nobody promises more than plain decoding"
SAMPLED = "a sample, to know whether it would pay"
FALLBACK = "nobody else pays, and it is the fallback"


@dataclass(slots=True)
class _Weighed:
    """A drafter's best plan, and what it was found for: these texts, times and chances."""

    plan: Plan | None
    at: int
    heard: int
    times: Times
    texts: Sequenced[Sequence]
    caps: Sequenced[int]
    together: bool

    def holds(self, now: int, heard: int, view: View) -> bool:
        """Whether it may be taken for found anew."""
        return (
            now - self.at < WEIGH_AGAIN
            and self.heard == heard
            and self.times is view.times
            and self.texts == view.texts
            and self._reaches(view.caps)
            and self.together == bool(view.lefts)
        )

    def _reaches(self, caps: Sequenced[int]) -> bool:
        """Whether texts that end soon leave it as it is."""
        depth = 0 if self.plan is None else self.plan.depth
        alike = zip(self.caps, caps, strict=True)
        return all(cap == before or depth <= cap < before for before, cap in alike)


class Chooser:
    """Chooses a plan for each round.

    Args:
        drafters: the alternatives.
        known: what rounds have taught.
        settings: bounds of the choice.

    Attributes:
        at_work: the drafter that was chosen last, None for nobody and for look-ups.
    """

    def __init__(
        self, drafters: Sequenced[Drafter], known: Knowledge, settings: ControlSettings
    ) -> None:
        self._drafters = drafters
        self._known = known
        self._settings = settings
        self._certain = [arm for arm, one in enumerate(drafters) if one.certain]
        self._drawing_arms = [arm for arm, one in enumerate(drafters) if not one.certain]
        self._fallback = next(
            (arm for arm, one in enumerate(drafters) if one.name == settings.fallback), None
        )
        self.at_work: int | None = None
        # Tokens that a drafter reads along with a round's first level.
        self._usual = settings.max_depth + 2
        self._plans: dict[int, _Weighed] = {}
        # Of one text, by its rule and the class of its length; and those of the text at work.
        self._every: dict[tuple[str, int], Alone] = {}
        self._alone = Alone(Times(1, 1.0, ()), known)
        # Until when the luck with a drafter that stands idle was forgotten.
        self._forgot = [0] * len(drafters)

    def choose(self, view: View) -> Choice:
        """The plan, why, and when a chain is to end sooner."""
        choice = self._chosen(view)
        choice.stop = self._stop(view, choice.plan)
        return choice

    def _chosen(self, view: View) -> Choice:
        times = view.times
        # A round that reads prompts, however little of them, times no plain decoding.
        if not view.prompt_rows and self._known.plain_due(len(view.texts), view.context):
            return Choice(NOTHING, TIMED, lasts=False)
        if times is None:
            return Choice(NOTHING, UNTIMED, lasts=False)
        found = self._alternatives(view, times)
        best, why = times.plain, PLAIN
        due = best.rate_tok_s * (1 + MANY * (1 - view.part))
        for one in found:
            counted = one.counted_tok_s(len(view.texts), view.uneven)
            if counted > due:
                best, why, due = one, MOST, counted
        for one in found:
            at_work = one.arm is not None and one.arm == self.at_work != best.arm
            if at_work and due < HYSTERESIS * one.counted_tok_s(len(view.texts), view.uneven):
                best, why = one, HELD
        if why == PLAIN and self._fallback is not None:
            for one in found:
                if one.arm == (None if self._fallback in self._certain else self._fallback):
                    best, why = one, FALLBACK
        self.at_work = best.arm
        sample = self._sample(view, times, found, best, due) if view.clean else None
        if sample is not None:
            return sample
        self._works(best.arm)
        return Choice(best, why)

    def again(self, view: View) -> Choice | None:
        """The choice for one text by plans that stand, or are found now; chains alone.

        None where a sample may be due. A fallback, and what holds for this text only, are not
        looked at.
        """
        text, state, offer = view.texts[0], view.states[0], view.offers[0]
        alone, known, times, at_work = self._alone, self._known, view.times, self.at_work
        assert times is not None and not state.guards
        best, stop, why, due = times.plain, None, PLAIN, 1.0
        held, taken, most = None, None, view.caps[0]
        if offer is not None and alone.certain:
            key = True, offer.arm, offer.cell
            taken = alone.get(key, len(offer.tokens)) or self._taken(offer, view, times)
            if taken.plan is not None and taken.gain > due:
                best, why, due = taken.plan, MOST, taken.gain
        for arm, book in alone.books:
            cell = book.cell(text.key)
            found = alone.get((False, arm, cell), most) or self._drawn(arm, cell, view, times)
            plan, gain = found.plan, found.gain
            if plan is None or (gain <= due and arm != at_work):
                continue
            if len(text.tokens) - state.read.get(arm, 0) > self._usual:
                read = self._behind_reading(plan, view, times)
                plan, gain = read, gain * read.rate_tok_s / plan.rate_tok_s
            if arm == at_work:
                held = plan, found.stop, gain
            if gain > due:
                best, stop, why, due = plan, found.stop, MOST, gain
        if held is not None and held[0] is not best and due < HYSTERESIS * held[2]:
            best, stop, why = held[0], held[1], HELD
        # Who is not let through is sampled, too.
        idle: list[int | None] = [arm for arm in self._drawing_arms if arm != best.arm]
        if taken is not None and taken.plan is not None and taken.plan is not best:
            idle.append(None)
        for kind in idle:
            if known.looks(kind, 1, beside=best.depth > 0):
                return None
        self.at_work = best.arm
        self._works(best.arm)
        return Choice(best, why, None, stop)

    def _works(self, arm: int | None) -> None:
        """It is chosen for this round: of one that draws no luck is forgotten up to here."""
        if arm is not None:
            self._forgot[arm] = self._known.now

    def renew(self, view: View, last: int) -> None:
        """What stands for one text goes by the times of `view`, and by what is let through now.

        `last` is the last round that is over: luck is forgotten up to there.
        """
        assert view.times is not None
        key, known = (view.rule, view.context), self._known
        alone = self._every.get(key)
        if alone is None or not alone.goes_by(view.times):
            alone = self._every[key] = Alone(view.times, known)
        self._alone = alone
        alone.certain, alone.books = self._allowed(None, view), []
        for arm in self._drawing_arms:
            book, idle = known.book(arm, view.rule), last - self._forgot[arm]
            if idle > 0:
                book.cells(view.texts, min(idle, 2 * WEIGH_AGAIN))
                self._forgot[arm] = last
            if self.serves(arm, view.rule) and self._allowed(arm, view):
                alone.books.append((arm, book))

    def forget(self) -> None:
        """Texts have changed: what was found for these is not taken for found."""
        self._plans.clear()

    def serves(self, arm: int, rule: str) -> bool:
        """Whether enough of a drafter's tokens was kept lately; the fallback is not asked."""
        least = self._settings.min_acceptance_rate
        if not least or arm == self._fallback:
            return True
        rate = self._known.rate(arm, rule)
        return rate is None or rate >= least

    def _alternatives(self, view: View, times: Times) -> list[Plan]:
        """The best plan of each kind that is allowed now."""
        found: list[Plan | None] = []
        if len(view.texts) == 1 and view.trees is None and not view.states[0].guards:
            return self._by_itself(view, times)
        if any(view.offers) and self._allowed(None, view):
            chances = [() if offer is None else offer.survival for offer in view.offers]
            found.append(plans.certain(times, chances, view.lefts))
        for arm in self._weighed(view):
            if self.serves(arm, view.rule):
                found.append(self._plan_of(arm, view, times))
        return [one for one in found if one is not None]

    def _by_itself(self, view: View, times: Times) -> list[Plan]:
        """The same for one text and chains: what stands, and what is found now and is to stand."""
        self.renew(view, self._known.now - 1)
        text, state, offer = view.texts[0], view.states[0], view.offers[0]
        alone = self._alone
        found: list[Plan | None] = []
        if offer is not None and alone.certain:
            found.append(self._taken(offer, view, times).now(times))
        # In a text's first round nobody who draws is asked.
        for arm, book in alone.books if view.caps[0] and state.rounds else ():
            plan = self._drawn(arm, book.cell(text.key), view, times).now(times)
            if plan is not None and len(text.tokens) - state.read.get(arm, 0) > self._usual:
                plan = self._behind_reading(plan, view, times)
            found.append(plan)
        return [one for one in found if one is not None]

    def _taken(self, offer: Offer, view: View, times: Times) -> Stands:
        """How much to take of one text's offer."""
        key, most = (True, offer.arm, offer.cell), len(offer.tokens)
        found = self._alone.get(key, most)
        if found is None:
            counts = self._known.book(offer.arm, view.rule).counts(offer.cell)
            plan = plans.certain(times, [offer.survival])
            found = self._alone.put(key, times, most, counts, plan, None)
        return found

    def _drawn(self, arm: int, cell: int, view: View, times: Times) -> Stands:
        """How deep to draft for one text of such a class."""
        key, most = (False, arm, cell), view.caps[0]
        found = self._alone.get(key, most)
        if found is None:
            # As deep as any text may be drafted for: how far this one may is looked at then.
            deepest = self._settings.max_depth
            counts = self._known.book(arm, view.rule).counts(cell)
            plan = plans.drawn(times, self._one(arm, counts.survival(deepest), times))
            stop = None if plan is None else self._stop(view, plan)
            found = self._alone.put(key, times, deepest, counts, plan, stop)
            if found.depth > most:
                found = found.up_to(most)
        return found

    def _one(self, arm: int, survival: Sequenced[float], times: Times) -> Drawing:
        """A drafter of one text's chains that has read it."""
        start_s, level_s = self._known.draft_s(arm, 1, times)
        classes = [Class(survival, self._settings.max_depth, [0])]
        return Drawing(arm, level_s, classes, self._known.offered(arm), start_s=start_s)

    def _behind_reading(self, plan: Plan, view: View, times: Times) -> Plan:
        """The plan, where the drafter has to read the text first; another depth is no better.

        What reading takes is spread over the tokens still to come.
        """
        arm, known = plan.arm, self._known
        assert arm is not None
        _, level_s = known.draft_s(arm, 1, times)
        reading_s = view.unread(arm, 0) / known.left(view.texts[0])
        more_s = reading_s * known.token_s(arm, level_s, times)
        tokens = plan.rate_tok_s * plan.expected_s
        seconds = plan.expected_s + more_s * tokens
        return Plan(arm, plan.depth, tokens / seconds, seconds)

    def _plan_of(self, arm: int, view: View, times: Times) -> Plan | None:
        """A drafter's best plan; of one that stands idle it is not found anew in each round."""
        idle, known = 0, self._plans.get(arm)
        now, heard = self._known.now, self._known.heard[arm]
        if arm != self.at_work:
            if known is not None and known.holds(now, heard, view):
                return known.plan
            # One text's is found anew half as often.
            most = WEIGH_AGAIN if len(view.texts) > 1 else 2 * WEIGH_AGAIN
            idle = 1 if known is None else min(now - known.at, most)
        self._forgot[arm] = now
        plan = self._best_of(arm, view, times, idle)
        if not view.prompt_rows:
            self._plans[arm] = _Weighed(
                plan, now, heard, times, view.texts, view.caps, bool(view.lefts)
            )
        return plan

    def _best_of(self, arm: int, view: View, times: Times, idle: int) -> Plan | None:
        """A drafter's best plan: its chains, or its trees of some size; of equals the smaller.

        It was idle for so many rounds.
        """
        best: Plan | None = None
        for trees in self._sizes(arm, view):
            if self._allowed(arm, view, trees=trees is not None):
                found = plans.drawn(times, self._drawing(arm, view, times, trees, idle))
                if found is not None and (best is None or found.rate_tok_s > best.rate_tok_s):
                    best = found
        return best

    def _sizes(self, arm: int, view: View) -> Sequenced[TreeBudget | None]:
        """How large a drafter's trees may be, None being chains; those of look-ups are at hand."""
        if view.trees is None:
            return _CHAINS
        certain = self._drafters[arm].certain
        sizes = sizes_of(view.trees, ranked=certain or _ranked(view))
        return sizes if certain else (None, *sizes)

    def _weighed(self, view: View) -> list[int]:
        """Drafters that are weighed as a whole: those that draw, and of trees all that can."""
        if view.trees is None or not view.max_certain:
            return self._drawing_arms
        return list(range(len(self._drafters)))

    def _allowed(self, arm: int | None, view: View, *, trees: bool = False) -> bool:
        """Whether the guard lets a choice through; None = look-ups."""
        if self._fallback is not None:
            exempt = self._certain if arm is None else [arm]
            if self._fallback in exempt:
                return True
        return self._known.allows(arm, view, trees=trees)

    def _drawing(
        self, arm: int, view: View, times: Times, trees: TreeBudget | None, idle: int
    ) -> Drawing:
        """A drafter as it stands for the texts that it could draft for.

        It was idle for so many rounds since it was weighed last.
        """
        known, drawing_trees = self._known, trees is not None
        book = known.book(arm, view.rule, trees)
        if not idle and view.trees is not None and book.at < known.now - 1:
            # It is at work, and drafts others than these.
            idle = 1
        start_s, level_s = known.draft_s(arm, len(view.texts), times, trees)
        classes: dict[tuple[int, int], list[int]] = {}
        reading = 0.0
        # Once for each text: what is asked of the view elsewhere is written out.
        cells = book.cells(view.texts, idle)
        every = zip(view.texts, view.states, view.caps, cells, strict=True)
        for b, (text, state, cap, cell) in enumerate(every):
            if not cap or not state.rounds:
                continue
            if state.guards and not state.allows(known.now, arm, trees=drawing_trees):
                continue
            unread = len(text.tokens) - state.read.get(arm, 0)
            if unread > self._usual:
                reading += unread / (view.lefts[b] if view.lefts else known.left(text))
            classes.setdefault((cell, cap), []).append(b)
        most = max(view.caps, default=0)
        return Drawing(
            arm,
            level_s,
            [
                Class(book.counts(cell).survival(most), cap, members)
                for (cell, cap), members in classes.items()
            ],
            known.offered(arm) if trees is None else (),
            None if trees is None else self._rows(arm, view, trees, most),
            reading * known.token_s(arm, level_s, times) if reading else 0.0,
            trees,
            start_s,
            view.lefts,
        )

    def _rows(self, arm: int, view: View, trees: TreeBudget, depth: int) -> Sequenced[int]:
        """Nodes of a tree by its levels."""
        return rows_of(trees, depth, ranked=self._drafters[arm].certain or _ranked(view))

    def _sample(
        self, view: View, times: Times, found: Sequenced[Plan], best: Plan, due: float
    ) -> Choice | None:
        """A trial of who was not chosen, where the budget has what it is expected to lose.

        `due` are the tokens a second that a plan had to be promised to be chosen.
        """
        known = self._known
        for kind in (None, *self._weighed(view)):
            chosen = best.depth > 0 and kind == best.arm
            beside = view.trees is None and best.depth > 0
            looked_at = known.looks(kind, len(view.texts), beside=beside)
            if not looked_at or (chosen and (kind is None or view.trees is None)):
                continue
            taken = next((one for one in found if one.arm is None), None)
            able = list[int]() if kind is None else view.able()
            if not (taken if kind is None else able):
                continue
            known.due[kind] = known.now + LOOK_AGAIN
            if kind is None:
                plan = taken
            elif chosen:
                plan = self._other_size(kind, view, times, best)
            else:
                plan = self._trial(kind, view, times, able, best, taken)
            if plan is None:
                continue
            # What hurries texts ahead saves as little here as where it is chosen.
            rate = plan.counted_tok_s(len(view.texts), view.uneven)
            lost_s = max(0.0, plan.expected_s * (1.0 - rate / due))
            if known.afford(kind, len(view.texts), lost_s):
                stake = Stake(lost_s, due)
                known.due[kind] = known.now + SAMPLE_EVERY
                return Choice(plan, SAMPLED, stake, lasts=False)
        return None

    def _stop(self, view: View, plan: Plan) -> Stop | None:
        """How likely a chain must be kept whole for the drafter to go on: as the next level costs.

        The token that stops the draft stays in it. Chains alone are ended so, of greedy texts, and
        no samples.
        """
        arm = plan.arm
        if arm is None or not plan.depth or view.times is None:
            return None
        if view.rule != "greedy" or plan.only is not None or plan.trees is not None:
            return None
        num, levels = len(view.texts), plan.depth + 1
        if num == 1 and self._drafters[arm].draws_unread:
            # To read each token before the next one takes about as long as to draft it.
            return None
        # In the mean: from one number of rows to the next the times step, and are noise.
        row_s = (view.times.target_s(num * levels) - view.times.plain_s) / levels
        _, level_s = self._known.draft_s(arm, num, view.times)
        gain = plan.rate_tok_s / num * (level_s + row_s)
        return self._known.book(arm, view.rule).confidence.stop(gain)

    def _other_size(self, arm: int, view: View, times: Times, best: Plan) -> Plan | None:
        """Chains or the largest trees of the drafter at work, whichever was not seen for long."""
        for trees in self._extremes(arm, view):
            book = self._known.book(arm, view.rule, trees)
            if trees != best.trees and book.at <= self._known.now - SAMPLE_EVERY:
                return plans.drawn(times, self._drawing(arm, view, times, trees, 0))
        return None

    def _extremes(self, arm: int, view: View) -> list[TreeBudget | None]:
        """A drafter's smallest and largest drafts, first that which was not seen for longest."""
        sizes = self._sizes(arm, view)
        ends = [sizes[0], sizes[-1]] if len(sizes) > 1 else [sizes[0]]
        return sorted(ends, key=lambda trees: self._known.book(arm, view.rule, trees).at)

    def _trial(
        self,
        arm: int,
        view: View,
        times: Times,
        able: Sequenced[int],
        best: Plan,
        taken: Plan | None,
    ) -> Plan:
        """A short draft for one text; the others have what certain drafters offer them."""
        known = self._known
        trees = self._extremes(arm, view)[0]
        start_s, level_s = known.draft_s(arm, 1, times, trees)
        token_s = known.token_s(arm, level_s, times)
        own = best if best.arm is None else taken
        lengths = list(own.lengths) if own is not None and own.lengths else [0] * len(view.texts)
        offered = [
            0.0 if offer is None else sum(offer.survival[:length])
            for offer, length in zip(view.offers, lengths, strict=True)
        ]

        book = known.book(arm, view.rule, trees)
        ending = plans.latest(view.lefts) if view.lefts else []

        def gained(b: int) -> float:
            """What it is expected to gain a text."""
            depth = min(SAMPLE_DEPTH, view.caps[b])
            return sum(book.survival(view.texts[b].key, depth)[:depth])

        def lost_s(b: int) -> float:
            """What is read for a text, what it was offered, and what it would hurry ahead."""
            ahead = offered[b]
            if ending and b not in ending:
                ahead += view.uneven * gained(b)
            return view.unread(arm, b) * token_s + ahead / best.rate_tok_s

        b = min(able, key=lost_s)
        depth = min(SAMPLE_DEPTH, view.caps[b])
        gains = list(offered)
        gains[b] = gained(b)
        tokens = len(view.texts) + sum(gains)
        # A round like this one does not come again: who ends last is as it was.
        last = sum(gains[b] for b in ending) / max(1, len(ending))
        lengths[b] = depth if trees is None else self._rows(arm, view, trees, depth)[depth]
        reading_s = view.unread(arm, b) * token_s
        drafting_s = start_s + depth * level_s
        expected_s = times.target_s(sum(lengths)) + drafting_s + reading_s
        rate = tokens / expected_s
        return Plan(arm, depth, rate, expected_s, tuple(lengths), b, trees, last, ending=ending)


def _ranked(view: View) -> bool:
    """Whether the rule's trees are grown best first."""
    return rule_named(view.rule, lossless=False).drawing.ranked
