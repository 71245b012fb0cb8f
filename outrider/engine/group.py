"""Group: the texts that go through a round together, and the target's scores of their drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider import noise
from outrider.decoding import (
    Draft,
    RoundNoise,
    Rule,
    TargetLaws,
    TargetRows,
    Verdict,
    chain_probs,
    check_logits,
)
from outrider.drafters.base import Drafter
from outrider.engine.controls import Controls
from outrider.errors import NonFinite
from outrider.models.base import Rows, Target
from outrider.sequence import Sequence


class Group:
    """B texts that share a drafter and a rule, from round to round while they stay together."""

    def __init__(self, texts: list[Sequence], drafter: Drafter, rule: Rule) -> None:
        self.texts = texts
        self.drafter = drafter
        self.rule = rule
        self.controls = Controls(texts)
        self.stats = [text.stats for text in texts]
        self._seed_B = noise.as_key(text.seed for text in texts)
        self._sample_B = torch.tensor([text.request.sample for text in texts])

    def depths(self) -> list[int]:
        """Tokens each text may draft: one less than it may still make, as the target adds one."""
        return [max(0, min(text.depth, text.remaining - 1)) for text in self.texts]

    def noise(self) -> RoundNoise:
        """This round's noise, anchored at the number of tokens settled so far."""
        anchor_B = torch.tensor([len(text.tokens) for text in self.texts])
        return RoundNoise(self._seed_B, self._sample_B, anchor_B)


@dataclass(frozen=True, slots=True)
class Scores:
    """Target logits of a group's drafted rows.

    `logits_RV` holds, text after text, one row per drafted token and one more; `usable_R` marks the
    rows that are laws; `counts` the rows of each text.
    """

    logits_RV: Tensor
    usable_R: Tensor
    counts: list[int]

    def laws(self, group: Group) -> TargetRows:
        """What the rule reads: laws, or logits where order suffices."""
        owners = [b for b, count in enumerate(self.counts) for _ in range(count)]
        ahead = [i for count in self.counts for i in range(count)]
        rows_RV = group.controls.masked(self.logits_RV, owners, ahead)
        if rows_RV is not self.logits_RV:
            # A row whose only mass was an end that may not come yet is no law either.
            self.usable_R.logical_and_(check_logits(rows_RV))
        if not self.usable_R.all():
            rows_RV = rows_RV.masked_fill(~self.usable_R[:, None], 0.0)
        if group.rule.needs_probs:
            rows_RV = group.controls.probs(rows_RV, owners)
        return TargetLaws(_padded(rows_RV, self.counts))

    def broken(self, text: int, accepted: int) -> NonFinite | None:
        """The error of a text whose walk met a row that is no law."""
        start = sum(self.counts[:text])
        walked = self.usable_R[start : start + accepted + 1]
        if walked.all():
            return None
        return NonFinite(
            f"the target's logits for row {int((~walked).nonzero()[0])} of the round hold NaN, "
            "+inf or nothing finite; check the model's weights and dtype, and min_tokens"
        )


def alphas(group: Group, draft: Draft, laws: TargetRows, verdict: Verdict) -> list[float]:
    """min(1, p(x)/q(x)) summed over each text's tested tokens: those whose prefix was accepted."""
    depth = draft.tree.num_nodes
    if depth == 0 or not group.rule.needs_probs:
        # One-hot laws: the ratio is 1 where a token was kept and 0 where it was not.
        return [float(count) for count in verdict.num_accepted_B.tolist()]
    draft = draft.to(laws.device)
    p_BK, q_BK = chain_probs(draft, laws)
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK, p_BK > 0).clamp(max=1.0)
    index_K = torch.arange(depth, device=laws.device)
    tested_BK = (index_K <= verdict.num_accepted_B[:, None]) & draft.tree.is_node()
    return torch.where(tested_BK, ratio_BK, 0.0).sum(1).tolist()


def score(target: Target, group: Group, draft: Draft, chunk: int) -> Scores:
    """Reads what each text has pending and drafted in one pass; long prompts go in chunks."""
    chains = [
        row[:length]
        for row, length in zip(
            draft.tree.tokens_BN.tolist(), draft.tree.counts_B.tolist(), strict=True
        )
    ]
    handles: list[int] = []
    pieces: list[list[int]] = []
    for text, chain in zip(group.texts, chains, strict=True):
        assert text.handle is not None
        pending = text.tokens[target.length(text.handle) :]
        read = (len(pending) - 1) // chunk * chunk
        for start in range(0, read, chunk):
            target.score(_rows([text.handle], [pending[start : start + chunk]], [0]))
        handles.append(text.handle)
        pieces.append(pending[read:] + chain)
    counts = [len(chain) + 1 for chain in chains]
    logits = target.score(_rows(handles, pieces, counts))
    return Scores(logits, check_logits(logits), counts)


def _rows(handles: list[int], pieces: list[list[int]], wanted: list[int]) -> Rows:
    """Flat rows of which the last `wanted[b]` of each piece give logits."""
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    rows = [i for end, count in zip(ends, wanted, strict=True) for i in range(end - count, end)]
    return Rows(
        seqs=tuple(handles),
        counts=tuple(len(piece) for piece in pieces),
        tokens_R=torch.tensor([token for piece in pieces for token in piece]),
        logits_rows=None if len(rows) == ends[-1] else torch.tensor(rows, dtype=torch.int64),
    )


def _padded(rows_RV: Tensor, counts: Sequenced[int]) -> Tensor:
    """`[R, V]` as `[B, T, V]`, shorter texts padded with zeros; a view where all are equal."""
    most = max(counts)
    if min(counts) == most:
        return rows_RV.view(len(counts), most, -1)
    parts = torch.split(rows_RV, list(counts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
