"""How drafters grow trees: static shapes drawn in many ways, and trees that look at values.

What was drawn may decide where to draw next. It may decide what to keep only where that cannot
matter: certain children, the hybrid rule's proxy, what a draw without replacement promises before
it is drawn, or `coupled`, whose target draws for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from outrider.certify.reference import Noise, inverse_cdf
from outrider.certify.reference_trees import DraftedTree, without
from outrider.decoding.draft import Kind
from outrider.decoding.theory import LawRow, Model, Number

Text: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]
"""Parent rows of the nodes, `(0, 0, 1)` being two children and one grandchild by the first."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter has in one round: the text, its model, levels it may fill, and noise."""

    text: Text
    model: Model
    room: int
    noise: Noise


Grow: TypeAlias = Callable[[Drafting], DraftedTree]


@dataclass(frozen=True, slots=True)
class Style:
    """How the children of one row are drawn: kinds by their number, and each one's model."""

    kinds: Callable[[int], Sequence[Kind]]
    models: Callable[[Model], Sequence[Model]] = lambda q: (q,)


def backwards(q: Model) -> Model:
    """A second drafter: the first one's laws read from the last token to the first."""
    return lambda text: tuple(reversed(q(text)))


STYLES: dict[str, Style] = {
    "without replacement": Style(lambda c: [Kind.WITHOUT] * c),
    "with replacement": Style(lambda c: [Kind.IID] * c),
    "top K": Style(lambda c: [Kind.POINT] * c),
    "tail + top K-1": Style(lambda c: [Kind.TAIL] + [Kind.POINT] * (c - 1)),
    "top K-1 + tail": Style(lambda c: [Kind.POINT] * (c - 1) + [Kind.TAIL]),
    "look-up + without": Style(lambda c: ([Kind.POINT] + [Kind.WITHOUT] * c)[:c]),
    "two drafters": Style(lambda c: [Kind.IID] * c, lambda q: (q, backwards(q))),
    "two drafters, without": Style(lambda c: [Kind.WITHOUT] * c, lambda q: (q, backwards(q))),
}


@dataclass(slots=True)
class Growing:
    """A tree under construction."""

    drafting: Drafting
    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    base: list[LawRow] = field(default_factory=list[LawRow])
    kinds: list[Kind] = field(default_factory=list[Kind])

    def tree(self) -> DraftedTree:
        """The tree so far; it sees later nodes too."""
        return DraftedTree(self.tokens, self.parents, self.base, self.kinds)

    def text(self, row: int) -> Text:
        """The text at a row."""
        return (*self.drafting.text, *self.tree().path_tokens(row))

    def depth(self, row: int) -> int:
        """Nodes on the path to a row."""
        return len(self.tree().path_tokens(row))

    def add(self, row: int, token: int, law: LawRow, kind: Kind) -> int:
        """Hangs a node from a row; its own row is returned."""
        self.tokens.append(token)
        self.parents.append(row)
        self.base.append(law)
        self.kinds.append(kind)
        return len(self.tokens)

    def draw(self, row: int, style: Style, place: int, count: int) -> int | None:
        """Draws the child at `place` of `count`; None where the support is used up."""
        kinds, models = style.kinds(count), style.models(self.drafting.model)
        kind, law = kinds[place], models[place % len(models)](self.text(row))
        certain = kinds.count(Kind.POINT)
        tops = top(law, certain) if certain else []
        if kind == Kind.POINT:
            rank = list(kinds[:place]).count(Kind.POINT)
            return self.add(row, tops[rank], law, kind) if rank < len(tops) else None
        siblings = {self.tokens[node] for node in self.tree().children(row)}
        taken = {Kind.IID: set[int](), Kind.WITHOUT: siblings, Kind.TAIL: set(tops)}[kind]
        weights = without(law, taken)
        if not any(weights):
            return None
        uniform = self.drafting.noise.draft(len(self.tokens))
        return self.add(row, inverse_cdf(weights, uniform), law, kind)


def top(law: LawRow, count: int) -> list[int]:
    """The likeliest tokens, the lowest id of equals, among those that can be drawn."""
    order = sorted(range(len(law)), key=lambda x: (-law[x], x))
    return [x for x in order[:count] if law[x] > 0]


Stop: TypeAlias = Callable[[LawRow, int], bool]
"""Whether nothing is drafted behind a token, given its law; the token itself stays."""


def never(law: LawRow, token: int) -> bool:
    """Drafts on."""
    return False


Hang: TypeAlias = Callable[[Growing, int, int, int], int | None]
"""Hangs the child at a place of several from a row; its row, or None where nothing goes on."""


def _shaped(shape: Shape, hang: Hang) -> Grow:
    """The shape, node by node, as far as there is room."""

    def grow(drafting: Drafting) -> DraftedTree:
        growing = Growing(drafting)
        rows: dict[int, int] = {0: 0}
        for node, parent in enumerate(shape):
            row = rows.get(parent)
            if row is None or growing.depth(row) >= drafting.room:
                continue
            made = hang(growing, row, shape[:node].count(parent), shape.count(parent))
            if made is not None:
                rows[node + 1] = made
        return growing.tree()

    return grow


