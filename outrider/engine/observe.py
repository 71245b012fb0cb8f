"""What drafters that ask for it get to see of a round: the target's rows along the kept path."""

from __future__ import annotations

from outrider.decoding import Draft, Verdict
from outrider.engine.group import Group, Scores


def show_rows(group: Group, draft: Draft, scores: Scores, verdict: Verdict) -> None:
    """Hands the group's drafter the tested rows of each text, before anything is committed."""
    drafted, paths = draft.tree.tokens_BN.tolist(), verdict.path_BD.tolist()
    accepted = verdict.num_accepted_B.tolist()
    for b, text in enumerate(group.texts):
        path = paths[b][: accepted[b]]
        if scores.broken(b, path) is None:
            tokens = [text.tokens[-1], *(drafted[b][row - 1] for row in path)]
            group.drafter.observe(text, tokens, scores.rows(b, [0, *path]))
