"""An independent draft model with its own cache (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.config import check_between
from outrider.decoding import Draft
from outrider.decoding.laws import softmax_of
from outrider.drafters.base import Drafter, Node, RoundDraws
from outrider.drafters.stop import class_of
from outrider.errors import warn
from outrider.models.base import Chain, Rows, Target
from outrider.models.plan import chain_ancestors
from outrider.noise import signed
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Int64

MAX_PENDING = 8
"""Tokens of a text that are read in one pass with the tree that hangs from them."""


class ModelDrafter(Drafter):
    """Drafts chains or trees with a smaller model of the same tokenizer.

    The draft's cache follows the text: the tokens it has not read yet are read with the first
    forward of a round, then each drafted token but the last takes one forward more, and in a tree
    each level of tokens but the last.

    A token beyond the draft's own width is read as its last one: a guess made from a slightly
    wrong text costs speed only, and the drafting goes on.

    A text whose drafted token had less than `confidence` under the draft's own law (before the
    request's controls) drafts no further in the round; nor does one that a `stop` ends. Whether a
    chain goes on depends on the tokens already drafted alone, so every rule stays what it is.

    `remake` takes the model and returns the one to go on with when the target has new weights; it
    is for models made from the target's own. Another stays as it is.
    """

    def __init__(
        self,
        model: Target,
        *,
        vocab_size: int | None = None,
        chunk: int = 512,
        name: str = "draft",
        confidence: float = 0.0,
        remake: Callable[[Target], Target] | None = None,
    ) -> None:
        check_between("confidence", confidence, 0.0, 1.0)
        self.model = model
        self.name = name
        self.confidence = confidence
        self.vocab_size = model.vocab_size
        self.chunk = chunk
        self._remake = remake
        self._width = vocab_size
        self._last = model.vocab_size - 1
        self._handles: dict[int, int] = {}
        # What was read of each text's draft this round, in the order of the staged rows.
        self._drafted: dict[int, list[Node]] = {}
        # A text, and the chain that was drawn for it this round before any of it was read.
        self._unread: tuple[int, list[int]] | None = None
        # The text whose next token has been read since, if it is the one that was foreseen.
        self._foreseen: int | None = None
        self._warned = self._asked = False

    @property
    def draws_unread(self) -> bool:
        """Where the model's rows are replayed one by one, and its confidence ends no chain."""
        return self.model.takes_unread and not self.confidence

    def expect(self, num_prompt: int) -> None:
        """Warns of a prompt that fills the draft model's context: nothing is drafted after it."""
        limit = self.model.max_length
        if limit is not None and num_prompt >= limit and not self._warned:
            self._warned = True
            warn(
                f"a prompt of {num_prompt} tokens fills the draft model's context of {limit}: such "
                "texts are decoded plainly; use a draft model with a longer context, or "
                "drafter='ngram'"
            )

    def never_asked(self) -> tuple[str, ...]:
        """Its name until it has drafted, unless it was said why it does not."""
        return () if self._asked or self._warned else (self.name,)

    def unread(self, text: Sequence) -> int:
        """Tokens of the text that the draft has not read; 0 where it reads no more of it."""
        limit = self.model.max_length
        return 0 if limit is not None and len(text.tokens) >= limit else len(self._pending(text))

    def read(self, text: Sequence, rows: int) -> None:
        """Reads the next `rows` tokens of the text, which are the draft's at once."""
        piece = self._pending(text)[:-1][:rows] if self.unread(text) else []
        if piece:
            self.model.read(self._handles[text.key], self._known(piece))

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """Draws up to `depths[b]` tokens after each text, one forward per depth for all of them."""
        limit = self.model.max_length
        depths = [
            depth if limit is None else max(0, min(depth, limit - len(text.tokens)))
            for text, depth in zip(texts, depths, strict=True)
        ]
        members = [b for b, depth in enumerate(depths) if depth > 0]
        pending = [self._pending(texts[b]) for b in members]
        self._asked = self._asked or bool(members)
        foreseen, self._foreseen, self._unread = self._foreseen, None, None
        for b in members:
            self._drafted[texts[b].key] = []
        if draws.trees is not None and self.model.scores_trees and members:
            return self._grown(texts, depths, draws, pending)
        if len(members) == 1 and self._may_wait(draws):
            (b,) = members
            # Of two the first has been read where that was foreseen; else they go together.
            one_by_one = len(pending[0]) <= (2 if foreseen == texts[b].key else 1)
            self._draw_unread(texts[b], b, depths[b], pending[0], draws, one_by_one=one_by_one)
            return draws.drawn()
        worths: list[list[float]] = [[] for _ in texts]
        chances, least = [1.0] * len(texts), 0.0 if self.stop is None else self.stop.least
        chain: Chain | None = None
        chained = 0
        for index in range(max(depths, default=0)):
            going = [i for i, b in enumerate(members) if depths[b] > index]
            members = [members[i] for i in going]
            pending = [pending[i] for i in going]
            if not members:
                break
            handles = [self._handles[texts[b].key] for b in members]
            if index == 1 and len(members) == 1:
                (chained,) = members
                chain = self.model.chain(handles[0], depths[chained] - 1)
            if chain is None:
                logits = self._read(handles, pending)[:, : self._width]
            else:
                logits = chain(min(pending[0][0], self._last))[:, : self._width]
            if index > 0:
                for b, (token,) in zip(members, pending, strict=True):
                    self._drafted[texts[b].key].append(Node(b, token, index - 1))
            tokens = draws.sample(logits, members, index)
            pending = [[token] for token in tokens]
            if self.confidence or self.stop is not None:
                for b, prob in zip(members, _probs(logits, tokens), strict=True):
                    worths[b].append(prob * (worths[b][-1] if index else 1.0))
                    if self.stop is not None:
                        chances[b] *= self.stop.chances[class_of(prob)]
                    if prob < self.confidence or chances[b] < least:
                        depths[b] = 0
        if chain is not None:
            tokens = [node.token for node in self._drafted[texts[chained].key]]
            chain.stage(self._known(tokens))
        draft = draws.drawn()
        if not self.confidence and self.stop is None:
            return draft
        most = draft.tree.num_nodes
        full = [[*own, *[0.0] * (most - len(own))] for own in worths]
        worth_BN = torch.tensor(full, dtype=torch.float64).reshape(len(full), most)
        return replace(draft, worth_BN=worth_BN)

    def _may_wait(self, draws: RoundDraws) -> bool:
        """Whether all tokens of a chain can be drawn before the host reads any."""
        return self.draws_unread and self.stop is None and draws.may_wait

    def _draw_unread(
        self,
        text: Sequence,
        member: int,
        depth: int,
        pending: list[int],
        draws: RoundDraws,
        *,
        one_by_one: bool,
    ) -> None:
        """Draws one text's chain behind what is pending; the host waits for its tokens once."""
        handle, begun = self._handles[text.key], self._known(pending)
        chain = self.model.chain(handle, len(pending) + depth - 1) if one_by_one else None
        if chain is not None:
            *head, last = begun
            for token in head:
                chain(token)
            logits_1V = chain(last)
        else:
            logits_1V, begun = self._read([handle], [pending]), []
            chain = self.model.chain(handle, depth - 1) if depth > 1 else None
        token_1 = draws.draw_unread(logits_1V[:, : self._width], member, 0)
        for index in range(1, depth):
            token_1 = token_1.clamp(max=self._last)
            # Where the cache has no room for all there may be some for the next.
            logits_1V = (
                self._read([handle], [token_1.tolist()]) if chain is None else chain(token_1)
            )
            token_1 = draws.draw_unread(logits_1V[:, : self._width], member, index)
        tokens = draws.read_drawn(member)
        self._unread = text.key, list(tokens)
        self._drafted[text.key] = [Node(member, token, i) for i, token in enumerate(tokens[:-1])]
        if chain is not None:
            chain.stage([*begun, *self._known(tokens[:-1])])

    def _grown(
        self,
        texts: Sequenced[Sequence],
        depths: Sequenced[int],
        draws: RoundDraws,
        pending: list[list[int]],
    ) -> Draft:
        """Trees, level by level; they hang from what the texts have pending, staged with them."""
        members = [b for b, depth in enumerate(depths) if depth > 0]
        handles = {b: self._handles[texts[b].key] for b in members}
        self._read_ahead(list(handles.values()), pending)
        masks = {
            b: chain_ancestors(len(tokens)).tolist()
            for b, tokens in zip(members, pending, strict=True)
        }
        above = {b: len(own) for b, own in masks.items()}
        trees = {b: self._drafted[texts[b].key] for b in members}
        flat = torch.tensor([mask for own in masks.values() for mask in own])
        roots_nV = self._read(list(handles.values()), pending, flat)

        def expand(nodes: Sequenced[Node]) -> torch.Tensor:
            counts = Counter(node.member for node in nodes)
            ancestors: list[int] = []
            for node in nodes:
                known = masks[node.member]
                parent = known[above[node.member] + node.parent - 1]
                known.append(parent | 1 << len(known))
                ancestors.append(signed(known[-1]))
                trees[node.member].append(node)
            tokens_R = torch.tensor([min(node.token, self._last) for node in nodes])
            seqs = tuple(handles[b] for b in counts)
            rows = Rows(seqs, tuple(counts.values()), tokens_R, torch.tensor(ancestors))
            return self.model.score(rows)[:, : self._width]

        return draws.grown(roots_nV[:, : self._width], depths, expand)

    def _pending(self, text: Sequence) -> list[int]:
        handle = self._handles.get(text.key)
        if handle is None:
            tokens = self._known(text.tokens)
            handle = self._handles[text.key] = self.model.open_for(tokens, text.expected)
        return text.tokens[self.model.length(handle) :]

    def _read_ahead(self, handles: list[int], pending: list[list[int]]) -> None:
        """Reads and keeps all but the last pending token where a tree would find no room."""
        for handle, tokens in zip(handles, pending, strict=True):
            while len(tokens) > MAX_PENDING:
                size = min(self.chunk, len(tokens) - 1)
                head, tokens[:] = tokens[:size], tokens[size:]
                self.model.read(handle, self._known(head))

    def _read(
        self,
        handles: list[int],
        pending: list[list[int]],
        ancestors_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[n, V]` after the pending tokens of n sequences; long texts go in chunks."""
        for handle, tokens in zip(handles, pending, strict=True):
            while len(tokens) > self.chunk:
                head, tokens[:] = tokens[: self.chunk], tokens[self.chunk :]
                self.model.read(handle, self._known(head))
        counts = tuple(len(tokens) for tokens in pending)
        flat = torch.tensor([token for tokens in pending for token in self._known(tokens)])
        last = None
        if len(flat) > len(counts):
            last = torch.tensor(list(itertools.accumulate(counts))) - 1
        return self.model.score(Rows(tuple(handles), counts, flat, ancestors_R, last))

    def _known(self, tokens: list[int]) -> list[int]:
        return [min(token, self._last) for token in tokens]

    def commit(self, text: Sequence, accepted: int) -> None:
        """Keeps what the draft has read of the text's own tokens; the rest is read next round."""
        handle = self._handles.get(text.key)
        if handle is None:
            return
        self._unread, drafted = None, self._drafted.pop(text.key, None)
        if drafted is None:
            # It was not asked, and has read nothing.
            return
        above = self.model.num_staged(handle) - len(drafted)
        tokens = text.tokens[self.model.length(handle) + above : -1]
        rows = [*range(above), *(above + row for row in _path(drafted, tokens))]
        self.model.commit(handle, len(rows) if rows == list(range(len(rows))) else rows)

    def foresee(
        self,
        text: Sequence,
        accepted_1: Int64[torch.Tensor, " 1"],
        token_1: Int64[torch.Tensor, " 1"],
    ) -> None:
        """Has the model read the next token already, if the last chain was drawn unread, too.

        The last drafted one has not been read: where it is kept it comes first.
        """
        if self._unread is None or self._unread[0] != text.key:
            return
        *read, last = self._unread[1]
        first = len(text.tokens)
        token_1 = token_1.masked_fill(accepted_1 > len(read), last).clamp(max=self._last)
        places = range(first, first + 1 + len(read))
        at_1 = accepted_1.clamp(max=len(read))
        if self.model.foresee(self._handles[text.key], places, at_1, token_1):
            self._foreseen = text.key

    def discard(self, text: Sequence) -> None:
        """Forgets the round's rows."""
        self._unread = self._foreseen = None
        self._drafted.pop(text.key, None)
        handle = self._handles.get(text.key)
        if handle is not None:
            self.model.discard(handle)

    def target_changed(self) -> None:
        """Makes the model anew where it was made from the target's weights."""
        if self._remake is not None:
            self.model = self._remake(self.model)

    def close(self, text: Sequence) -> None:
        """Gives the text's cache back."""
        self._drafted.pop(text.key, None)
        handle = self._handles.pop(text.key, None)
        if handle is not None:
            self.model.close(handle)


def _probs(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    """How likely the draft thought some drafted tokens, before the request's controls."""
    inside = torch.tensor(tokens, device=logits.device).clamp(max=logits.shape[-1] - 1)
    return softmax_of(logits.float(), inside).tolist()


def _path(drafted: Sequenced[Node], tokens: Sequenced[int]) -> list[int]:
    """The rows read of a draft that the text goes on with, as far as there are any.

    Where siblings bear one token either's row will do: what it has seen is the same.
    """
    numbers = {(node.parent, node.token): i + 1 for i, node in enumerate(drafted)}
    at, rows = 0, list[int]()
    for token in tokens:
        at = numbers.get((at, token), 0)
        if at == 0:
            break
        rows.append(at - 1)
    return rows
