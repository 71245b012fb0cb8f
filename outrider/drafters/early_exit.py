"""The target's own first layers as its draft model, on the target's own cache.

LayerSkip (Elhoushi et al., ACL 2024, arXiv 2404.16710) trains models for it; others can be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequenced
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.config import check_between, check_whole
from outrider.decoding import Draft
from outrider.drafters.base import Drafter, Node, RoundDraws
from outrider.errors import InvalidConfig
from outrider.models.base import Rows, Target
from outrider.sequence import Sequence

if TYPE_CHECKING:
    from outrider.models.early_exit import EarlyExit, Guess
    from outrider.models.exit_head import ExitHead


class EarlyExitDrafter(Drafter):
    """Drafts chains or trees with the target's first `layers` layers, its final norm and its head.

    A chain ends with the first token that is drawn where the confidence is below `exit_threshold`;
    that token is kept. Confidence looks at what stands before the token, never at the token, so
    laws stay what they are said to be, under every rule. A tree has one level where the
    confidence in the text's own row is that low.

    The drafted rows are staged in the target's cache, where its own pass over them goes on from the
    layer they have reached: verification runs the remaining layers, and all of them for the last
    token of a path alone.

    Args:
        layers: how many layers draft.
        head: adapts what leaves them, and tells the confidence; without one this is the likeliest
            token's probability.
        exit_threshold: 0 never stops; None is the head's own, and 0 without one.
        chunk: rows of a prompt that are read at once.

    Raises:
        InvalidConfig: no whole number of layers, or other than the head's; a threshold that is no
            probability.
    """

    def __init__(
        self,
        layers: int,
        *,
        head: ExitHead | None = None,
        exit_threshold: float | None = None,
        chunk: int = 512,
    ) -> None:
        check_whole("layers", layers, 1)
        if head is not None and head.shape.layers != layers:
            raise InvalidConfig(
                f"layers={layers} with a head that reads behind layer {head.shape.layers}; give "
                "the head's"
            )
        if exit_threshold is None:
            exit_threshold = 0.0 if head is None else head.shape.exit_threshold
        check_between("exit_threshold", exit_threshold, 0.0, 1.0)
        self.layers = layers
        self.exit_threshold = exit_threshold
        self.name = f"early-exit:{layers}" if head is None else "early-exit"
        self.chunk = chunk
        self._head = head
        self._exit: EarlyExit | None = None

    def attach(self, target: Target) -> Target:
        """The target with an exit, of which the engine's scores and the drafts are two parts.

        Raises:
            VocabularyMismatch, TargetShapeMismatch: the head of another target.
            InvalidConfig: more layers than the target has to spare; a drafter in use elsewhere.
            UnsupportedModel: a target whose first layers and rest are not the whole.
        """
        # Who brings their own two methods needs no transformers.
        from outrider.models.early_exit import EarlyExit

        if self._exit is None:
            self._exit = EarlyExit(target, self.layers, self._head)
            self.vocab_size = target.vocab_size
        elif self._exit.target is not target:
            raise InvalidConfig(
                f"drafter {self.name} drafts on the cache of another target; make a drafter for "
                "each"
            )
        return self._exit

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """Draws up to `depths[b]` tokens after each text, a pass of the first layers per depth."""
        members = [b for b, depth in enumerate(depths) if depth > 0]
        if draws.trees is not None and members:
            return self._grown(texts, members, depths, draws)
        pieces = [self._pending(texts[b], self.chunk) for b in members]
        index = 0
        while members:
            guess = self._read(texts, members, pieces)
            tokens = draws.sample(guess.logits_nV, members, index)
            index += 1
            surely = zip(members, self._is_sure(guess), strict=True)
            going = [i for i, (b, sure) in enumerate(surely) if sure and depths[b] > index]
            members = [members[i] for i in going]
            pieces = [[tokens[i]] for i in going]
        return draws.drawn()

    def _is_sure(self, guess: Guess) -> list[bool]:
        """Whether to go on behind each row's token."""
        if self.exit_threshold == 0:
            return [True] * len(guess.logits_nV)
        return (self._target.confidence(guess) >= self.exit_threshold).tolist()

    def _grown(
        self,
        texts: Sequenced[Sequence],
        members: list[int],
        depths: Sequenced[int],
        draws: RoundDraws,
    ) -> Draft:
        """Trees, level by level, on each text's last token: row 0 of what is staged of it."""
        masks = {b: [1] for b in members}
        pieces = [self._pending(texts[b], 1) for b in members]
        roots = self._read(texts, members, pieces, torch.ones(len(members), dtype=torch.int64))
        unsure = {b for b, sure in zip(members, self._is_sure(roots), strict=True) if not sure}
        depths = [min(depth, 1) if b in unsure else depth for b, depth in enumerate(depths)]

        def expand(nodes: Sequenced[Node]) -> Tensor:
            counts = Counter(node.member for node in nodes)
            own: list[int] = []
            for node in nodes:
                known = masks[node.member]
                known.append(known[node.parent] | 1 << len(known))
                own.append(known[-1])
            handles = tuple(_handle(texts[b]) for b in counts)
            tokens_R = torch.tensor([node.token for node in nodes])
            # Of a tree so few tokens are read that the highest bit stays free.
            return self._target.draft(
                Rows(handles, tuple(counts.values()), tokens_R, torch.tensor(own))
            )

        return draws.grown(roots.logits_nV, depths, expand)

    @property
    def _target(self) -> EarlyExit:
        if self._exit is None:
            raise InvalidConfig(f"drafter {self.name} has no target yet; an engine attaches it")
        return self._exit

    def _pending(self, text: Sequence, at_once: int) -> list[int]:
        """What the target has not read of a text; all but the last `at_once` tokens are read."""
        handle = _handle(text)
        pending = text.tokens[self._target.length(handle) :]
        ahead = (len(pending) - 1) // at_once * at_once
        for start in range(0, ahead, self.chunk):
            self._target.read(handle, pending[start : min(ahead, start + self.chunk)])
        return pending[ahead:]

    def _read(
        self,
        texts: Sequenced[Sequence],
        members: list[int],
        pieces: list[list[int]],
        ancestors_R: Tensor | None = None,
    ) -> Guess:
        """What leaves the exit after the pieces of n texts."""
        counts = tuple(map(len, pieces))
        tokens_R = torch.tensor([token for piece in pieces for token in piece])
        handles = tuple(_handle(texts[b]) for b in members)
        ends = None if len(tokens_R) == len(counts) else torch.tensor(counts).cumsum(0) - 1
        return self._target.guess(Rows(handles, counts, tokens_R, ancestors_R, ends))


def _handle(text: Sequence) -> int:
    assert text.handle is not None, "the engine admits a text before it asks for drafts"
    return text.handle
