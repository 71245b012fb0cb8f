"""The certificate: every rule's exact law over many pairs, the optimum, and the broken variants."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from itertools import count, islice
from typing import Any

from outrider.certify.enumerate import (
    RIGHT,
    TooManyLeaves,
    distance,
    first_kept,
    output_law,
    target_law,
    tree_law,
)
from outrider.certify.growth import Drafting
from outrider.certify.journal import Journal
from outrider.certify.linear import optimum
from outrider.certify.pairs import Pair, tree_pair
from outrider.certify.reference_trees import DraftedTree
from outrider.certify.replay import Replay, every_path
from outrider.certify.schemes import Certifiable, certifiables
from outrider.certify.wrong import Wrong, wrong_chains
from outrider.certify.wrong_trees import wrong_trees

Progress = Callable[[str], None]
CASE_LEAVES = 2_000
"""Random cases above this are left out; the bound asked of any case is MAX_LEAVES."""
TREE_LEAVES = 8
"""Leaves that follow from one drafted tree, about: what it takes for a case to be tried."""
ROUNDING = 1e-7
"""What the linear program's optimum may be off by."""


@dataclass(frozen=True, slots=True)
class Certified:
    """Exact enumeration of one rule with one drafter and tree.

    Attributes:
        cases, leaves, largest: pairs, paths over all of them, paths of the largest.
        max_tv: largest total variation of the written texts from the law they must have.
        max_other: largest chance of a text that is not plain decoding's, for rules exact per seed.
        expected_accepted: drafted tokens kept per round on the toy pair.
        optimum: the most any lossless rule keeps there.
        as_in_theory: whether the kept tokens of every pair's first round are those of the closed
            form; None where there is none.
    """

    rule: str
    drafter: str
    tree: str
    cases: int
    leaves: int
    largest: int
    max_tv: Fraction
    max_other: Fraction
    expected_accepted: Fraction
    optimum: float
    as_in_theory: bool | None

    @property
    def exact(self) -> bool:
        """Whether the law is the right one, and nothing else speaks against it."""
        return (
            self.cases > 0
            and self.max_tv == 0
            and self.max_other == 0
            and self.as_in_theory is not False
            and self.expected_accepted <= self.optimum + ROUNDING
        )

    @property
    def optimal(self) -> bool:
        """Whether no rule keeps more of the toy's drafts."""
        return self.expected_accepted >= self.optimum - ROUNDING

    def as_dict(self) -> dict[str, Any]:
        """The row of `outrider certify rules --json`."""
        return {
            "rule": self.rule,
            "drafter": self.drafter,
            "tree": self.tree,
            "cases": self.cases,
            "max_tv": str(self.max_tv),
            "expected_accepted": float(self.expected_accepted),
            "optimum": round(self.optimum, 9),
            "exact": self.exact,
        }


@dataclass(frozen=True, slots=True)
class Caught:
    """A broken variant, its exact total variation (or count of differing texts) and the verdict."""

    name: str
    measure: str
    found: bool

    def as_dict(self) -> dict[str, Any]:
        """The row of `outrider certify rules --json`."""
        return {"name": self.name, "tv": self.measure, "found": self.found}


