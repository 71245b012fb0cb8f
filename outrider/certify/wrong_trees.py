"""Tree rules broken on purpose: laws, siblings, pruning, noise and updates that are not right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

from outrider.certify import reference_gbv as multipath
from outrider.certify.enumerate import RIGHT, Addresses, TreeScheme
from outrider.certify.growth import (
    STYLES,
    Grow,
    Shape,
    Style,
    part_of,
    paths,
    promised,
    proxy,
    raced,
    realised,
    reranked,
    static,
)
from outrider.certify.misplaced import by_position, one_for_all, same_every_round, taken_from
from outrider.certify.pairs import Pair, fixed, small
from outrider.certify.reference import excess, inverse_cdf
from outrider.certify.reference_trees import (
    DraftedTree,
    LawOf,
    TreeOutcome,
    TreeRound,
    TreeRule,
    coupled,
    enough,
    kseq,
    match,
    normalised,
    recursive,
    traversal,
    without,
)
from outrider.certify.wrong import Wrong
from outrider.decoding.draft import Kind
from outrider.decoding.theory import LawRow, Number
from outrider.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_EXTRA, STREAM_TARGET

FORK: Shape = (0, 0)
TWIG: Shape = (0, 0, 1)
SPRIG: Shape = (0, 0, 2)
BUSH: Shape = (0, 0, 1, 2)
WITHOUT, WITH = STYLES["without replacement"], STYLES["with replacement"]
CERTAIN, HYBRID = STYLES["top K"], STYLES["tail + top K-1"]


def wrong_trees() -> list[Wrong]:
    """Broken variants of the tree rules."""
    return [
        *_laws(),
        *_siblings(),
        *_pruned(),
        *_noise(),
        *_updates(),
        *_several_paths(),
        *_races(),
    ]


def _broken(
    rule: str,
    defect: str,
    right: TreeScheme,
    pair: Pair | None = None,
    *,
    reported: str = "",
    grow: Grow | None = None,
    instead: TreeRule | None = None,
    at: Addresses = RIGHT,
) -> Wrong:
    """The right scheme with something put in the place of a part of it."""
    scheme = TreeScheme(defect, grow or right.grow, instead or right.rule, at)
    return Wrong(rule, scheme, pair or small(), right, reported)


def _static(shape: Shape, style: Style, rule: TreeRule) -> TreeScheme:
    return TreeScheme("right", static(shape, style), rule)


def _wide() -> Pair:
    """Four tokens, the draft's order turned round: refusals leave two tokens in the residual."""
    return fixed("wide", [4, 3, 2, 1], [1, 2, 3, 4], depth=1, length=2)


def _laws() -> list[Wrong]:
    """Children tested with a law they were not drawn from."""
    softmax = "certain children told by the draft's softmax law"
    wide, near = _wide(), small()
    cases: list[tuple[str, str, Style, LawOf, Pair, str]] = [
        ("recursive", softmax, CERTAIN, _base, near, "transformers#32867"),
        ("recursive", "without replacement, told as with", WITHOUT, _base, wide, ""),
        ("recursive", "without replacement, not renormalised", WITHOUT, _unscaled, wide, ""),
        ("recursive", "with replacement, told as without", WITH, _as_without, wide, ""),
        ("hybrid", "tail child told by the whole law", HYBRID, _base_of_tail, near, ""),
        ("traversal", softmax, CERTAIN, _base, near, ""),
        ("traversal", "without replacement, told as with", WITHOUT, _base, wide, ""),
        ("traversal", "without replacement, not renormalised", WITHOUT, _unscaled, wide, ""),
        ("hybrid-traversal", "tail child told by the whole law", HYBRID, _base_of_tail, near, ""),
    ]
    rules = {"recursive": recursive, "hybrid": recursive}
    return [
        _broken(
            rule,
            defect,
            _static(FORK if pair is wide else TWIG, style, rules.get(rule, traversal)),
            pair,
            reported=reported,
            instead=partial(rules.get(rule, traversal), law_of=law_of),
        )
        for rule, defect, style, law_of, pair, reported in cases
    ]


