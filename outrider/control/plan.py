"""The planner: which drafter, how deep, how wide, at which batch, and whether at all.

Each drafter guesses once behind every token of the user's own prompts (see `observe`), a few rounds
of each kind are timed, and from the two every combination's speed is foretold; the best are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.config import check_whole, counted
from outrider.control.costs import Costs
from outrider.control.fit import costs_of
from outrider.control.guesses import Guesses
from outrider.control.policies import Fixed
from outrider.control.record import Asked, depths_to_time, observed, timed
from outrider.control.replay import replay
from outrider.control.replayed import Replayed
from outrider.control.runs import Arm, Run, Spread, bootstrapped, compared, whole
from outrider.control.trace import TracedText
from outrider.control.trees import TreeCosts, best_static_tree, node_budget
from outrider.decoding import RULES, theory
from outrider.engine import Requests
from outrider.errors import InvalidConfig
from outrider.tree import MAX_NODES, TreeBudget

DRAWS = 4
"""Outcomes that are averaged over, where what is kept has a law."""
MOST = 32
"""Nodes of trees that are looked at."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to decode.

    Attributes:
        drafter: who guesses; `none` is plain decoding.
        rule: what verifies.
        batch: texts at a time.
        depth: levels drafted at most.
        width, nodes: of trees grown to a budget; None for chains.
        shape: the one shape of all trees; None where they have none.
    """

    drafter: str
    rule: str
    batch: int
    depth: int = 0
    width: int | None = None
    nodes: int | None = None
    shape: tuple[int, ...] | None = None

    @property
    def trees(self) -> TreeBudget | None:
        """How large its trees may be; None for chains."""
        if self.shape is not None:
            return TreeBudget.of_shape(self.shape)
        if self.width is None or self.nodes is None:
            return None
        return TreeBudget(self.width, self.nodes)

    def __str__(self) -> str:
        if self.depth == 0:
            return "none"
        levels = counted(self.depth, "level")
        if self.shape is not None:
            return f"{self.drafter}, {levels}, a shape of {counted(len(self.shape), 'node')}"
        if self.nodes is not None:
            return f"{self.drafter}, {levels}, {counted(self.nodes, 'node')}"
        return f"{self.drafter}, k = {self.depth}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a candidate promises on these prompts.

    Attributes:
        tokens_per_s: of all texts, prompts included.
        speedup: over plain decoding at the same batch.
        tokens_per_round: the target's own included.
        stages: seconds of a round at the middle of a text: draft, score, verify.
    """

    candidate: Candidate
    tokens_per_s: Spread
    speedup: Spread
    tokens_per_round: float
    stages: tuple[float, float, float]

    @property
    def plain_tokens_per_s(self) -> float:
        """Of plain decoding as it was timed beside this drafter, which `speedup` is over."""
        return self.tokens_per_s.mean / self.speedup.mean


@dataclass(frozen=True, slots=True)
class Verified:
    """A candidate that was run, in turn with plain decoding."""

    prediction: Prediction
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: Spread

    @property
    def error(self) -> float:
        """How far the predicted rate is from the measured one, as a share of it."""
        return self.prediction.tokens_per_s.mean / self.tokens_per_s - 1

    @property
    def holds(self) -> bool:
        """Whether the predicted speed-up is within 10 percent or inside the measured interval."""
        told, found = self.prediction.speedup.mean, self.speedup
        return abs(told / found.mean - 1) <= 0.10 or found.low <= told <= found.high


