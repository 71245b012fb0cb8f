"""Production against reference on random token trees: same laws, same Philox noise, same path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider import noise
from outrider.certify import growth, reference_gbv, reference_trees
from outrider.certify.growth import Drafting, Grow, Shape, Style
from outrider.certify.paths import MARGIN, PathCount, Watched, as_form, law_rows
from outrider.certify.reference import Noise
from outrider.certify.reference_trees import DraftedTree, TreeOutcome, TreeRound, TreeRule
from outrider.decoding import RULES, Draft, Draws, Kind, Law, RoundNoise, Rule, TargetLaws
from outrider.decoding.children import Drawing, Raced, TailThenTop, Top, Without, WithReplacement
from outrider.decoding.grow import grow
from outrider.decoding.rules import kseq
from outrider.decoding.theory import LawRow
from outrider.tree import TokenTree, full

_REFERENCES: dict[str, TreeRule] = {
    "greedy": reference_trees.greedy,
    "match": reference_trees.match,
    "coupled": reference_trees.coupled,
    "recursive": reference_trees.recursive,
    "hybrid": reference_trees.recursive,
    "traversal": reference_trees.traversal,
    "hybrid-traversal": reference_trees.traversal,
    "kseq": partial(
        reference_trees.kseq, rho_of=partial(reference_trees.enough, halvings=kseq.HALVINGS)
    ),
    "gbv": reference_gbv.gbv,
}
TREE_RULES = tuple(_REFERENCES)
STEEP = 1
"""Every fourth seed, by its remainder, has laws that span e^-60 to 1."""
RACED, PATHS, GROWN = "raced", "paths", "grown"
STYLES: dict[str, Style] = growth.STYLES | {
    "every kind": Style(lambda c: [list(Kind)[i % 4] for i in range(c)]),
    "every kind, tail first": Style(lambda c: [list(Kind)[3 - i % 4] for i in range(c)]),
}
"""Ways to draw siblings; beside them there are `raced`, `paths` (of i.i.d. tokens, from the root)
and `grown`: the rule's own way, drawn by production too."""
_DRAWN_BY: dict[type[Drawing], str] = {
    WithReplacement: "with replacement",
    Without: "without replacement",
    Top: "top K",
    TailThenTop: "tail + top K-1",
    Raced: RACED,
}
# Siblings have as many children each: which of them a used-up support leaves out is all the same.
_GROWN_SHAPES: tuple[Shape, ...] = (full(2, 2), full(3, 1), (0, 0, 1, 1, 1, 2, 2, 2), full(1, 3))
_GROWN_PATHS: tuple[Shape, ...] = ((0, 0, 1, 2, 3, 4), (0, 0, 0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 2))


def reference_of(rule: str) -> TreeRule:
    """A rule's reference, numbers as production takes them."""
    return _REFERENCES[rule]


def styles_of(rule: str) -> tuple[str, ...]:
    """The styles a rule takes."""
    if rule == "gbv":
        return PATHS, GROWN
    if rule == "kseq":
        return "with replacement", GROWN
    return (*STYLES, RACED, GROWN) if rule == "coupled" else (*STYLES, GROWN)


def forms_of(style: str) -> tuple[str, ...]:
    """How laws may be handed over: certain children need none, which is form `point`."""
    return ("dense", "sparse", "point") if style == "top K" else ("dense", "sparse")


def combinations_of(rule: str) -> list[tuple[str, str]]:
    """Every style and form of a rule."""
    return [(style, form) for style in styles_of(rule) for form in forms_of(style)]


