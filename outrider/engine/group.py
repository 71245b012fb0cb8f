"""Group: the texts that go through a round together, and the target's scores of their drafts.

Row t of a text is row t of its drafted tree: 0 is the text as it stands, node j is row j + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequenced

import torch
from torch import Tensor

from outrider import host, noise
from outrider.decoding import (
    Draft,
    RoundNoise,
    Rule,
    TargetBest,
    TargetFew,
    TargetLaws,
    TargetRows,
    Verdict,
    chain_probs,
    check_logits,
)
from outrider.decoding.laws import all_laws, likeliest, likeliest_of_laws
from outrider.drafters.base import Drafter
from outrider.engine.controls import Controls
from outrider.engine.places import Places
from outrider.errors import NonFinite
from outrider.models.base import Rows, Taps, Target
from outrider.sequence import Sequence
from outrider.tree import TokenTree, TreeBudget

# Numbers in the rows that become laws all at once: fewer calls, and they stay in caches.
_AT_ONCE = 1 << 19


class Group:
    """B texts that share a drafter and a rule, from round to round while they stay together.

    Attributes:
        followed: whether other texts wait for the place of one that is done.
    """

    def __init__(
        self,
        texts: list[Sequence],
        drafter: Drafter,
        rule: Rule,
        trees: TreeBudget | None = None,
    ) -> None:
        self.texts = texts
        self.drafter = drafter
        self.rule = rule
        self.trees = trees if rule.trees else None
        self.followed = False
        self.controls = Controls(texts)
        self._seed_B = noise.as_key(text.seed for text in texts)
        self._sample_B = torch.tensor([text.request.sample for text in texts])

    @property
    def handles(self) -> list[int]:
        """The texts' sequences of the target's cache, which texts in a round have."""
        return [text.handle for text in self.texts if text.handle is not None]

    def depths(self) -> list[int]:
        """Tokens each text may draft: one less than it may still make, as the target adds one."""
        return [max(0, min(text.depth, text.remaining - 1)) for text in self.texts]

    def noise(self) -> RoundNoise:
        """This round's noise, anchored at the number of tokens settled so far."""
        anchor_B = torch.tensor([len(text.tokens) for text in self.texts])
        return RoundNoise(self._seed_B, self._sample_B, anchor_B)