def _siblings() -> list[Wrong]:
    """What siblings do to each other."""
    with_, fork = _static(TWIG, WITH, recursive), _static(FORK, WITH, recursive)
    sorted_, merged = _changed(with_.grow, _sorted), _changed(fork.grow, _merged)
    first = _static(FORK, WITHOUT, recursive)
    leaf_up = replace(fork, rule=traversal)
    return [
        _broken("recursive", "no update after a refused sibling", with_, instead=_no_update),
        _broken(
            "recursive", "added from the first residual", first, _wide(), instead=_first_residual
        ),
        _broken("recursive", "duplicates merged", fork, _wide(), grow=merged),
        _broken("traversal", "duplicates merged", leaf_up, _wide(), grow=merged),
        _broken("kseq", "duplicates merged", replace(fork, rule=kseq), _wide(), grow=merged),
        _broken("recursive", "siblings sorted by value", with_, grow=sorted_),
        _broken(
            "traversal", "siblings sorted by value", replace(with_, rule=traversal), grow=sorted_
        ),
    ]


def _pruned() -> list[Wrong]:
    """Sampled children dropped for the value that came out."""
    sampled, hybrid = _static(BUSH, WITHOUT, recursive), static(SPRIG, HYBRID)
    by_proxy = TreeScheme("right", reranked(hybrid, proxy, 2), recursive)
    fork, deep = _static(FORK, WITHOUT, recursive), replace(_wide(), depth=2, length=3)
    by_value, tail_by_value = reranked(sampled.grow, realised, 2), reranked(hybrid, realised, 2)
    by_promise = TreeScheme("right", reranked(sampled.grow, promised, 2), recursive)
    late = reranked(sampled.grow, _hindsight, 2)
    pruned, tail = "sampled children pruned by value", "tail child pruned by its realised value"
    looked_at = "promise of a child without its own token"
    leaf_up, hybrid_up = replace(sampled, rule=traversal), replace(by_proxy, rule=traversal)
    return [
        _broken("recursive", pruned, sampled, grow=by_value),
        _broken("traversal", pruned, leaf_up, grow=by_value),
        _broken("recursive", looked_at, by_promise, grow=late),
        _broken("traversal", looked_at, replace(by_promise, rule=traversal), grow=late),
        _broken("hybrid", tail, by_proxy, deep, grow=tail_by_value),
        _broken("hybrid-traversal", tail, hybrid_up, deep, grow=tail_by_value),
        _broken(
            "recursive",
            "law of a pruned sibling's sibling",
            fork,
            grow=_changed(fork.grow, _forgets),
        ),
    ]


def _noise() -> list[Wrong]:
    """Addresses used for two things, or twice."""
    recursive_ = _static(TWIG, WITHOUT, recursive)
    sun = fixed("sun", [1, 2], [2, 1], depth=2, length=4)
    chain = _static((0, 1), WITHOUT, traversal)
    return [
        _broken(
            "recursive",
            "siblings tested at one address",
            recursive_,
            at=Addresses(test=one_for_all(STREAM_ACCEPT)),
        ),
        _broken(
            "recursive",
            "draft noise used again to test",
            recursive_,
            at=Addresses(test=taken_from(STREAM_DRAFT)),
        ),
        _broken(
            "recursive",
            "test noise used again to add",
            recursive_,
            at=Addresses(extra=taken_from(STREAM_ACCEPT)),
        ),
        _broken(
            "recursive",
            "siblings drawn at one address",
            _static(TWIG, WITH, recursive),
            at=Addresses(draft=one_for_all(STREAM_DRAFT)),
        ),
        _broken(
            "traversal",
            "tests at one address in every round",
            chain,
            sun,
            at=Addresses(test=same_every_round(STREAM_ACCEPT)),
        ),
        _broken(
            "traversal",
            "keyed by token position",
            chain,
            sun,
            at=Addresses(test=by_position(STREAM_ACCEPT)),
        ),
        _broken(
            "match",
            "every row of a tree drawn at one address",
            _static(TWIG, WITHOUT, match),
            at=Addresses(extra=one_for_all(STREAM_EXTRA)),
        ),
    ]