class Readings:
    """The noise of a batch as Python numbers."""

    def __init__(self, round_noise: RoundNoise, num_nodes: int, width: int) -> None:
        self._noise, self._width, self._rows = round_noise, width, num_nodes + 1
        self._address = round_noise.seed_B[:, None], round_noise.sample_B[:, None]
        index, place = torch.arange(num_nodes + 1), round_noise.anchor_B[:, None]
        test, extra, draft = noise.STREAM_ACCEPT, noise.STREAM_EXTRA, noise.STREAM_DRAFT
        self._tests = noise.uniforms(*self._address, test, place, index).tolist()
        self._extra = noise.uniforms53(*self._address, extra, place, index).tolist()
        self._draft = noise.uniforms53(*self._address, draft, place, index).tolist()

    def gumbels(self, b: int) -> list[list[float]]:
        """Of tree b the noise of all tokens at each depth."""
        return self._gumbels[b]

    @cached_property
    def _gumbels(self) -> list[list[list[float]]]:
        seed, sample = (part[:, :, None] for part in self._address)
        position = (self._noise.anchor_B[:, None] + torch.arange(self._rows))[:, :, None]
        return noise.gumbels(seed, sample, position, torch.arange(self._width)).tolist()

    def noise(self, b: int) -> Noise:
        """The noise of tree b."""

        def race(position: int, law: LawRow, count: int) -> tuple[int, ...]:
            return tuple(x for _, x in self._race(b, position, law)[:count])

        test, extra, draft = (p[b].__getitem__ for p in (self._tests, self._extra, self._draft))
        return Noise(test, extra, draft, race=race)

    def watched(self, b: int, met: list[float]) -> Noise:
        """The same; how close decisions were goes to `met`."""
        plain = self.noise(b)

        def race(position: int, law: LawRow, count: int) -> tuple[int, ...]:
            keys = [-key for key, _ in self._race(b, position, law)]
            met.extend(a - z for a, z in pairwise(keys[: count + 1]))
            return plain.race(position, law, count)

        return Noise(
            lambda i: Watched(plain.test(i), met),
            lambda i: Watched(plain.extra(i), met),
            lambda i: Watched(plain.draft(i), met),
            race=race,
        )

    def _race(self, b: int, position: int, law: LawRow) -> list[tuple[float, int]]:
        gumbels = self._gumbels[b][position]
        return sorted((-math.log(q) - gumbels[x], x) for x, q in enumerate(law) if q > 0)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch in both forms: for production, and tree by tree for the reference.

    Attributes:
        draft: trees drawn in plain Python, with dense float64 laws.
        target: the target's laws `[B, T, V]`, float64.
        q: the draft's law at every row, `[B, T, V]`.
        noise, readings: addresses and what stands there.
        trees: the same trees.
        style, shapes: how siblings were drawn, and for which parents.
    """

    draft: Draft
    target: NDArray[np.float64]
    q: NDArray[np.float64]
    noise: RoundNoise
    readings: Readings
    trees: list[DraftedTree]
    style: str
    shapes: list[Shape]

    def redraw(self, b: int, chance: Noise) -> DraftedTree:
        """Tree b once more, from other readings of its noise."""
        tree = self.trees[b]
        texts = [tree.path_tokens(row) for row in range(len(tree.tokens) + 1)]
        laws = dict(zip(texts, self.q[b].tolist(), strict=False))
        shape = self.shapes[b]
        return _growth(shape, self.style)(Drafting((), laws.__getitem__, len(shape), chance))

    def round(self, b: int, chance: Noise | None = None) -> TreeRound:
        """What the reference is given of tree b."""
        tree = self.trees[b]
        rows = self.target[b, : len(tree.tokens) + 1].tolist()
        return TreeRound(tree, rows, chance or self.readings.noise(b))


def random_case(
    seed: int,
    style: str,
    *,
    num_texts: int = 150,
    grain: int | None = None,
    shape: Shape | None = None,
) -> Case:
    """Trees of up to 7 nodes (paths: 9) over 2 to 6 tokens; laws are functions of the text before.

    Args:
        seed: of everything.
        style: how siblings are drawn.
        num_texts: trees.
        grain: laws are whole multiples of 1 / grain; None = any.
        shape: of all trees, where they have one; None = each has its own.
    """
    chance = np.random.default_rng(seed)
    width, most = int(chance.integers(2, 7)), int(chance.integers(1, 8))
    shapes = [_shape(chance, style, most) if shape is None else shape for _ in range(num_texts)]
    num_nodes = max(map(len, shapes), default=0)
    addresses = RoundNoise(
        torch.from_numpy(chance.integers(-(2**63), 2**63, num_texts)),
        torch.from_numpy(chance.integers(0, 4, num_texts)),
        torch.from_numpy(chance.integers(1, 2**20, num_texts)),
    )
    readings = Readings(addresses, num_nodes, width)
    p_BTV, q_BTV = _laws(chance, (num_texts, num_nodes + 1, width), grain)
    if grain is None and seed % 4 == STEEP:
        p_BTV, q_BTV = _steep(chance, p_BTV), _steep(chance, q_BTV)
    trees: list[DraftedTree] = []
    places_BT = np.zeros((num_texts, num_nodes + 1), dtype=np.int64)
    for b, q_rows in enumerate(q_BTV.tolist()):
        tree, places = _drawn(shapes[b], style, q_rows, readings.noise(b))
        trees.append(tree)
        places_BT[b, : len(places)] = places
    target = np.take_along_axis(p_BTV, places_BT[:, :, None], 1)
    q = np.take_along_axis(q_BTV, places_BT[:, :, None], 1)
    draft = _draft(trees, q_BTV, places_BT)
    return Case(draft, target, q, addresses, readings, trees, style, shapes)


def _shape(chance: np.random.Generator, style: str, most: int) -> Shape:
    if style == PATHS:
        count, depth = int(chance.integers(0, 5)), int(chance.integers(1, 4))
        depth = min(depth, 9 // max(1, count))
        return tuple(0 if d == 0 else k * depth + d for k in range(count) for d in range(depth))
    return tuple(int(chance.integers(0, j + 1)) for j in range(int(chance.integers(0, most + 1))))


def _laws(
    chance: np.random.Generator, size: tuple[int, int, int], grain: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Laws of target and draft by number of the text; some equal, some nearly."""
    p, q = law_rows(chance, size), law_rows(chance, size)
    close = chance.random(size[:2]) < 0.3
    near = (chance.random(size[:2]) * (chance.random(size[:2]) < 0.5))[close][:, None]
    if grain:
        p, q = _rounded(p, grain), _rounded(q, grain)
    p[close] = np.where(near == 0, q[close], (1 - near) * q[close] + near * p[close])
    return (_rounded(p, grain) if grain else p), q


