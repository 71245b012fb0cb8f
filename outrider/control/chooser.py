"""The choice: the plan of most tokens a second, unless it does not pay as measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequenced

from outrider.control import plans
from outrider.control.knowledge import Knowledge
from outrider.control.plans import Class, Drawing, Plan, Times
from outrider.control.rounds import Choice, View
from outrider.control.settings import ControlSettings
from outrider.drafters.base import Drafter

HYSTERESIS = 1.03
"""Another drafter must promise so much more than the one at work."""
PLAIN_AT_FIRST = 2
"""Plain rounds that are timed before anything else; of another class of rounds one is."""
PLAIN_EVERY = 256
"""Rounds with drafts after which a plain one is timed again."""
SAMPLE_EVERY = 12
"""Rounds between two samples of a drafter; none where the last one was kept whole."""
SAMPLE_DEPTH = 2

NOTHING = Plan(None, 0, 0.0, 0.0)
TIMED = "plain decoding is timed"
MOST = "it promises most tokens a second"
HELD = "nobody promises clearly more"
PLAIN = "nobody promises more than plain decoding"
SAMPLED = "a sample, to know whether it would pay"
FALLBACK = "nobody else pays, and it is the fallback"


class Chooser:
    """Chooses a plan for each round.

    Args:
        drafters: the alternatives.
        known: what rounds have taught.
        settings: bounds of the choice.
    """

    def __init__(
        self, drafters: Sequenced[Drafter], known: Knowledge, settings: ControlSettings
    ) -> None:
        self._drafters = drafters
        self._known = known
        self._settings = settings
        self._certain = [arm for arm, one in enumerate(drafters) if one.certain]
        self._fallback = next(
            (arm for arm, one in enumerate(drafters) if one.name == settings.fallback), None
        )
        self._at_work: int | None = None

    def choose(self, view: View) -> Choice:
        """The plan, and why."""
        times = view.times
        if times is None or (view.clean and self._to_be_timed(view)):
            return Choice(NOTHING, TIMED)
        found = self._alternatives(view, times)
        best, why = plans.plain(times), PLAIN
        for one in found:
            if one.rate_tok_s > best.rate_tok_s:
                best, why = one, MOST
        for one in found:
            at_work = one.arm is not None and one.arm == self._at_work != best.arm
            if at_work and best.rate_tok_s < HYSTERESIS * one.rate_tok_s:
                best, why = one, HELD
        if why == PLAIN and self._fallback is not None:
            for one in found:
                if one.arm == (None if self._fallback in self._certain else self._fallback):
                    best, why = one, FALLBACK
        self._at_work = best.arm
        if view.clean and best.arm is None:
            sample = self._sample(view, times)
            if sample is not None:
                return sample
        return Choice(best, why)

    def _to_be_timed(self, view: View) -> bool:
        """Whether plain decoding of rounds like this one was timed too seldom, or too long ago."""
        known = self._known
        least = 1 if known.plain_at else PLAIN_AT_FIRST
        few = known.num_plain(len(view.texts), view.context) < least
        return few or known.now - known.plain_at >= PLAIN_EVERY

    def _alternatives(self, view: View, times: Times) -> list[Plan]:
        """The best plan of each kind that is allowed now."""
        found: list[Plan | None] = []
        if any(view.offers) and self._allowed(None, view.rule):
            chances = [() if offer is None else offer.survival for offer in view.offers]
            found.append(plans.certain(times, chances))
        for arm in self._weighed(view):
            if self._allowed(arm, view.rule):
                found.append(plans.drawn(times, self._drawing(arm, view, times)))
        return [one for one in found if one is not None]

    def _weighed(self, view: View) -> list[int]:
        """Drafters that are weighed as a whole: those that draw, and of trees all that can."""
        trees = view.trees is not None and view.max_certain > 0
        return [arm for arm, one in enumerate(self._drafters) if trees or not one.certain]

    def _allowed(self, arm: int | None, rule: str) -> bool:
        """Whether the guard and the least acceptance rate let a choice through; None = look-ups."""
        if self._fallback is not None and self._fallback in (
            self._certain if arm is None else [arm]
        ):
            return True
        known, least = self._known, self._settings.min_acceptance_rate
        if not known.guards[arm].allows(known.now):
            return False
        rate = known.rate(self._certain if arm is None else [arm], rule) if least else None
        return rate is None or rate >= least

    def _drawing(self, arm: int, view: View, times: Times) -> Drawing:
        """A drafter as it stands for the texts that it could draft for."""
        known = self._known
        book = known.book(arm, view.rule, trees=view.trees is not None)
        level_s = known.level_s(arm, len(view.texts), times)
        token_s = known.token_s(arm, level_s, times)
        classes: Counter[tuple[int, int]] = Counter()
        reading_s = 0.0
        for b, text in enumerate(view.texts):
            if not view.can_draw(b):
                continue
            if arm != self._at_work:
                book.drift(text.key)
            unread = view.unread(arm, b)
            if unread > self._settings.max_depth + 2:
                reading_s += unread * token_s / known.left(text)
            classes[book.cell(text.key), view.caps[b]] += 1
        most = max(view.caps, default=0)
        return Drawing(
            arm,
            level_s,
            [
                Class(book.counts(cell).survival(most), cap, num)
                for (cell, cap), num in classes.items()
            ],
            known.offered(arm),
            self._tree_rows(arm, view, most),
            reading_s,
        )

    def _tree_rows(self, arm: int, view: View, most: int) -> list[int] | None:
        """Nodes of a tree by its levels; None for chains."""
        if view.trees is None:
            return None
        nodes = view.max_certain if self._drafters[arm].certain else view.trees.nodes
        return [min(nodes, view.trees.width * level) for level in range(most + 1)]

    def _sample(self, view: View, times: Times) -> Choice | None:
        """A short draft for one text by a drafter not chosen, where the budget has it."""
        known = self._known
        able = [b for b in range(len(view.texts)) if view.can_draw(b)]
        due = [arm for arm in self._weighed(view) if known.due[arm] <= known.now]
        if not able or not due:
            return None
        arm = min(due, key=lambda one: known.due[one])
        b = min(able, key=lambda one: view.unread(arm, one))
        level_s = known.level_s(arm, 1, times)
        reading_s = view.unread(arm, b) * known.token_s(arm, level_s, times)
        depth = min(SAMPLE_DEPTH, view.caps[b])
        cost_s = depth * level_s + reading_s + times.target_s(depth) - times.plain_s
        if cost_s > known.budget_s:
            return None
        known.budget_s -= cost_s
        known.due[arm] = known.now + SAMPLE_EVERY
        lengths = tuple(depth if one == b else 0 for one in range(len(view.texts)))
        expected_s = times.plain_s + cost_s
        plan = Plan(arm, depth, len(view.texts) / expected_s, expected_s, lengths)
        return Choice(plan, SAMPLED, sample=True)