@dataclass(frozen=True, slots=True)
class BreakEven:
    """At which acceptance a drafter that guesses in every round would begin to pay.

    Attributes:
        acceptance: of every position, conditional; None where none would do.
        found: what was found, of the first position.
    """

    drafter: str
    batch: int
    acceptance: float | None
    found: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything foretold and run, the best first within each batch."""

    predictions: tuple[Prediction, ...]
    verified: tuple[Verified, ...]
    break_even: tuple[BreakEven, ...]
    acceptance: dict[str, tuple[float, ...]]
    """Of each drafter the chance that its first 1, 2, ... guesses are kept, behind any token."""

    def best(self, batch: int) -> Prediction:
        """What to run at a batch: the best that was run, plain decoding where nothing pays.

        Something pays if its speed-up as it was run, or as it was foretold where nothing was run,
        is above 1 with its whole interval.
        """
        plain = next(one for one in self.of(batch) if one.candidate.depth == 0)
        run = [one for one in self.verified if one.prediction.candidate.batch == batch]
        known = [(one.speedup, one.prediction) for one in run] or [
            (one.speedup, one) for one in self.of(batch) if one.candidate.depth
        ]
        paying = [pair for pair in known if pair[0].low > 1]
        return max(paying, key=lambda pair: pair[0].mean)[1] if paying else plain

    def of(self, batch: int) -> list[Prediction]:
        """The predictions for a batch."""
        return [one for one in self.predictions if one.candidate.batch == batch]


@dataclass(frozen=True, slots=True)
class Search:
    """What is looked at.

    Attributes:
        drafters: names that requests of the engine may ask for.
        depth: levels at most.
        widths: of trees; none looks at chains alone.
        batches: texts at a time.
        rules: None chooses by the law that is asked for.
        verify: how many of the best of each batch are run.
    """

    drafters: tuple[str, ...]
    depth: int = 8
    widths: tuple[int, ...] = (3,)
    batches: tuple[int, ...] = (1,)
    rules: tuple[str | None, ...] = (None,)
    verify: int = 3

    def __post_init__(self) -> None:
        if not self.drafters or "none" in self.drafters:
            raise InvalidConfig(
                f"drafters={','.join(self.drafters)!r}: one at least is due, and plain decoding is "
                "looked at anyway"
            )
        check_whole("depth", self.depth, 1)
        check_whole("verify", self.verify, 0)
        for name in ("widths", "batches"):
            for value in getattr(self, name):
                check_whole(name, value, 2 if name == "widths" else 1)


Note = Callable[[str], None]
"""Told what is done now."""


def plan(requests: Requests, asked: Asked, search: Search, note: Note = lambda _: None) -> Plan:
    """Foretells every combination on some prompts, and runs the best.

    Args:
        requests: of an engine that has all the drafters.
        asked: the prompts and the law; drafter, depth, rule and batch are the search's.
        search: what is looked at.
        note: told what is done now.

    Raises:
        InvalidConfig: no prompt, or nothing to look at; and whatever the drafters raise.
    """
    if not asked.prompts:
        raise InvalidConfig("no prompt to plan for; give one at least")
    before = requests.engine.trees
    try:
        return _Planner(requests, asked, search, note).plan()
    finally:
        requests.engine.trees = before


class _Planner:
    """One search under way."""

    def __init__(self, requests: Requests, asked: Asked, search: Search, note: Note) -> None:
        self._requests, self._asked, self._search, self._note = requests, asked, search, note
        self._steps_done = 0
        self._texts: dict[tuple[str, str | None, int], list[TracedText]] = {}
        self._timed: dict[tuple[str, str | None, int], tuple[list[TracedText], ...]] = {}

    def plan(self) -> Plan:
        search = self._search
        for drafter in search.drafters:
            for rule in search.rules:
                for width in self._widths(drafter, rule):
                    self._observe(drafter, rule, width)
                for batch in search.batches:
                    self._time(drafter, rule, batch)
        predictions: list[Prediction] = []
        verified: list[Verified] = []
        for batch in search.batches:
            own = self._predicted(batch)
            predictions += own
            verified += self._run([one for one in own if one.candidate.depth][: search.verify])
        return Plan(
            tuple(predictions),
            tuple(verified),
            tuple(self._break_even()),
            {drafter: self._acceptance(drafter) for drafter in search.drafters},
        )

    def _begin(self, step: str) -> None:
        """Tells which of how many steps begins now."""
        search = self._search
        kinds = [(drafter, rule) for drafter in search.drafters for rule in search.rules]
        observed = sum(len(self._widths(*kind)) for kind in kinds)
        steps = observed + len(search.batches) * (len(kinds) + (search.verify > 0))
        self._steps_done += 1
        self._note(f"{self._steps_done} of {steps}: {step}")

    def _widths(self, drafter: str, rule: str | None) -> tuple[int, ...]:
        """1 for chains; trees where drafter and rule have them."""
        certain = self._requests.engine.choice.of(drafter).certain
        able = rule is None or RULES[rule].trees
        chains = rule is None or rule not in ("recursive", "hybrid", "traversal", "kseq", "gbv")
        trees = (
            ()
            if certain or not able or not self._requests.engine.target.scores_trees
            else (self._search.widths)
        )
        return (*((1,) if chains else ()), *trees)

    def _with(self, drafter: str, rule: str | None, depth: int, batch: int | None) -> Asked:
        return replace(self._asked, drafter=drafter, rule=rule, depth=depth, batch=batch)

    def _observe(self, drafter: str, rule: str | None, width: int) -> None:
        self._begin(f"{drafter}, guesses behind every token" + (f", width {width}" * (width > 1)))
        self._requests.engine.trees = None if width == 1 else TreeBudget(width, MAX_NODES)
        asked = self._with(drafter, rule, self._search.depth, None)
        self._texts[drafter, rule, width] = observed(self._requests, asked)

    def _time(self, drafter: str, rule: str | None, batch: int) -> None:
        """A few rounds of every depth, and of trees of some sizes."""
        self._begin(f"{drafter}, what rounds cost, {batch} at a time")
        depth, engine = self._search.depth, self._requests.engine
        prompts = (list(self._asked.prompts) * batch)[: max(batch, 2)]
        asked = replace(self._with(drafter, rule, depth, batch), prompts=prompts)
        there, back = list[TracedText](), list[TracedText]()
        for width in self._widths(drafter, rule):
            kinds = [(None, depths_to_time(depth))]
            if width > 1:
                few = (0, (depth + 1) // 2, depth)
                kinds = [(TreeBudget(width, nodes), few) for nodes in (4, 12, MOST)]
            for engine.trees, depths in kinds:
                ways = timed(self._requests, asked, depths)
                there += ways[0]
                back += ways[1]
        self._timed[drafter, rule, batch] = there, back

    def _costs(self, batch: int, key: tuple[str, str | None]) -> tuple[Costs, Costs, Costs]:
        """Of all timed rounds, of those timed on the way there and on the way back."""
        there, back = self._timed[*key, batch]
        return costs_of((*there, *back)), costs_of(there), costs_of(back)

    def _predicted(self, batch: int) -> list[Prediction]:
        """All candidates at a batch, the best first."""
        found: list[Prediction] = []
        plain: Replayed | None = None
        for (drafter, rule, width), own in self._texts.items():
            texts = whole(own, batch)
            costs = self._costs(batch, (drafter, rule))
            base = _averaged(texts, Fixed("none"), costs[0], batch)
            if plain is None:
                plain = base[0]
                candidate = Candidate("none", texts[0].settings.rule, batch)
                found.append(self._prediction(candidate, (base, base), costs, texts))
            for candidate in self._candidates(drafter, width, texts, costs[0], batch):
                policy = Fixed(str(candidate), candidate.depth, candidate.nodes, candidate.shape)
                ways = _averaged(texts, policy, costs[0], batch)
                found.append(self._prediction(candidate, (ways, base), costs, texts))
        return sorted(found, key=lambda one: -one.speedup.mean)

    def _candidates(
        self, drafter: str, width: int, texts: list[TracedText], costs: Costs, batch: int
    ) -> list[Candidate]:
        rule = texts[0].settings.rule
        depths = range(1, self._search.depth + 1)
        if width == 1:
            return [Candidate(drafter, rule, batch, depth) for depth in depths]
        tree_costs = _tree_costs(costs, drafter, batch)
        found: list[Candidate] = []
        for depth in depths:
            nodes = node_budget(_values(texts, depth), tree_costs, depth)
            # With no more nodes than levels it is a chain, or a tree of fewer levels.
            if nodes > depth:
                found.append(Candidate(drafter, rule, batch, depth, width, nodes))
        rates = _rank_rates(texts, width)
        best = best_static_tree(rates, tree_costs, max_nodes=MOST, max_levels=self._search.depth)
        if max(map(best.parents.count, best.parents), default=0) > 1:
            shape = best.parents
            found.append(Candidate(drafter, rule, batch, best.levels, shape=shape))
        return found

    def _prediction(
        self,
        candidate: Candidate,
        ways: tuple[list[Replayed], list[Replayed]],
        costs: tuple[Costs, Costs, Costs],
        texts: list[TracedText],
    ) -> Prediction:
        own, plain = (_per_batch(one, candidate.batch) for one in ways)
        rate, gain = bootstrapped(own, plain)
        apart = _apart(candidate, costs, ways[0][0])
        rounds = sum(one.rounds for one in ways[0]) / len(ways[0])
        middle = texts[0].settings.prompt_tokens + len(texts[0].tokens) // 2
        return Prediction(
            candidate,
            _widened(rate, apart),
            _widened(gain, apart) if candidate.depth else gain,
            ways[0][0].tokens / rounds,
            _stages(candidate, costs[0], ways[0][0], middle),
        )

    def _run(self, best: list[Prediction]) -> list[Verified]:
        """Runs some candidates in turn with plain decoding, there and back."""
        if not best:
            return []
        batch = best[0].candidate.batch
        self._begin(f"running the best {len(best)}, {batch} at a time")
        plain = Candidate("none", best[0].candidate.rule, batch)
        arms = [plain, *(one.candidate for one in best)]
        runs = compared(self._requests, [arm_of(one, self._asked) for one in arms])
        return [
            Verified(prediction, rate.mean, runs[0][0].mean, gain)
            for prediction, (rate, gain) in zip(best, runs[1:], strict=True)
        ]

    def _break_even(self) -> list[BreakEven]:
        found: list[BreakEven] = []
        for drafter in self._search.drafters:
            if self._requests.engine.choice.of(drafter).certain:
                # A look-up has nothing to offer in most rounds, and they cost it next to nothing.
                continue
            for batch in self._search.batches:
                costs = self._costs(batch, (drafter, self._search.rules[0]))[0]
                needed = _needed(costs, drafter, batch, self._search.depth)
                found.append(BreakEven(drafter, batch, needed, self._acceptance(drafter)[0]))
        return found

    def _acceptance(self, drafter: str) -> tuple[float, ...]:
        """The chance that the first 1, 2, ... guesses are kept."""
        key = next(one for one in self._texts if one[0] == drafter)
        texts, depth = self._texts[key], self._search.depth
        kept = np.zeros(depth)
        count = 0
        for i, text in enumerate(texts):
            guesses = Guesses(text, i)
            for made in range(max(1, guesses.num_tokens - depth)):
                kept += np.arange(1, depth + 1) <= guesses.draft(made, depth).kept
                count += 1
        return tuple((kept / max(1, count)).tolist())


def arm_of(one: Candidate, asked: Asked) -> Arm:
    """How a candidate is run, on the prompts and under the law that are asked for."""
    drafter = None if one.depth == 0 else one.drafter
    own = replace(asked, depth=one.depth, rule=one.rule, batch=one.batch, drafter=drafter)
    return own, one.trees


def _averaged(
    texts: Sequence[TracedText], policy: Fixed, costs: Costs, batch: int
) -> list[Replayed]:
    """The outcomes that are averaged over; one where there is but one."""
    drawn = texts[0].settings.rule in ("token", "block") and policy.depth > 0
    return [replay(texts, policy, costs, batch=batch, draw=i) for i in range(DRAWS if drawn else 1)]


def _per_batch(ways: Sequence[Replayed], batch: int) -> list[Run]:
    """Tokens and seconds of each batch, which shares its rounds, in the mean over the outcomes."""
    found: list[Run] = []
    texts = ways[0].steps
    prompt_s = ways[0].prompt_s / len(texts)
    for first in range(0, len(texts), batch):
        own = range(first, first + batch)
        seconds = sum(step.seconds for one in ways for i in own for step in one.steps[i])
        tokens = sum(step.kept + 1 for i in own for step in texts[i])
        found.append((tokens, seconds / len(ways) + batch * prompt_s))
    return found


def _widened(spread: Spread, apart: float) -> Spread:
    """The interval of two independent sources of doubt."""
    low = 1 - ((1 - spread.low / spread.mean) ** 2 + apart**2) ** 0.5
    high = 1 + ((spread.high / spread.mean - 1) ** 2 + apart**2) ** 0.5
    return replace(spread, low=spread.mean * max(0.0, low), high=spread.mean * high)


def _apart(candidate: Candidate, costs: tuple[Costs, Costs, Costs], found: Replayed) -> float:
    """How far costs of the way there and back are apart, over plain decoding's, as a share."""
    seconds = [_round_s(candidate, one, found) / one.round_s() for one in costs]
    return abs(seconds[1] - seconds[2]) / (2 * seconds[0])