class Scores:
    """Target logits of a group's drafted rows, which of them are laws, and hidden states.

    Args:
        logits_RV: text after text, a row for the text as it stands and one per drafted token.
        draft: what was drafted.
        taps: hidden states of all rows read in the round, if the drafter declared any.
    """

    def __init__(self, logits_RV: Tensor, draft: Draft, taps: Taps | None = None) -> None:
        self._logits_RV = logits_RV
        self._taps = taps or Taps(())
        self._tree = draft.tree
        self._usable_R: Tensor | None = None
        self._sound = False
        self._usable: list[bool] | None = None
        self._counts = [count + 1 for count in draft.tree.counts_B.tolist()]
        self._owners = [b for b, count in enumerate(self._counts) for _ in range(count)]

    def laws(self, group: Group) -> TargetRows:
        """What the rule reads: laws, or logits where order suffices."""
        rows_RV = self._logits_RV
        on_host, few = host.reads_free(rows_RV.device), rows_RV.numel() <= _AT_ONCE
        if (few or not on_host) and self._tree.is_chain and not group.rule.needs_probs:
            found = self._best(rows_RV, group)
            if found is not None:
                return found
        self._sound = on_host and not group.controls.act and all_laws(rows_RV)
        if not self._sound:
            rows_RV = self._adjusted(rows_RV, group)
        # A row for every place of the tree, though no text may have a node at the last of them:
        # where supports run out, a shape's trees are all smaller than it.
        num_rows = self._tree.num_nodes + 1
        if not group.rule.needs_probs:
            return TargetLaws(_padded(rows_RV, self._counts, num_rows))
        if self._tree.is_chain:
            law = group.controls.few(rows_RV, self._owners)
            if law is not None:
                law = law.select(_places(self._counts, num_rows))
                return TargetFew(law, (len(self._counts), num_rows, rows_RV.shape[1]))
        if few or group.rule.reads == "all" or not on_host:
            laws_RV = group.controls.probs(rows_RV, self._owners)
            return TargetLaws(_padded(laws_RV, self._counts, num_rows))
        return OnDemand(rows_RV, self._counts, num_rows, group.controls)

    def _adjusted(self, rows_RV: Tensor, group: Group) -> Tensor:
        """Rows under the controls; instead of those that are no law any."""
        usable_R = check_logits(rows_RV)
        if group.controls.act:
            rows_RV = group.controls.adjusted(rows_RV, Places.of(self._tree))
            # A row whose only mass was on tokens that may not come is no law either.
            usable_R.logical_and_(check_logits(rows_RV))
        self._usable_R = usable_R
        # Elsewhere than on a processor the rule would wait for this: rows are looked at afterwards.
        self._sound = host.reads_free(rows_RV.device) and bool(usable_R.all())
        return rows_RV if self._sound else rows_RV.masked_fill(~usable_R[:, None], 0.0)

    def _best(self, rows_RV: Tensor, group: Group) -> TargetRows | None:
        """The likeliest tokens of chains' rows; None where controls act, or a row is no law.

        Elsewhere than on a processor that is looked at afterwards.
        """
        if group.controls.act:
            return None
        if host.reads_free(rows_RV.device):
            best_R = likeliest_of_laws(rows_RV)
            if best_R is None:
                return None
            self._sound = True
        else:
            top_R, best_R = rows_RV.max(-1)
            self._usable_R = top_R.isfinite()
        counts, num_rows = self._counts, self._tree.num_nodes + 1
        if min(counts) == num_rows:
            best_BT = best_R.view(len(counts), num_rows)
        else:
            places = host.send(_places(counts, num_rows), best_R.device)
            best_BT = best_R[places].view(len(counts), num_rows)
        return TargetBest(
            best_BT, rows_RV.shape[1], lambda: TargetLaws(_padded(rows_RV, counts, num_rows))
        )

    def reading(
        self, verdict: Verdict, alphas_B: Tensor | None
    ) -> Callable[[], tuple[Verdict, list[float] | None]]:
        """Sends a verdict, numbers beside it, and which rows are laws to the host.

        What comes back waits for them, once for all.
        """
        parts = verdict.num_accepted_B, verdict.token_B, verdict.path_BD
        more = [part for part in (alphas_B, self._usable_R) if part is not None]
        reading = host.Reading((*parts, *more))

        def waited() -> tuple[Verdict, list[float] | None]:
            found = reading.wait()
            if self._usable_R is not None:
                self._usable = found[-1].tolist()
            return Verdict(*found[:3]), None if alphas_B is None else found[3].tolist()

        return waited

    def rows(self, text: int, rows: Sequenced[int]) -> Tensor:
        """The model's own logits of some rows of one text, 0 that of its root."""
        start = sum(self._counts[:text])
        return self._logits_RV[[start + row for row in rows]]

    def hidden(self, seq: int, staged: int, path: Sequenced[int]) -> Tensor:
        """Hidden states `[n, F]` of what a sequence keeps of the rows read in the round.

        Those read ahead of the pass are kept; of the last `staged` ones those in `path`.
        """
        states_nF = self._taps.of(seq)
        ahead = len(states_nF) - staged
        return states_nF[[*range(ahead), *(ahead + row for row in path)]]

    def broken(self, text: int, path: Sequenced[int]) -> NonFinite | None:
        """The error of a text whose walk met a row that is no law."""
        if self._sound:
            return None
        assert self._usable is not None, "rows become laws before anything is kept of them"
        start = sum(self._counts[:text])
        walked = [self._usable[start + row] for row in (0, *path)]
        if all(walked):
            return None
        return NonFinite(
            f"the target's logits for row {walked.index(False)} of the round hold NaN, "
            "+inf or nothing finite; check the model's weights and dtype, and the controls that "
            "forbid tokens (min_tokens, bad_words, allowed_token_ids, grammars, no_repeat_ngram, "
            "processors)"
        )


