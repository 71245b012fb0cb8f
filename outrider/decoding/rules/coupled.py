"""`coupled`: draft and target race on the same Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule, all_rows, while_equal
from outrider.decoding.sampling import gumbel_race


class CoupledRule(Rule):
    """Target and draft race on the same Gumbel noise; drafted tokens stay while both agree.

    The text is that of plain sampling with the same seed, whatever was drafted, and however.
    Source: Daliri, Musco, Suresh, arXiv 2408.07978.
    """

    name = "coupled"
    source = "Daliri, Musco, Suresh, arXiv 2408.07978 (chains)"
    guarantee = "seed"
    trees = True
    reads = "path"

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """A row at depth d races with the noise of position anchor + d on stream TARGET."""
        at_BT = all_rows(target)
        num_texts, num_rows = at_BT.shape
        tree = draft.tree
        ahead_BT = tree.depths().to(noise.anchor_B.device)
        wide = noise.select(
            torch.arange(num_texts, device=ahead_BT.device).repeat_interleave(num_rows)
        )
        # Rows past a tree's end are padding: an empty support costs no noise.
        real_BT = torch.nn.functional.pad(tree.is_node(), (1, 0), value=True)
        rows = target.probs(at_BT.flatten())
        if not real_BT.all():
            rows = rows.masked_fill(~real_BT.reshape(-1, 1).to(rows.device), 0)
        position = wide.anchor_B + ahead_BT.flatten()
        drawn = gumbel_race(rows, None, wide.seed_B, wide.sample_B, position)
        return while_equal(draft, drawn.view_as(at_BT))

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """The race at position anchor + index with the draft's law."""
        return gumbel_race(
            law.probs, law.ids, noise_n.seed_B, noise_n.sample_B, noise_n.anchor_B + index
        )