@dataclass(slots=True)
class Certificate:
    """Everything the enumeration found."""

    rules: list[Certified] = field(default_factory=list[Certified])
    wrong: list[Caught] = field(default_factory=list[Caught])
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every rule is exact and every broken variant was caught."""
        return all(rule.exact for rule in self.rules) and all(caught.found for caught in self.wrong)

    def as_dict(self) -> dict[str, Any]:
        """What `outrider certify rules --json` prints."""
        return {
            "rules": [rule.as_dict() for rule in self.rules],
            "wrong": [caught.as_dict() for caught in self.wrong],
            "ok": self.ok,
        }


def certify(thing: Certifiable, num_pairs: int, max_leaves: int = CASE_LEAVES) -> Certified:
    """Whole multi-round runs on random pairs, and one round on the toy, in exact fractions."""
    cases = leaves = largest = 0
    max_tv, max_other, as_in_theory = Fraction(0), Fraction(0), True
    for pair in _pairs(thing):
        if cases == num_pairs:
            break
        p, q, depth = pair.target, pair.draft, thing.depth
        if not _fits(thing, pair, max_leaves // TREE_LEAVES):
            continue
        try:
            law = output_law(thing.scheme, p, q, depth, pair.length, max_leaves, thing.plain)
        except TooManyLeaves:
            continue
        cases, leaves, largest = cases + 1, leaves + law.leaves, max(largest, law.leaves)
        max_tv = max(max_tv, distance(law.probs, target_law(thing.goal(pair), pair.length)))
        max_other = max(max_other, law.other)
        if thing.theory is not None:
            first = min(depth, pair.length - 1)
            as_in_theory &= law.first_kept == thing.theory(p, q, first)
    toy = thing.toy
    return Certified(
        thing.rule,
        thing.drafter,
        thing.tree,
        cases,
        leaves,
        largest,
        max_tv,
        max_other,
        first_kept(thing.scheme, toy.target, toy.draft, thing.depth),
        optimum(tree_law(thing.grow, toy.draft, thing.depth), thing.goal(toy), thing.depth),
        None if thing.theory is None else as_in_theory,
    )


def _fits(thing: Certifiable, pair: Pair, max_trees: int) -> bool:
    """Whether few enough trees are drafted in the first round: a quick look before a long."""
    noise = RIGHT.noise

    def grow(replay: Replay) -> DraftedTree:
        return thing.grow(Drafting((), pair.draft, thing.depth, noise(replay, 0)))

    return sum(1 for _ in islice(every_path(grow), max_trees + 1)) <= max_trees


def _pairs(thing: Certifiable) -> Iterator[Pair]:
    """The toy, then random pairs."""
    yield replace(thing.toy, length=thing.length)
    yield from (tree_pair(seed, thing.size, thing.depth, thing.length) for seed in count())


def catch(wrong: Wrong) -> Caught:
    """Enumerates a broken variant; it is found when its law is not the target's."""
    pair = wrong.pair
    law = output_law(wrong.scheme, pair.target, pair.draft, pair.depth, pair.length)
    tv = distance(law.probs, target_law(pair.target, pair.length))
    return Caught(wrong.name, str(tv), tv > 0)


def wrong_schemes() -> list[Wrong]:
    """The whole battery, chains first."""
    return [*wrong_chains(), *wrong_trees()]


def certify_rules(
    *,
    num_pairs: int = 12,
    processes: int = 2,
    progress: Progress = lambda _: None,
    journal: Journal[Any] | None = None,
) -> Certificate:
    """Certifies every rule and runs the battery of broken ones.

    Args:
        num_pairs: tabular pairs per rule, drafter and tree.
        processes: worker processes; 1 = this one alone.
        progress: called with one line whenever a part is done.
        journal: where parts are kept, and found that an earlier run did.
    """
    started = time.perf_counter()
    jobs = [
        *(("rule", i) for i in range(len(_things()))),
        *(("wrong", i) for i in range(len(_wrong()))),
    ]
    # The largest trees take longest: begun first, they do not keep the rest waiting at the end.
    order = sorted(range(len(jobs)), key=lambda job: -_size(jobs[job]))
    found: dict[int, Certified | Caught] = {}
    if journal is not None:
        found = {job: journal[str(job)] for job in order if str(job) in journal}
        order = [job for job in order if job not in found]
    work = partial(_work, num_pairs=num_pairs)
    if processes == 1:
        results: Iterable[Certified | Caught] = map(work, (jobs[job] for job in order))
        _collect(order, results, found, progress, journal)
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            every = pool.imap(work, (jobs[job] for job in order))
            _collect(order, every, found, progress, journal)
    done = [found[job] for job in range(len(jobs))]
    return Certificate(
        [one for one in done if isinstance(one, Certified)],
        [one for one in done if isinstance(one, Caught)],
        time.perf_counter() - started,
    )


def _collect(
    order: list[int],
    results: Iterable[Certified | Caught],
    found: dict[int, Certified | Caught],
    progress: Progress,
    journal: Journal[Any] | None,
) -> None:
    whole = len(order) + len(found)
    for job, result in zip(order, results, strict=True):
        found[job] = result
        if journal is not None:
            journal.keep(str(job), result)
        tell = (
            f"{result.rule}, {result.drafter}, {result.tree}: TV {result.max_tv} on {result.cases}"
            if isinstance(result, Certified)
            else f"{result.name}: TV {result.measure}"
        )
        progress(f"[{len(found)}/{whole}] {tell}")


# Schemes are made of functions, which do not travel between processes: their numbers do.
@cache
def _things() -> list[Certifiable]:
    return certifiables()


@cache
def _wrong() -> list[Wrong]:
    return wrong_schemes()


def _size(job: tuple[str, int]) -> int:
    kind, number = job
    return _things()[number].size if kind == "rule" else 0


def _work(job: tuple[str, int], num_pairs: int) -> Certified | Caught:
    kind, number = job
    return certify(_things()[number], num_pairs) if kind == "rule" else catch(_wrong()[number])
