"""EAGLE-3: a head that guesses from the target's hidden states (Li et al. 2025, arXiv 2503.01840).

The head follows the text in two steps. What the target has read is caught up with its own hidden
states; from there on the head feeds itself. What it read of its own guesses is forgotten with the
round, as those rows' true states come with the target's next scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding import Draft
from outrider.drafters.base import Drafter, Node, RoundDraws
from outrider.errors import InvalidConfig
from outrider.models.base import Rows, Target
from outrider.noise import signed
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.eagle import EagleHead
    from outrider.models.eagle_cache import CachedHead


@dataclass(slots=True)
class _Known:
    """What is kept of a text: a sequence of the head's, and states it has not read yet.

    `first` is the text's token that the sequence's row 0 stands for; `waiting` holds the states of
    the tokens behind its last row.
    """

    handle: int
    first: int
    waiting: list[Tensor] = field(default_factory=list[Tensor])

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))

    def states(self, count: int) -> Tensor:
        """The first `count` waiting states `[count, F]`."""
        if len(self.waiting) > 1:
            self.waiting = [torch.cat(self.waiting)]
        return self.waiting[0][:count]


class EagleDrafter(Drafter):
    """Drafts chains or trees with an EAGLE-3 head of the target's.

    A text is drafted for from the round on in which the target has read all of it but its last
    token. Where it begins with tokens that the target holds of an earlier text, and whose states
    it therefore never had, the head's own view of it begins behind them.
    """

    def __init__(self, head: EagleHead, *, chunk: int = 512, name: str = "eagle") -> None:
        self.name = name
        self.chunk = chunk
        self.taps = head.shape.taps
        self.vocab_size = head.shape.vocab_size
        self._given = head
        self._head: CachedHead | None = None
        self._target: Target | None = None
        self._texts: dict[int, _Known] = {}
        self._asked = False

    def attach(self, target: Target) -> Target:
        """The target itself; the head gets its embeddings, dtype and device.

        Raises:
            UnsupportedModel: a target without hidden states to be had.
            VocabularyMismatch, TargetShapeMismatch: the head of another target.
            InvalidConfig: a drafter in use elsewhere.
        """
        # Who brings their own two methods needs no transformers.
        from outrider.models.eagle_cache import CachedHead, fitted

        if self._head is None:
            self._head, self._target = CachedHead(fitted(self._given, target)), target
        elif self._target is not target:
            raise InvalidConfig(
                f"drafter {self.name} reads the hidden states of another target; make a drafter "
                "for each"
            )
        return target

    @property
    def model(self) -> CachedHead:
        """The head and its cache, once an engine has attached it."""
        if self._head is None:
            raise InvalidConfig(f"drafter {self.name} has no target yet; an engine attaches it")
        return self._head

    def never_asked(self) -> tuple[str, ...]:
        """Its name until it was asked to draft."""
        return () if self._asked else (self.name,)

    def notice(self, text: Sequence, first: int, hidden_nF: Float[Tensor, "n F"]) -> None:
        """Keeps the states that follow those known; where some are missing, begins anew."""
        known = self._texts.get(text.key)
        if known is not None:
            due = known.first + self.model.length(known.handle) + known.num_waiting
            if first <= due:
                # An interrupted round's rows come twice.
                known.waiting.append(hidden_nF[due - first :])
                return
            self.model.close(known.handle)
        self._texts[text.key] = _Known(self.model.open(text.expected), first, [hidden_nF])

    def unread(self, text: Sequence) -> int:
        """Tokens whose states the head has not read."""
        known = self._texts.get(text.key)
        return 0 if known is None else known.num_waiting

    def read(self, text: Sequence, rows: int) -> None:
        """Reads the states of the next `rows` tokens, of all but the last known at most."""
        known = self._texts.get(text.key)
        if known is not None and known.num_waiting > 1:
            self._catch_up([text], [min(rows, known.num_waiting - 1)])

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """Draws up to `depths[b]` tokens after each text the target has read, a step per depth."""
        self._asked = self._asked or any(depths)
        depths = [
            depth if self._is_up(text) else 0 for text, depth in zip(texts, depths, strict=True)
        ]
        members = [b for b, depth in enumerate(depths) if depth > 0]
        if not members:
            return draws.drawn()
        asked = [texts[b] for b in members]
        for text in asked:
            while (waiting := self._texts[text.key].num_waiting) > self.chunk:
                self._catch_up([text], [min(self.chunk, waiting - 1)])
        logits_nM, h_nD = self._catch_up(asked, [self._texts[t.key].num_waiting for t in asked])
        tokens_M = self.model.head.tokens
        if draws.trees is not None:
            return self._grown(texts, depths, draws, (logits_nM, h_nD))
        index = 0
        while True:
            tokens = draws.sample(logits_nM, members, index, tokens_M)
            index += 1
            going = [i for i, b in enumerate(members) if depths[b] > index]
            if not going:
                return draws.drawn()
            if len(going) < len(members):
                members = [members[i] for i in going]
                tokens, h_nD = [tokens[i] for i in going], h_nD[going]
            handles = tuple(self._texts[texts[b].key].handle for b in members)
            rows = Rows(handles, (1,) * len(handles), torch.tensor(tokens))
            logits_nM, h_nD = self.model.score(rows, h_nD)

    def _grown(
        self,
        texts: Sequenced[Sequence],
        depths: Sequenced[int],
        draws: RoundDraws,
        roots: tuple[Tensor, Tensor],
    ) -> Draft:
        """Trees, level by level; a node's feature is that behind its parent."""
        members = [b for b, depth in enumerate(depths) if depth > 0]
        masks: dict[int, list[int]] = {b: [0] for b in members}
        places = {b: [i] for i, b in enumerate(members)}
        features = [roots[1]]

        def expand(nodes: Sequenced[Node]) -> Tensor:
            counts = Counter(node.member for node in nodes)
            known_nD = torch.cat(features) if len(features) > 1 else features[0]
            features[:] = [known_nD]
            ancestors: list[int] = []
            for i, node in enumerate(nodes):
                own = masks[node.member]
                own.append(own[node.parent] | 1 << (len(own) - 1))
                ancestors.append(signed(own[-1]))
                places[node.member].append(len(known_nD) + i)
            before = [places[node.member][node.parent] for node in nodes]
            handles = tuple(self._texts[texts[b].key].handle for b in counts)
            tokens_R = torch.tensor([node.token for node in nodes])
            rows = Rows(handles, tuple(counts.values()), tokens_R, torch.tensor(ancestors))
            logits_nM, h_nD = self.model.score(rows, known_nD[before])
            features.append(h_nD)
            return logits_nM

        return draws.grown(roots[0], depths, expand, self.model.head.tokens)

    def _is_up(self, text: Sequence) -> bool:
        """Whether the states of all tokens but the last are known."""
        known = self._texts.get(text.key)
        if known is None:
            return False
        held = known.first + self.model.length(known.handle) + known.num_waiting
        return known.num_waiting > 0 and held == len(text.tokens) - 1

    def _catch_up(
        self, texts: Sequenced[Sequence], counts: Sequenced[int]
    ) -> tuple[Tensor, Tensor]:
        """Reads and keeps so many waiting states of each text; what follows their last ones."""
        tokens: list[int] = []
        features: list[Tensor] = []
        handles: list[int] = []
        for text, count in zip(texts, counts, strict=True):
            known = self._texts[text.key]
            first = known.first + self.model.length(known.handle) + 1
            tokens += text.tokens[first : first + count]
            features.append(known.states(count))
            handles.append(known.handle)
        ends = torch.tensor(counts).cumsum(0) - 1
        h_RD = self.model.head.fused(torch.cat(features))
        found = self.model.score(
            Rows(tuple(handles), tuple(counts), torch.tensor(tokens), None, ends), h_RD
        )
        for text, handle, count in zip(texts, handles, counts, strict=True):
            self.model.commit(handle, count)
            known = self._texts[text.key]
            known.waiting = [known.states(known.num_waiting)[count:]]
        return found

    def commit(self, text: Sequence, accepted: int) -> None:
        """Forgets what was read of the round's guesses: their own states are on the way."""
        self.discard(text)

    def discard(self, text: Sequence) -> None:
        """Forgets the round's rows."""
        known = self._texts.get(text.key)
        if known is not None:
            self.model.discard(known.handle)

    def close(self, text: Sequence) -> None:
        """Gives back what is kept of the text."""
        known = self._texts.pop(text.key, None)
        if known is not None:
            self.model.close(known.handle)
