"""What drafters that ask for it get to see of a round: the target's rows along the kept path."""

from __future__ import annotations

import itertools

from outrider.decoding import Draft, Verdict
from outrider.engine.group import Group, Scores


def show_rows(group: Group, draft: Draft, scores: Scores, verdict: Verdict) -> None:
    """Hands the group's drafter the tested rows of each text, before anything is committed."""
    starts = itertools.accumulate(scores.counts, initial=0)
    drafted, paths = draft.tree.tokens_BN.tolist(), verdict.path_BD.tolist()
    accepted = verdict.num_accepted_B.tolist()
    for b, (text, start) in enumerate(zip(group.texts, starts, strict=False)):
        if scores.broken(b, accepted[b]) is not None:
            continue
        nodes = paths[b][: accepted[b]]
        tokens = [text.tokens[-1], *(drafted[b][node - 1] for node in nodes)]
        rows = [start, *(start + node for node in nodes)]
        group.drafter.observe(text, tokens, scores.logits_RV[rows])