def _steep(chance: np.random.Generator, laws: NDArray[np.float64]) -> NDArray[np.float64]:
    """The laws, half of them replaced by such as span e^-60 to 1."""
    far = np.exp(-60 * chance.random(laws.shape))
    far /= far.sum(-1, keepdims=True)
    return np.where(chance.random(laws.shape[:-1])[..., None] < 0.5, far, laws)


def _rounded(laws: NDArray[np.float64], grain: int) -> NDArray[np.float64]:
    """Whole multiples of 1 / grain; the likeliest token takes what is left over."""
    whole = np.floor(laws * grain)
    top = laws.argmax(-1)[..., None]
    left = grain - whole.sum(-1, keepdims=True)
    np.put_along_axis(whole, top, np.take_along_axis(whole, top, -1) + left, -1)
    return whole / grain


def _drawn(
    shape: Shape, style: str, rows: Sequence[LawRow], chance: Noise
) -> tuple[DraftedTree, list[int]]:
    """A tree, and for each of its rows the number of the text before it."""
    numbers: dict[tuple[int, ...], int] = {}

    def number(text: tuple[int, ...]) -> int:
        return numbers.setdefault(text, len(numbers))

    drafting = Drafting((), lambda text: rows[number(text)], len(shape), chance)
    tree = _growth(shape, style)(drafting)
    texts: list[tuple[int, ...]] = [()]
    for x, parent in zip(tree.tokens, tree.parents, strict=True):
        texts.append((*texts[parent], x))
    return tree, [number(text) for text in texts]


def _growth(shape: Shape, style: str) -> Grow:
    if style == RACED:
        return growth.raced(shape)
    return growth.static(shape, STYLES["with replacement" if style == PATHS else style])