def _updates() -> list[Wrong]:
    """Traversal with a step left out, and K-SEQ asked for too much."""
    traversal_ = _static(TWIG, WITHOUT, traversal)
    kseq_, short = _static(FORK, WITH, kseq), replace(small(), depth=1, length=2)
    return [
        _broken("traversal", "share not updated after a refusal", traversal_, instead=_share_kept),
        _broken(
            "traversal", "target not updated after a refusal", traversal_, instead=_target_kept
        ),
        _broken("traversal", "rest not scaled by the share", traversal_, instead=_rest_unscaled),
        _broken("kseq", "rho too small", kseq_, instead=partial(kseq, rho_of=_rho_of_one)),
        _broken(
            "kseq",
            "rho of half the children",
            _static((0, 0, 0), WITH, kseq),
            short,
            instead=partial(kseq, rho_of=lambda p, q, k: enough(p, q, 1)),
        ),
        _broken("kseq", "residual of one draft", kseq_, instead=_kseq_one_residual),
    ]


def _several_paths() -> list[Wrong]:
    """The best of several paths, told as something it is not."""
    right = TreeScheme("right", paths(2, 2), multipath.gbv)
    fork = TreeScheme("right", paths(2, 1), multipath.gbv)
    short = replace(small(), depth=1, length=2)
    even = fixed("likely for both", [4, 3, 2, 1], [4, 1, 1, 4], depth=1, length=2)
    return [
        _broken("gbv", "best path told by the plain law", right, instead=_gbv_plain),
        _broken("gbv", "best path chosen by the target alone", fork, even, instead=_gbv_by_target),
        _broken("gbv", "number of paths from what was drawn", fork, short, instead=_gbv_distinct),
        _broken("gbv", "equal paths merged", right, grow=_changed(right.grow, _merged)),
    ]


def _races() -> list[Wrong]:
    """Shared noise that is not the target's own, or is asked for more than it holds."""
    right = TreeScheme("right", raced(TWIG), coupled)
    return [
        _broken(
            "coupled",
            "keyed by the round",
            right,
            at=Addresses(race=one_for_all(STREAM_TARGET)),
        ),
        _broken(
            "coupled",
            "keyed by the node's depth alone",
            right,
            at=Addresses(race=lambda anchor, i: (STREAM_TARGET, i, 0)),
        ),
        _broken(
            "coupled", "residual added with the shared noise", right, instead=_residual_of_race
        ),
        _broken("coupled", "a child is kept if it is likely enough", right, instead=_lenient_race),
    ]


def _base(tree: DraftedTree, node: int) -> LawRow:
    return tree.base[node]


def _unscaled(tree: DraftedTree, node: int) -> LawRow:
    return without(tree.base[node], tree.taken(node))


def _as_without(tree: DraftedTree, node: int) -> LawRow:
    siblings = tree.children(tree.parents[node])
    return normalised(without(tree.base[node], {tree.tokens[s] for s in siblings if s < node}))


def _base_of_tail(tree: DraftedTree, node: int) -> LawRow:
    return tree.base[node] if tree.kinds[node] == Kind.TAIL else tree.law(node)


def _changed(grow: Grow, change: Callable[[DraftedTree], DraftedTree]) -> Grow:
    return lambda drafting: change(grow(drafting))


def _merged(tree: DraftedTree) -> DraftedTree:
    """Equal siblings become one, and what hangs from them hangs from it."""
    rows, kept = {0: 0}, list[int]()
    places: dict[tuple[int, int], int] = {}
    for node, parent in enumerate(tree.parents):
        place = rows[parent], tree.tokens[node]
        if place not in places:
            kept.append(node)
            places[place] = len(kept)
        rows[node + 1] = places[place]
    return DraftedTree(
        [tree.tokens[node] for node in kept],
        [rows[tree.parents[node]] for node in kept],
        [tree.base[node] for node in kept],
        [tree.kinds[node] for node in kept],
    )


def _sorted(tree: DraftedTree) -> DraftedTree:
    """Siblings by the draft's probability, the likeliest first."""
    order: list[int] = []

    def visit(row: int) -> None:
        children = sorted(tree.children(row), key=lambda node: -realised(tree, node))
        order.extend(children)
        for node in children:
            visit(node + 1)

    visit(0)
    return part_of(tree, order)


def _forgets(tree: DraftedTree) -> DraftedTree:
    """The first child goes; the second is told as if it had been drawn alone."""
    return DraftedTree(tree.tokens[1:], tree.parents[1:], tree.base[1:], tree.kinds[1:])


def _hindsight(tree: DraftedTree, node: int) -> Number:
    """How sharp a child's law is once its token is out of it too: known when it has been drawn."""
    left = normalised(without(tree.law(node), {tree.tokens[node]}))
    return sum((mass * mass for mass in left), start=Fraction(0))


