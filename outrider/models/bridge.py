"""A draft model of another tokenizer, spoken to in the target's tokens.

Every token of the target is read as the draft tokens that spell its text; what the draft predicts
is kept where both vocabularies have the token, and the rest of its mass is spread over that
intersection: Timor et al. 2025, arXiv 2502.05202, token-level intersection.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.errors import VocabularyMismatch
from outrider.models.base import Rows, Target

if TYPE_CHECKING:
    from jaxtyping import Float, Int64

_SPELLINGS = str.maketrans({"\u2581": " ", "\u0120": " ", "\u010a": "\n", "\u0109": "\t"})
"""How tokenizers write spaces, newlines and tabs in their vocabularies."""


class Tokenizer(Protocol):
    """What a dictionary is made from."""

    def vocabulary(self) -> Mapping[str, int]:
        """Every token's text and id."""
        ...

    def spell(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True, slots=True)
class Dictionary:
    """Two vocabularies side by side.

    Attributes:
        pieces: for every token of the target, at least one of the draft.
        target_ids, draft_ids: int64 `[M]`, tokens of one text, id beside id.
    """

    pieces: tuple[tuple[int, ...], ...]
    target_ids: Int64[Tensor, " M"]
    draft_ids: Int64[Tensor, " M"]

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer, vocab_size: int) -> Dictionary:
        """The dictionary of two tokenizers; `vocab_size` is the width of the target's rows.

        Raises:
            VocabularyMismatch: not one token in common.
        """
        known = {text.translate(_SPELLINGS): i for text, i in draft.vocabulary().items()}
        shared = {
            i: known[name]
            for text, i in target.vocabulary().items()
            if (name := text.translate(_SPELLINGS)) in known and i < vocab_size
        }
        if not shared:
            raise VocabularyMismatch(
                "the draft model's tokenizer and the target's have no token in common; choose "
                "another draft model"
            )
        filler = (draft.spell(" ") or draft.spell("a") or [0])[0]
        pieces = tuple(
            (shared[i],) if i in shared else tuple(draft.spell(target.decode([i]))) or (filler,)
            for i in range(vocab_size)
        )
        ids = torch.tensor(sorted(shared.items()), dtype=torch.int64)
        return cls(pieces, ids[:, 0].contiguous(), ids[:, 1].contiguous())


class BridgedModel(Target):
    """Another target's model behind the tokens of this one; chains only.

    A text is read token by token, so that nothing settled is ever spelled anew. Tokens outside the
    intersection are never drafted. Its `max_length` is in the target's tokens, each counted as
    long as the longest.

    Args:
        model: the draft model.
        dictionary: the vocabularies, side by side.
    """

    scores_trees = False

    def __init__(self, model: Target, dictionary: Dictionary) -> None:
        self.model = model
        self.dictionary = dictionary
        self.vocab_size = len(dictionary.pieces)
        longest = max(map(len, dictionary.pieces))
        self.max_length = None if model.max_length is None else model.max_length // longest
        self._lengths: dict[int, int] = {}
        self._staged: dict[int, list[int]] = {}

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return a handle of the draft model; nothing is known of a prefix."""
        seq = self.model.open(reserve)
        self._lengths[seq], self._staged[seq] = 0, []
        return seq

    def length(self, seq: int) -> int:
        """Return the number of committed tokens of the target."""
        return self._lengths[seq]

    def num_staged(self, seq: int) -> int:
        """Return the number of staged tokens of the target."""
        return len(self._staged[seq])

    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the spelled rows; return logits over the target's tokens, -inf where unshared."""
        assert rows.ancestors_R is None, "a bridged model drafts chains"
        pieces = [self.dictionary.pieces[token] for token in rows.tokens_R.tolist()]
        ends = list(itertools.accumulate(map(len, pieces)))
        starts = [0, *itertools.accumulate(rows.counts)]
        own = [pieces[a:b] for a, b in itertools.pairwise(starts)]
        wanted = range(len(pieces)) if rows.logits_rows is None else rows.logits_rows.tolist()
        logits_nV = self.model.score(
            Rows(
                rows.seqs,
                tuple(sum(map(len, part)) for part in own),
                torch.tensor([token for piece in pieces for token in piece]),
                None,
                torch.tensor([ends[row] - 1 for row in wanted], dtype=torch.int64),
            )
        )
        for seq, part in zip(rows.seqs, own, strict=True):
            self._staged[seq] += map(len, part)
        device = logits_nV.device
        out_nV = logits_nV.new_full((len(logits_nV), self.vocab_size), -torch.inf)
        columns = self.dictionary.target_ids.to(device)
        out_nV[:, columns] = logits_nV[:, self.dictionary.draft_ids.to(device)]
        return out_nV

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` staged tokens."""
        assert isinstance(path, int), "a bridged model commits chains"
        self.model.commit(seq, sum(self._staged[seq][:path]))
        self._lengths[seq] += path
        self._staged[seq] = []

    def discard(self, seq: int) -> None:
        """Forget the staged tokens."""
        self.model.discard(seq)
        self._staged[seq] = []

    def close(self, seq: int) -> None:
        """Give back the draft model's cache."""
        self.model.close(seq)
        del self._lengths[seq], self._staged[seq]
