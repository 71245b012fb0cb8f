"""`greedy`: drafted tokens stay while they are the target's argmax."""

from __future__ import annotations

from torch import Tensor

from outrider.decoding.children import Drawing, Top
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, while_equal
from outrider.decoding.rules.walking import follow


class GreedyRule(Rule):
    """Drafted tokens stay while they are the target's argmax, the lowest id of several."""

    name = "greedy"
    source = "Stern, Shazeer, Uszkoreit, NeurIPS 2018, arXiv 1811.03115; trees: SpecInfer"
    guarantee = "seed"
    trees = True
    reads = "path"
    drawing: Drawing = Top()
    needs_probs = False

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """No noise is read. The few rows of short chains are all read at once."""
        if draft.tree.is_chain and target.fits_caches:
            return while_equal(draft, target.likeliest())

        def own(texts_n: Tensor, at_n: Tensor, flat_n: Tensor) -> Tensor:
            return target.argmax(flat_n)

        return follow(draft, target, own)

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """The law's likeliest token."""
        return law.argmax()