def static(shape: Shape, style: Style, stopped: Stop = never) -> Grow:
    """The shape, as far as room and support allow and no path is stopped."""

    def hang(growing: Growing, row: int, place: int, count: int) -> int | None:
        made = growing.draw(row, style, place, count)
        if made is None or stopped(growing.base[made - 1], growing.tokens[made - 1]):
            return None
        return made

    return _shaped(shape, hang)


def paths(count: int, depth: int) -> Grow:
    """`count` i.i.d. paths from the root, not merged."""
    shape = tuple(0 if d == 0 else k * depth + d for k in range(count) for d in range(depth))
    return static(shape, STYLES["with replacement"])


def raced(shape: Shape) -> Grow:
    """The shape with children in the order of the target's own race, run with the draft's law."""

    def hang(growing: Growing, row: int, place: int, count: int) -> int | None:
        law = growing.drafting.model(growing.text(row))
        order = growing.drafting.noise.race(growing.depth(row), law, place + 1)
        return growing.add(row, order[place], law, Kind.WITHOUT) if place < len(order) else None

    return _shaped(shape, hang)


Value: TypeAlias = Callable[[DraftedTree, int], Number]
"""How promising a node looks beside its siblings."""


def realised(tree: DraftedTree, node: int) -> Number:
    """The draft's probability of the token that came out."""
    return tree.base[node][tree.tokens[node]]


def proxy(tree: DraftedTree, node: int) -> Number:
    """The probability of a certain child, and of a tail child the mass of its tail."""
    if tree.kinds[node] == Kind.POINT:
        return realised(tree, node)
    return sum(without(tree.base[node], tree.taken(node)), start=Fraction(0))


def promised(tree: DraftedTree, node: int) -> Number:
    """What a child without replacement is worth by its law and its earlier siblings' alone.

    Of the k-th sibling's law `2 / (5 k)` is shared where it is flat, all where it is sharp.
    """
    siblings = tree.children(tree.parents[node])
    refused, worth = Fraction(1), Fraction(1)
    for k, sibling in enumerate(siblings[: siblings.index(node) + 1], start=1):
        agree = sum(mass * mass for mass in tree.law(sibling))
        flat = Fraction(2, 5 * k)
        worth = min(worth, refused * (flat + (1 - flat) * agree))
        refused -= worth
    return worth


def best_first(width: int, budget: int) -> Grow:
    """The `budget` likeliest paths among the top `width` children everywhere (EAGLE-2)."""

    def grow(drafting: Drafting) -> DraftedTree:
        growing = Growing(drafting)
        offers: list[tuple[Number, int, int, LawRow]] = []

        def expand(row: int, value: Number) -> None:
            if growing.depth(row) < drafting.room:
                law = drafting.model(growing.text(row))
                offers.extend((value * law[x], row, x, law) for x in top(law, width))

        expand(0, Fraction(1))
        while offers and len(growing.tokens) < budget:
            best = max(offers, key=lambda offer: (offer[0], -offer[1], -offer[2]))
            offers.remove(best)
            value, row, x, law = best
            expand(growing.add(row, x, law, Kind.POINT), value)
        return growing.tree()

    return grow


def decided_first(width: int, budget: int) -> Grow:
    """Children without replacement where paths look best; decided before they are drawn.

    What was drawn may decide where to draw next. It may not decide what to keep of it.
    """

    def grow(drafting: Drafting) -> DraftedTree:
        growing = Growing(drafting)
        values: dict[int, Number] = {0: Fraction(1)} if drafting.room else {}
        while values and len(growing.tokens) < budget:
            row = max(values, key=lambda row: (values[row], -row))
            value = values.pop(row)
            for place in range(min(width, budget - len(growing.tokens))):
                made = growing.draw(row, STYLES["without replacement"], place, width)
                if made is not None and growing.depth(made) < drafting.room:
                    values[made] = value * realised(growing.tree(), made - 1)
        return growing.tree()

    return grow


def reranked(grow: Grow, value: Value, budget: int) -> Grow:
    """The `budget` nodes of the largest products of values along their paths; of equals the first.

    No value is above 1, so what stays is a tree.
    """

    def pruned(drafting: Drafting) -> DraftedTree:
        tree = grow(drafting)
        products: list[Number] = []
        for node, parent in enumerate(tree.parents):
            above = products[parent - 1] if parent else Fraction(1)
            products.append(above * value(tree, node))
        order = sorted(range(len(products)), key=lambda node: (-products[node], node))
        return part_of(tree, sorted(order[:budget]))

    return pruned


def part_of(tree: DraftedTree, nodes: Sequence[int]) -> DraftedTree:
    """Some nodes of a tree in a new order, each before what hangs from it.

    What was taken out of a node's law stays out, whether or not those siblings are still there.
    """
    rows = {0: 0} | {node + 1: i + 1 for i, node in enumerate(nodes)}
    return DraftedTree(
        [tree.tokens[node] for node in nodes],
        [rows[tree.parents[node]] for node in nodes],
        [tree.law(node) for node in nodes],
        [Kind.POINT if tree.kinds[node] == Kind.POINT else Kind.IID for node in nodes],
    )
