"""`recursive`: children are tested one after another, each against its own law."""

from __future__ import annotations

import torch

from outrider.decoding import host
from outrider.decoding.children import Drawing, Without
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, extra_uniforms, first_rows, test_uniforms
from outrider.decoding.rules.residual import Residuals, by_row, first_kept
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
        tests_R = by_row(test_uniforms(noise, draft.tree.num_nodes), target)
        residuals = Residuals(draft, target)
        walk = Walk(draft.tree, target)
        for _ in range(draft.tree.depth):
            if len(walk.texts_n) == 0:
                break
            inner = host.some(residuals.offers(walk.flat_n, torch.zeros_like(walk.at_n)))
            next_n = torch.zeros_like(walk.at_n)
            at = walk.flat_n[inner]
            next_n[inner] = first_kept(residuals, tests_R, at, torch.zeros_like(at).bool())
            walk.step(next_n)
        at_B = first_rows(target) + walk.at_B
        return walk.verdict(residuals.draw(at_B, extra_uniforms(noise)), draft.tree.depth)