def _round_s(candidate: Candidate, costs: Costs, found: Replayed) -> float:
    return sum(_stages(candidate, costs, found, 0))


def _stages(
    candidate: Candidate, costs: Costs, found: Replayed, context: int
) -> tuple[float, float, float]:
    """Seconds of a round of all texts: drafting, the target's forward, the rest."""
    drafting = [step for text in found.steps for step in text if step.nodes]
    levels, nodes, size = 0, 0, candidate.batch
    if drafting:
        levels = round(sum(step.levels for step in drafting) / len(drafting))
        nodes = round(size * sum(step.nodes for step in drafting) / len(drafting))
    drafted_s = costs.draft_s(candidate.drafter, levels, nodes) if levels else 0.0
    rest_s = size * costs.verify_text_s + nodes * costs.verify_row_s
    return drafted_s, costs.score_s(size + nodes, size, context), rest_s


def _tree_costs(costs: Costs, drafter: str, batch: int) -> TreeCosts:
    """What a text's tree costs where all texts of a batch have one."""
    draft = costs.drafts[drafter]
    rows = range(MOST + 1)
    verify = [
        costs.score_s(batch * (1 + n), batch)
        + batch * (costs.verify_text_s + n * costs.verify_row_s)
        for n in rows
    ]
    return TreeCosts(
        tuple(verify),
        level=max(0.0, draft.level_s - draft.node_s),
        node=batch * draft.node_s,
        other=draft.round_s,
    )


