"""`coupled`: draft and target race on the same Gumbel noise."""

from __future__ import annotations

from torch import Tensor

from outrider import host
from outrider.decoding.children import Drawing, Raced
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule
from outrider.decoding.rules.walking import follow
from outrider.decoding.sampling import gumbel_race


class CoupledRule(Rule):
    """Target and draft race on the same Gumbel noise; drafted tokens stay while both agree.

    The target's own token at a position is argmax(log p + G), as in plain sampling with the seed;
    the walk goes on while a child bears it. So the text is that of plain sampling with the same
    seed, whatever was drafted, and however. The children of a row should be the top K of
    log q + G: sampled without replacement, and on the same noise as the target.
    Source: Daliri, Musco, Suresh, arXiv 2408.07978, for one child.
    """

    name = "coupled"
    source = "Daliri, Musco, Suresh, arXiv 2408.07978 (chains)"
    guarantee = "seed"
    trees = True
    reads = "path"
    drawing: Drawing = Raced()

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """A row at depth d races with the noise of position anchor + d on stream TARGET."""
        parts = draft.tree.depths(), noise.seed_B, noise.sample_B, noise.anchor_B
        depths_BT, seed_B, sample_B, anchor_B = host.sent(parts, target.device)

        def own(texts_n: Tensor, at_n: Tensor, flat_n: Tensor) -> Tensor:
            position_n = anchor_B[texts_n] + depths_BT[texts_n, at_n]
            rows_nV = target.probs(flat_n)
            return gumbel_race(rows_nV, None, seed_B[texts_n], sample_B[texts_n], position_n)

        return follow(draft, target, own)

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """The race at position anchor + index with the draft's law."""
        return gumbel_race(
            law.probs, law.ids, noise_n.seed_B, noise_n.sample_B, noise_n.anchor_B + index
        )
