"""What a request is told of a round beside its tokens, for those who ask."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from typing import Any

import torch

from outrider.decoding import Draft, Kind, TargetRows, Verdict
from outrider.engine.group import Group, Scores
from outrider.engine.logprobs import logprobs, sampled
from outrider.sequence import Sequence
from outrider.types import RoundTrace, Source, StageTimes, TokenLogprob


@dataclass(frozen=True, slots=True)
class Told:
    """Log-probabilities of the kept tokens and the added one, and the round; None: not asked."""

    logprobs: tuple[TokenLogprob, ...] | None = None
    trace: RoundTrace | None = None


NOTHING = Told()


def asks(text: Sequence) -> bool:
    """Whether a text's request wants to be told anything."""
    return text.request.trace or text.request.sampling.logprobs is not None


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
    if not rows:
        return []
    if draft.part_BN is None:
        return [group.drafter.names[draft.part]] * len(rows)
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
        added, worth_BN = int(self._verdict.token_B[b]), self._draft.worth_BN
        return RoundTrace(
            round=len(text.outbox),
            position=len(text.tokens),
            rule=text.rule,
            allowed=self._allowed[b],
            tokens=tuple(tokens),
            parents=tuple(parents),
            drafters=tuple(names_of(self._group, self._draft, b, range(1, count + 1))),
            kinds=tuple(kind.name.lower() for kind in kinds),
            **self._laws_in_short(b, tokens, parents, kinds),
            **self._added(b, added, path[-1] if path else 0, (parents, kinds)),
            worths=None if worth_BN is None else tuple(worth_BN[b, :count].tolist()),
            path=tuple(path),
            added=added,
            source=added_source(parents, path),
            kept=len(path) + 1,
            num_texts=len(self._group.texts),
            num_rows=len(self._group.texts) + int(tree.counts_B.sum()),
            times=self._times,
        )

    def _laws_in_short(
        self, b: int, tokens: list[int], parents: list[int], kinds: list[Kind]
    ) -> dict[str, tuple[Any, ...]]:
        """The fields that say what the laws were at each token's parent's row."""
        # Siblings share their parent's row.
        rows = sorted(set(parents))
        p_nV = sampled(self._group, self._laws, b, rows) if rows else torch.empty(0, 0)
        places = [rows.index(parent) for parent in parents]
        q_NV = self._draft_laws(b, len(tokens), p_nV)
        apart_N = None if q_NV is None else (q_NV - p_nV[places]).abs().sum(-1).tolist()
        certain = [kind == Kind.POINT for kind in kinds]

        def drawn(numbers: list[float] | None) -> tuple[float | None, ...]:
            if numbers is None:
                return (None,) * len(tokens)
            pairs = zip(numbers, certain, strict=True)
            return tuple(None if sure else number for number, sure in pairs)

        nodes = list(range(len(tokens)))
        entropy_n = _entropies(p_nV)
        return {
            "draft_probs": drawn(None if q_NV is None else q_NV[nodes, tokens].tolist()),
            "target_probs": tuple(p_nV[places, tokens].tolist()) if rows else (),
            "overlaps": drawn(apart_N and [1 - apart / 2 for apart in apart_N]),
            "entropies": tuple(entropy_n[place] for place in places),
            "draft_entropies": drawn(None if q_NV is None else _entropies(q_NV)),
        }

    def _added(
        self, b: int, token: int, row: int, nodes: tuple[list[int], list[Kind]]
    ) -> dict[str, Any]:
        """The fields that say how likely the added token was, at the row it follows."""
        p_V = sampled(self._group, self._laws, b, [row])[0]
        law, drawn = self._draft.law, None
        for j, (parent, kind) in enumerate(zip(*nodes, strict=True)):
            if law is not None and parent == row and kind != Kind.POINT:
                at = self._draft.law_rows()[b, j : j + 1].to(law.probs.device)
                drawn = float(law.select(at).prob_of(torch.tensor([token], device=at.device)))
                break
        return {"added_prob": float(p_V[token]), "added_draft_prob": drawn}

    def _draft_laws(self, b: int, count: int, p_nV: torch.Tensor) -> torch.Tensor | None:
        """The law each token was drawn from, a certain one's is none; None where all are."""
        law = self._draft.law
        if law is None or count == 0:
            return None
        rows_N = self._draft.law_rows()[b, :count].to(law.probs.device)
        return law.select(rows_N).table(p_nV.shape[1]).to(p_nV)


def _entropies(probs_nV: torch.Tensor) -> list[float]:
    """Shannon entropies in nats."""
    return torch.special.entr(probs_nV.double()).sum(-1).tolist()