def _values(texts: Sequence[TracedText], levels: int) -> list[float]:
    """The share of rounds in which the most promising node is kept, the second most, and so on."""
    kept = np.zeros(MOST)
    rounds = 0
    for text in texts:
        guesses = Guesses(text)
        for made in range(max(1, guesses.num_tokens - levels)):
            order = guesses.by_worth(made, levels)
            path = set(guesses.path(made)[:levels])
            rounds += 1
            kept[: len(order)] += [row in path for row in order[:MOST]]
    return (kept / max(1, rounds)).tolist()


def _rank_rates(texts: Sequence[TracedText], width: int) -> list[float]:
    """The share of rounds in which child 0, 1, ... of the text as it stands is kept."""
    kept = np.zeros(width)
    rounds = 0
    for text in texts:
        for one in text.rounds:
            first = [row + 1 for row, parent in enumerate(one.trace.parents) if parent == 0]
            if not first:
                continue
            rounds += 1
            if one.path:
                kept[min(width - 1, first.index(one.path[0]))] += 1
    return (kept / max(1, rounds)).tolist()


def _needed(costs: Costs, drafter: str, batch: int, depth: int) -> float | None:
    """The acceptance of every position at which the best depth costs what plain decoding does."""

    def gain(alpha: float) -> float:
        return max(
            float(theory.expected_tokens_iid(alpha, levels))
            * _batch_s(costs, None, batch, 0)
            / _batch_s(costs, drafter, batch, levels)
            for levels in range(1, depth + 1)
        )

    if gain(1.0) <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 1 else (low, middle)
    return high


def _batch_s(costs: Costs, drafter: str | None, batch: int, levels: int) -> float:
    return costs.round_s(drafter, levels=levels, nodes=levels, texts=batch)
