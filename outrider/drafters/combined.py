"""Several drafters for one draft: `a+b`.

Chains: each text gets the longest proposal. Trees: one tree of all proposals, in which every child
keeps the law it was drawn from. Which drafter serves a text never depends on what was drawn, so
that laws stay what they are said to be.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding import Draft, Kind
from outrider.decoding.laws import one_table
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.points import PointTree, merged
from outrider.errors import InvalidConfig, UnsupportedModel
from outrider.models.base import Target
from outrider.sequence import Sequence
from outrider.tree import TokenTree
from outrider.types import StageTimes

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@dataclass(slots=True)
class _Node:
    """A drafted token in plain numbers.

    `law_row` counts from the first of all parts' laws, `part` through the combination's names.
    """

    token: int
    parent: int
    kind: int
    law_row: int
    part: int


class SeveralDrafters(Drafter):
    """What every drafter made of others does: it tells them all.

    Args:
        drafters: the parts, the preferred first among equals.
    """

    def __init__(self, drafters: Sequenced[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.trusted = any(drafter.trusted for drafter in drafters)
        self.certain = all(drafter.certain for drafter in drafters)
        self.by_clock = any(drafter.by_clock for drafter in drafters)
        self.wants_rows = any(drafter.wants_rows for drafter in drafters)
        self.taps = tuple(sorted({layer for drafter in drafters for layer in drafter.taps}))
        # A call for each text and round, which most look-ups have nothing to do in.
        self._committed = [one for one in drafters if type(one).commit is not Drafter.commit]
        self._timed = [one for one in drafters if type(one).timed is not Drafter.timed]

    def attach(self, target: Target) -> Target:
        """Asks all of them, one after another."""
        for drafter in self.drafters:
            target = drafter.attach(target)
        if self.taps:
            try:
                with target.tapping(self.taps):
                    pass
            except UnsupportedModel as error:
                raise UnsupportedModel(
                    f"drafter={self.name!r} cannot be: a part of it reads hidden states that "
                    f"another part keeps from it ({error}); take one of the two"
                ) from error
        return target

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts."""
        return tuple(name for drafter in self.drafters for name in drafter.names)

    def first_names(self, asked: Sequenced[Drafter]) -> list[int]:
        """Where the names of some of the drafters begin among all."""
        counts = [len(drafter.names) for drafter in self.drafters]
        return [sum(counts[: self.drafters.index(drafter)]) for drafter in asked]

    def observe(
        self, text: Sequence, tokens: Sequenced[int], logits_nV: Float[Tensor, "n V"]
    ) -> None:
        """Shows the rows to those who asked."""
        for drafter in self.drafters:
            if drafter.wants_rows:
                drafter.observe(text, tokens, logits_nV)

    def notice(self, text: Sequence, first: int, hidden_nF: Float[Tensor, "n F"]) -> None:
        """Shows each the states of its own layers."""
        states = dict(zip(self.taps, hidden_nF.chunk(len(self.taps), -1), strict=True))
        for drafter in self.drafters:
            if drafter.taps == self.taps:
                drafter.notice(text, first, hidden_nF)
            elif drafter.taps:
                drafter.notice(text, first, torch.cat([states[i] for i in drafter.taps], -1))

    def expect(self, num_prompt: int) -> None:
        """Asks all of them."""
        for drafter in self.drafters:
            drafter.expect(num_prompt)

    def never_asked(self) -> tuple[str, ...]:
        """Those of all of them."""
        return tuple(name for drafter in self.drafters for name in drafter.never_asked())

    def target_changed(self) -> None:
        """Tells all of them."""
        for drafter in self.drafters:
            drafter.target_changed()

    def foresee(
        self, text: Sequence, accepted_1: Int64[Tensor, " 1"], token_1: Int64[Tensor, " 1"]
    ) -> None:
        """Tells all of them: who did not draw for the text lets it be."""
        for drafter in self.drafters:
            drafter.foresee(text, accepted_1, token_1)

    def commit(self, text: Sequence, accepted: int) -> None:
        """Tells all of them."""
        for drafter in self._committed:
            drafter.commit(text, accepted)

    def timed(self, texts: Sequenced[Sequence], times: StageTimes) -> None:
        """Tells all of them."""
        for drafter in self._timed:
            drafter.timed(texts, times)

    def discard(self, text: Sequence) -> None:
        """Tells all of them."""
        for drafter in self.drafters:
            drafter.discard(text)

    def close(self, text: Sequence) -> None:
        """Tells all of them."""
        for drafter in self.drafters:
            drafter.close(text)