def _draft(
    trees: list[DraftedTree], q_BTV: NDArray[np.float64], places_BT: NDArray[np.int64]
) -> Draft:
    """The trees as production reads them; the second drafter's laws stand behind the first's."""
    tree = TokenTree.of([t.tokens for t in trees], [t.parents for t in trees])
    table = np.concatenate((q_BTV, q_BTV[:, :, ::-1])).reshape(-1, q_BTV.shape[2])
    num_rows = q_BTV.shape[1]
    rows = np.zeros(tree.tokens_BN.shape, dtype=np.int64)
    kinds = np.zeros_like(rows)
    for b, one in enumerate(trees):
        for j, (parent, base) in enumerate(zip(one.parents, one.base, strict=True)):
            place = b * num_rows + places_BT[b, parent]
            # Lists are the first drafter's own rows, tuples its rows read backwards.
            rows[b, j] = place + (len(table) // 2 if isinstance(base, tuple) else 0)
            kinds[b, j] = one.kinds[j]
    occurring = frozenset(kind for one in trees for kind in one.kinds)
    law, law_rows_BN = Law.dense(torch.from_numpy(table)), torch.from_numpy(rows)
    return Draft(tree, law, law_rows_BN, torch.from_numpy(kinds), occurring)


def with_law(draft: Draft, dtype: torch.dtype, form: str) -> Draft:
    """The same draft, its laws in another dtype and form."""
    if form == "point":
        assert draft.kinds <= {Kind.POINT}
        return Draft(draft.tree, None)
    law = draft.law and as_form(draft.law.probs.to(dtype), form)
    return Draft(draft.tree, law, draft.law_rows_BN, draft.kinds_BN, draft.kinds)


def compare_trees(
    rule: str,
    seed: int,
    texts: int,
    style: str,
    form: str,
    dtype: torch.dtype,
    production: Rule | None = None,
) -> PathCount:
    """Runs random trees through production and through the reference.

    Args:
        rule: name of the rule.
        seed: of shapes, laws and noise addresses.
        texts: how many trees.
        style: how siblings are drawn, of `styles_of(rule)`.
        form: how the draft's laws are handed over, of `forms_of(style)`.
        dtype: float64 or float32; the reference reads float64.
        production: what is compared with the reference of `rule`; None = the rule itself.
    """
    production = production or RULES[rule]
    # gbv orders tokens by p / q, on a scale of 2^16 to the octave: of 128ths no two ratios are
    # nearer than that.
    grain = 128 if rule == "gbv" else None
    if style == GROWN:
        shapes = _GROWN_PATHS if rule == "gbv" else _GROWN_SHAPES
        drawn_as = _DRAWN_BY[type(RULES[rule].drawing)]
        shape = shapes[seed % len(shapes)]
        case = random_case(seed, drawn_as, num_texts=texts, grain=grain, shape=shape)
        draft = _grown(RULES[rule], case, shape, dtype, form)
    else:
        case = random_case(seed, style, num_texts=texts, grain=grain)
        draft = with_law(case.draft, dtype, form)
    p_BTV = torch.from_numpy(case.target).to(dtype)
    verdict = production.verify(draft, TargetLaws(p_BTV), case.noise)
    drawn_alike = _alike(draft, case.draft).tolist()
    parts = verdict.num_accepted_B.tolist(), verdict.path_BD.tolist(), verdict.token_B.tolist()
    count = PathCount(rule, rounds=texts)
    for b, (kept, path, token) in enumerate(zip(*parts, strict=True)):
        count.draws += _draws_of(rule, case.trees[b], case.target.shape[2])
        outcome = TreeOutcome(tuple(path[:kept]), token)
        if drawn_alike[b] and _REFERENCES[rule](case.round(b)) == outcome and not any(path[kept:]):
            continue
        distance = margin(rule, case, b)
        if distance < MARGIN:
            count.excused += 1
            continue
        count.wrong += 1
        if len(count.examples) < 3:
            what = f"gave {outcome}" if drawn_alike[b] else "was drawn otherwise"
            count.examples.append(f"{rule}, {style}: {case.round(b)} {what}, margin {distance:.1e}")
    return count


def _grown(rule: Rule, case: Case, shape: Shape, dtype: torch.dtype, form: str) -> Draft:
    """The trees of the case, drawn by production."""
    q_BTV, texts = torch.from_numpy(case.q).to(dtype), torch.arange(len(case.q))[:, None]

    def expand(tree: TokenTree, rows_BL: Tensor) -> Law:
        return as_form(q_BTV[texts, rows_BL].flatten(0, 1), form)

    return grow(Draws(rule, case.noise), shape, expand)


def _alike(drawn: Draft, plain: Draft) -> Tensor:
    """Which trees two drafts have in common; `plain` may be padded less."""
    num_nodes = plain.tree.num_nodes
    beyond_BN = ~plain.tree.is_node()
    same_B = drawn.tree.counts_B == plain.tree.counts_B
    for own, other in (
        (drawn.tree.tokens_BN, plain.tree.tokens_BN),
        (drawn.tree.parents_BN, plain.tree.parents_BN),
        (drawn.node_kinds(), plain.node_kinds()),
    ):
        same_B = same_B & ((own[:, :num_nodes] == other) | beyond_BN).all(1)
    return same_B


def _draws_of(rule: str, tree: DraftedTree, width: int) -> int:
    """Uniforms that drawing and verifying a tree may read."""
    count = len(tree.tokens)
    drawn = sum(kind != Kind.POINT for kind in tree.kinds)
    if rule == "coupled":
        deepest = max((len(tree.path_tokens(row)) for row in range(count + 1)), default=0)
        return (deepest + 1) * width
    if rule == "greedy":
        return drawn
    return drawn + count + 1


def margin(rule: str, case: Case, b: int) -> float:
    """The least distance of a decision of the reference from its threshold, draws included."""
    met: list[float] = []
    round_ = case.round(b, case.readings.watched(b, met))
    _REFERENCES[rule](round_)
    if rule == "greedy":
        rows = (sorted(row)[-2:] for row in round_.target)
        met.extend(float(second) - float(first) for first, second in rows)
    case.redraw(b, round_.noise)
    return min(met, default=math.inf)
