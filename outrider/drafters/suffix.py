"""Suffix decoding: what followed the longest earlier occurrence of the text's end, by counts.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). A suffix automaton of the text, and those of a
store of earlier outputs, answer in constant time; how much is drafted follows how much matched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequenced
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from outrider.config import check_between, check_whole
from outrider.decoding import Draft
from outrider.drafters.automaton import SuffixAutomaton
from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.points import Budget, PointTree, grow_likeliest
from outrider.drafters.suffix_store import END, StoreReader, SuffixStore
from outrider.sequence import Sequence


@dataclass(slots=True)
class Match:
    """A place in an automaton that ends as the text does."""

    automaton: SuffixAutomaton
    state: int
    length: int

    def chain(self, num_tokens: int, min_prob: float) -> list[int]:
        """The commonest successor again and again, while the path's chance is `min_prob`."""
        automaton, state, length = self.automaton, self.state, self.length
        tokens: list[int] = []
        chance = 1.0
        while len(tokens) < num_tokens and length:
            found = automaton.commonest(state, length)
            if found is None:
                # The end of the text: what comes next is what came after less of it.
                state, length = automaton.shorter(state, length)
                continue
            token, share, state, length = found
            chance *= share
            if token == END or chance < min_prob:
                break
            tokens.append(token)
        return tokens

    def tree(self, budget: Budget) -> PointTree:
        """The likeliest continuations by their counts."""
        return grow_likeliest((self.state, self.length), self._successors, budget)

    def _successors(self, place: tuple[int, int]) -> list[tuple[int, float, tuple[int, int]]]:
        automaton, (state, length) = self.automaton, place
        while length:
            times, found = automaton.successors(state, length)
            if found:
                return [
                    (token, count / times, automaton.follow(state, length, token))
                    for token, count in found
                    if token != END
                ]
            state, length = automaton.shorter(state, length)
        return []


class _Text:
    """What is known of one text: its automaton, and its places in the store."""

    def __init__(self, longest: int, store: SuffixStore | None) -> None:
        self.automaton = SuffixAutomaton(longest)
        self.store = store
        self.reader = None if store is None else StoreReader(store)

    def match(self, tokens: list[int]) -> Match:
        """The longest match of the text's end; of equals the commoner, then the text's own."""
        self.automaton.extend(tokens[self.automaton.num_tokens :])
        best = Match(self.automaton, *self.automaton.last())
        if self.reader is not None:
            for automaton, (state, length) in self.reader.places(tokens):
                if length > best.length:
                    best = Match(automaton, state, length)
        return best


class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrence of the text's end; tokens are certain.

    Args:
        longest: tokens of the longest match looked up in the text; a store has its own bound.
        spec_factor: tokens drafted at most, over the tokens matched.
        min_prob: the least share of the occurrences that a drafted path may have.
        store: outputs of earlier requests to look in too, and where finished texts' outputs go;
            None = each text by itself.
        tenant: whose texts these are: the store must be of the same tenant, or shared. A request
            that names another has a store of that tenant's own, `store.of(tenant)`.

    Raises:
        InvalidConfig: a value that cannot be meant, a store of another tenant.
    """

    name = "suffix"
    certain = True

    def __init__(
        self,
        *,
        longest: int = 24,
        spec_factor: float = 1.0,
        min_prob: float = 0.1,
        store: SuffixStore | None = None,
        tenant: str = "",
    ) -> None:
        check_whole("longest", longest, 1, 2**31)
        check_between("spec_factor", spec_factor, 0.0, math.inf)
        check_between("min_prob", min_prob, 0.0, 1.0)
        if store is not None:
            store.check_tenant(tenant)
        self.longest, self.spec_factor, self.min_prob = longest, spec_factor, min_prob
        self.store, self.tenant = store, tenant
        self._texts: dict[int, _Text] = {}

    def propose(
        self, texts: Sequenced[Sequence], depths: Sequenced[int], draws: RoundDraws
    ) -> Draft:
        """The likeliest continuation of the longest match, or nothing."""
        if not draws.max_certain:
            return draws.points(self.chains(texts, depths))
        with self._lock():
            trees = [
                self._tree(self._match(text), depth, draws.max_certain)
                for text, depth in zip(texts, depths, strict=True)
            ]
        return draws.point_trees(
            [list(tree.tokens) for tree in trees], [list(tree.parents) for tree in trees]
        )

    def chains(self, texts: Sequenced[Sequence], depths: Sequenced[int]) -> list[list[int]]:
        """The likeliest continuations as chains."""
        with self._lock():
            matches = [self._match(text) for text in texts]
            return [
                match.chain(min(depth, self._most(match)), self.min_prob)
                for match, depth in zip(matches, depths, strict=True)
            ]

    def _lock(self) -> AbstractContextManager[object]:
        return nullcontext() if self.store is None else self.store.lock

    def _match(self, text: Sequence) -> Match:
        known = self._texts.get(text.key)
        if known is None:
            tenant = text.request.tenant
            store = self.store and self.store.of(self.tenant if tenant is None else tenant)
            known = self._texts[text.key] = _Text(self.longest, store)
        return known.match(text.tokens)

    def _most(self, match: Match) -> int:
        return int(match.length * self.spec_factor)

    def _tree(self, match: Match, depth: int, max_nodes: int) -> PointTree:
        return match.tree(Budget(min(max_nodes, self._most(match)), depth, self.min_prob))

    def close(self, text: Sequence) -> None:
        """Forgets the text; the output of a finished one goes to the store."""
        known = self._texts.pop(text.key, None)
        whole = text.finish_reason is not None and text.error is None
        if known is not None and known.store is not None and whole:
            known.store.add(text.tokens[text.num_prompt :])