class OnDemand(TargetRows):
    """Wide rows of logits that become laws when the rule asks for them."""

    def __init__(
        self, masked_RV: Tensor, counts: list[int], num_rows: int, controls: Controls
    ) -> None:
        self._masked_RV, self._controls = masked_RV, controls
        self._shape = len(counts), num_rows, masked_RV.shape[1]
        self._row_R = _places(counts, num_rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        return self._shape

    @property
    def device(self) -> torch.device:
        """That of the logits."""
        return self._masked_RV.device

    def probs(self, at_n: Tensor) -> Tensor:
        """The processed laws of the rows."""
        owners = (at_n // self._shape[1]).tolist()
        return self._controls.probs(self._masked_RV[self._row_R[at_n]], owners)

    def prob_of(self, at_n: Tensor, tokens_n: Tensor) -> Tensor:
        """One entry of each row's law."""
        found_n = tokens_n.new_empty(len(at_n), dtype=torch.float64)
        for part in self.parts(len(at_n)):
            found_n[part] = self.probs(at_n[part]).gather(1, tokens_n[part, None])[:, 0].double()
        return found_n

    def argmax(self, at_n: Tensor) -> Tensor:
        """The likeliest token of each row's law."""
        return likeliest(self.probs(at_n))


def alphas(group: Group, draft: Draft, laws: TargetRows, verdict: Verdict) -> Tensor | None:
    """min(1, p(x)/q(x)) summed over each text's tested tokens: those whose prefix was accepted.

    `[B]` float64, where the verdict is.

    None for trees, where what a token is tested against depends on its siblings.
    """
    if not draft.tree.is_chain:
        return None
    depth = draft.tree.num_nodes
    if depth == 0 or not group.rule.needs_probs:
        # One-hot laws: the ratio is 1 where a token was kept and 0 where it was not.
        return verdict.num_accepted_B.double()
    draft = draft.to(laws.device)
    p_BK, q_BK = chain_probs(draft, laws)
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK, p_BK > 0).clamp(max=1.0)
    index_K = torch.arange(depth, device=laws.device)
    tested_BK = (index_K <= verdict.num_accepted_B[:, None]) & draft.tree.is_node()
    return torch.where(tested_BK, ratio_BK, 0.0).sum(1)


def score(target: Target, group: Group, draft: Draft, chunk: int) -> Scores:
    """Reads what each text has pending and drafted in one pass; long prompts go in chunks.

    What is read ahead of the pass is committed at once: its tokens are the text's own. A tree hangs
    from a text's last token, and all before that is read ahead.
    """
    tree = draft.tree
    at_once = chunk if tree.is_chain else 1
    tokens_BN, counts = tree.tokens_BN.tolist(), tree.counts_B.tolist()
    handles: list[int] = []
    pieces: list[list[int]] = []
    chunks: list[dict[int, list[int]]] = []
    for text, nodes, count in zip(group.texts, tokens_BN, counts, strict=True):
        assert text.handle is not None
        pending = text.tokens[target.length(text.handle) :]
        ahead = (len(pending) - 1) // at_once * at_once
        for i, start in enumerate(range(0, ahead, chunk)):
            if i == len(chunks):
                chunks.append({})
            chunks[i][text.handle] = pending[start : min(ahead, start + chunk)]
        handles.append(text.handle)
        pieces.append(pending[ahead:] + nodes[:count])
    ancestors_R = None if tree.is_chain else _ancestors(tree)
    rows = _rows(handles, pieces, [count + 1 for count in counts], ancestors_R)
    with target.tapping(group.drafter.taps) as taps:
        for together in chunks:
            target.read_all(together)
        return Scores(target.score(rows), draft, taps)


def _ancestors(tree: TokenTree) -> Tensor:
    """Bitmasks of each text's last token and of its drafted nodes, which see it, one by one."""
    masks_BT = torch.nn.functional.pad(tree.ancestors() << 1, (1, 0)) | 1
    return masks_BT[torch.nn.functional.pad(tree.is_node(), (1, 0), value=True)]


def _rows(
    handles: list[int],
    pieces: list[list[int]],
    wanted: list[int],
    ancestors_R: Tensor | None = None,
) -> Rows:
    """Flat rows of which the last `wanted[b]` of each piece give logits."""
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    rows = [i for end, count in zip(ends, wanted, strict=True) for i in range(end - count, end)]
    return Rows(
        seqs=tuple(handles),
        counts=tuple(len(piece) for piece in pieces),
        tokens_R=torch.tensor([token for piece in pieces for token in piece]),
        ancestors_R=ancestors_R,
        logits_rows=None if len(rows) == ends[-1] else torch.tensor(rows, dtype=torch.int64),
    )


def _places(counts: Sequenced[int], num_rows: int) -> Tensor:
    """The row that each of as many places of every text has, flat.

    A place behind a text's last row has that row: nobody reads it for what it is.
    """
    first_B1 = torch.tensor([0, *itertools.accumulate(counts[:-1])])[:, None]
    last_B1 = torch.tensor(counts)[:, None] - 1
    return (first_B1 + torch.arange(num_rows).minimum(last_B1)).flatten()


def _padded(rows_RV: Tensor, counts: Sequenced[int], num_rows: int) -> Tensor:
    """`[R, V]` as `[B, num_rows, V]`, padded with zeros; a view where no text has fewer."""
    if min(counts) == num_rows:
        return rows_RV.view(len(counts), num_rows, -1)
    padded_BTV = rows_RV.new_zeros(len(counts), num_rows, rows_RV.shape[1])
    for padded_TV, own_nV in zip(padded_BTV, rows_RV.split(list(counts)), strict=True):
        padded_TV[: len(own_nV)] = own_nV
    return padded_BTV
