"""Greedy multi-path block verification: the best of K i.i.d. paths, and the law it really has.

Source: Thomas and Pal 2026, arXiv 2602.16961; the guard on the number of paths is the closed form
of the root's acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cmp_to_key
from typing import Any, TypeAlias

from outrider.certify.reference import Noise, Round, block
from outrider.certify.reference_trees import TreeOutcome, TreeRound
from outrider.decoding.theory import LawRow, Number

Path: TypeAlias = tuple[int, ...]
"""Nodes from a child of the root down to a leaf."""
Guard: TypeAlias = Callable[[LawRow, LawRow, int], int]
Rank: TypeAlias = Callable[[TreeRound, Path], list[Any]]
Told: TypeAlias = Callable[[TreeRound, Path, int], Sequence[LawRow]]


def local_order(p: LawRow, q: LawRow) -> list[int]:
    """Tokens by p / q, best first, the lowest id of equals; tokens the draft lacks stand last."""

    def compare(x: int, y: int) -> int:
        here, there = p[x] * q[y], p[y] * q[x]
        return (there > here) - (there < here) or x - y

    drawn = sorted((x for x in range(len(q)) if q[x] > 0), key=cmp_to_key(compare))
    return drawn + [x for x in range(len(q)) if not q[x] > 0]


def best_of(p: LawRow, q: LawRow, count: int) -> list[Number]:
    """The law of the best of `count` i.i.d. draws: (1 - c)^k - (1 - c - q)^k, c the better mass."""
    law: list[Number] = [0 * mass for mass in q]
    better: Number = Fraction(0)
    for x in local_order(p, q):
        law[x] = (1 - better) ** count - (1 - better - q[x]) ** count
        better += q[x]
    return law


def best_count(p: LawRow, q: LawRow, most: int) -> int:
    """How many draws to take the best of: the first maximum of sum min(p, best_of).

    More than that would favour the better tokens beyond what the target gives them. Only laws are
    read, never what was drawn.
    """

    def kept(count: int) -> Number:
        law = best_of(p, q, count)
        return sum((min(a, b) for a, b in zip(p, law, strict=True)), start=Fraction(0))

    return max(range(1, most + 1), key=kept)


def path_from(round: TreeRound, node: int) -> Path:
    """The path that begins with a child of the root."""
    below = round.tree.children(node + 1)
    return (node, *path_from(round, below[0])) if below else (node,)


def ranks(round: TreeRound, path: Path) -> list[int]:
    """The rank of each token of a path in the local order before it: compared, the first decides.

    Paths share the rows they have in common in law, not in number, so ranks are comparable.
    """
    tree = round.tree
    orders = (local_order(round.target[tree.parents[n]], tree.base[n]) for n in path)
    return [order.index(tree.tokens[n]) for order, n in zip(orders, path, strict=True)]


def skewed(round: TreeRound, path: Path, count: int) -> list[LawRow]:
    """The best path's conditional laws: cell(prefix + x) / cell(prefix).

    cell(z) = (1 - B)^k - (1 - B - q(z))^k, B the mass of the prefixes of its length better than z.
    """
    laws: list[LawRow] = []
    better: Number = Fraction(0)
    mass: Number = Fraction(1)
    whole: Number = Fraction(1)
    for node in path:
        q = round.tree.base[node]
        cells: list[Number] = [0 * x for x in q]
        starts: list[Number] = [0 * x for x in q]
        start = better
        for x in local_order(round.target[round.tree.parents[node]], q):
            starts[x] = start
            cells[x] = (1 - start) ** count - (1 - start - mass * q[x]) ** count
            start += mass * q[x]
        laws.append([cell / whole for cell in cells])
        x = round.tree.tokens[node]
        better, mass, whole = starts[x], mass * q[x], cells[x]
    return laws


def gbv(
    round: TreeRound,
    guard: Guard = best_count,
    rank: Rank = ranks,
    told: Told = skewed,
) -> TreeOutcome:
    """Block verification of the best path under the law that being the best gives it."""
    tree = round.tree
    roots = tree.children(0)
    if not roots:
        outcome = block(Round([], round.target[:1], [], round.noise))
        return TreeOutcome((), outcome.token)
    count = guard(round.target[0], tree.base[roots[0]], len(roots))
    paths = [path_from(round, root) for root in roots[:count]]
    best = min(paths, key=lambda path: rank(round, path))
    rows = (0, *(node + 1 for node in best))
    outcome = block(
        Round(
            [tree.tokens[node] for node in best],
            [round.target[row] for row in rows],
            told(round, best, count),
            Noise(lambda i: round.noise.test(best[i]), round.noise.extra, round.noise.draft),
        )
    )
    return TreeOutcome(rows[1 : outcome.kept + 1], outcome.token)