class CombinedDrafter(SeveralDrafters):
    """Drafts with several drafters at once.

    Those whose tokens are certain cost next to nothing and are always asked. Of chains each text
    gets the longest; one that is drawn is asked for where those fall short of the depth. A tree has
    the nodes of all certain drafters and of the first that draws. Drawn nodes come before certain
    ones: what was drawn without its earlier siblings is still without those alone.

    Args:
        drafters: two or more, the preferred first among equals.

    Raises:
        InvalidConfig: fewer than two.
    """

    def __init__(self, drafters: Sequenced[Drafter]) -> None:
        if len(drafters) < 2:
            raise InvalidConfig(
                f"{len(drafters)} drafters to combine; give two or more, or the one by itself"
            )
        super().__init__(drafters)
        self.name = "+".join(drafter.name for drafter in drafters)
        self._certain = [drafter for drafter in drafters if drafter.certain]
        self._drawing = [drafter for drafter in drafters if not drafter.certain]

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The longest chain of each text, or one tree of all."""
        if draws.trees is not None:
            # A second one would draw with the noise of the first. Where a rule takes no certain
            # tokens, those who have no others are left out.
            able = self._certain if draws.max_certain or not self._drawing else ()
            asked = (*self._drawing[:1], *able)
            drafts = [drafter.propose(texts, depths, draws) for drafter in asked]
            return Parts(drafts, self.first_names(asked)).grafted(draws.trees.nodes)
        return self._longest(texts, depths, draws)

    def _longest(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        drafts: list[Draft] = []
        order = (*self._certain, *self._drawing)
        chosen: list[int | None] = [None] * len(texts)
        left = list(depths)
        lengths = [0] * len(texts)
        for drafter in order:
            if drafts and not any(left):
                break
            draft = drafter.propose(texts, left, draws)
            for b, count in enumerate(draft.tree.counts_B.tolist()):
                # A drawn chain's length may follow from what was drawn: it is not compared.
                if count > (lengths[b] if drafter.certain else 0):
                    chosen[b], lengths[b] = len(drafts), count
                    left[b] = left[b] if drafter.certain and count < left[b] else 0
            drafts.append(draft)
        firsts = self.first_names(order[: len(drafts)])
        serving = {which for which in chosen if which is not None}
        if len(serving) > 1:
            return Parts(drafts, firsts).side_by_side(chosen)
        # One alone says something, or nobody: its draft is all there is.
        (which,) = serving or {0}
        draft = drafts[which]
        if draft.worth_BN is not None:
            # Nobody stops the whole, so nothing is to be learned of when to.
            draft = replace(draft, worth_BN=None)
        return named(draft, firsts[which])

    def unread(self, text: Sequence) -> int:
        """What the one with the most to read has left."""
        return max(drafter.unread(text) for drafter in self.drafters)

    def read(self, text: Sequence, rows: int) -> None:
        """Each reads as many tokens."""
        for drafter in self.drafters:
            drafter.read(text, rows)


def named(draft: Draft, first: int) -> Draft:
    """A part's draft as one of the whole's, among whose names its own begin at `first`."""
    if not first:
        return draft
    # In each round: `replace` takes three times as long.
    return Draft(
        tree=draft.tree,
        law=draft.law,
        law_rows_BN=draft.law_rows_BN,
        kinds_BN=draft.kinds_BN,
        kinds=draft.kinds,
        part_BN=None if draft.part_BN is None else draft.part_BN + first,
        worth_BN=draft.worth_BN,
        part=draft.part + (first if draft.part_BN is None else 0),
    )


class Parts:
    """Drafts of the same texts taken apart; `names` says where those of each begin."""

    def __init__(self, drafts: Sequenced[Draft], names: Sequenced[int]) -> None:
        self._drafts, self._names = drafts, names
        self._laws = [draft.law for draft in drafts if draft.law is not None]
        self._first: list[int] = []
        num_rows = 0
        for draft in drafts:
            self._first.append(num_rows)
            num_rows += 0 if draft.law is None else len(draft.law)
        self._lists = [
            [
                part.tolist()
                for part in (
                    draft.tree.tokens_BN,
                    draft.tree.parents_BN,
                    draft.node_kinds(),
                    draft.law_rows(),
                    draft.parts(),
                    draft.tree.counts_B,
                )
            ]
            for draft in drafts
        ]

    def side_by_side(self, chosen: Sequenced[int | None]) -> Draft:
        """One draft, of which text b is that of draft `chosen[b]`, or empty."""
        return self._draft(
            [[] if which is None else self._nodes(which, b) for b, which in enumerate(chosen)]
        )

    def grafted(self, max_nodes: int) -> Draft:
        """One tree per text of all drafts' trees, as far as there is room."""
        num_texts = len(self._drafts[0].tree.counts_B)
        return self._draft([self._whole(b, max_nodes) for b in range(num_texts)])

    def _nodes(self, which: int, b: int) -> list[_Node]:
        """The nodes of one draft's tree."""
        tokens, parents, kinds, rows, parts, counts = self._lists[which]
        return [
            _Node(
                tokens[b][j],
                parents[b][j],
                kinds[b][j],
                0 if kinds[b][j] == Kind.POINT else self._first[which] + rows[b][j],
                self._names[which] + parts[b][j],
            )
            for j in range(counts[b])
        ]

    def _whole(self, b: int, max_nodes: int) -> list[_Node]:
        """All drafts' nodes of one text: drawn ones, then certain ones, equal paths once.

        A drawn child and a certain one of the same token both stay: taking either out by what was
        drawn would change the law of the rest.
        """
        trees = [self._nodes(which, b) for which in range(len(self._drafts))]
        whole: list[_Node] = []
        if any(node.kind != Kind.POINT for node in trees[0]):
            whole = trees.pop(0)
        if any(node.kind == Kind.TAIL for node in whole):
            # A tail leaves out its certain siblings, of which there must be no others.
            return whole
        points = merged([_points(nodes) for nodes in trees], max_nodes - len(whole))
        before = len(whole)
        found = zip(points.tokens, points.parents, points.origins, strict=True)
        for token, parent, part in found:
            whole.append(_Node(token, parent + before if parent else 0, Kind.POINT, 0, part))
        return whole

    def _draft(self, texts: list[list[_Node]]) -> Draft:
        """The draft of these nodes."""
        tree = TokenTree.of(
            [[node.token for node in nodes] for nodes in texts],
            [[node.parent for node in nodes] for nodes in texts],
        )
        kinds = frozenset(Kind(node.kind) for nodes in texts for node in nodes)
        part_BN = _table([[node.part for node in nodes] for nodes in texts], tree)
        if kinds <= {Kind.POINT}:
            return Draft(tree, None, part_BN=part_BN)
        rows_BN = _table([[node.law_row for node in nodes] for nodes in texts], tree)
        kinds_BN = _table([[node.kind for node in nodes] for nodes in texts], tree)
        return Draft(tree, one_table(self._laws), rows_BN, kinds_BN, kinds, part_BN)


def _points(nodes: list[_Node]) -> PointTree:
    return PointTree(
        tuple(node.token for node in nodes),
        tuple(node.parent for node in nodes),
        tuple(node.part for node in nodes),
    )


def _table(rows: list[list[int]], tree: TokenTree) -> Tensor:
    full = [[*row, *[0] * (tree.num_nodes - len(row))] for row in rows]
    return torch.tensor(full, dtype=torch.int64).reshape(len(full), tree.num_nodes)
