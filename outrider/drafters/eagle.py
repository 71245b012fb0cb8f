"""Heads that guess from the target's hidden states and then from their own features.

EAGLE (Li et al. 2024, arXiv 2401.15077; 2025, arXiv 2503.01840) and multi-token prediction
(DeepSeek-V3, arXiv 2412.19437).

A head follows the text in two steps. What the target has read is caught up with its own hidden
states; from there on the head feeds itself. What it read of its own guesses is forgotten with the
round, as those rows' true states come with the target's next scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.decoding import Draft
from outrider.drafters.base import Node, RoundDraws
from outrider.drafters.tapped import TappedDrafter
from outrider.errors import InvalidConfig
from outrider.models.base import Rows, Target
from outrider.noise import signed
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from jaxtyping import Float

    from outrider.models.eagle_cache import CachedHead
    from outrider.models.head import Head


@dataclass(slots=True)
class _Known:
    """What is kept of a text: a sequence of the head's, and features it has not read yet.

    `first` is the text's token that the sequence's row 0 stands for; `waiting[m]` holds what module
    m is to read behind its last row: states of the target's, or features of the module before.
    """

    handle: int
    first: int
    waiting: list[list[Tensor]]

    def num_waiting(self, module: int = 0) -> int:
        return sum(map(len, self.waiting[module]))

    def features(self, count: int, module: int) -> Tensor:
        """The first `count` that wait for a module."""
        if len(self.waiting[module]) > 1:
            self.waiting[module] = [torch.cat(self.waiting[module])]
        return self.waiting[module][0][:count]


class EagleDrafter(TappedDrafter["Head"]):
    """Drafts chains or trees with a head of the target's, module after module.

    Where a text begins with tokens that the target holds of an earlier one, and whose states it
    therefore never had, the head's own view of it begins behind them.
    """

    def __init__(self, head: Head, *, chunk: int = 512, name: str | None = None) -> None:
        super().__init__(head, head.kind if name is None else name)
        self.chunk = chunk
        self._head: CachedHead | None = None
        self._texts: dict[int, _Known] = {}

    def attach(self, target: Target) -> Target:
        """As of every head; it gets a cache, too."""
        from outrider.models.eagle_cache import CachedHead
        from outrider.models.head import body_of

        super().attach(target)
        if self._head is None:
            self._head = CachedHead(self._given, body_of(target))
        return target

    @property
    def model(self) -> CachedHead:
        """The head and its cache, once an engine has attached it."""
        if self._head is None:
            raise InvalidConfig(f"drafter {self.name} has no target yet; an engine attaches it")
        return self._head

    def notice(self, text: Sequence, first: int, hidden_nF: Float[Tensor, "n F"]) -> None:
        """Keeps the states that follow those known; where some are missing, begins anew."""
        known = self._texts.get(text.key)
        if known is not None:
            due = known.first + self.model.length(known.handle) + known.num_waiting()
            if first <= due:
                # An interrupted round's rows come twice.
                known.waiting[0].append(hidden_nF[due - first :])
                return
            self.model.close(known.handle)
        waiting = [[hidden_nF], *([] for _ in range(1, self._given.num_modules))]
        self._texts[text.key] = _Known(self.model.open(text.expected), first, waiting)

    def unread(self, text: Sequence) -> int:
        """Tokens whose states the head has not read."""
        known = self._texts.get(text.key)
        return 0 if known is None else known.num_waiting()

    def read(self, text: Sequence, rows: int) -> None:
        """Reads the states of the next `rows` tokens, of all but the last known at most."""
        known = self._texts.get(text.key)
        if known is not None and known.num_waiting() > 1:
            self._catch_up([text], [min(rows, known.num_waiting() - 1)], kept=1)

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
            while (waiting := self._texts[text.key].num_waiting()) > self.chunk:
                self._catch_up([text], [min(self.chunk, waiting - 1)], kept=1)
        h_nD = self._catch_up(asked, [self._texts[t.key].num_waiting() for t in asked])
        tokens_M = self.model.head.tokens
        if draws.trees is not None:
            return self._grown(texts, depths, draws, h_nD)
        index = 0
        while True:
            logits_nM = self._logits(h_nD, index)
            tokens = draws.sample(logits_nM, members, index, tokens_M)
            index += 1
            going = [i for i, b in enumerate(members) if depths[b] > index]
            if not going:
                return draws.drawn()
            if len(going) < len(members):
                members = [members[i] for i in going]
                tokens, h_nD = [tokens[i] for i in going], [own[going] for own in h_nD]
            handles = tuple(self._texts[texts[b].key].handle for b in members)
            rows = Rows(handles, (1,) * len(handles), torch.tensor(tokens))
            h_nD = self._advanced(rows, h_nD, index)

    def _grown(
        self,
        texts: Sequenced[Sequence],
        depths: Sequenced[int],
        draws: RoundDraws,
        roots: list[Tensor],
    ) -> Draft:
        """Trees, level by level; a node's features are those behind its parent."""
        members = [b for b, depth in enumerate(depths) if depth > 0]
        masks: dict[int, list[int]] = {b: [0] for b in members}
        places = {b: [i] for i, b in enumerate(members)}
        known, level = roots, 0

        def expand(nodes: Sequenced[Node]) -> Tensor:
            nonlocal known, level
            level += 1
            counts = Counter(node.member for node in nodes)
            ancestors: list[int] = []
            for i, node in enumerate(nodes):
                own = masks[node.member]
                own.append(own[node.parent] | 1 << (len(own) - 1))
                ancestors.append(signed(own[-1]))
                places[node.member].append(len(known[0]) + i)
            before = [places[node.member][node.parent] for node in nodes]
            handles = tuple(self._texts[texts[b].key].handle for b in counts)
            tokens_R = torch.tensor([node.token for node in nodes])
            rows = Rows(handles, tuple(counts.values()), tokens_R, torch.tensor(ancestors))
            h_nD = self._advanced(rows, [own[before] for own in known], level)
            known = [torch.cat(pair) for pair in zip(known, h_nD, strict=True)]
            return self._logits(h_nD, level)

        return draws.grown(self._logits(roots, 0), depths, expand, self.model.head.tokens)

    def _logits(self, h_nD: list[Tensor], level: int) -> Tensor:
        """Logits after rows `level` drafted tokens behind the text, by the module for them."""
        return self.model.head.logits(h_nD[min(level, len(h_nD) - 1)])

    def _advanced(self, rows: Rows, before_nD: list[Tensor], level: int) -> list[Tensor]:
        """Features of all modules after drafted tokens of a level, given those before.

        A drafted token is the last one that module m reads up to level m, each time for a later
        row; behind that the last module goes on from its own features.
        """
        after_nD, last = list(before_nD), len(before_nD) - 1
        for module in range(min(level, last), last + 1):
            h_nD = before_nD[module - 1 if level <= module else module]
            after_nD[module] = self.model.score(rows, h_nD, module)
        return after_nD

    def _is_up(self, text: Sequence) -> bool:
        """Whether the states of all tokens but the last are known, and each module has a row."""
        known = self._texts.get(text.key)
        if known is None or not known.num_waiting():
            return False
        rows = self.model.length(known.handle) + known.num_waiting()
        return known.first + rows == len(text.tokens) - 1 and rows >= len(known.waiting)

    def _catch_up(
        self, texts: Sequenced[Sequence], counts: Sequenced[int], *, kept: int = 0
    ) -> list[Tensor]:
        """Reads and keeps so many waiting states of each text; each module's last features.

        The texts' last `kept` tokens are left for the next time: a draft starts from rows that
        every module has just read.
        """
        found = [self._read(texts, counts, 0)]
        for module in range(1, self.model.head.num_modules):
            due = [self._due(text, module) - kept for text in texts]
            found.append(self._read(texts, due, module))
        return found

    def _due(self, text: Sequence, module: int) -> int:
        """How many features a later module can read at most: those whose tokens are known."""
        known = self._texts[text.key]
        return len(text.tokens) - known.first - self.model.length(known.handle, module) - module - 1

    def _read(self, texts: Sequenced[Sequence], counts: Sequenced[int], module: int) -> Tensor:
        """Has a module read and keep rows of each text; the features behind their last ones."""
        given = [(self._texts[t.key], t, n) for t, n in zip(texts, counts, strict=True)]
        given = [(known, t, min(n, known.num_waiting(module))) for known, t, n in given]
        reading = [(known, t, n) for known, t, n in given if n > 0]
        if not reading:
            return torch.empty(0)
        tokens: list[int] = []
        features: list[Tensor] = []
        for known, text, count in reading:
            first = known.first + self.model.length(known.handle, module) + module + 1
            tokens += text.tokens[first : first + count]
            features.append(known.features(count, module))
        h_RD = torch.cat(features)
        rows = Rows(
            tuple(known.handle for known, _, _ in reading),
            tuple(count for _, _, count in reading),
            torch.tensor(tokens),
        )
        if module == 0:
            h_RD = self.model.head.fused(h_RD)
        after_RD = self.model.score(rows, h_RD, module)
        parts = after_RD.split(rows.counts)
        for (known, _, count), part in zip(reading, parts, strict=True):
            self.model.commit(known.handle, count, module)
            known.waiting[module] = [known.features(known.num_waiting(module), module)[count:]]
            if module + 1 < len(known.waiting):
                known.waiting[module + 1].append(part)
        return torch.stack([part[-1] for part in parts])

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
