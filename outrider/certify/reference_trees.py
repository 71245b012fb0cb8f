"""The rules on token trees as a few lines one can read, for any arithmetic.

Row 0 is the root, node j is row j + 1; siblings are tested in ascending order of their nodes. A
rule reads the law each node was really drawn from through `DraftedTree.law`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from outrider.certify.reference import Noise, excess, inverse_cdf
from outrider.decoding.draft import Kind
from outrider.decoding.theory import LawRow, Number


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """N drafted tokens, the rows they hang from, and how each was drawn.

    Attributes:
        tokens, parents: of node j; `parents[j]` is a row in 0..j.
        base: the law q that node j came from, before its siblings were taken out of it.
        kinds: what was taken out.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    base: Sequence[LawRow]
    kinds: Sequence[Kind]

    def children(self, row: int) -> list[int]:
        """Nodes hanging from a row, in the order they were drawn and are tested."""
        return [node for node, parent in enumerate(self.parents) if parent == row]

    def law(self, node: int) -> LawRow:
        """The law the node's token was drawn from, given its earlier siblings."""
        if self.kinds[node] == Kind.POINT:
            return tuple(Fraction(int(x == self.tokens[node])) for x in range(len(self.base[node])))
        return normalised(without(self.base[node], self.taken(node)))

    def taken(self, node: int) -> set[int]:
        """Tokens taken out of the node's base law before it was drawn."""
        siblings = self.children(self.parents[node])
        if self.kinds[node] == Kind.WITHOUT:
            return {self.tokens[s] for s in siblings if s < node}
        if self.kinds[node] == Kind.TAIL:
            return {self.tokens[s] for s in siblings if self.kinds[s] == Kind.POINT}
        return set()

    def path_tokens(self, row: int) -> tuple[int, ...]:
        """Tokens from the root down to a row."""
        if row == 0:
            return ()
        return (*self.path_tokens(self.parents[row - 1]), self.tokens[row - 1])


@dataclass(frozen=True, slots=True)
class TreeRound:
    """A drafted tree, N + 1 laws of the target, and the noise."""

    tree: DraftedTree
    target: Sequence[LawRow]
    noise: Noise


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """Rows kept, from the root's child down, and the token added."""

    path: tuple[int, ...]
    token: int


TreeRule: TypeAlias = Callable[[TreeRound], TreeOutcome]
LawOf: TypeAlias = Callable[[DraftedTree, int], LawRow]
Update: TypeAlias = Callable[[dict[int, Number], dict[int, LawRow], int, LawRow], None]
Rho: TypeAlias = Callable[[LawRow, LawRow, int], Number]


def without(law: LawRow, tokens: set[int]) -> LawRow:
    """The law with some tokens' mass removed, not renormalised."""
    return tuple(0 * mass if token in tokens else mass for token, mass in enumerate(law))


def normalised(weights: LawRow) -> LawRow:
    """The law of weights; weights without mass stay as they are."""
    total = sum(weights)
    return tuple(weight / total for weight in weights) if total > 0 else weights


def descend(round: TreeRound, choose: Callable[[int], int]) -> TreeOutcome:
    """Follows the token chosen at each row while a child carries it."""
    row, path = 0, ()
    while True:
        y = choose(row)
        same = [node for node in round.tree.children(row) if round.tree.tokens[node] == y]
        if not same:
            return TreeOutcome(path, y)
        row = same[0] + 1
        path = (*path, row)


def greedy(round: TreeRound) -> TreeOutcome:
    """The likeliest token at each row, the first of equals."""
    rows = round.target
    return descend(round, lambda row: max(range(len(rows[row])), key=lambda x: rows[row][x]))


def match(round: TreeRound) -> TreeOutcome:
    """The target draws at each row it reaches, from the row's own address."""
    return descend(round, lambda row: inverse_cdf(round.target[row], round.noise.extra(row)))


def coupled(round: TreeRound) -> TreeOutcome:
    """The target's own seeded draw at each position: the text of plain seeded sampling.

    With one child it is Daliri, Musco, Suresh 2024; with K the children are the top K of the same
    race run with the draft's law.
    """

    def own(row: int) -> int:
        depth = len(round.tree.path_tokens(row))
        return round.noise.race(depth, round.target[row], 1)[0]

    return descend(round, own)


