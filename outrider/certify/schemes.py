"""What is certified: every rule with every way of drafting it is exact for, on small trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from outrider.certify import reference
from outrider.certify.enumerate import (
    Plain,
    Scheme,
    Speculation,
    TreeScheme,
    plain_greedy,
    plain_seeded,
)
from outrider.certify.growth import (
    STYLES,
    Grow,
    Shape,
    best_first,
    decided_first,
    paths,
    promised,
    proxy,
    raced,
    realised,
    reranked,
    static,
)
from outrider.certify.pairs import Pair, fixed
from outrider.certify.reference_gbv import gbv
from outrider.certify.reference_trees import (
    TreeRule,
    coupled,
    enough,
    greedy,
    kseq,
    match,
    recursive,
    traversal,
)
from outrider.certify.surrogates import SURROGATES, Surrogate, towards, trees_towards
from outrider.decoding import theory
from outrider.decoding.theory import LawRow, Model, Number

TREES: dict[str, Shape] = {
    "chain 1": (0,),
    "chain 2": (0, 1),
    "chain 3": (0, 1, 2),
    "2": (0, 0),
    "3": (0, 0, 0),
    "2 x 1": (0, 0, 1, 2),
    "2, one grown": (0, 0, 1),
    "2 x 2": (0, 0, 1, 1, 2, 2),
    "3, two grown": (0, 0, 0, 1, 1, 2),
    "7 nodes": (0, 0, 1, 1, 2, 3, 4),
}
LARGE = 6
Goal = Callable[[Pair], Model]
Theory = Callable[[Model, Model, int], Number]


def _target(pair: Pair) -> Model:
    return pair.target


@dataclass(frozen=True, slots=True)
class Certifiable:
    """A rule, a drafter and a tree that together must write with one exact law.

    Attributes:
        grow: the drafter's trees, for the optimum over all rules.
        depth, length: levels drafted, and tokens written by as many rounds as it takes.
        size: how large cases are: nodes of the tree, more where noise makes many choices.
        goal: the law to be written with.
        plain: plain decoding with the same noise, where the text must be the very same.
        theory: expected tokens kept in closed form, where there is one.
        toy: the pair that expected tokens and optimum are told for.
    """

    rule: str
    drafter: str
    tree: str
    scheme: Speculation
    grow: Grow
    depth: int
    length: int
    size: int
    toy: Pair
    goal: Goal = _target
    plain: Plain | None = None
    theory: Theory | None = None


def certifiables() -> list[Certifiable]:
    """All of them."""
    return [*_chains(), *_recursive(), *_leaf_to_root(), *_multi_draft(), *_seeded(), *_lossy()]


def _sun(depth: int) -> Pair:
    return fixed("sun", [1, 2], [2, 1], depth=depth, length=depth + 1)


def _toy(depth: int) -> Pair:
    return fixed("toy", [3, 2, 1], [2, 1, 3], depth=depth, length=depth + 1)


def _chains() -> list[Certifiable]:
    """Sampled chains; a drafter may stop behind an unlikely token as long as it keeps it."""
    rules = [
        ("match", theory.match_expected_accepted),
        ("token", theory.token_expected_accepted),
        ("block", theory.block_expected_accepted),
    ]
    found: list[Certifiable] = []
    for name, closed in rules:
        rule = reference.IN_LAW[name]
        for depth in (2, 3):
            found.append(_chain(name, "sampled", Scheme(name, rule), depth, 4, theory=closed))
        stopping = Scheme(name, rule, stopped=_unlikely)
        found.append(_chain(name, "stops behind an unlikely token", stopping, 3, 4))
    return found


def _chain(
    rule: str,
    drafter: str,
    scheme: Scheme,
    depth: int,
    length: int,
    *,
    goal: Goal = _target,
    theory: Theory | None = None,
    toy: Pair | None = None,
) -> Certifiable:
    grow = static(TREES[f"chain {depth}"], STYLES["with replacement"], scheme.stopped)
    return Certifiable(
        rule,
        drafter,
        f"chain {depth}",
        scheme,
        grow,
        depth,
        length,
        depth if length == depth + 1 and rule != "match" else LARGE,
        toy or _sun(depth),
        goal,
        theory=theory,
    )


def _unlikely(law: LawRow, token: int) -> bool:
    return 2 * law[token] < 1


def _tree(
    rule: str,
    drafter: str,
    tree: str,
    decide: TreeRule,
    grow: Grow | None = None,
    *,
    plain: Plain | None = None,
    goal: Goal = _target,
    theory: Theory | None = None,
    size: int | None = None,
) -> Certifiable:
    shape = TREES[tree]
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    depth = max(depths)
    grow = grow or static(shape, STYLES[drafter])
    # One level fits twice into few leaves; deeper trees meet later rounds with fewer levels.
    length = depth + 2 if depth == 1 and goal is _target else depth + 1
    toy = _sun(depth) if tree.startswith("chain") else _toy(depth)
    scheme = TreeScheme(f"{rule}, {drafter}, {tree}", grow, decide)
    return Certifiable(
        rule,
        drafter,
        tree,
        scheme,
        grow,
        depth,
        length,
        size or len(shape),
        toy,
        goal,
        plain,
        theory,
    )


def _recursive() -> list[Certifiable]:
    """Root to leaf: any law per child, and trees that look at values where that is lawful."""
    bush, hybrid = TREES["2 x 2"], STYLES["tail + top K-1"]
    without = partial(theory.recursive_acceptance_without, num_drafts=3)
    tail = partial(theory.hybrid_acceptance, num_drafts=3)
    laws = [
        ("without replacement", "2 x 1"),
        ("without replacement", "7 nodes"),
        ("with replacement", "2 x 1"),
        ("top K", "2 x 2"),
        ("look-up + without", "2 x 1"),
        ("two drafters", "2, one grown"),
        ("two drafters, without", "2, one grown"),
        ("top K-1 + tail", "2 x 1"),
    ]
    return [
        _tree("recursive", "without replacement", "3", recursive, theory=_of_one_level(without)),
        *(_tree("recursive", drafter, tree, recursive) for drafter, tree in laws),
        _tree("recursive", "best first, certain", "7 nodes", recursive, best_first(2, 5)),
        _tree("recursive", "best first, then drawn", "2 x 2", recursive, decided_first(2, 4)),
        *(_promising("recursive", recursive, tree) for tree in ("2 x 2", "3, two grown")),
        _tree("hybrid", "tail + top K-1", "3", recursive, theory=_of_one_level(tail)),
        _tree("hybrid", "tail + top K-1", "2 x 1", recursive),
        _tree("hybrid", "tail + top K-1", "7 nodes", recursive),
        _tree(
            "hybrid",
            "pruned by proxy",
            "2 x 2",
            recursive,
            reranked(static(bush, hybrid), proxy, 3),
        ),
    ]


def _leaf_to_root() -> list[Certifiable]:
    bush, hybrid = TREES["2 x 2"], STYLES["tail + top K-1"]
    block = theory.block_expected_accepted
    laws = [
        ("without replacement", "2 x 1"),
        ("without replacement", "7 nodes"),
        ("with replacement", "2 x 1"),
        ("top K", "2 x 2"),
        ("two drafters, without", "2, one grown"),
    ]
    return [
        _tree("traversal", "without replacement", "chain 3", traversal, theory=block, size=LARGE),
        *(_tree("traversal", drafter, tree, traversal) for drafter, tree in laws),
        _tree("traversal", "best first, then drawn", "2 x 2", traversal, decided_first(2, 4)),
        *(_promising("traversal", traversal, tree) for tree in ("2 x 2", "3, two grown")),
        _tree("hybrid-traversal", "tail + top K-1", "2 x 1", traversal),
        _tree("hybrid-traversal", "tail + top K-1", "7 nodes", traversal),
        _tree(
            "hybrid-traversal",
            "pruned by proxy",
            "2 x 2",
            traversal,
            reranked(static(bush, hybrid), proxy, 3),
        ),
    ]


def _promising(rule: str, decide: TreeRule, tree: str) -> Certifiable:
    """Children without replacement of which those stay that promised most before they were drawn.

    What came out of one decides what its later siblings promise, and so which others stay.
    """
    grow = reranked(static(TREES[tree], STYLES["without replacement"]), promised, 3)
    return _tree(rule, "pruned by promise", tree, decide, grow)


def _of_one_level(accepted: Callable[[LawRow, LawRow], Number]) -> Theory:
    """A closed form for one row, as the expected number of tokens kept of a tree of one level."""
    return lambda p, q, depth: accepted(p(()), q(()))


def _multi_draft() -> list[Certifiable]:
    """K-SEQ on i.i.d. children, GBV on i.i.d. paths."""
    least = partial(kseq, rho_of=enough)
    block = theory.block_expected_accepted
    three = partial(theory.kseq_acceptance, num_drafts=3, rho=Fraction(3))
    return [
        _tree("kseq", "with replacement", "3", kseq, size=LARGE, theory=_of_one_level(three)),
        _tree(
            "kseq",
            "with replacement, least rho",
            "2",
            least,
            static((0, 0), STYLES["with replacement"]),
        ),
        _tree(
            "kseq",
            "with replacement, least rho",
            "2, one grown",
            least,
            static((0, 0, 1), STYLES["with replacement"]),
        ),
        _paths(1, 3, theory=block),
        _paths(2, 1, theory=_of_one_level(lambda p, q: theory.best_of_guard(p, q, 2).acceptance)),
        _paths(3, 1, theory=_of_one_level(lambda p, q: theory.best_of_guard(p, q, 3).acceptance)),
        _paths(2, 2),
        _paths(2, 3),
        _paths(3, 2),
    ]


def _paths(count: int, depth: int, *, theory: Theory | None = None) -> Certifiable:
    grow, name = paths(count, depth), f"{count} paths of {depth}"
    toy = _sun(depth) if count == 1 else _toy(depth)
    return Certifiable(
        "gbv",
        "with replacement",
        name,
        TreeScheme(f"gbv, {name}", grow, gbv),
        grow,
        depth,
        depth + 2 if depth == 1 else depth + 1,
        max(count * depth, depth * 2),
        toy,
        theory=theory,
    )


def _seeded() -> list[Certifiable]:
    """The very text of plain decoding: `coupled` under its seed, `greedy` and `match` by rule."""
    seeded = partial(_tree, "coupled", decide=coupled, plain=plain_seeded, size=LARGE)
    likeliest = partial(_tree, "greedy", decide=greedy, plain=plain_greedy, goal=_one_hot)
    bush, top = TREES["2 x 2"], "top K"
    raced_ = "top K of the target's race"
    return [
        seeded(raced_, "chain 3", grow=raced(TREES["chain 3"]), theory=coupled_expected_accepted),
        seeded(raced_, "3", grow=raced(TREES["3"])),
        seeded(raced_, "2 x 2", grow=raced(bush)),
        seeded("pruned by value", "2 x 2", grow=reranked(raced(bush), realised, 3)),
        seeded("another's top K", "2 x 2", grow=static(bush, STYLES[top])),
        likeliest(top, "chain 3"),
        likeliest(top, "2 x 2"),
        likeliest("best first, certain", "7 nodes", grow=best_first(2, 5)),
        _tree("match", top, "2 x 2", match),
        _tree("match", "without replacement", "2 x 1", match),
    ]


def coupled_expected_accepted(p: Model, q: Model, depth: int) -> Number:
    """Tokens `coupled` keeps of a chain: w(x) = w(parent) Pr[both races are won by x], summed.

    That chance is 1 / sum_i max(p_i / p_x, q_i / q_x): Daliri, Musco, Suresh, arXiv 2408.07978.
    """

    def walk(prefix: tuple[int, ...], mass: Number) -> Number:
        total: Number = Fraction(0)
        if len(prefix) < depth:
            rows = p(prefix), q(prefix)
            for x, (p_x, q_x) in enumerate(zip(*rows, strict=True)):
                if p_x > 0 and q_x > 0:
                    won = mass / sum(max(a / p_x, b / q_x) for a, b in zip(*rows, strict=True))
                    total += won + walk((*prefix, x), won)
        return total

    return walk((), Fraction(1))


def _one_hot(pair: Pair) -> Model:
    def law(text: tuple[int, ...]) -> LawRow:
        likeliest = reference.argmax(pair.target(text))
        return tuple(Fraction(int(x == likeliest)) for x in range(pair.vocab_size))

    return law


def _lossy() -> list[Certifiable]:
    """Lossy rules write with the law they declare; the last token, never drafted, with p."""
    found: list[Certifiable] = []
    for name, pi in SURROGATES.items():
        goal = partial(_declared, pi)
        for rule in ("token", "block"):
            scheme = Scheme(name, towards(pi, reference.IN_LAW[rule]))
            found.append(_chain(name, f"sampled, {rule}", scheme, 2, 3, goal=goal, toy=_toy(2)))
        lossy = trees_towards(pi, recursive)
        grow = static(TREES["2 x 1"], STYLES["without replacement"])
        found.append(_tree(name, "without replacement, recursive", "2 x 1", lossy, grow, goal=goal))
    return found


def _declared(pi: Surrogate, pair: Pair) -> Model:
    """Pi of target and draft wherever a token may have been drafted."""

    def law(text: tuple[int, ...]) -> LawRow:
        p = pair.target(text)
        return pi(p, pair.draft(text)) if len(text) < pair.length - 1 else p

    return law
