"""What rounds have taught: times, what was kept, and whether choices paid."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from statistics import fmean, median_low

from outrider.control.book import Book
from outrider.control.costs import Costs
from outrider.control.guard import SLOWEST, Guard, Pace, half_of_many, scatter_of
from outrider.control.live import LiveDraft, LiveRounds, context_class
from outrider.control.plans import Times, latest
from outrider.control.rounds import FEW, Round, State, Tally, View
from outrider.control.sizes import Grown, sizes_of
from outrider.decoding import rule_named
from outrider.drafters.base import Drafter
from outrider.sequence import Sequence
from outrider.tree import TreeBudget
from outrider.types import StageTimes

BUDGET = 0.02
"""Share of the time that samples of drafters not chosen may take; of many texts half of it: one is
drafted for, and all wait."""
SAVED_UP = 30
"""Rounds of which the share may be saved up, beside one round whole; or what the sample costs."""
SAMPLE_EVERY = 12
"""Rounds between two samples of a drafter; none where the last one was kept whole. Beside another
one that is chosen one text's needs none so long behind a draft of its own that was chosen."""
PLAIN_AT_FIRST = 2
"""Plain rounds that are timed before anything else; of another kind of rounds one is."""
PLAIN_AGAIN = (8, 256)
"""Rounds after which a plain one is timed again, at first and, doubled each time, at last."""
REACH = 4
"""Rows that are looked at, over the most that were ever timed."""
SCORED = 4
"""Tokens of a certain draft that is not taken which are compared with what came."""
WAITING = "who promises most has to read the text first"
RESTING = "nobody has paid for long, and nobody is asked"
SHORT = (FEW, 512)
"""Prompts whose reading in a round tells what a token takes: neither noise nor read ahead."""


