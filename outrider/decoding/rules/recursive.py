"""`recursive`: children are tested one after another, each against its own law."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from outrider.decoding.children import Drawing, Without
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules import rowwise
from outrider.decoding.rules.base import Rule, first_rows, round_uniforms
from outrider.decoding.rules.residual import Residuals, by_row, first_kept
from outrider.decoding.rules.rowwise import Row, Trees
from outrider.decoding.rules.token import TokenRule
from outrider.decoding.rules.walking import Walk

_TOKEN = TokenRule()


class RecursiveRule(Rule):
    """Keeps the first child x with `u * law(x) < R(x)`; a refused one takes its law out of R.

    R begins as the target's law and becomes `norm(max(0, R - law))`, law being the child's own
    given its earlier siblings; where every child was refused the added token is drawn from R. With
    replacement it is SpecInfer's multi-step rule, without it is recursive rejection; of certain
    children it keeps x with chance R(x); kinds and drafters may be mixed. On a chain it is `token`.
    """

    name = "recursive"
    source = (
        "Miao et al. (SpecInfer), ASPLOS 2024, arXiv 2305.09781; Chen et al. (Sequoia), NeurIPS "
        "2024, arXiv 2402.12374; Jeon et al., arXiv 2402.14160; Li et al. (EAGLE), ICML 2024"
    )
    trees = True
    needs_draft_law = True
    drawing: Drawing = Without()

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """Node j is tested on stream ACCEPT, index j; the added token is drawn on EXTRA, index 0.

        Rows are read as they are reached; those off the walk are not.
        """
        if draft.tree.is_chain:
            return _TOKEN.verify(draft, target, noise)
        self.check(draft)
        draft = draft.to(target.device)
        tests_BN, extra_B = round_uniforms(noise, draft.tree.num_nodes, target.device)
        if not target.on_host:
            return _level_by_level(draft, target, tests_BN, extra_B)
        trees = Trees(draft, target, tests_BN)
        return trees.verdict(_tree_by_tree(trees), extra_B)


def _tree_by_tree(trees: Trees) -> Iterator[tuple[list[int], Row]]:
    """The path each text goes down, and the row it ends on."""
    for root in trees.roots:
        path, row = list[int](), Row(trees, root)
        while (kept := rowwise.first_kept(trees, row)) is not None:
            path.append(kept)
            row = Row(trees, kept)
        yield path, row


def _level_by_level(draft: Draft, target: TargetRows, tests_BN: Tensor, extra_B: Tensor) -> Verdict:
    """The same, all texts at once; the host reads nothing."""
    tests_R = by_row(tests_BN, target)
    residuals = Residuals(draft, target)
    walk = Walk(draft.tree, target)
    for _ in range(draft.tree.depth):
        walk.step(first_kept(residuals, tests_R, walk.flat_n))
    at_B = first_rows(target) + walk.at_B
    return walk.verdict(residuals.draw(at_B, extra_B), draft.tree.depth)
