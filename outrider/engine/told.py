"""What a request is told of a round beside its tokens, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

import torch

from outrider.decoding import Draft, Kind, TargetRows, Verdict
from outrider.engine.group import Group, Scores
from outrider.engine.logprobs import logprobs, sampled
from outrider.types import RoundTrace, Source, StageTimes, TokenLogprob


@dataclass(frozen=True, slots=True)
class Told:
    """Log-probabilities of the kept tokens and the added one, and the round; None: not asked."""

    logprobs: tuple[TokenLogprob, ...] | None = None
    trace: RoundTrace | None = None


NOTHING = Told()


def told(
    group: Group,
    draft: Draft,
    scores: Scores,
    laws: TargetRows,
    verdict: Verdict,
    times: StageTimes,
) -> list[Told]:
    """What each text's request asked for; `times` are filled in as the round goes on."""
    asked = [text.request.trace for text in group.texts]
    likely = logprobs(group, draft, scores, laws, verdict)
    if not any(asked) and all(one is None for one in likely):
        return [NOTHING] * len(asked)
    rounds = _Rounds(group, draft, laws, verdict, times)
    return [Told(likely[b], rounds.of(b) if wanted else None) for b, wanted in enumerate(asked)]


def names_of(group: Group, draft: Draft, text: int, rows: Sequenced[int]) -> list[str]:
    """Who drafted the nodes of some rows of a text."""
    if draft.part_BN is None or not rows:
        return [group.drafter.name for _ in rows]
    parts = draft.part_BN[text].tolist()
    return [group.drafter.names[parts[row - 1]] for row in rows]


def added_source(parents: list[int], path: list[int]) -> Source:
    """What the target's own token is: a correction where it stands beside guesses."""
    return "correction" if (path[-1] if path else 0) in parents else "bonus"


class _Rounds:
    """The traces of a group's round."""

    def __init__(
        self, group: Group, draft: Draft, laws: TargetRows, verdict: Verdict, times: StageTimes
    ) -> None:
        self._group, self._draft, self._laws = group, draft, laws
        self._verdict, self._times = verdict, times
        self._allowed = group.depths()

    def of(self, b: int) -> RoundTrace:
        """The round of one text; `kept` is what it would be without stop rules."""
        text, tree = self._group.texts[b], self._draft.tree
        count = int(tree.counts_B[b])
        tokens, parents = (part[b, :count].tolist() for part in (tree.tokens_BN, tree.parents_BN))
        path = self._verdict.path_BD[b, : int(self._verdict.num_accepted_B[b])].tolist()
        kinds = [Kind(kind) for kind in self._draft.node_kinds()[b, :count].tolist()]
        return RoundTrace(
            round=len(text.outbox),
            position=len(text.tokens),
            rule=text.rule,
            allowed=self._allowed[b],
            tokens=tuple(tokens),
            parents=tuple(parents),
            drafters=tuple(names_of(self._group, self._draft, b, range(1, count + 1))),
            kinds=tuple(kind.name.lower() for kind in kinds),
            draft_probs=self._draft_probs(b, tokens, kinds),
            target_probs=self._target_probs(b, tokens, parents),
            path=tuple(path),
            added=int(self._verdict.token_B[b]),
            source=added_source(parents, path),
            kept=len(path) + 1,
            num_texts=len(self._group.texts),
            times=self._times,
        )

    def _draft_probs(
        self, b: int, tokens: list[int], kinds: list[Kind]
    ) -> tuple[float | None, ...]:
        law = self._draft.law
        if law is None:
            return (None,) * len(tokens)
        rows = self._draft.law_rows()[b, : len(tokens)]
        probs = law.select(rows).prob_of(torch.tensor(tokens, device=law.probs.device)).tolist()
        pairs = zip(probs, kinds, strict=True)
        return tuple(None if kind == Kind.POINT else prob for prob, kind in pairs)

    def _target_probs(self, b: int, tokens: list[int], parents: list[int]) -> tuple[float, ...]:
        # Siblings share their parent's row.
        rows = sorted(set(parents))
        if not rows:
            return ()
        laws_nV = sampled(self._group, self._laws, b, rows)
        places = [rows.index(parent) for parent in parents]
        return tuple(laws_nV[places, tokens].tolist())
