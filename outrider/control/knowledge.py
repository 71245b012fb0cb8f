"""What rounds have taught: times, what was kept, and whether choices paid."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

from outrider.control.book import Book
from outrider.control.costs import Costs
from outrider.control.guard import Guard
from outrider.control.live import LiveDraft, LiveRounds
from outrider.control.plans import Times
from outrider.control.rounds import Round, State, Tally, View
from outrider.drafters.base import Drafter
from outrider.sequence import Sequence
from outrider.types import StageTimes

BUDGET = 0.02
"""Share of the time that samples of drafters not chosen may take."""
SAVED_UP = 30
"""Rounds of which the share may be saved up, beside one round whole."""
SHORT = (32, 512)
"""Prompts whose reading in a round tells what a token takes: neither noise nor read ahead."""


class Knowledge:
    """What is known of a target and some drafters, from rounds that are over.

    Attributes:
        now: number of the round under way.
        plain_at: the last round in which plain decoding was timed; 0 = never.
        budget_s: seconds that samples may take.
        guards: the ledger of each drafter that draws, and of certain drafters together (None).
        due: the first round in which a drafter is to be sampled again.
        tallies: by the names of who drafted.
    """

    def __init__(self, drafters: Sequenced[Drafter], costs: Costs | None) -> None:
        self._names = [drafter.name for drafter in drafters]
        self._live = LiveRounds(costs)
        self._drafts = [LiveDraft(name, costs) for name in self._names]
        self._offered: list[list[float]] = [[] for _ in drafters]
        self._books: dict[tuple[int, str, bool], Book] = {}
        self._num_output = 64.0
        self.now = self.plain_at = 0
        self.budget_s = 0.0
        self.guards: dict[int | None, Guard] = {None: Guard()}
        self.guards |= {arm: Guard() for arm in range(len(drafters))}
        self.due = [0] * len(drafters)
        self.tallies: dict[str, Tally] = {}

    def book(self, arm: int, rule: str, *, trees: bool) -> Book:
        """What was kept of a drafter's tokens."""
        found = self._books.get((arm, rule, trees))
        if found is None:
            found = self._books[arm, rule, trees] = Book()
        return found

    def rate(self, arms: Sequenced[int], rule: str) -> float | None:
        """The share of some drafters' tokens that was kept lately, the best one's."""
        books = (book for (arm, own, _), book in self._books.items() if arm in arms and own == rule)
        return max((book.rate for book in books if book.rate is not None), default=None)

    def offered(self, arm: int) -> Sequenced[float]:
        """P(level i is drafted | so many levels are asked for)."""
        return self._offered[arm]

    def times(self, num_texts: int, context: int, most: int) -> Times | None:
        """What rounds of up to `most` drafted tokens take; None before any was timed."""
        plain_s = self._live.plain_s(num_texts, context)
        curve = self._live.curve(context, num_texts + most + 2)
        if plain_s is None or curve is None:
            return None
        seen = max(self._live.most_rows(context) or 1, num_texts)
        # A clock may be too coarse to see a round at all.
        return Times(num_texts, max(plain_s, 1e-9), curve, 2 * seen + 4)

    def num_plain(self, num_texts: int, context: int) -> int:
        """Plain rounds of about so many texts, with contexts of this class, that were timed."""
        return self._live.plain_count(num_texts, context)

    def level_s(self, arm: int, num_texts: int, times: Times) -> float:
        """Seconds of a drafter's level."""
        return self._drafts[arm].level_s(num_texts, times.plain_s)

    def token_s(self, arm: int, level_s: float, times: Times) -> float:
        """Seconds of each token that a drafter has to read first."""
        target_s = self._live.prompt_token_s or times.curve[1] / 16
        return self._drafts[arm].prompt_token_s(target_s * min(1.0, level_s / times.plain_s))

    def left(self, text: Sequence) -> float:
        """Tokens that a text is likely still to have made, at least a few."""
        usual = max(16.0, self._num_output - text.num_output)
        return max(1.0, min(text.remaining, usual))

    def compare(self, text: Sequence, state: State, part: float) -> None:
        """Scores offers that were not taken by what came instead: full information for nothing."""
        for arm, offer in list(state.pending.items()):
            came = text.tokens[offer.start : offer.start + len(offer.tokens)]
            same = 0
            for ours, theirs in zip(offer.tokens, came, strict=False):
                if ours != theirs:
                    break
                same += 1
            if same < len(came) or len(came) == len(offer.tokens):
                book = self.book(arm, text.rule, trees=False)
                book.saw(text.key, offer.cell, same, len(offer.tokens), part=part)
                del state.pending[arm]

    def read_ahead(self, arm: int, tokens: int, seconds: float) -> None:
        """A drafter has read so many tokens of a text, in no round."""
        self._drafts[arm].saw_prompt(tokens, seconds)

    def drafted(self, done: Round, seconds: float) -> None:
        """A drafter that draws was at work for so long."""
        arm, times = done.plan.arm, done.view.times
        num = sum(who == arm for who in done.served)
        if arm is None or times is None or not num or not done.levels:
            return
        live = self._drafts[arm]
        # What the last round left unread goes with the first level; of a little more nothing tells.
        if done.unread > num * SHORT[0]:
            beside = done.levels * live.level_s(num, times.plain_s)
            live.saw_prompt(done.unread, seconds - beside)
        elif done.unread <= num * (done.plan.depth + 2):
            live.saw(num, done.levels, seconds)

    def over(self, done: Round, times: StageTimes) -> None:
        """A round is over."""
        view = done.view
        target_s = times.score_s + times.verify_s + times.commit_s
        took_s = target_s + times.draft_s
        self._count(done, took_s)
        self._keep(done)
        self.budget_s = min(self.budget_s + BUDGET * took_s, (SAVED_UP * BUDGET + 1) * took_s)
        num, rows = len(view.texts), sum(done.offered)
        if not view.clean:
            self._read(view, times)
            return
        plain_s = self._live.plain_s(num, view.context)
        self._live.saw(num, num + rows, view.context, target_s)
        if rows == 0:
            self.plain_at = self.now
        elif plain_s is not None and not done.choice.sample:
            per_text = (num + sum(done.kept.values())) / num
            self.guards[done.plan.arm].saw(
                self.now, plain_s * per_text, took_s, max(done.plan.expected_s, plain_s)
            )

    def _keep(self, done: Round) -> None:
        """What was kept of whose tokens."""
        view, sample = done.view, done.choice.sample
        for b, text in enumerate(view.texts):
            arm, asked, offered = done.served[b], done.asked[b], done.offered[b]
            if arm is None:
                continue
            kept = done.kept.get(text.key, 0)
            book = self.book(arm, view.rule, trees=view.trees is not None)
            if arm != done.plan.arm:
                book.saw(text.key, done.cells[b], kept, offered, part=view.part)
                continue
            levels = min(asked, offered)
            self._offer(arm, asked, levels)
            part = 1.0 if sample else view.part
            book.saw(text.key, done.cells[b], kept, levels, asked, part=part)
            if sample and levels and kept == levels:
                # Another one at once: it may pay again.
                self.due[arm] = self.now

    def _offer(self, arm: int, asked: int, levels: int) -> None:
        shares = self._offered[arm]
        shares.extend([1.0] * (asked - len(shares)))
        for i in range(asked):
            shares[i] += 0.1 * ((levels > i) - shares[i])

    def _read(self, view: View, times: StageTimes) -> None:
        """What a token of a prompt takes."""
        fresh = zip(view.texts, view.states, strict=True)
        tokens = sum(text.num_prompt for text, state in fresh if state.rounds == 1)
        if SHORT[0] <= tokens <= SHORT[1]:
            seconds, known = times.score_s / tokens, self._live.prompt_token_s
            self._live.prompt_token_s = seconds if known is None else 0.7 * known + 0.3 * seconds

    def _count(self, done: Round, took_s: float) -> None:
        names = {self._names[arm] for arm in done.served if arm is not None}
        tally = self.tallies.setdefault("+".join(sorted(names)) or "none", Tally())
        tally.rounds += 1
        tally.levels += max(done.offered, default=0)
        tally.tokens += len(done.view.texts) + sum(done.kept.values())
        tally.seconds += took_s
        tally.reasons[done.choice.why] = tally.reasons.get(done.choice.why, 0) + 1

    def close(self, text: Sequence) -> None:
        """A text is over, or begins anew."""
        if text.finished:
            self._num_output += 0.1 * (text.num_output - self._num_output)
        for book in self._books.values():
            book.close(text.key)