def _no_update(round: TreeRound) -> TreeOutcome:
    row, path = 0, ()
    while True:
        left: LawRow = round.target[row]
        for node in round.tree.children(row):
            law, x = round.tree.law(node), round.tree.tokens[node]
            if round.noise.test(node) * law[x] < round.target[row][x]:
                row = node + 1
                path = (*path, row)
                break
            left = excess(round.target[row], law)
        else:
            return TreeOutcome(path, inverse_cdf(left, round.noise.extra(0)))


def _first_residual(round: TreeRound) -> TreeOutcome:
    outcome = recursive(round)
    row = outcome.path[-1] if outcome.path else 0
    children = round.tree.children(row)
    if not children:
        return outcome
    left = excess(round.target[row], round.tree.law(children[0]))
    return TreeOutcome(outcome.path, inverse_cdf(left, round.noise.extra(7)))


def _share_kept(round: TreeRound) -> TreeOutcome:
    def update(share: dict[int, Number], left: dict[int, LawRow], row: int, law: LawRow) -> None:
        left[row] = normalised(excess(left[row], law, share[row]))

    return traversal(round, update=update)


def _target_kept(round: TreeRound) -> TreeOutcome:
    def update(share: dict[int, Number], left: dict[int, LawRow], row: int, law: LawRow) -> None:
        mass = sum(max(0, share[row] * p - q) for p, q in zip(left[row], law, strict=True))
        room = mass + 1 - share[row]
        share[row] = mass / room if room > 0 else Fraction(1)

    return traversal(round, update=update)


def _rest_unscaled(round: TreeRound) -> TreeOutcome:
    def update(share: dict[int, Number], left: dict[int, LawRow], row: int, law: LawRow) -> None:
        mass = sum(max(0, p - q) for p, q in zip(left[row], law, strict=True))
        room = mass + 1 - share[row]
        share[row] = mass / room if room > 0 else Fraction(1)
        left[row] = normalised(excess(left[row], law))

    return traversal(round, update=update)


def _rho_of_one(p: LawRow, q: LawRow, count: int) -> Number:
    return Fraction(1)


def _kseq_one_residual(round: TreeRound) -> TreeOutcome:
    """A refusal of all children is followed by the residual of a single one."""
    outcome = kseq(round)
    row = outcome.path[-1] if outcome.path else 0
    children = round.tree.children(row)
    if not children:
        return outcome
    left = excess(round.target[row], round.tree.base[children[0]])
    return TreeOutcome(outcome.path, inverse_cdf(left, round.noise.extra(7)))


def _gbv_plain(round: TreeRound) -> TreeOutcome:
    return multipath.gbv(round, told=lambda same, path, count: multipath.skewed(same, path, 1))


def _gbv_by_target(round: TreeRound) -> TreeOutcome:
    def better(round: TreeRound, path: multipath.Path) -> list[Number]:
        tree = round.tree
        return [-round.target[tree.parents[n]][tree.tokens[n]] for n in path]

    return multipath.gbv(round, rank=better)


def _gbv_distinct(round: TreeRound) -> TreeOutcome:
    different = len({round.tree.tokens[node] for node in round.tree.children(0)})
    return multipath.gbv(round, guard=lambda p, q, most: different)


def _residual_of_race(round: TreeRound) -> TreeOutcome:
    """Recursive, its added token won by the race that drew the children."""
    row, path = 0, ()
    while True:
        left: LawRow = round.target[row]
        for node in round.tree.children(row):
            law, x = round.tree.law(node), round.tree.tokens[node]
            if round.noise.test(node) * law[x] < left[x]:
                row = node + 1
                path = (*path, row)
                break
            left = normalised(excess(left, law))
        else:
            return TreeOutcome(path, round.noise.race(len(path), left, 1)[0])


def _lenient_race(round: TreeRound) -> TreeOutcome:
    """A child at least half as likely as the target's own draw is taken for it."""
    row, path = 0, ()
    while True:
        p = round.target[row]
        y = round.noise.race(len(path), p, 1)[0]
        near = [n for n in round.tree.children(row) if 2 * p[round.tree.tokens[n]] >= p[y]]
        if not near:
            return TreeOutcome(path, y)
        row = near[0] + 1
        path = (*path, row)