def recursive(round: TreeRound, law_of: LawOf = DraftedTree.law) -> TreeOutcome:
    """Children in order, each against what the target's law has left: u law(x) < R(x).

    A refused child takes its law out of R = norm(max(0, R - law)). It is SpecInfer's multi-step
    rule for children with replacement, recursive rejection (Jeon et al. 2024; Sequoia, Chen et al.
    2024) without, sample-and-match for certain children, and any mixture of them.
    """
    row, path = 0, ()
    while True:
        left: LawRow = round.target[row]
        for node in round.tree.children(row):
            law, x = law_of(round.tree, node), round.tree.tokens[node]
            if round.noise.test(node) * law[x] < left[x]:
                row = node + 1
                path = (*path, row)
                break
            left = normalised(excess(left, law))
        else:
            return TreeOutcome(path, inverse_cdf(left, round.noise.extra(0)))


def refused(share: dict[int, Number], left: dict[int, LawRow], row: int, law: LawRow) -> None:
    """What a row has left, and its share of being kept, once a child drawn from `law` is gone."""
    rest = [max(0 * p, share[row] * p - q) for p, q in zip(left[row], law, strict=True)]
    mass = sum(rest)
    room = mass + 1 - share[row]
    share[row] = mass / room if room > 0 else Fraction(1)
    if mass > 0:
        left[row] = normalised(rest)


def traversal(
    round: TreeRound, law_of: LawOf = DraftedTree.law, update: Update = refused
) -> TreeOutcome:
    """Weng et al. 2025, leaf to root, with the law of each child: on a chain it is `block`.

    Each row has a share a of being kept and a target R. A leaf is tested with u < a; refused, it
    is deleted, what its parent has left is Z = max(0, a R - law), and the parent's share becomes
    |Z| / (|Z| + 1 - a). A row is tested when its last child is gone.
    """
    tree = round.tree
    live = {row: tree.children(row) for row in range(len(tree.tokens) + 1)}
    share: dict[int, Number] = {0: Fraction(1)}
    left: dict[int, LawRow] = {0: round.target[0]}
    row = 0
    while True:
        while live[row]:
            node = live[row][0]
            x, law = tree.tokens[node], law_of(tree, node)
            share[node + 1] = min(Fraction(1), share[row] * left[row][x] / law[x])
            left[node + 1] = round.target[node + 1]
            row = node + 1
        if row == 0 or round.noise.test(row - 1) < share[row]:
            return TreeOutcome(_path(tree, row), inverse_cdf(left[row], round.noise.extra(0)))
        node, row = row - 1, tree.parents[row - 1]
        live[row] = live[row][1:]
        update(share, left, row, law_of(tree, node))


def _path(tree: DraftedTree, row: int) -> tuple[int, ...]:
    return () if row == 0 else (*_path(tree, tree.parents[row - 1]), row)


def as_many(p: LawRow, q: LawRow, count: int) -> Number:
    """rho = K, which is always enough."""
    return Fraction(count)


def enough(p: LawRow, q: LawRow, count: int, halvings: int = 5) -> Number:
    """The smallest lossless rho of K-SEQ, from above: 1 - (1 - beta)^K <= rho beta, bisected."""
    low, high = Fraction(1), Fraction(count)
    if keeps(p, q, count, low):
        return low
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (low, middle) if keeps(p, q, count, middle) else (middle, high)
    return high


def keeps(p: LawRow, q: LawRow, count: int, rho: Number) -> bool:
    """Whether K-SEQ with this rho leaves no token more mass than the target gives it."""
    beta = overlap(p, q, rho)
    return 1 - (1 - beta) ** count <= rho * beta


def overlap(p: LawRow, q: LawRow, rho: Number) -> Number:
    """beta = sum min(q, p / rho): how often one draft is accepted."""
    return sum((min(b, a / rho) for a, b in zip(p, q, strict=True)), start=Fraction(0))


def kseq(round: TreeRound, rho_of: Rho = as_many) -> TreeOutcome:
    """SpecTr (Sun et al. 2023): each of K i.i.d. children against p / rho, one residual at the end.

    The residual is p - min(q, p / rho) (1 - (1 - beta)^K) / beta, not negative while rho is enough.
    """
    row, path = 0, ()
    while True:
        children, p = round.tree.children(row), round.target[row]
        if not children:
            return TreeOutcome(path, inverse_cdf(p, round.noise.extra(0)))
        q = round.tree.base[children[0]]
        rho = rho_of(p, q, len(children))
        for node in children:
            x = round.tree.tokens[node]
            if round.noise.test(node) * (rho * q[x]) < p[x]:
                row = node + 1
                path = (*path, row)
                break
        else:
            beta = overlap(p, q, rho)
            some = (1 - (1 - beta) ** len(children)) / beta if beta > 0 else Fraction(0)
            rest = [max(0 * a, a - min(b, a / rho) * some) for a, b in zip(p, q, strict=True)]
            return TreeOutcome(
                path, inverse_cdf(rest if sum(rest) > 0 else p, round.noise.extra(0))
            )