class Knowledge:
    """What is known of a target and some drafters, from rounds that are over.

    Attributes:
        now: number of the round under way.
        full: share of texts that ended with as many tokens as they might have, lately: of such it
            is known who ends last.
        budgets: seconds that samples may lose, of each drafter of which one was ever thought of,
            and of certain drafters together (None).
        guards: a ledger of each of these, drafting trees or not, with about so many texts under one
            rule.
        due: the first round in which it is looked whether to sample.
        heard: of each drafter, drafts of which it was seen what was kept.
        sampled: of each drafter, samples of what it draws.
        tallies: by the names of who drafted.
    """

    def __init__(self, drafters: Sequenced[Drafter], costs: Costs | None) -> None:
        self._names = [drafter.name for drafter in drafters]
        self._live = LiveRounds(costs)
        self._drafts = [LiveDraft(name, costs) for name in self._names]
        self._tree_drafts = [
            LiveDraft(name, costs, chains)
            for name, chains in zip(self._names, self._drafts, strict=True)
        ]
        self._offered: list[list[float]] = [[] for _ in drafters]
        self._books: dict[tuple[int, str, TreeBudget | None], Book] = {}
        self._times: dict[tuple[int, int], tuple[int, int, Times]] = {}
        self._num_output = 64.0
        self.full = 0.5
        self._timed = False
        self.now = 0
        kinds: list[int | None] = list(range(len(drafters)))
        if any(drafter.certain for drafter in drafters):
            kinds.append(None)
        self.budgets: dict[int | None, float] = {}
        self._wanted: dict[int | None, float] = {}
        # Until anybody is thought of.
        self._unspent = 0.0
        self.guards: dict[tuple[int | None, bool, int, str], Guard] = {}
        self._paces: dict[tuple[int | None, bool, int, str], Pace] = {}
        # What a sample was to lose with about so many texts, while they are under way.
        self._prices: dict[tuple[int | None, int], float] = {}
        self._asking: dict[int, Pace] = {}
        self.due: dict[int | None, int] = dict.fromkeys(kinds, 0)
        self.heard = [0] * len(self._names)
        self.sampled = [0] * len(self._names)
        # The last round for which each drafter's chains were chosen.
        self._served = [-SAMPLE_EVERY] * len(self._names)
        self.tallies: dict[str, Tally] = {}
        self._together: dict[frozenset[int | None], Tally] = {}

    def book(self, arm: int, rule: str, trees: TreeBudget | None = None) -> Book:
        """What was kept of a drafter's chains, or of its trees of one size."""
        found = self._books.get((arm, rule, trees))
        if found is None:
            like = None if trees is None else self._smaller(arm, rule, trees)
            found = self._books[arm, rule, trees] = Book(like)
        return found

    def _smaller(self, arm: int, rule: str, trees: TreeBudget) -> Book:
        """The book of the drafter's next smaller trees, or of its chains."""
        own = trees.nodes, trees.width
        smaller = [
            (of.nodes, of.width, of)
            for who, law, of in self._books
            if of is not None and (who, law) == (arm, rule) and (of.nodes, of.width) < own
        ]
        return self.book(arm, rule, max(smaller, key=lambda one: one[:2])[2] if smaller else None)

    def rate(self, arm: int, rule: str) -> float | None:
        """The share of a drafter's tokens that was kept lately."""
        books = (book for (one, own, _), book in self._books.items() if one == arm and own == rule)
        return max((book.rate for book in books if book.rate is not None), default=None)

    def allows(self, arm: int | None, view: View, *, trees: bool = False) -> bool:
        """Whether the ledger of a choice in rounds like this one lets it through."""
        found = self.guards.get((arm, trees, len(view.texts).bit_length(), view.rule))
        return found is None or found.allows(self.now)

    def looks(self, kind: int | None, num_texts: int, *, beside: bool) -> bool:
        """Whether it is to be looked whether a sample of who was not chosen can be afforded.

        `beside`: another one is, and chains alone are drafted. One that was chosen lately for one
        text tells as much as a sample then; where nobody is, it may pay by now.
        """
        if self.due.get(kind, 0) > self.now:
            return False
        if kind is None or not beside or num_texts > 1:
            return not self.too_dear(kind, num_texts)
        seen = self.now - self._served[kind] < SAMPLE_EVERY
        return not seen and not self.too_dear(kind, num_texts)

    def too_dear(self, kind: int | None, num_texts: int) -> bool:
        """Whether a sample, for these texts, was to lose more than twice what the budget has."""
        price_s = self._prices.get((kind, num_texts.bit_length()), 0.0)
        return self.budgets.get(kind, 0.0) < price_s / 2

    def afford(self, kind: int | None, num_texts: int, lost_s: float) -> bool:
        """Takes what a sample may lose from the budget; where that is too little, it is saved."""
        self._wanted[kind] = self._prices[kind, num_texts.bit_length()] = lost_s
        if kind not in self.budgets:
            self.budgets[kind], self._unspent = self._unspent, 0.0
        if lost_s > self.budgets[kind]:
            return False
        self.budgets[kind] -= lost_s
        return True

    def plain_due(self, num_texts: int, context: int, ahead: int = 0) -> bool:
        """Whether plain decoding of rounds like these was timed too seldom, or too long ago.

        `ahead` asks for so many rounds behind this one.
        """
        count, at = self._live.plain_seen(num_texts, context)
        if count < (1 if self._timed else PLAIN_AT_FIRST):
            return True
        self._timed = True
        first, last = PLAIN_AGAIN
        return self.now + ahead - at >= min(last, first << min(count - 1, 16))

    def offered(self, arm: int) -> Sequenced[float]:
        """P(token i of a chain is drafted | so many are asked for)."""
        return self._offered[arm]

    def times(self, num_texts: int, context: int, most: int, width: int = 1) -> Times | None:
        """What rounds of up to `most` drafted tokens take; None before any was timed.

        `width` nodes of a text's draft are weighed whatever is known of so many rows.
        """
        of, reach, found = self._times.get((num_texts, context), (-1, 0, None))
        if of == self._live.version and reach >= most * width:
            return found
        seen = max(self._live.most_rows(num_texts, context), num_texts)
        rows = min(num_texts + most, max(REACH * seen, num_texts * (1 + width))) + 2
        # Drawn to the last row first: what a plain round takes is read off it, too.
        curve = self._live.curve(num_texts, context, rows)
        plain_s = self._live.plain_s(num_texts, context)
        if plain_s is None or curve is None:
            return None
        # A clock may be too coarse to see a round at all.
        fixed = self._live.fixed(num_texts, context)
        found = Times(num_texts, max(plain_s, 1e-9), curve, 2 * seen + 4, fixed)
        self._times[num_texts, context] = self._live.version, most * width, found
        return found

    def draft_s(
        self, arm: int, num_texts: int, times: Times, trees: TreeBudget | None = None
    ) -> tuple[float, float]:
        """Seconds of a drafter before its first level, and of each: of chains, or of trees."""
        if trees is None:
            return self._drafts[arm].seconds(num_texts, times.plain_s, self.now)
        rows = num_texts * trees.width
        return self._tree_drafts[arm].seconds(rows, times.plain_s, self.now)

    def token_s(self, arm: int, level_s: float, times: Times) -> float:
        """Seconds of each token that a drafter has to read first."""
        target_s = self._live.prompt_token_s or times.curve[1] / 16
        return self._drafts[arm].prompt_token_s(target_s * min(1.0, level_s / times.plain_s))

    def left(self, text: Sequence) -> float:
        """Tokens that a text is likely still to have made, at least a few."""
        return self.left_of((text,))[0]

    def left_of(self, texts: Sequenced[Sequence]) -> list[float]:
        """The same of some texts."""
        usual = self._num_output
        lefts: list[float] = []
        for text in texts:
            left = text.remaining
            if left > 16:
                left = min(left, max(16.0, usual - text.num_output))
            lefts.append(left if left > 1 else 1.0)
        return lefts

    def compare(self, text: Sequence, state: State, part: float) -> None:
        """Scores offers that were not taken by what came instead: full information for nothing."""
        for arm, offer in tuple(state.pending.items()):
            most, same = min(SCORED, len(offer.tokens)), 0
            came = text.tokens[offer.start : offer.start + most]
            for ours, theirs in zip(offer.tokens, came, strict=False):
                if ours != theirs:
                    break
                same += 1
            if same < len(came) or len(came) == most:
                self.heard[arm] += 1
                book = self.book(arm, text.rule)
                book.saw(offer.cell, same, most, part=part)
                book.felt(text.key, same, most)
                del state.pending[arm]

    def read_ahead(self, arm: int, tokens: int, seconds: float) -> None:
        """A drafter has read so many tokens of a text, in no round."""
        self._drafts[arm].saw_prompt(tokens, seconds, self.now)

    def _drafted(self, done: Round) -> None:
        """A drafter that draws was at work."""
        plan, times, seconds = done.plan, done.view.times, done.drawn_s
        arm, own = plan.arm, zip(done.served, done.taken, strict=True)
        num = sum([served == arm and not taken for served, taken in own])
        if arm is None or times is None or not num or not done.levels:
            return
        trees, live = plan.trees, self._drafts[arm]
        # What the last round left unread goes with the first level; of a little more nothing tells.
        if done.unread > num * SHORT[0]:
            start_s, level_s = self.draft_s(arm, num, times, trees)
            beside = start_s + done.levels * level_s
            live.saw_prompt(done.unread, seconds - beside, self.now)
        elif done.unread <= num * (plan.depth + 2):
            if trees is not None:
                num, live = num * trees.width, self._tree_drafts[arm]
            live.saw(num, done.levels, seconds, self.now)

    def rested(
        self, texts: Sequenced[Sequence], rounds: Sequenced[StageTimes], *, plain: bool
    ) -> None:
        """Rounds of these texts in which nobody was asked; `plain`: and no prompt was read.

        Their low median times plain decoding as it is where nobody is asked.
        """
        num, seconds = len(texts), list[float]()
        tally = self.tallies.get("none") or self.tallies.setdefault("none", Tally())
        tally.rounds += len(rounds)
        tally.tokens += num * len(rounds)
        tally.reasons[RESTING] = tally.reasons.get(RESTING, 0) + len(rounds)
        for times in rounds:
            target_s = times.score_s + times.verify_s + times.commit_s
            seconds.append(target_s)
            took_s = target_s + times.draft_s
            tally.seconds += took_s
            if plain:
                self._earn(took_s, num)
        if plain:
            context = context_class(sum([len(text.tokens) for text in texts]) // num)
            self._live.saw(num, num, context, median_low(seconds), self.now, plain=True)

    def over(self, done: Round, times: StageTimes) -> tuple[float, float] | None:
        """A round is over; seconds that asking in it saved, and that the round took.

        None where the round does not tell: of a sample, of one that read prompts, and where plain
        decoding was not timed.
        """
        view, choice = done.view, done.choice
        plan = choice.plan
        num, rows = len(view.texts), sum(done.offered)
        made = num + sum(done.kept.values())
        draft_s, target_s = times.draft_s, times.score_s + times.verify_s + times.commit_s
        self._count(done, made, target_s + draft_s)
        drafted = rows > 0 or plan.arm is not None
        if drafted:
            if plan.arm is not None:
                self._drafted(done)
            if not done.felt:
                self.felt(done)
            self._keep(done)
        # What the round was chosen by.
        plain_s = None if view.times is None else view.times.plain_s
        clean = view.clean
        if clean:
            scored = num + rows + view.prompt_rows
            plain = scored == num
            self._live.saw(num, scored, view.context, target_s, self.now, plain=plain)
        else:
            self._read(view, times, plain_s)
            target_s -= view.prompt_rows * (self._live.prompt_token_s or 0.0)
        if plain_s is None:
            return None
        took_s = (target_s if clean else max(target_s, plain_s)) + draft_s
        self._earn(took_s, num)
        # In rounds of plain decoding.
        worth = made / num
        if plan.ending and rows:
            worth += view.uneven * (_nearer(done) - worth)
        stake = choice.stake
        if stake is not None:
            if not done.waiting:
                spent_s = min(took_s, SLOWEST * plan.expected_s)
                lost_s = max(0.0, spent_s - num * worth / stake.rate_tok_s)
                # It gives back what it did not lose.
                self.budgets[plan.arm] += stake.lost_s - lost_s
            return None
        if drafted:
            found = self._settle(done, worth, plain_s, took_s)
            return found if clean else None
        if not clean:
            return None
        asking_s = draft_s
        if not view.prompt_rows:
            # The forward behind it had to load what asking used the caches for. That is not told
            # apart from what a neighbour on the machine takes, and counts for as much at most.
            pace = self._asking.setdefault(num.bit_length(), Pace())
            beside_s = pace.usual_s(took_s, plain_s) - plain_s - asking_s
            asking_s += min(max(0.0, beside_s), asking_s)
        # One stall is no more than a round.
        asking_s = min(asking_s, plain_s)
        return -asking_s, plain_s + asking_s

    def _earn(self, took_s: float, num: int) -> None:
        """What samples may lose grows by a share of the time, here of a round of so many texts."""
        earned_s, budgets = half_of_many(BUDGET, num) * took_s, self.budgets
        most = SAVED_UP * earned_s + took_s
        if not budgets:
            self._unspent = min(self._unspent + earned_s, most)
            return
        earned_s /= len(budgets)
        for kind, saved_s in budgets.items():
            saved_s += earned_s
            if saved_s > most:
                saved_s = min(saved_s, max(most, self._wanted.get(kind, 0.0)))
            budgets[kind] = saved_s

    def _settle(
        self, done: Round, worth: float, plain_s: float, took_s: float
    ) -> tuple[float, float]:
        """Into the ledgers: of all texts of the round, and of each that was drafted for.

        It is worth so many plain rounds. Seconds that were saved, and that the round took.
        """
        view, plan = done.view, done.plan
        num, expected_s = len(view.texts), max(plan.expected_s, plain_s, 1e-9)
        key = (plan.arm, plan.trees is not None, num.bit_length(), view.rule)
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace()
            self.guards[key] = Guard()
        took_s = pace.usual_s(took_s, expected_s)
        promised = max(0.0, plan.rate_tok_s * plan.expected_s / num - 1.0)
        scatter = scatter_of(promised, plan.depth, len(plan.ending) or num)
        self.guards[key].saw(self.now, worth - took_s / plain_s, scatter)
        found = plain_s * worth - took_s, took_s
        if num == 1:
            return found
        rows = sum(done.offered)
        if not rows:
            return found
        row = max(0.0, took_s / plain_s - 1.0) * num / rows
        scatter = scatter_of(promised, plan.depth)
        drawn = plan.arm, plan.trees is not None
        for b, offered in enumerate(done.offered):
            if done.served[b] is None or not offered:
                continue
            own, guards = (None, False) if done.taken[b] else drawn, view.states[b].guards
            guard = guards.get(own)
            if guard is None:
                guard = guards[own] = Guard()
            guard.saw(self.now, done.kept.get(view.texts[b].key, 0) - row * offered, scatter)
        return found

    def felt(self, done: Round) -> None:
        """What was kept changes the luck of texts, whenever the rest of the round is noted."""
        view, choice = done.view, done.choice
        plan, done.felt = choice.plan, True
        for b, arm in enumerate(done.served):
            if arm is not None:
                key, offered, trees = view.texts[b].key, done.offered[b], plan.trees
                if done.taken[b]:
                    trees = None
                elif offered:
                    offered = done.drawn(b)
                self.book(arm, view.rule, trees).felt(key, done.kept.get(key, 0), offered)
                if offered and choice.stake is None and plan.trees is None:
                    self._served[arm] = self.now

    def _keep(self, done: Round) -> None:
        """What was kept of whose tokens."""
        view, plan, part = done.view, done.plan, done.view.part
        trees, sample = plan.trees, plan.only is not None
        worths = None if trees is not None or done.worth_BN is None else done.worth_BN.tolist()
        for b, arm in enumerate(done.served):
            if arm is None:
                continue
            kept, asked, offered = (
                done.kept.get(view.texts[b].key, 0),
                done.asked[b],
                done.offered[b],
            )
            self.heard[arm] += 1
            if done.taken[b]:
                self.book(arm, view.rule).saw(done.cells[b], kept, offered, part=part)
                continue
            book = self.book(arm, view.rule, trees)
            book.at = self.now
            if not offered:
                # A text it cannot draft for says nothing of others.
                continue
            levels = done.drawn(b)
            if trees is None:
                if sample:
                    self.sampled[arm] += 1
                self._offer(arm, asked, levels)
                if worths is not None:
                    book.confidence.saw(worths[b][:offered], kept)
            if done.grown is not None:
                self._keep_smaller(done, done.grown, b, 1.0 if sample else part)
            book.saw(done.cells[b], kept, levels, asked, part=1.0 if sample else part)
            if sample and kept == levels:
                # Another one at once: it may pay again.
                self.due[arm] = self.now

    def _keep_smaller(self, done: Round, grown: Grown, b: int, part: float) -> None:
        """What smaller trees of the drafter would have kept, and chains where that is sure."""
        view, (arm, own) = done.view, (done.plan.arm, done.plan.trees)
        assert arm is not None and own is not None and view.trees is not None
        text, asked = view.texts[b], min(done.asked[b], done.levels)
        places, firsts = grown.kept(b, text.tokens, done.kept.get(text.key, 0))
        would: list[tuple[TreeBudget | None, int]] = [
            (trees, sum(place < trees.nodes for place in places))
            for trees in sizes_of(view.trees, ranked=True)
            if trees.nodes < own.nodes
        ]
        if rule_named(view.rule, lossless=False).seeded:
            would.append((None, firsts))
        for trees, kept in would:
            book = self.book(arm, view.rule, trees)
            book.at = self.now
            book.saw(book.cell(text.key), kept, asked, done.asked[b], part=part)
            book.felt(text.key, kept, asked)

    def _offer(self, arm: int, asked: int, levels: int) -> None:
        shares = self._offered[arm]
        if len(shares) < asked:
            shares.extend([1.0] * (asked - len(shares)))
        shares[:levels] = [share + 0.1 * (1.0 - share) for share in shares[:levels]]
        shares[levels:asked] = [share - 0.1 * share for share in shares[levels:asked]]

    def _read(self, view: View, times: StageTimes, plain_s: float | None) -> None:
        """What a token of a prompt takes."""
        if view.prompt_rows <= SHORT[1]:
            beside = 0.0 if plain_s is None else plain_s
            seconds = max(0.0, times.score_s - beside) / view.prompt_rows
            known = self._live.prompt_token_s
            self._live.prompt_token_s = seconds if known is None else 0.7 * known + 0.3 * seconds

    def _count(self, done: Round, made: int, took_s: float) -> None:
        arms = frozenset(done.served)
        tally = self._together.get(arms)
        if tally is None:
            name = " and ".join(sorted(self._names[arm] for arm in arms if arm is not None))
            tally = self._together[arms] = self.tallies.setdefault(name or "none", Tally())
        most, trees = max(done.offered, default=0), done.branches
        tally.rounds += 1
        tally.trees += trees
        tally.levels += done.levels if trees else most
        tally.nodes += most
        tally.tokens += made
        tally.seconds += took_s
        why = WAITING if done.waiting and arms == {None} else done.choice.why
        tally.reasons[why] = tally.reasons.get(why, 0) + 1

    def close(self, text: Sequence) -> None:
        """A text is over, or begins anew."""
        self._prices.clear()
        if text.finished:
            self._num_output += 0.1 * (text.num_output - self._num_output)
            self.full += 0.1 * ((text.remaining < 1) - self.full)
        for book in self._books.values():
            book.close(text.key)


def _nearer(done: Round) -> float:
    """By how many tokens a round brought the end of texts nearer that end together.

    As the plan promised it, of those that may end last by it; and no more than those made in the
    mean that would end last without it.
    """
    view, plan, left = done.view, done.plan, max(done.view.lefts)
    made = [1 + done.kept.get(text.key, 0) for text in view.texts]
    nearer = fmean([made[b] * left / view.lefts[b] for b in plan.ending])
    return min(nearer - plan.lag, fmean([made[b] for b in latest(view.lefts)]))
