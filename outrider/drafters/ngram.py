"""Prompt lookup: what followed the last time the text ended like this.

Saxena, "Prompt Lookup Decoding", 2023; vLLM's `ngram` and llama.cpp's `lookup` are of this kind.
Every n-gram of the text is indexed as it grows, so a proposal costs O(1) amortised in the context
length.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

from outrider.decoding import Draft
from outrider.drafters.base import Drafter, RoundDraws
from outrider.errors import InvalidConfig
from outrider.sequence import Sequence

TOKEN_BITS = 32
"""Bits of one token in the number that stands for an n-gram."""


class NgramIndex:
    """Where each n-gram of one growing text was last followed by a token.

    An n-gram is one number, whose digits are its tokens, each plus 1: tuples take twice as long,
    and a garbage collection looks at each of them.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        sizes = range(longest, shortest - 1, -1)
        self._after: list[tuple[dict[int, int], int]] = [
            ({}, (1 << TOKEN_BITS * size) - 1) for size in sizes
        ]
        self._most = (1 << TOKEN_BITS * longest) - 1
        self._indexed = 0
        # The last tokens. Digits of 0 before the text begins tell those of one length from others.
        self._last = 0

    def extend(self, tokens: list[int]) -> None:
        """Indexes the n-grams whose following token is new since the last call."""
        last, most = self._last, self._most
        for after in range(self._indexed, len(tokens)):
            for known, mask in self._after:
                known[last & mask] = after
            last = (last << TOKEN_BITS | tokens[after] + 1) & most
        self._indexed, self._last = len(tokens), last

    def follow(self, tokens: list[int], length: int) -> list[int]:
        """At most `length` tokens: what followed the longest indexed n-gram that ends the text.

        `tokens` are those indexed last. Where the earlier occurrence runs into the end of the text,
        the copy goes on with its own tokens: the text is taken to be periodic.
        """
        for known, mask in self._after:
            start = known.get(self._last & mask)
            if start is not None:
                copy = tokens[start : start + length]
                while 0 < len(copy) < length:
                    copy += copy[: length - len(copy)]
                return copy
        return []


class NgramDrafter(Drafter):
    """Drafts by prompt lookup; every drafted token is certain (a point mass).

    Args:
        shortest, longest: lengths of the n-grams looked up, the longest first (vLLM's
            `prompt_lookup_min` and `prompt_lookup_max`).

    Raises:
        InvalidConfig: `shortest` below 1 or above `longest`.
    """

    name = "ngram"
    certain = True

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidConfig(
                f"shortest={shortest}, longest={longest}: 1 <= shortest <= longest is due"
            )
        self.shortest, self.longest = shortest, longest
        self._indices: dict[int, NgramIndex] = {}

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The continuation of the most recent earlier occurrence, or nothing."""
        return draws.points(self.chains(texts, depths))

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]]:
        """The same in plain numbers."""
        return [self._follow(text, depth) for text, depth in zip(texts, depths, strict=True)]

    def _follow(self, text: Sequence, depth: int) -> list[int]:
        index = self._indices.get(text.key)
        if index is None:
            index = self._indices[text.key] = NgramIndex(self.shortest, self.longest)
        index.extend(text.tokens)
        return index.follow(text.tokens, depth)

    def close(self, text: Sequence) -> None:
        """Forgets the text's index."""
        self._indices.pop(text.key, None)
